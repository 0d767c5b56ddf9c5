"""Linear layers that are more than their weight and bias, as other libraries make them, do what they do on their own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch_geometric.data import Batch, Data

from sfiformer import SFiAttention, SFiFormer

SETTINGS = [
    {},
    {"mode": "dfi"},
    {"adjacency": False},
    {"attention": False},
    {"head_width": 3, "norm": False},
    {"friction": "tied", "qk_norm": False},
]


class Adapter(nn.Module):
    """A low-rank term beside a layer, which it holds."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))

    def merged(self) -> nn.Linear:
        layer = copy.deepcopy(self.base)
        layer.weight.data += self.up.weight.data @ self.down.weight.data
        return layer


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _model(**arguments) -> SFiFormer:
    small = {"layers": 2, "dim": 12, "heads": 2, "node_encoder": "linear", "node_features": 3, "pe_dim": 4}
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    return SFiFormer.from_preset("peptides-func", **small, **quiet, edge_encoder="constant", **arguments)


def _cases():
    torch.manual_seed(0)
    x, edge_index, ptr = torch.randn(9, 8), torch.randint(9, (2, 20)), torch.tensor([0, 4, 4, 9])
    for setting in SETTINGS:
        yield SFiAttention(8, 2, **setting).eval(), (x, edge_index, ptr)
    graphs = [
        Data(
            x=torch.randn(n, 3),
            edge_index=torch.randint(n, (2, 3 * n)),
            lappe_vectors=torch.randn(n, 10),
            lappe_values=torch.rand(1, 10),
        )
        for n in (5, 1, 7)
    ]
    yield _model().eval(), (Batch.from_data_list(graphs),)


CASES = list(_cases())


@pytest.fixture(params=range(len(CASES)))
def case(request):
    module, inputs = CASES[request.param]
    return copy.deepcopy(module), inputs


def _linears(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if type(layer) is nn.Linear]


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, place = name.rpartition(".")
    module.get_submodule(parent)._modules[place] = layer


def test_adapters(case):
    module, inputs = case
    merged = copy.deepcopy(module)
    for name in _linears(module):
        adapter = Adapter(module.get_submodule(name))
        _replace(module, name, adapter)
        _replace(merged, name, adapter.merged())
    out = module(*inputs)
    torch.testing.assert_close(out, merged(*inputs), atol=1e-4, rtol=1e-4)
    out.square().sum().backward()
    used = [layer for layer in module.modules() if isinstance(layer, Adapter)]
    assert all(layer.up.weight.grad is not None for layer in used)


def test_layers_with_a_forward_of_their_own(case):
    module, inputs = case
    twice = copy.deepcopy(module)
    for name in _linears(module):
        module.get_submodule(name).__class__ = Doubled
        for parameter in twice.get_submodule(name).parameters():
            parameter.data *= 2
    torch.testing.assert_close(module(*inputs), twice(*inputs), atol=1e-4, rtol=1e-4)


def test_hooks(case):
    module, inputs = case
    expected, called = module(*inputs), set()
    for name in _linears(module):
        module.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    torch.testing.assert_close(module(*inputs), expected, atol=1e-5, rtol=1e-5)
    assert called == set(_linears(module))


def test_layers_without_a_bias(case):
    module, inputs = case
    zero = copy.deepcopy(module)
    for name in _linears(module):
        module.get_submodule(name).bias = None
        nn.init.zeros_(zero.get_submodule(name).bias)
    torch.testing.assert_close(module(*inputs), zero(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        nn.utils.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "old weight_norm", "pruned"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_are_made_in_each_call(case, change):
    """A changed parameter is felt, as it is by a layer whose weight is set to what it makes."""
    module, inputs = case
    names, plain = _linears(module), copy.deepcopy(module)
    for name in names:
        change(module.get_submodule(name))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("weight_g", "original0", "weight_orig")):
                parameter.mul_(1.5)
        for name in names:
            layer = module.get_submodule(name)
            layer(torch.zeros(1, layer.in_features))
            plain.get_submodule(name).weight.copy_(layer.weight)
    out = module(*inputs)
    torch.testing.assert_close(out, plain(*inputs), atol=1e-4, rtol=1e-4)
    out.square().sum().backward()


def test_quantised(case):
    module, inputs = case
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    quantised = quantize(copy.deepcopy(module), {nn.Linear})
    assert not _linears(quantised)
    torch.testing.assert_close(quantised(*inputs), module(*inputs), atol=0.3, rtol=0.3)


def test_replicas(case):
    """Of `DataParallel`: what were parameters are tensors that are no leaves."""
    module, inputs = case
    expected = module(*inputs)
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            del part._parameters[name]
            setattr(part, name, None if parameter is None else parameter * 1)
    torch.testing.assert_close(module(*inputs), expected)
