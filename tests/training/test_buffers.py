"""Batches in one piece of memory are the batches that were put there."""

import pytest
import torch
from torch.testing import assert_close

from sfiformer import SFiFormer
from sfiformer.data.batch import GraphBatch
from sfiformer.data.shapes import Ladder
from sfiformer.training import prepare
from sfiformer.training.buffers import BatchBuffer, room


def tensors(batch: GraphBatch) -> list[torch.Tensor]:
    found = []
    batch.map(lambda tensor: found.append(tensor) or tensor)
    return found


def make_buffer(*batches: GraphBatch) -> BatchBuffer:
    return BatchBuffer(batches, torch.zeros(room(batches), dtype=torch.uint8))


@pytest.fixture
def gathered(experiment):
    """gathered([0, 1]): the batch of those graphs in a shape that holds any four, with its structure."""
    prepared = prepare(experiment({"data.batch_size": 4}))
    store, model = prepared.stores["train"], SFiFormer(prepared.config.model)
    shape = Ladder(store, 4).shape(store.node_ptr.diff().topk(4).indices.numpy())

    def gather(graphs):
        batch = store.batch(graphs, shape)
        return batch.structured(model.structure(batch))

    return gather


def test_a_buffer_holds_what_it_was_filled_with(gathered):
    first, second = gathered([0, 1, 2]), gathered([3])
    buffer = make_buffer(first, second)
    buffer.fill([first, second])
    for expected, got in zip([first, second], buffer.batches, strict=True):
        assert len(tensors(got)) == len(tensors(expected)) > 10
        for left, right in zip(tensors(got), tensors(expected), strict=True):
            assert left.dtype == right.dtype
            assert left.shape == right.shape
            assert torch.equal(left, right)
    buffer.fill([second, first])
    for left, right in zip(tensors(buffer.batches[0]), tensors(second), strict=True):
        assert torch.equal(left, right)


def test_one_copy_moves_everything(gathered):
    batch = gathered([0, 1])
    source, target = make_buffer(batch), make_buffer(batch)
    source.fill([batch])
    target.memory.copy_(source.memory)
    for left, right in zip(tensors(target.batches[0]), tensors(batch), strict=True):
        assert torch.equal(left, right)


def test_what_comes_twice_lies_there_once_and_starts_where_kernels_like_it(gathered):
    batch = gathered([0, 1])
    got = make_buffer(batch).batches[0]
    assert got.structure.edge_index.data_ptr() == got.edge_index.data_ptr()
    assert got.structure.adjacency.order.by_source.data_ptr() == got.structure.order.by_source.data_ptr()
    start = min(tensor.data_ptr() for tensor in tensors(got))
    assert all((tensor.data_ptr() - start) % 256 == 0 for tensor in tensors(got))


def test_two_shapes_share_memory(gathered):
    large, small = gathered([0, 1, 2, 3]), gathered([0, 1]).replace(x=torch.ones(3, 1))
    memory = torch.zeros(room([large]) + 512, dtype=torch.uint8)
    first, second = BatchBuffer([large], memory), BatchBuffer([small], memory)
    for buffer, batch in ((first, large), (second, small), (first, large)):
        buffer.fill([batch])
        assert len(buffer.memory) == room([batch])
        for left, right in zip(tensors(buffer.batches[0]), tensors(batch), strict=True):
            assert torch.equal(left, right)


def test_other_shapes_are_not_taken(gathered):
    batch = gathered([0, 1])
    with pytest.raises(RuntimeError, match="size"):
        make_buffer(batch).fill([batch.replace(x=batch.x[:-1])])


@pytest.mark.parametrize("pe", ["eslappe", "lappe", "rwse"])
def test_a_batch_with_its_structure_gives_what_it_gives_without(experiment, pe):
    prepared = prepare(experiment({"model.pe": pe, "model.pe_dim": 4}))
    model, batch = SFiFormer(prepared.config.model).eval(), prepared.stores["train"].batch([0, 1, 2])
    structured = batch.structured(model.structure(batch))
    assert batch.structure is None
    assert_close(model(structured), model(batch), rtol=0, atol=0)
    assert structured.replace(x=batch.x).structure is None
    moved = structured.to("meta")
    assert moved.structure.order.source_ptr.is_meta
    assert moved.structure.graphs.max_nodes == batch.max_nodes
