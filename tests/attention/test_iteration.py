"""The paper's iteration by kernels is the plain one, and so are its derivatives.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on small matrices).
"""

import os
import subprocess
import sys

import pytest
import torch

from sfiformer.attention import iteration, sfi_attention
from sfiformer.attention.iteration import FusedProximal, fused_iteration
from sfiformer.flow import Proximal, flows_from_scores

pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (4, 3, 0)  # of matrices side by side


SCALE, ALPHA = 3**-0.5, 0.1


def _problem(dtype=torch.float64, lam=(0.2, 0.05, 0.1), size=4):
    """Scores of two heads, λ and sizes of graphs side by side."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(SIZES), 2, size, size)
    s, u = (torch.randn(shape, generator=generator, dtype=dtype) / SCALE for _ in range(2))
    return [x.to(DEVICE) for x in (s, u, torch.tensor(lam, dtype=dtype), torch.tensor(SIZES))]


def _fused(s, u, lam, sizes, **settings):
    return FusedProximal(**settings).of_scores(s, u, lam, sizes, alpha=ALPHA, scale=SCALE)


def _plain(s, u, lam, sizes, **settings):
    real = torch.arange(s.shape[-1], device=s.device) < sizes.unsqueeze(1)
    mask = (real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1).expand_as(s)
    options = {"lam": lam.view(-1, 1, 1), "alpha": ALPHA, "mask": mask, "solver": Proximal(**settings)}
    return flows_from_scores(s * SCALE, u * SCALE, **options)


def _both(problem, rtol, atol, **settings):
    """Flows and gradients by kernels and without, which are alike; those by kernels."""
    found = []
    for solve in (_fused, _plain):
        *parts, sizes = problem
        parts = [x.clone().requires_grad_() for x in parts]
        z = solve(*parts, sizes, **settings)
        weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype, device=z.device).view_as(z)
        found.append([z, *torch.autograd.grad((z * weights).sum() + (z * z).sum(), parts)])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)
    assert torch.equal(found[0][0] == 0, found[1][0] == 0)
    return found[0]


@pytest.mark.parametrize("iterations", [1, 2, 3, 10])
@pytest.mark.parametrize("start", ["uniform", "constant", "softmax"])
def test_flows_and_derivatives_are_those_of_the_plain_iteration(iterations, start):
    _both(_problem(), 1e-9, 1e-12, iterations=iterations, start=start, seed=3 + 2**40)


def test_padding_is_not_looked_at():
    """Whatever stands there, the flows are the same and the gradients there 0."""
    s, u, lam, sizes = _problem(size=5)
    given = [x.clone().requires_grad_() for x in (s, u)]
    z = _fused(*given, lam, sizes, iterations=3)
    gradients = torch.autograd.grad((z * z).sum(), given)
    for graph, size in enumerate(SIZES):
        for x in (s, u):
            x[graph, :, size:], x[graph, :, :, size:] = torch.nan, torch.inf
    given = [x.clone().requires_grad_() for x in (s, u)]
    again = _fused(*given, lam, sizes, iterations=3)
    assert torch.equal(again, z)
    for left, right in zip(torch.autograd.grad((again * again).sum(), given), gradients, strict=True):
        assert torch.equal(left, right)
    for graph, size in enumerate(SIZES):
        assert not z[graph, :, size:].any()
        assert not z[graph, :, :, size:].any()


@pytest.mark.parametrize("iterations", [1, 4, 5])
def test_without_a_derivative_only_two_steps_are_kept(iterations, monkeypatch):
    from sfiformer.attention.kernels import iteration as kernels

    kept, made = [], kernels.iterate

    def iterate(*given):
        found = made(*given)
        kept.append(len(found[3]))
        return found

    monkeypatch.setattr(kernels, "iterate", iterate)
    s, *rest = _problem()
    learning = _fused(s.clone().requires_grad_(), *rest, iterations=iterations)
    with torch.no_grad():
        quiet = _fused(s.clone().requires_grad_(), *rest, iterations=iterations)
    assert torch.equal(_fused(s, *rest, iterations=iterations), learning)
    assert torch.equal(quiet, learning)
    assert kept == [iterations, min(iterations, 2), min(iterations, 2)]


@pytest.mark.parametrize("lam", [0.0, 1e3])
def test_where_nothing_moves_the_length_is_kept(lam):
    """With friction this strong all flows vanish in the first step, and no step length can be made of the second."""
    z, *_ = _both(_problem(lam=(lam,) * 3), 1e-9, 1e-12, iterations=6)
    assert (lam == 0) == bool(z.any())


def test_in_single_precision():
    _both(_problem(torch.float32), 1e-3, 1e-4)


@pytest.mark.parametrize("name", ["alpha", "scale"])
def test_what_is_learnt_besides_is_learnt_by_the_plain_iteration(monkeypatch, name):
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    inputs = torch.randn(5, 5, 1, 4, dtype=torch.float64).to(DEVICE)
    ptr, found = torch.tensor([0, 2, 5], device=DEVICE), []
    options = {"lam": 0.1, "alpha": ALPHA, "scale": 0.5, "solver": Proximal(3), "check": False}
    for asked in (False, True):
        learnt = torch.tensor(options[name], dtype=torch.float64, device=DEVICE, requires_grad=True)
        out = sfi_attention(*inputs, ptr, max_nodes=3, return_flows=asked, **options | {name: learnt})
        found.append(torch.autograd.grad((out[0] if asked else out).square().sum(), learnt)[0])
    assert found[0] != 0
    torch.testing.assert_close(*found)


def test_attention_takes_it_where_kernels_serve_and_flows_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    assert isinstance(fused_iteration("proximal", torch.zeros(1)), FusedProximal)
    assert fused_iteration("exact", torch.zeros(1)) == "exact"
    ends = Proximal(tolerance=1e-3)
    assert fused_iteration(ends, torch.zeros(1)) is ends

    class FromNothing(Proximal):
        def first(self, resistance, mask):
            return torch.zeros_like(resistance)

    own = FromNothing()
    assert fused_iteration(own, torch.zeros(1)) is own
    assert type(fused_iteration(Proximal(0), torch.zeros(1))) is Proximal

    q, k, v, qf, kf = torch.randn(5, 5, 1, 4, dtype=torch.float64).to(DEVICE)
    ptr = torch.tensor([0, 2, 5], device=DEVICE)
    options = {"lam": 0.1, "alpha": 0.1, "solver": "proximal", "check": False}
    q.requires_grad_()
    fused = sfi_attention(q, k, v, qf, kf, ptr, **options)
    plain, _ = sfi_attention(q, k, v, qf, kf, ptr, return_flows=True, **options)
    torch.testing.assert_close(fused, plain)
    of_fused, of_plain = (torch.autograd.grad((x * x).sum(), q, create_graph=True)[0] for x in (fused, plain))
    torch.testing.assert_close(of_fused, of_plain)
    torch.autograd.grad(of_plain.sum(), q)
    with pytest.raises(NotImplementedError, match="return_flows"):
        torch.autograd.grad(of_fused.sum(), q)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from sfiformer.attention.kernels import energies, iteration

def made(kernel, constants, pointer):
    numbers = {"rows": "i32", "size": "i32", "heads": "i32", "seed": "i64", "sizes": "*i32"}
    names, constants = kernel.arg_names, {"ALPHA": 0.1, "SCALE": 0.5, "BLOCK": 256, **constants}
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else numbers.get(name, pointer) for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})

for pointer in ("*fp32", "*fp64"):
    for start in range(3):
        made(energies.energy_kernel, {"START": start}, pointer)
    made(energies.score_kernel, {}, pointer)
    for first in (True, False):
        made(iteration.step_kernel, {"FIRST": first}, pointer)
        for last in (True, False):
            made(iteration.gradient_kernel, {"FIRST": first, "LAST": last}, pointer)
print("compiled")
"""


def test_kernels_compile_for_a_gpu_that_need_not_be_here(tmp_path):
    """What Triton's interpreter takes its compiler may not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
