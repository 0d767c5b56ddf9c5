"""AdamW in two kernels against PyTorch's, after PyTorch's clipping.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import copy

import pytest
import torch
from lightning.fabric import Fabric
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer import SFiFormer
from sfiformer.config import ExperimentConfig
from sfiformer.training import adamw, prepare
from sfiformer.training.adamw import ClippedAdamW, served
from sfiformer.training.launch import make_optimizer
from sfiformer.training.losses import CrossEntropy
from sfiformer.training.step import Step

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")
SHAPES = [(70, 130), (5,), (), (0,), (2, 4096), (4097,), (33, 3)]  # beside chunks of 4,096 numbers
DECAY, LR = 0.1, 1e-2


class Pair:
    """The same parameters twice, with the kernels and with PyTorch in float64."""

    def __init__(self, shapes=SHAPES, **settings):
        torch.manual_seed(0)
        self.ours = [Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
        self.theirs = [Parameter(p.detach().double()) for p in self.ours]
        settings = {"weight_decay": DECAY, **settings}
        self.kernels = ClippedAdamW(self.ours, torch.tensor(LR, device=DEVICE), **settings)
        self.plain = torch.optim.AdamW(self.theirs, lr=LR, **settings)
        self.spoilt = torch.zeros((), device=DEVICE)

    def set_gradients(self, size=1.0, without=()):
        for number, (ours, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
            ours.grad = None if number in without else torch.randn_like(ours) * size
            theirs.grad = None if number in without else ours.grad.double()

    def step(self, max_norm, losses=(1.0,)):
        """The norms of both."""
        losses = torch.tensor(losses, device=DEVICE)
        values = self.kernels.clipped_step(losses.unbind(), max_norm, self.spoilt)
        assert torch.equal(values[:-1].nan_to_num(), losses.nan_to_num())
        norm = clip_grad_norm_(self.theirs, max_norm)
        self.plain.step()
        return values[-1], norm

    def assert_same(self):
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6)
            assert (ours in self.kernels.state) == (theirs in self.plain.state)
            state, expected = self.kernels.state[ours], self.plain.state[theirs]
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                largest = (
                    float(value.abs().max()) if value.numel() else 0.0
                )  # means of numbers that may cancel
                found, value = state[key].double(), value.double().to(DEVICE)
                torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6 * largest)


def snapshot(parameters, optimizer):
    states = [value.clone() for p in parameters for value in optimizer.state[p].values()]
    return [p.detach().clone() for p in parameters] + states


def test_kernels_are_launched_on_the_device_of_the_parameters(monkeypatch):
    devices, known = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: devices.append(x) or known(x))
    pair = Pair()
    pair.set_gradients()
    pair.step(1.0)
    assert [x.shape for x in devices] == SHAPES[:1]


@pytest.mark.parametrize("max_norm", [1.0, 1e9, float("inf")])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.0, "betas": (0.5, 0.99), "eps": 1e-3}])
def test_against_pytorch(max_norm, settings):
    pair = Pair(**settings)
    for number in range(4):
        pair.set_gradients(size=10.0 ** (number - 2))
        norm, expected = pair.step(max_norm)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)
    pair.assert_same()
    assert pair.spoilt == 0


def test_the_learning_rate_is_read_on_the_device():
    pair = Pair()
    for lr in (LR, 3 * LR, 0.0):
        pair.kernels.param_groups[0]["lr"].fill_(lr)
        pair.plain.param_groups[0]["lr"] = lr
        pair.set_gradients()
        pair.step(1.0)
    pair.assert_same()


def test_parameters_without_a_gradient_are_left_alone():
    pair = Pair()
    for without in ((0, 2), (), (6,), (0, 1, 2, 3, 4, 5)):
        before = [p.detach().clone() for p in pair.ours]
        pair.set_gradients(without=without)
        pair.step(1.0)
        assert all(torch.equal(pair.ours[number], before[number]) for number in without)
    pair.assert_same()
    assert [int(pair.kernels.state[p]["step"]) for p in pair.ours] == [2, 3, 2, 3, 3, 3, 3]


def test_very_large_gradients_are_clipped_too():
    """Their squares are beyond float32."""
    pair = Pair()
    for size in (1e30, 1e36):
        pair.set_gradients(size=size)
        norm, expected = pair.step(1.0)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)
    pair.assert_same()
    assert pair.spoilt == 0


def test_gradients_that_lie_anyhow():
    """Across, and beside multiples of 16 bytes."""
    pair = Pair()
    for shift in (1, 2):
        pair.set_gradients()
        for p in pair.ours:
            room = torch.empty(p.numel() + shift, device=DEVICE)
            p.grad = room[shift:].view(p.shape).copy_(p.grad)
        pair.ours[0].grad = pair.ours[0].grad.t().contiguous().t()
        pair.step(1.0)
    pair.assert_same()


def test_more_tensors_and_chunks_than_a_kernel_takes_at_once(monkeypatch):
    monkeypatch.setattr(adamw, "MOST", 3)
    monkeypatch.setattr(adamw, "PARTS", 2)
    pair = Pair()
    for without in ((), (1,)):
        pair.set_gradients(without=without)
        pair.step(1.0)
    pair.assert_same()


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 2, 5, "loss"])
def test_what_is_not_finite_changes_nothing_nor_does_any_step_after_it(wrong, place):
    pair = Pair()
    pair.set_gradients()
    pair.step(1.0, (1.0, 2.0, 3.0))
    before = snapshot(pair.ours, pair.kernels)
    pair.set_gradients()
    if place != "loss":
        pair.ours[place].grad.view(-1)[-1] = wrong
    norm, _ = pair.step(1.0, (1.0, wrong if place == "loss" else 2.0, 3.0))
    assert norm.isfinite() == (place == "loss")
    assert pair.spoilt == 1
    pair.set_gradients()
    norm, _ = pair.step(1.0, (1.0, 2.0, 3.0))
    assert norm.isfinite()
    assert pair.spoilt == 1
    assert all(torch.equal(*each) for each in zip(before, snapshot(pair.ours, pair.kernels), strict=True))


def test_a_norm_beyond_float32_is_not_finite():
    pair = Pair([(4096, 2)])
    pair.ours[0].grad = torch.full((4096, 2), 3e38, device=DEVICE)
    before = pair.ours[0].detach().clone()
    values = pair.kernels.clipped_step([torch.tensor(1.0, device=DEVICE)], 1.0, pair.spoilt)
    assert values[-1] == float("inf")
    assert pair.spoilt == 1
    assert torch.equal(pair.ours[0], before)


def test_two_runs_agree_to_the_bit():
    runs = []
    for _ in range(2):
        pair = Pair()
        for _ in range(2):
            pair.set_gradients()
            pair.step(1.0)
        runs.append(snapshot(pair.ours, pair.kernels))
    assert all(torch.equal(*each) for each in zip(*runs, strict=True))


def test_a_copy_goes_on_by_itself():
    pair = Pair([(3,), (5, 2)])
    pair.set_gradients()
    pair.step(1.0)
    twin = copy.deepcopy(pair)
    for each in (pair, twin):
        torch.manual_seed(1)
        each.set_gradients()
        each.step(1.0)
        each.assert_same()
    assert all(torch.equal(a, b) for a, b in zip(pair.ours, twin.ours, strict=True))


def test_autograd_knows_that_parameters_have_changed():
    pair = Pair([(3,)])
    loss = pair.ours[0].square().sum()
    pair.set_gradients()
    pair.step(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_state_dicts_are_those_of_pytorch(first, fused):
    """Two steps with one of them, whose state the other takes up, and two steps more with both."""
    torch.manual_seed(0)
    start = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(4)]

    def ours(values):
        parameters = [Parameter(value.detach().clone()) for value in values]
        return parameters, ClippedAdamW(parameters, torch.tensor(7.0, device=DEVICE), weight_decay=9.0)

    def theirs(values):
        parameters = [Parameter(value.detach().clone()) for value in values]
        lr = torch.tensor(7.0, device=DEVICE) if fused else 7.0
        settings = {"lr": lr, "fused": fused, "capturable": fused and GPU}
        return parameters, torch.optim.AdamW(parameters, weight_decay=9.0, **settings)

    def step(parameters, optimizer, grads):
        for parameter, gradient in zip(parameters, grads, strict=True):
            parameter.grad = gradient.clone()
        if isinstance(optimizer, ClippedAdamW):
            zero = torch.zeros((), device=DEVICE)
            optimizer.clipped_step([zero], 1.0, zero.clone())
        else:
            clip_grad_norm_(parameters, 1.0)
            optimizer.step()

    makers = (ours, theirs) if first == "ours" else (theirs, ours)
    parameters, optimizer = makers[0](start)
    for group in optimizer.param_groups:
        group["weight_decay"] = DECAY
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(LR)
        else:
            group["lr"] = LR
    for grads in gradients[:2]:
        step(parameters, optimizer, grads)
    saved = copy.deepcopy(optimizer.state_dict())
    others, other = makers[1](parameters)
    other.load_state_dict(saved)
    again = other.state_dict()
    assert again["state"].keys() == saved["state"].keys()
    for number, state in saved["state"].items():
        assert state.keys() == again["state"][number].keys()
        assert all(
            torch.equal(value.cpu(), again["state"][number][key].cpu()) for key, value in state.items()
        )
    (left,), (right,) = saved["param_groups"], again["param_groups"]
    assert left.keys() == right.keys()
    assert left["params"] == right["params"]
    for grads in gradients[2:]:
        step(parameters, optimizer, grads)
        step(others, other, grads)
    for one, two in zip(parameters, others, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-6)


def test_misuse_is_named():
    one, two, lr = Parameter(torch.ones(3)), Parameter(torch.ones(3)), torch.tensor(LR)
    with pytest.raises(ValueError, match="one group of parameters, not 2"):
        ClippedAdamW([{"params": [one]}, {"params": [two]}], lr)
    with pytest.raises(ValueError, match="knows no amsgrad"):
        ClippedAdamW([one], lr, amsgrad=True)
    with pytest.raises(ValueError, match=r"learning rate must be a float32 tensor on cpu, not 0\.1"):
        ClippedAdamW([one], 0.1)
    loss, spoilt = torch.zeros(()), torch.zeros(())
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        ClippedAdamW([one], lr).clipped_step([loss], 1.0, spoilt)
    for wrong in (Parameter(torch.ones(3).double()), Parameter(torch.ones(3, 2).t())):
        wrong.grad = torch.zeros_like(wrong)
        with pytest.raises(ValueError, match="takes float32 parameters, each in one piece, all on cpu"):
            ClippedAdamW([wrong], lr).clipped_step([loss], 1.0, spoilt)


def test_a_cpu_has_that_of_pytorch():
    model = torch.nn.Linear(3, 2)
    assert not served(list(model.parameters()))
    assert type(make_optimizer(model, ExperimentConfig())) is torch.optim.AdamW


@on_gpu
def test_a_gpu_has_the_kernels_in_float32_alone():
    model = torch.nn.Linear(3, 2).cuda()
    assert type(make_optimizer(model, ExperimentConfig())) is ClippedAdamW
    assert type(make_optimizer(model.double(), ExperimentConfig())) is torch.optim.AdamW


def test_a_step_with_the_kernels_is_a_plain_one(experiment):
    prepared = prepare(experiment({"model.dropout": 0.0, "model.attention_dropout": 0.0}))
    batch = prepared.stores["train"].batch([0, 1, 2]).to(DEVICE)
    fabric, loss = Fabric(accelerator=DEVICE, devices=1), CrossEntropy(6, weighted=True)
    values, moments = [], []
    for kind in (ClippedAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = SFiFormer(prepared.config.model).to(DEVICE)
        # Small: the first steps would turn the last bit of a gradient into a whole step.
        optimizer = kind(model.parameters(), lr=torch.tensor(1e-6, device=DEVICE), fused=True)
        step = Step(fabric, model, optimizer, loss, prepared.task, 0.1)
        if not GPU:
            step.spoilt = torch.zeros(())
        values.append(torch.cat([step([batch, batch]), step([batch])]))
        assert all(p.grad is None for p in model.parameters())
        states = [optimizer.state[p] for p in model.parameters() if optimizer.state[p]]
        assert all(state["step"] == 2 for state in states)
        moments.append(torch.cat([state["exp_avg"].flatten() for state in states]))
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    assert values[0][2] > 0.1  # and was clipped
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-4 * float(moments[1].abs().max()))


@on_gpu
def test_many_parameters():
    pair = Pair([(1000, 1000), (235, 235), (7,), *[(96, 96), (96,)] * 160])
    for max_norm in (1.0, 1e9, 1.0):
        pair.set_gradients()
        norm, expected = pair.step(max_norm)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)
    pair.assert_same()


@on_gpu
def test_a_captured_step_is_a_plain_one_and_waits_for_nothing():
    """The gradients of a capture are made in it, at addresses of their own."""
    plain, captured = Pair([(300, 300), (9,), ()]), Pair([(300, 300), (9,), ()])
    scale, loss = torch.ones((), device="cuda"), torch.ones((), device="cuda")

    def work(pair):
        for number, p in enumerate(pair.ours):
            p.grad = torch.sin(p.detach() * 3 + number) * scale
        values = pair.kernels.clipped_step([loss], 1.0, pair.spoilt)
        pair.kernels.zero_grad(set_to_none=True)
        return values

    torch.cuda.set_sync_debug_mode("error")
    try:
        warm = [(work(plain), work(captured)) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(*each) for each in warm)
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outputs.append(work(captured))
    for number, size in enumerate((1.0, 1e-4, 1e30, 1.0, float("inf"), 1.0)):
        scale.fill_(size)
        captured.kernels.param_groups[0]["lr"].fill_(LR / (number + 1))
        plain.kernels.param_groups[0]["lr"].fill_(LR / (number + 1))
        expected = work(plain)
        graphs[number % 2].replay()
        assert torch.equal(outputs[number % 2].nan_to_num(), expected.nan_to_num())
        states = (snapshot(pair.ours, pair.kernels) for pair in (plain, captured))
        assert all(torch.equal(*each) for each in zip(*states, strict=True))
    assert plain.spoilt == captured.spoilt == 1
    assert all(captured.kernels.state[p]["step"] == 6 for p in captured.ours)


@on_gpu
def test_the_first_step_of_all_must_not_be_captured():
    pair = Pair([(3,)])
    loss = torch.ones((), device="cuda")
    pair.set_gradients()
    with (
        pytest.raises(RuntimeError, match="plain step with these gradients before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        pair.kernels.clipped_step([loss], 1.0, pair.spoilt)
