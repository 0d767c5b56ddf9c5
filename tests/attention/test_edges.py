"""Orders of edges and sums along them, by plain PyTorch and by kernel, against dense matrices."""

import pytest
import torch

from sfiformer.attention import EdgeOrder
from sfiformer.attention.edges import neighbour_sum, row_sum, segment_sum, spread

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def random_edges(nodes, edges, seed=0):
    """With parallel edges and self-loops; the last node has no edge."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(nodes - 1, 1), (2, edges), generator=generator).to(DEVICE)


def check_order(order, edge_index, nodes):
    source, target = edge_index.tolist()
    by_target = range(len(target)) if order.by_target is None else order.by_target.tolist()
    for ptr, edges, ends in (
        (order.target_ptr.tolist(), list(by_target), target),
        (order.source_ptr.tolist(), order.by_source.tolist(), source),
    ):
        assert sorted(edges) == list(range(len(target)))
        assert len(ptr) == nodes + 1
        for node in range(nodes):
            here = edges[ptr[node] : ptr[node + 1]]
            assert here == sorted(here, key=lambda e: (target[e], e))
            assert sorted(here) == [e for e in range(len(target)) if ends[e] == node]


@pytest.mark.parametrize(("nodes", "edges"), [(7, 40), (30, 12), (1, 3), (4, 0), (0, 0)])
def test_order(nodes, edges):
    edge_index = random_edges(nodes, edges)
    check_order(EdgeOrder.of(edge_index, nodes), edge_index, nodes)
    in_order = edge_index[:, edge_index[1].argsort(stable=True)]
    known = EdgeOrder.of(in_order, nodes, by_target=True)
    assert known.by_target is None
    check_order(known, in_order, nodes)


@pytest.mark.parametrize("by_target", [True, False])
def test_order_of_edges_in_int32(by_target):
    """Places are counted in int64: a product of a node's number and a width may be beyond int32."""
    edge_index = random_edges(7, 40)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    narrow, wide = (EdgeOrder.of(each, 7, by_target=by_target) for each in (edge_index.int(), edge_index))
    for x, y in zip(narrow, wide, strict=True):
        assert (x is None and y is None) or (x.dtype == torch.int64 and torch.equal(x, y))


def test_neighbour_sum_and_its_gradient():
    edge_index = random_edges(9, 50)
    order = EdgeOrder.of(edge_index, 9)
    weight, loop = torch.rand(50, device=DEVICE).double(), torch.rand(9, device=DEVICE).double()
    dense = torch.diag(loop).index_put((edge_index[1], edge_index[0]), weight, accumulate=True)
    x = torch.randn(9, 5, device=DEVICE, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(neighbour_sum(x, weight, loop, *order), dense @ x)
    assert torch.autograd.gradcheck(lambda x: neighbour_sum(x, weight, loop, *order), x)
    assert torch.autograd.gradgradcheck(lambda x: neighbour_sum(x, weight, loop, *order), x)


@pytest.mark.parametrize("ordered", [False, True])
def test_states_at_the_ends_of_edges(ordered):
    edge_index = random_edges(6, 20)
    if ordered:
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    order = EdgeOrder.of(edge_index, 6, by_target=ordered)
    x = torch.randn(6, 2, 3, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert torch.equal(order.at_source(x), x[edge_index[0]])
    assert torch.equal(order.at_target(x), x[edge_index[1]])
    for at in (order.at_source, order.at_target):
        assert torch.autograd.gradcheck(at, x)
        assert torch.autograd.gradgradcheck(at, x)


def test_the_operators_are_sound():
    order = EdgeOrder.of(random_edges(6, 20), 6)
    x, values = torch.randn(6, 3, requires_grad=True), torch.randn(20, 3, requires_grad=True)
    segments = (order.source_ptr, order.source, order.by_source)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, args in (
        (neighbour_sum, (x, torch.rand(20), torch.rand(6), *order)),
        (segment_sum, (values, *segments)),
        (spread, (x, *segments)),
    ):
        moved = tuple(None if a is None else a.to(DEVICE) for a in args)
        torch.library.opcheck(op.plain, moved, test_utils=checks)


def test_segments_of_numbers():
    ptr, index = torch.tensor([0, 2, 2, 3], device=DEVICE), torch.tensor([0, 0, 2], device=DEVICE)
    assert segment_sum(torch.tensor([1.0, 2.0, 4.0], device=DEVICE), ptr, index).tolist() == [3.0, 0.0, 4.0]
    assert spread(torch.tensor([1.0, 2.0, 4.0], device=DEVICE), ptr, index).tolist() == [1.0, 1.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(dtype):
    ones = torch.ones(1000, 2, dtype=dtype, device=DEVICE)
    sums = segment_sum(
        ones, torch.tensor([0, 0, 1000], device=DEVICE), torch.ones(1000, device=DEVICE).long()
    )
    assert sums.dtype == torch.float32
    assert sums.tolist() == [[0.0, 0.0], [1000.0, 1000.0]]


@pytest.mark.parametrize("width", [1, 40, 235])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("few", [0, 512])
def test_the_kernel_matches(width, ordered, few, monkeypatch):
    rows = pytest.importorskip("sfiformer.attention.kernels.rows", reason="the kernel needs Triton")
    monkeypatch.setattr(rows, "FEW", few)  # 0: these rows are many short ones
    nodes, edges = 5, 40
    edge_index = random_edges(nodes, edges, seed=width)
    if ordered:
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    order = EdgeOrder.of(edge_index, nodes, by_target=ordered)
    x, weight, loop = (torch.randn(*s, device=DEVICE) for s in ((nodes, width), (edges,), (nodes,)))
    values = torch.randn(edges, width, device=DEVICE)
    for args in (
        (x, order.target_ptr, order.by_target, order.source, weight, loop),
        (x, order.source_ptr, order.by_source, order.target, weight),
        (values, order.target_ptr, order.by_target),
        (values, order.source_ptr, order.by_source),
        (values, torch.tensor([0, 0, 30, edges], device=DEVICE)),
    ):
        exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        out = rows.row_sum(*args)
        torch.testing.assert_close(out.double(), row_sum(*exact), rtol=1e-5, atol=1e-5)
        assert torch.equal(out, rows.row_sum(*args))


@pytest.mark.parametrize("width", [1, 16, 235])
def test_some_long_rows_among_many_short_ones(width):
    """As the graphs of a padded batch: their mean is 27 terms, the longest has 150."""
    rows = pytest.importorskip("sfiformer.attention.kernels.rows", reason="the kernel needs Triton")
    sizes = torch.tensor([150, 131, 0, 1, 2, 2, 0, 3, 5, 1, 1])
    terms = int(sizes.sum())
    generator = torch.Generator().manual_seed(width)
    values, nodes = (torch.randn(count, width, generator=generator) for count in (terms, len(sizes)))
    weight, loop = (torch.randn(count, generator=generator) for count in (terms, len(sizes)))
    order = torch.randperm(terms, generator=generator)
    column = torch.randint(len(sizes), (terms,), generator=generator)
    segment = torch.repeat_interleave(torch.arange(len(sizes)), sizes)  # of the k-th term
    matrix = torch.nn.functional.one_hot(segment, len(sizes)).T.double()
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    for args, exact in (
        ((values, ptr), matrix @ values.double()),
        ((values, ptr, order), matrix @ values[order].double()),
        ((values, ptr, order, None, weight), matrix @ (weight[:, None] * values.double())[order]),
        ((nodes, ptr, None, column, weight), matrix @ (weight[:, None] * nodes[column].double())),
        ((nodes, ptr, order, column), matrix @ nodes[column[order]].double()),
        (
            (nodes, ptr, order, column, weight, loop),
            matrix @ (weight[:, None] * nodes[column].double())[order] + loop[:, None] * nodes.double(),
        ),
    ):
        moved = [None if a is None else a.to(DEVICE) for a in args]
        torch.testing.assert_close(rows.row_sum(*moved).double().cpu(), exact, rtol=1e-5, atol=1e-5)


def test_the_kernel_without_rows_or_edges():
    rows = pytest.importorskip("sfiformer.attention.kernels.rows", reason="the kernel needs Triton")
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    out = rows.row_sum(torch.ones(2, 3, device=DEVICE), torch.zeros(3, device=DEVICE).long(), None, none)
    assert out.tolist() == [[0.0] * 3] * 2
    assert rows.row_sum(torch.ones(0, 3, device=DEVICE), none.new_zeros(1)).shape == (0, 3)


@pytest.mark.parametrize("width", [1, 20, 235])
@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_taken_by_their_numbers(width, count, dtype):
    rows = pytest.importorskip("sfiformer.attention.kernels.rows", reason="the kernel needs Triton")
    table = torch.randn(7, 2 * width, device=DEVICE).to(dtype)[
        :, ::2
    ]  # its entries are not next to each other
    index = torch.randint(7, (count,), device=DEVICE)
    taken = rows.take_rows(table, index)
    assert taken.dtype == dtype
    assert taken.tolist() == [table.tolist()[number] for number in index.tolist()]
