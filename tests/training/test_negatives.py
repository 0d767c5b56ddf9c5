import torch

from sfiformer.training.negatives import sample_negatives

PTR = torch.tensor([0, 5, 8, 12])
# Graph 1 (nodes 5, 6, 7): head 5 is linked with both others and has no free tail.
LINKS = torch.tensor([[0, 0, 3, 5, 5, 8], [1, 2, 0, 6, 7, 11]])


def draw(seed, per_positive=2):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(LINKS.size(1), per_positive, generator=generator, dtype=torch.float64)
    return sample_negatives(LINKS, PTR, uniform)


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


def test_no_links():
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert sample_negatives(none, PTR, torch.zeros(0, 2)).shape == (2, 0)
