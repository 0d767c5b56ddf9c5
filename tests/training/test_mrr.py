import pytest
import torch

from sfiformer.training.mrr import LinkMRR, link_mrrs


def brute_force(x, links, sizes):
    """Ranks by listing every candidate; links: a list of (h, t) for each graph."""
    graph_means = {"mrr": [], "mrr_filtered": [], "mrr_filtered_self": []}
    start = 0
    for size, pairs in zip(sizes, links, strict=True):
        nodes = x[start : start + size].tolist()
        start += size
        if not pairs:
            continue
        reciprocal = {name: [] for name in graph_means}
        for h, t in pairs:
            score = [sum(a * b for a, b in zip(nodes[h], other, strict=True)) for other in nodes]
            others = [j for j in range(size) if j != t]
            unknown = [j for j in others if (h, j) not in pairs]
            for name, pool in (
                ("mrr", others),
                ("mrr_filtered", unknown),
                ("mrr_filtered_self", [j for j in unknown if j != h]),
            ):
                best = 1 + sum(score[j] > score[t] for j in pool)
                worst = 1 + sum(score[j] >= score[t] for j in pool)
                reciprocal[name].append(2 / (best + worst))
        for name, values in reciprocal.items():
            graph_means[name].append(sum(values) / len(values))
    return {name: sum(values) / len(values) for name, values in graph_means.items()}


def make(seed):
    """Integer embeddings: scores tie often and are exact. One graph has no links, one has a single node."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [6, 1, 9, 4, 7]
    x = torch.randint(-2, 3, (sum(sizes), 3), generator=generator).float()
    links = []
    for size in sizes:
        count = 0 if size in (1, 4) else size
        ends = torch.randint(0, size, (count, 2), generator=generator).tolist()
        links.append(list(dict.fromkeys((h, t) for h, t in ends if h != t)))
    return x, links, sizes


def batch(x, links, sizes):
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    pairs = [(h + int(ptr[g]), t + int(ptr[g])) for g, of in enumerate(links) for h, t in of]
    return x, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T, ptr


@pytest.mark.parametrize("seed", range(5))
def test_three_mrrs_equal_a_brute_force_ranking(seed):
    x, links, sizes = make(seed)
    collection = link_mrrs()
    collection.update(*batch(x, links, sizes))
    expected = brute_force(x, links, sizes)
    assert {name: pytest.approx(value) for name, value in expected.items()} == collection.compute()


def test_batches_do_not_matter_and_false_links_are_left_out():
    x, links, sizes = make(9)
    metric = LinkMRR("filtered")
    start = 0
    for size, pairs in zip(sizes, links, strict=True):
        part, index, ptr = batch(x[start : start + size], [pairs], [size])
        false = torch.zeros(2, 1, dtype=torch.int64)
        label = torch.cat([torch.ones(index.shape[1]), torch.zeros(1)])
        metric.update(part, torch.cat([index, false], dim=1), ptr, label)
        start += size
    assert metric.compute() == pytest.approx(brute_force(x, links, sizes)["mrr_filtered"])


def test_all_ties_are_the_middle_rank():
    metric = LinkMRR()
    metric.update(torch.ones(5, 2), torch.tensor([[0], [1]]), torch.tensor([0, 5]))
    assert metric.compute() == pytest.approx(1 / 3)  # ranks 1 to 5
