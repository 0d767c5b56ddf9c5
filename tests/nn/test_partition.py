from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Batch, Data

from sfiformer.nn.partition import Partition


def _graphs():
    return [Data(x=torch.randn(n, 2), edge_index=torch.zeros(2, 0, dtype=torch.long)) for n in (3, 1, 2)]


def test_of_a_pyg_batch():
    batch = Batch.from_data_list(_graphs())
    graphs = Partition.of(batch, 6, batch.x.device)
    assert graphs.batch.tolist() == [0, 0, 0, 1, 2, 2]
    assert graphs.ptr.tolist() == [0, 3, 4, 6]
    assert (graphs.num_graphs, graphs.max_nodes) == (3, 3)
    assert graphs.real_nodes is None
    batch.real_nodes = torch.tensor(4)
    assert Partition.of(batch, 6, batch.x.device).real_nodes == 4


def test_of_a_single_graph():
    graphs = Partition.of(_graphs()[0], 3, torch.device("cpu"))
    assert graphs.ptr.tolist() == [0, 3]
    assert graphs.batch.tolist() == [0, 0, 0]


def test_of_a_batch_without_ptr():
    batch = SimpleNamespace(batch=torch.tensor([0, 0, 2]), num_graphs=4)
    assert Partition.of(batch, 3, torch.device("cpu")).ptr.tolist() == [0, 2, 2, 3, 3]


def test_of_data_that_only_name_the_graph_of_each_node():
    data = Data(x=torch.zeros(3, 1), batch=torch.tensor([0, 0, 1]))
    assert Partition.of(data, 3, torch.device("cpu")).ptr.tolist() == [0, 2, 3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_of_data_that_only_say_where_graphs_start(dtype):
    data = Data(x=torch.zeros(5, 1), ptr=torch.tensor([0, 3, 3, 5], dtype=dtype))
    graphs = Partition.of(data, 5, torch.device("cpu"))
    assert graphs.batch.tolist() == [0, 0, 0, 2, 2]
    assert graphs.ptr.tolist() == [0, 3, 3, 5]
    assert graphs.ptr.dtype == torch.int64
    assert (graphs.num_graphs, graphs.max_nodes) == (3, 3)


@pytest.mark.parametrize(
    ("ptr", "message"),
    [
        ([0, 3, 5], "tensor of integer offsets"),
        (torch.tensor([0, 3]), "end at the number of nodes, 5, got 3"),
    ],
)
def test_starts_of_graphs_that_are_none(ptr, message):
    with pytest.raises(ValueError, match=f"^ptr must .*{message}"):
        Partition.of(Data(x=torch.zeros(5, 1), ptr=ptr), 5, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_graphs_of_nodes_in_any_integers(dtype):
    batch = Batch.from_data_list(_graphs())
    batch.batch = batch.batch.to(dtype)
    graphs = Partition.of(batch, 6, batch.x.device)
    assert graphs.batch.dtype == torch.int64
    assert graphs.spread(graphs.ptr[1:]).tolist() == [3, 3, 3, 4, 6, 6]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_nodes_of_a_graph_stand_together(dtype):
    batch = Batch.from_data_list(_graphs())
    batch.batch = batch.batch[torch.tensor([3, 0, 1, 2, 4, 5])].to(dtype)
    with pytest.raises(ValueError, match=r"batch must be sorted.*argsort"):
        Partition.of(batch, 6, batch.x.device)


def test_sum_mean_and_spread():
    graphs = Partition(torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3]), 3, 2)
    values = torch.tensor([[1.0], [3.0], [5.0]])
    assert graphs.sum(values).tolist() == [[4.0], [0.0], [5.0]]
    assert graphs.mean(values).tolist() == [[2.0], [0.0], [5.0]]
    assert graphs.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7.0, 7.0, 9.0]


def test_half_precision_is_added_up_in_float32():
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)  # bfloat16 itself stops counting at 256
    graphs = Partition(torch.zeros(1000, dtype=torch.long), torch.tensor([0, 1000]), 1, 1000)
    assert graphs.sum(ones).item() == 1000.0


def test_gradients_of_sums_and_means():
    graphs = Partition(torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3]), 3, 2)
    values = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(graphs.sum, values)
    assert torch.autograd.gradcheck(graphs.mean, values[:, 0])
    empty = Partition(torch.zeros(0, dtype=torch.long), torch.tensor([0, 0]), 1, 0)
    assert empty.sum(torch.zeros(0, 3)).tolist() == [[0.0, 0.0, 0.0]]
