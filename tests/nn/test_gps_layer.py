import pytest
import torch

from sfiformer import ModelConfig
from sfiformer.nn import GPSLayer
from sfiformer.nn.gps_layer import make_attention
from sfiformer.nn.partition import Partition, Structure

GRAPHS = Partition(torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 3, 4, 5]), 3, 3)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


def _count(module):
    return sum(p.numel() for p in module.parameters())


def test_the_equations_of_the_layer():
    torch.manual_seed(0)
    layer = GPSLayer(ModelConfig(dim=8, heads=2, norm="graph", activation="gelu")).eval()
    x, e = torch.randn(5, 8), torch.randn(3, 8)
    local, new_e = layer.local(x, e, EDGES)
    attended = layer.attention(x, EDGES, GRAPHS.ptr)
    h = layer.local_norm(local, GRAPHS) + layer.attention_norm(x + attended, GRAPHS)
    wide, _, _, narrow = layer.feed_forward
    wanted = layer.norm(h + narrow(torch.nn.functional.gelu(wide(h))), GRAPHS)
    out_x, out_e = layer(x, e, Structure(EDGES, GRAPHS))
    torch.testing.assert_close(out_x, wanted)
    torch.testing.assert_close(out_e, new_e)


def test_the_equations_without_residual_and_feed_forward():
    torch.manual_seed(0)
    config = ModelConfig(dim=8, heads=2, norm="graph", residual=False, feed_forward=False)
    layer = GPSLayer(config).eval()
    x, e = torch.randn(5, 8), torch.randn(3, 8)
    local, new_e = layer.local(x, e, EDGES)
    assert not layer.local.residual
    wanted = layer.local_norm(local, GRAPHS) + layer.attention_norm(
        layer.attention(x, EDGES, GRAPHS.ptr), GRAPHS
    )
    out_x, out_e = layer(x, e, Structure(EDGES, GRAPHS))
    torch.testing.assert_close(out_x, wanted)
    torch.testing.assert_close(out_e, new_e)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_without_residual_what_is_dropped_is_gone(norm):
    config = ModelConfig(
        dim=8, heads=2, local="gcn", norm=norm, dropout=0.999, residual=False, feed_forward=False
    )
    layer = GPSLayer(config)
    torch.manual_seed(0)  # with this seed nothing of 5 · 8 numbers is kept, twice
    out, _ = layer(torch.randn(5, 8), None, Structure(EDGES, GRAPHS))
    assert torch.equal(out, torch.zeros(5, 8))


def test_layers_can_start_without_attention():
    torch.manual_seed(0)
    config = ModelConfig(dim=8, heads=2, norm="none", residual=False, feed_forward=False, attention_gain=0.0)
    layer = GPSLayer(config).eval()
    x, e = torch.randn(5, 8), torch.randn(3, 8)
    assert torch.equal(layer(x, e, Structure(EDGES, GRAPHS))[0], layer.local(x, e, EDGES)[0])
    with pytest.raises(ValueError, match="attention_gain is nan"):
        ModelConfig(attention_gain=float("nan"))


def test_a_layer_has_something_in_it():
    assert GPSLayer(ModelConfig(local="none", attention="none")).feed_forward is not None
    with pytest.raises(ValueError, match="nothing is left of a layer"):
        ModelConfig(local="none", attention="none", feed_forward=False)


@pytest.mark.parametrize("pe", ["none", "eslappe"])
def test_parameter_count_is_the_formula(pe):
    d, heads = 6, 3
    layer = GPSLayer(ModelConfig(dim=d, heads=heads, pe=pe))
    extra = 3 * d + 1 if pe == "eslappe" else 0
    assert _count(layer) == (6 * heads + 9) * d**2 + (5 * heads + 21) * d + 2 + extra


@pytest.mark.parametrize("local", ["gatedgcn", "gcn", "gin", "gine", "gat", "sage", "none"])
@pytest.mark.parametrize("attention", ["sfi", "dfi", "softmax", "adjacency", "none"])
def test_every_pair_of_local_and_global(local, attention):
    layer = GPSLayer(ModelConfig(dim=7, heads=2, local=local, attention=attention), last=True)
    x = torch.randn(5, 7)
    out, _ = layer(x, torch.randn(3, 7), Structure(EDGES, GRAPHS))
    out.square().sum().backward()
    assert out.shape == x.shape
    for name, parameter in layer.named_parameters():
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), name


def test_softmax_attention_is_pytorchs():
    torch.manual_seed(0)
    ours = make_attention(ModelConfig(dim=8, heads=2, attention="softmax", head_width="narrow"))
    reference = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        reference.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
        reference.out_proj.weight.copy_(ours.out.weight)
        reference.out_proj.bias.copy_(ours.out.bias)
    x = torch.randn(1, 5, 8)
    wanted = reference(x, x, x, need_weights=False)[0][0]
    torch.testing.assert_close(ours(x[0], EDGES, torch.tensor([0, 5])), wanted)
    assert _count(ours) == _count(reference)


def test_narrow_heads_round_up():
    attention = make_attention(ModelConfig(dim=235, heads=4, attention="softmax", head_width="narrow"))
    assert attention.query.out_features == 4 * 59


def test_the_papers_iteration_takes_as_many_steps_as_asked():
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    state = GPSLayer(ModelConfig(dim=8, heads=2)).state_dict()

    def run(**settings):
        layer = GPSLayer(
            ModelConfig(dim=8, heads=2, dropout=0.0, lam_scaling="graph", alpha=1.0, **settings)
        ).eval()
        layer.load_state_dict(state)
        return layer(x, torch.zeros(3, 8), Structure(EDGES, GRAPHS))[0]

    exact = run(solver="exact")
    errors = [(run(solver="proximal", proximal_iterations=n) - exact).norm() for n in (1, 10, 200)]
    assert errors[0] > errors[1] > errors[2]
    assert torch.equal(run(solver="proximal"), run(solver="proximal", proximal_iterations=10))
    with pytest.raises(ValueError, match="proximal_iterations is 0"):
        ModelConfig(proximal_iterations=0)
