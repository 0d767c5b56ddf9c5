"""Places for nodes that have none."""

import torch

from sfiformer.explain.page.layout import spring_layout


def communities(sizes: tuple[int, ...], inside: float, between: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    chance = torch.where(of[:, None] == of, inside, between)
    return of, (torch.rand(chance.shape, generator=generator) < chance).triu(1).nonzero().T


def test_the_same_graph_gives_the_same_places():
    _, edges = communities((9, 9), 0.5, 0.1)
    first, second = (torch.from_numpy(spring_layout(edges, 18)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert torch.pdist(first).min() > 0


def test_neighbours_are_near_and_clusters_apart():
    of, edges = communities((20, 20, 20), 0.5, 0.02)
    places = torch.from_numpy(spring_layout(edges, 60))
    distance = torch.cdist(places, places)
    same = of[:, None] == of
    assert distance[same].mean() < 0.5 * distance[~same].mean()


def test_a_ring_comes_out_round():
    nodes = torch.arange(20)
    places = torch.from_numpy(spring_layout(torch.stack([nodes, nodes.roll(-1)]), 20))
    steps = (places - places.roll(-1, 0)).norm(dim=1)
    assert steps.max() < 2.5 * steps.min()


def test_graphs_without_edges_or_with_loops():
    for edges, nodes in (
        (torch.zeros(2, 0, dtype=torch.int64), 5),
        (torch.zeros(2, 1, dtype=torch.int64), 1),
    ):
        assert torch.from_numpy(spring_layout(edges, nodes)).isfinite().all()
