import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfiformer.data import BatchShape, GraphStore
from sfiformer.training.examples import with_negatives
from sfiformer.training.negatives import sample_negatives

PTR = torch.tensor([0, 5, 8, 12])
# Graph 1 (nodes 5, 6, 7): head 5 is linked with both others and has no free tail.
LINKS = torch.tensor([[0, 0, 3, 5, 5, 8], [1, 2, 0, 6, 7, 11]])


def draw(seed, per_positive=2):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(LINKS.size(1), per_positive, generator=generator, dtype=torch.float64)
    every = torch.ones(LINKS.size(1), dtype=torch.bool)
    pairs, drawn = sample_negatives(LINKS, every, PTR, 12, uniform)
    return pairs[:, drawn]


def test_heads_are_those_of_the_true_links_and_tails_are_free():
    heads, tails = draw(0)
    assert heads.tolist() == [0, 0, 0, 0, 3, 3, 8, 8]
    known = {frozenset(pair) for pair in LINKS.T.tolist()}
    for head, tail in zip(heads.tolist(), tails.tolist(), strict=True):
        assert head != tail
        assert frozenset((head, tail)) not in known
        assert torch.searchsorted(PTR, head, right=True) == torch.searchsorted(PTR, tail, right=True)


def test_every_free_tail_is_drawn_about_equally_often():
    heads, tails = draw(1, per_positive=3000)
    for head, free in ((0, [4]), (3, [1, 2, 4]), (8, [9, 10])):
        counts = torch.bincount(tails[heads == head], minlength=12)
        assert counts.nonzero().flatten().tolist() == free
        share = counts[free] / counts.sum()
        assert (share - 1 / len(free)).abs().max() < 0.05


def test_the_draws_decide():
    assert torch.equal(draw(3, 50), draw(3, 50))
    assert not torch.equal(draw(3, 50), draw(4, 50))


def test_links_that_are_not_true_neither_exclude_nor_count():
    true = torch.tensor([True, False, True, True, True, False])
    pairs, drawn = sample_negatives(LINKS, true, PTR, 12, torch.full((6, 1), 0.99))
    assert pairs.shape == (2, 6)
    assert drawn.tolist() == [True, False, True, False, False, False]
    # 0 is linked with 1 and 3, and no more with 2; 3 with 0.
    assert pairs[:, drawn].tolist() == [[0, 3], [4, 4]]


def test_no_links():
    none = torch.zeros(2, 0, dtype=torch.int64)
    pairs, drawn = sample_negatives(none, torch.zeros(0, dtype=torch.bool), PTR, 12, torch.zeros(0, 2))
    assert pairs.shape == (2, 0)
    assert drawn.shape == (0,)


def test_padding_draws_nothing():
    rng = np.random.default_rng(0)
    ends = torch.from_numpy(rng.integers(0, 5, (9, 2)))
    store = GraphStore(
        torch.tensor([0, 5, 10]),
        torch.tensor([0, 0, 0]),
        torch.zeros(2, 0, dtype=torch.int64),
        link_ptr=torch.tensor([0, 4, 9]),
        link={"edge_label_index": ends, "edge_label": torch.from_numpy(rng.integers(0, 2, 9))},
    )
    plain, padded = store.batch([0, 1]), store.batch([0, 1], BatchShape(6, 17, 0, 16, 5, 5))
    want, got = with_negatives(plain, 3), with_negatives(padded, torch.tensor(3))
    labelled = [batch.edge_label_index[:, ~batch.edge_label.isnan()] for batch in (want, got)]
    assert torch.equal(*labelled)
    assert labelled[0].size(1) > 9
    assert torch.equal(*(batch.edge_label[~batch.edge_label.isnan()] for batch in (want, got)))
    assert int(got.edge_label_index.max()) < 17


def linked(graphs=40):
    """Graphs of 12 nodes with a link each, of the first node and the last."""
    ends = torch.tensor([[0, 11]]).expand(graphs, 2)
    return GraphStore(
        12 * torch.arange(graphs + 1),
        torch.zeros(graphs + 1, dtype=torch.int64),
        torch.zeros(2, 0, dtype=torch.int64),
        link_ptr=torch.arange(graphs + 1),
        link={"edge_label_index": ends},
    )


def tails(batch, seed):
    """Of the two negatives of each link, as places in its graph, by graph."""
    found = with_negatives(batch, seed)
    negative = found.edge_label == 0
    heads, ends = found.edge_label_index[:, negative]
    graphs = batch.batch[heads]
    return {
        int(batch.graph_ids[g]): (ends - batch.ptr[graphs])[graphs == g].tolist()
        for g in range(batch.num_graphs)
    }


def test_what_a_link_draws_does_not_depend_on_its_batch():
    store = linked()
    whole = tails(store.batch(range(40)), 5)
    assert all(len(drawn) == 2 for drawn in whole.values())
    for some in ([7], [3, 31, 4], range(20, 40)):
        assert tails(store.batch(some), 5).items() <= whole.items()
    assert tails(store.batch(range(40)), 6) != whole
    assert tails(store.batch(range(40)), 5 + 2**40) != whole
    assert tails(store.batch(range(40)), torch.tensor(2**62 + 5)) == tails(store.batch(range(40)), 2**62 + 5)


def test_all_free_tails_are_drawn_alike():
    """Over graphs, over seeds, and the second as the first, whatever that was."""
    batch = linked().batch(range(40))
    pairs = [drawn for seed in range(300) for drawn in tails(batch, seed).values()]
    table = np.histogram2d(*np.array(pairs).T, bins=[np.arange(1, 12)] * 2)[0]
    assert table.shape == (10, 10)  # of those in between
    assert table.sum() == 40 * 300
    expected = table.mean()
    assert ((table - expected) ** 2 / expected).sum() < 99 + 4 * (2 * 99) ** 0.5


def test_nothing_waits_for_the_device():
    """On tensors without values: whatever asks for one is an error."""
    batch = linked().batch(range(3), BatchShape(6, 60, 0, 8, 12, 12))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = batch.map(mode.from_tensor)
        found = with_negatives(fake, mode.from_tensor(torch.tensor(3)))
        assert found.edge_label_index.shape == (2, 24)
