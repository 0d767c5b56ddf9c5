"""Chunks bound the memory and change nothing else."""

import pytest
import torch

from packing import RAGGED, attend, offsets, packed
from sfiformer import dfi_attention
from sfiformer.attention import dense
from sfiformer.attention.chunks import chunks
from sfiformer.attention.spans import spans


@pytest.mark.parametrize("size", [1, 16, 100, 400])
@pytest.mark.parametrize("arguments", [{"lam": 0.1}, {"lam": 0.7, "scaling": "potential"}])
def test_chunk_size_does_not_change_results(monkeypatch, size, arguments):
    lam = torch.full((len(RAGGED),), arguments["lam"], dtype=torch.float64)
    results = []
    for chunk_size in (1 << 20, size):
        monkeypatch.setattr("sfiformer.attention.chunks.CHUNK_SIZE", chunk_size)
        inputs, strength = packed().leaves(), lam.clone().requires_grad_()
        out = attend(inputs, **(arguments | {"lam": strength}))
        results.append((out, *torch.autograd.grad(out.square().sum(), (*inputs[:5], strength))))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("span_size", [1, 200])
def test_spans_and_parts_side_by_side_change_nothing(monkeypatch, span_size):
    inputs = packed().leaves()
    expected = attend(inputs, lam=0.3)
    of_expected = torch.autograd.grad(expected.square().sum(), inputs[:5])
    monkeypatch.setattr("sfiformer.attention.spans.SPAN_SIZE", span_size)
    side_by_side = torch.stack([x.detach() for x in inputs[:5]], dim=1).requires_grad_()
    found = attend([*side_by_side.unbind(1), *inputs[5:]], lam=0.3)
    (of_found,) = torch.autograd.grad(found.square().sum(), side_by_side)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    for x, y in zip(of_found.unbind(1), of_expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_every_row_is_in_one_chunk(size):
    ptr, heads = packed().ptr, 2
    seen = []
    for chunk in chunks(ptr, heads, size):
        rows = chunk.rows.stop - chunk.rows.start
        if rows > 1 or len(chunk.graphs) > 1:
            assert len(chunk.graphs) * heads * rows * chunk.size <= size
        seen += [start + row for start in chunk.starts for row in range(chunk.rows.start, chunk.rows.stop)]
    assert sorted(seen) == list(range(sum(RAGGED)))


@pytest.mark.parametrize("span_size", [1, 60, 300, 10_000])
def test_every_row_is_in_one_span_and_these_are_small(monkeypatch, span_size):
    monkeypatch.setattr("sfiformer.attention.spans.SPAN_SIZE", span_size)
    sizes, heads, width = (3,) * 20 + RAGGED, 2, 5
    seen, before = [], 0
    for span in spans(offsets(sizes), torch.empty(sum(sizes), heads, width), width):
        assert span.first == before
        before += len(span.chunks)
        graphs = [place for chunk in span.chunks for place in chunk.graphs]
        nodes = sum(sizes[place] for place in graphs)
        assert len(graphs) == 1 or nodes * heads * width <= span_size
        seen += [start + row for chunk in span.chunks for start in chunk.starts for row in range(chunk.size)]
    assert sorted(seen) == list(range(sum(sizes)))


def test_where_no_threads_share_them_graphs_of_one_size_are_one_chunk():
    sizes, heads, width = (30,) * 128, 4, 64
    for device, together in (("cpu", 17), ("meta", 128)):
        like = torch.empty(sum(sizes), heads, width, device=device)
        first = next(spans(offsets(sizes), like, width))
        assert [len(chunk.graphs) for chunk in first.chunks] == [together]


def test_dense_attention_of_a_large_graph_in_blocks(monkeypatch):
    inputs = packed()
    expected = dfi_attention(inputs.q, inputs.k, inputs.v, inputs.ptr)
    for largest in (dense.LARGEST, 0):  # by the operator, by PyTorch's kernel
        with monkeypatch.context() as patch:
            patch.setattr(dense, "LARGEST", largest)
            patch.setattr(dense, "CHUNK_SIZE", 30)
            patch.setattr("sfiformer.attention.chunks.CHUNK_SIZE", 30)
            found = dfi_attention(inputs.q, inputs.k, inputs.v, inputs.ptr)
        torch.testing.assert_close(found, expected)


def _peak_bytes(run) -> int:
    """The most that was allocated at a time, beyond what was there before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0
    return peak


def test_a_large_graph_needs_no_matrix_of_scores():
    nodes, heads = 2000, 8
    inputs = packed((nodes,), heads=heads, dtype=torch.float32).leaves()
    one_matrix = heads * nodes * nodes * 4
    peak = _peak_bytes(lambda: attend(inputs, lam=1 / nodes).sum().backward())
    assert peak < one_matrix


def test_chunk_size_bounds_the_memory(monkeypatch):
    inputs = packed((600,), heads=4, dtype=torch.float32).leaves()
    peaks = []
    for size in (1 << 21, 1 << 15):
        monkeypatch.setattr("sfiformer.attention.chunks.CHUNK_SIZE", size)
        peaks.append(_peak_bytes(lambda: attend(inputs, lam=1 / 600).sum().backward()))
    assert peaks[1] < peaks[0] / 5


def test_memory_between_forward_and_backward_grows_with_nodes_not_their_square():
    nodes, heads, width = 1000, 4, 8
    inputs = packed((nodes,), heads=heads, width=width, dtype=torch.float32).leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend(inputs, lam=1 / nodes)
    extra = sum(x.numel() for x in kept if x.data_ptr() not in {y.data_ptr() for y in inputs})
    assert extra < 10 * nodes * heads * width
