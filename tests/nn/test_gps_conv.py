"""The drop-in for PyG's GPSConv."""

import inspect

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, GINEConv, GPSConv, global_add_pool

from sfiformer import SFiAttention, SFiGPSConv


class Model(nn.Module):
    """A small GPS model as PyG's examples have it; ``layer`` is the one line that changes."""

    def __init__(self, layer: type[nn.Module], channels: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, channels)
        self.embed_edge = nn.Linear(2, channels)
        self.convs = nn.ModuleList()
        for _ in range(2):
            mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))
            self.convs.append(layer(channels, GINEConv(mlp), heads=heads, dropout=0.1))
        self.head = nn.Linear(channels, 1)

    def forward(self, data: Data) -> torch.Tensor:
        x, edges = self.embed(data.x), self.embed_edge(data.edge_attr)
        for conv in self.convs:
            x = conv(x, data.edge_index, data.batch, edge_attr=edges)
        return self.head(global_add_pool(x, data.batch))


def _batch(sizes=(5, 1, 8), seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    graphs = [
        Data(
            x=torch.randn(n, 3, generator=generator),
            edge_index=torch.randint(n, (2, 3 * n), generator=generator),
            edge_attr=torch.randn(3 * n, 2, generator=generator),
        )
        for n in sizes
    ]
    return Batch.from_data_list(graphs)


def _gin(channels: int) -> GINConv:
    return GINConv(nn.Linear(channels, channels))


@pytest.mark.parametrize("layer", [GPSConv, SFiGPSConv])
def test_one_line_changes_a_model_over(layer):
    torch.manual_seed(0)
    model, data = Model(layer), _batch()
    target = torch.tensor([[1.0], [0.0], [-1.0]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = (model(data) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None for p in model.parameters())
    assert model.eval()(data).shape == (3, 1)


def test_arguments_are_those_of_gps_conv():
    ours, theirs = (inspect.signature(layer.__init__).parameters for layer in (SFiGPSConv, GPSConv))
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name].default == theirs[name].default
    call = list(inspect.signature(GPSConv.forward).parameters)
    assert list(inspect.signature(SFiGPSConv.forward).parameters) == call


def test_dense_mode_equals_gps_conv_of_the_same_weights():
    torch.manual_seed(0)
    theirs = GPSConv(8, _gin(8), heads=1).eval()
    plain = {"mode": "dfi", "adjacency": False, "norm": False, "qk_norm": False}
    ours = SFiGPSConv(8, _gin(8), heads=1, attn_kwargs=plain).eval()
    ours.conv.load_state_dict(theirs.conv.state_dict())
    ours.mlp.load_state_dict(theirs.mlp.state_dict())
    for place in range(3):
        ours.norms[place].load_state_dict(getattr(theirs, f"norm{place + 1}").state_dict())
    with torch.no_grad():
        projections = zip(
            (ours.attn.query, ours.attn.key, ours.attn.value),
            theirs.attn.in_proj_weight.chunk(3),
            theirs.attn.in_proj_bias.chunk(3),
            strict=True,
        )
        for linear, weight, bias in projections:
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        ours.attn.out.load_state_dict(theirs.attn.out_proj.state_dict())
    data = _batch()
    x = torch.randn(14, 8)
    expected = theirs(x, data.edge_index, data.batch)
    torch.testing.assert_close(ours(x, data.edge_index, data.batch), expected, atol=1e-5, rtol=1e-5)


def test_other_attention():
    assert isinstance(SFiGPSConv(8, None, attn_type="multihead").attn, SFiAttention)
    with pytest.raises(ValueError, match=r"attn_type.*performer.*attn_kwargs"):
        SFiGPSConv(8, None, attn_type="performer")


def test_parameters_as_the_readme_counts_them():
    layers = (
        SFiGPSConv(64, _gin(64), heads=4),
        SFiGPSConv(64, _gin(64), heads=4, attn_kwargs={"head_width": 16}),
        GPSConv(64, _gin(64), heads=4),
    )
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert counts == [120_898, 46_210, 37_760]


@pytest.mark.parametrize("layout", ["csr", "coo", "csc"])
@pytest.mark.parametrize("layer", [GPSConv, SFiGPSConv])
def test_adjacency_as_a_sparse_matrix(layer, layout):
    torch.manual_seed(0)
    layer, x = layer(8, _gin(8), heads=2).eval(), torch.randn(14, 8)
    data = _batch()
    source, target = data.edge_index = data.edge_index.unique(dim=1)
    rows = torch.sparse_coo_tensor(
        torch.stack([target, source]), torch.ones(len(source)), (14, 14)
    ).coalesce()
    rows = {"csr": rows.to_sparse_csr, "coo": rows.coalesce, "csc": rows.to_sparse_csc}[layout]()
    out = layer(x, data.edge_index, data.batch)
    torch.testing.assert_close(layer(x, rows, data.batch), out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize("attention", [{}, {"mode": "dfi"}, {"lam_scaling": "graph"}])
def test_compiled_whole(attention, with_batch):
    torch._dynamo.reset()
    layer = SFiGPSConv(8, _gin(8), heads=2, attn_kwargs=attention).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for sizes in ((5, 1, 8), (4, 4), (9,), (3, 2, 2, 6)):
        data, x = _batch(sizes), torch.randn(sum(sizes), 8, requires_grad=True)
        batch = data.batch * 7 if with_batch else None  # names of graphs may leave out numbers
        expected, out = (each(x, data.edge_index, batch) for each in (layer, compiled))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        got, true = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected))
        torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-3)
    torch._dynamo.reset()


def test_compiled_it_still_looks_at_the_batch():
    torch._dynamo.reset()
    compiled = torch.compile(SFiGPSConv(8, None), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="batch must be sorted"):
        compiled(torch.randn(4, 8), torch.empty(2, 0, dtype=torch.int64), torch.tensor([0, 1, 0, 1]))
    torch._dynamo.reset()


def test_export_for_batches_of_all_sizes():
    layer = SFiGPSConv(8, _gin(8), heads=2).eval()

    def inputs(sizes):
        data = _batch(sizes)
        return torch.randn(sum(sizes), 8), data.edge_index, data.batch

    open_size = torch.export.Dim.DYNAMIC
    dynamic = ({0: open_size}, {1: open_size}, {0: open_size})
    exported = torch.export.export(layer, inputs((5, 1, 8)), dynamic_shapes=dynamic).module()
    for sizes in ((5, 1, 8), (4, 4), (9,)):
        given = inputs(sizes)
        torch.testing.assert_close(exported(*given), layer(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", [[0, 0, 1, 4], [0], []])
def test_operator(batch):
    batch = torch.tensor(batch, dtype=torch.int64)
    torch.library.opcheck(torch.ops.sfiformer.starts.default, (batch,))


def test_one_graph_needs_no_batch():
    layer = SFiGPSConv(8, _gin(8), heads=2).eval()
    data, x = _batch((6,)), torch.randn(6, 8)
    expected = layer(x, data.edge_index, torch.zeros(6, dtype=torch.int64))
    torch.testing.assert_close(layer(x, data.edge_index), expected)


def test_graphs_do_not_feel_each_other():
    layer = SFiGPSConv(8, _gin(8), heads=2).eval()
    data, x = _batch((5, 1, 8)), torch.randn(14, 8)
    out = layer(x, data.edge_index, data.batch)
    own = data.edge_index[:, data.edge_index[0] >= 6] - 6
    torch.testing.assert_close(layer(x[6:], own), out[6:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", "graph_norm", "instance_norm", None])
def test_norms(norm):
    layer = SFiGPSConv(8, _gin(8), norm=norm)
    data = _batch()
    assert layer(torch.randn(14, 8), data.edge_index, data.batch).shape == (14, 8)


def test_without_message_passing_and_any_number_of_heads():
    layer = SFiGPSConv(7, None, heads=3, act="gelu", attn_kwargs={"lam": 2.0})
    data = _batch()
    assert layer(torch.randn(14, 7), data.edge_index, data.batch).shape == (14, 7)
    assert layer.attn.lam == 2.0


def test_graph_without_nodes_between_others():
    layer = SFiGPSConv(8, None).eval()
    x, none = torch.randn(5, 8), torch.empty(2, 0, dtype=torch.int64)
    out = layer(x, none, torch.tensor([0, 0, 2, 2, 2]))
    torch.testing.assert_close(out, layer(x, none, torch.tensor([0, 0, 1, 1, 1])))


def test_no_nodes():
    layer = SFiGPSConv(8, _gin(8)).eval()
    none = torch.empty(2, 0, dtype=torch.int64)
    assert layer(torch.empty(0, 8), none).shape == (0, 8)
    assert layer(torch.empty(0, 8), none, torch.empty(0, dtype=torch.int64)).shape == (0, 8)


def test_reset_and_repr():
    layer = SFiGPSConv(8, _gin(8), heads=2)
    before = layer.attn.query.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.attn.query.weight)
    assert repr(layer).startswith("SFiGPSConv(8, conv=GINConv")


def test_message_passing_without_a_reset_of_its_own_is_reset_part_by_part():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gin = _gin(8)

        def forward(self, x, edge_index):
            return self.gin(x, edge_index)

    layer = SFiGPSConv(8, Wrapped(), heads=2)
    before = [weight.clone() for weight in layer.conv.parameters() if weight.dim() == 2]
    layer.reset_parameters()
    after = [weight for weight in layer.conv.parameters() if weight.dim() == 2]
    assert before
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_without_edges():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="needs edge_index; attn_kwargs"):
        SFiGPSConv(8, None)(x, None)
    assert SFiGPSConv(8, None, attn_kwargs={"adjacency": False})(x, None).shape == (4, 8)


@pytest.mark.parametrize("batch", [[0, 1, 0, 1], [0, 0, 1], [[0, 0, 1, 1]]])
def test_bad_batch(batch):
    layer = SFiGPSConv(8, None)
    with pytest.raises(ValueError, match="batch"):
        layer(torch.randn(4, 8), torch.empty(2, 0, dtype=torch.int64), torch.tensor(batch))
