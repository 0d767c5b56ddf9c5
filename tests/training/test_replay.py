"""Captured steps do what plain ones do; the capture itself needs a GPU."""

import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric

from sfiformer import SFiFormer
from sfiformer.data.shapes import BatchShape
from sfiformer.training import prepare, replays, train
from sfiformer.training.average import Average
from sfiformer.training.compiling import rehearse
from sfiformer.training.examples import with_negatives
from sfiformer.training.launch import make_optimizer
from sfiformer.training.losses import CrossEntropy
from sfiformer.training.preparation import objective
from sfiformer.training.replay import WARM_UPS, Memory, Replay
from sfiformer.training.replays import iterates_at_once, replayable
from sfiformer.training.step import Step

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
STEPS, SHARE = 6, 0.9


PROXIMAL = {"model.solver": "proximal", "model.lam_scaling": "graph"}


@pytest.fixture(params=["eslappe", "lappe", "rwse", "gcn", "proximal"])
def setting(experiment, request):
    """setting(): a step with a fresh model, and the store of its data, on the GPU."""
    # A small learning rate: AdamW's first steps would turn the last bit of a gradient into a whole step.
    quiet = {
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
        "model.pe": {"gcn": "rwse", "proximal": "lappe"}.get(request.param, request.param),
        "model.local": "edge-gcn" if request.param == "gcn" else "gatedgcn",
        "model.residual": request.param != "gcn",
        "model.feed_forward": request.param != "gcn",
        "model.pe_dim": 4,
        "model.sign_flip": False,
        "data.batch_size": 4,
        "optim.lr": 1e-6,
        **(PROXIMAL if request.param == "proximal" else {}),
    }
    prepared = prepare(experiment(quiet))
    store = prepared.stores["train"].to("cuda")

    def build():
        torch.manual_seed(0)
        model = SFiFormer(prepared.config.model).cuda()
        optimizer = make_optimizer(model, prepared.config)
        fabric, loss = Fabric(accelerator="cuda", devices=1), CrossEntropy(6, weighted=True)
        return Step(fabric, model, optimizer, loss, prepared.task, 1.0, Average(model, SHARE)), store

    return build


def batches(store):
    rng = np.random.default_rng(0)
    same = rng.permutation(len(store))[:4]
    return [same] * (WARM_UPS + 1) + [rng.permutation(same) for _ in range(STEPS)]


def test_a_cpu_replays_nothing(experiment):
    prepared = prepare(experiment({}))
    assert not replayable(prepared.config, prepared.stores)


def test_what_a_kernel_takes_is_the_width_of_a_head(experiment, monkeypatch):
    store = SimpleNamespace(device=torch.device("cuda"), node_ptr=torch.tensor([0, 9]))
    monkeypatch.setattr("sfiformer.attention.kernels.has_room", lambda device: True)
    monkeypatch.setattr("sfiformer.attention.kernels.HAS_TRITON", True)
    for settings, expected in (
        ({"model.head_width": "narrow"}, True),
        ({}, False),
        ({"model.attention": "none"}, True),
    ):
        prepared = prepare(experiment(settings))
        config = replace(prepared.config, model=replace(prepared.config.model, dim=275))
        assert replayable(config, {"train": store}) == expected


def test_the_iteration_is_captured_where_all_graphs_of_a_batch_have_room_at_once(experiment, monkeypatch):
    model = replace(prepare(experiment(PROXIMAL)).config.model, heads=4)
    step, measured = BatchShape(222, 4928, 9999, 0, 444, 8), BatchShape(900, 20096, 40000, 0, 444, 8)
    assert iterates_at_once(model, True, step)
    assert iterates_at_once(model, False, measured)
    assert not iterates_at_once(model, True, measured)
    assert iterates_at_once(replace(model, solver="exact"), True, measured)
    assert iterates_at_once(replace(model, attention="dfi"), True, measured)

    store = SimpleNamespace(device=torch.device("cuda"), node_ptr=torch.tensor([0, 4097]))
    monkeypatch.setattr("sfiformer.attention.kernels.has_room", lambda device: True)
    monkeypatch.setattr("sfiformer.attention.kernels.HAS_TRITON", True)
    prepared = prepare(experiment(PROXIMAL))
    assert not replayable(prepared.config, {"train": store})
    store.node_ptr[1] -= 1
    assert replayable(prepared.config, {"train": store})


def test_work_that_waits_is_done_plainly(experiment, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    store = prepare(experiment({"data.batch_size": 4})).stores["train"]
    replay = Replay(store, 4, lambda batches: (batches[0].x.sum(),), never_waits=lambda shape: False)
    graphs = np.array([5, 2, 7, 0])
    found = [replay([graphs])[0] for _ in range(WARM_UPS + 2)]
    assert not replay._captured
    assert all(torch.equal(value, found[0]) for value in found)


@pytest.mark.parametrize("solver", [{}, PROXIMAL])
def test_a_run_on_padded_batches_is_the_plain_one(tmp_path, experiment, monkeypatch, in_float64, solver):
    settings = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "trainer.accumulate": 2, **solver}
    _padded_run_is_the_plain_one(experiment(settings), tmp_path, monkeypatch)


def test_a_run_on_padded_batches_of_links_is_the_plain_one(tmp_path, links, monkeypatch, in_float64):
    """With the same negatives: what a link draws does not depend on what is beside it."""
    drawn, draw = [], replays.with_negatives
    monkeypatch.setattr(replays, "with_negatives", lambda *given: drawn.append(1) or draw(*given))
    _padded_run_is_the_plain_one(links(), tmp_path, monkeypatch)
    assert drawn


def _padded_run_is_the_plain_one(config, folder, monkeypatch):
    runs = []
    for name in ("plain", "padded"):
        train(config, folder / name, progress=False)
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        runs.append([json.loads(line) for line in lines])
        # All that a GPU does but the capture.
        monkeypatch.setattr("sfiformer.training.replays.replayable", lambda *_: True)
        monkeypatch.setattr("sfiformer.training.replay.WARM_UPS", 10**9)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for plain, padded in zip(*runs, strict=True):
        for key in ("loss", "train", "val", "test"):
            assert padded[key] == pytest.approx(plain[key], rel=1e-6), key


def test_an_example_lies_in_memory_as_the_work_finds_it(experiment, monkeypatch):
    """Kernels are compiled for how their tensors lie."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    prepared, seen = prepare(experiment({"data.batch_size": 4})), []
    model = SFiFormer(prepared.config.model)
    replay = Replay(
        prepared.stores["train"], 4, lambda batches: seen.append(batches[0]) or (), structure=model.structure
    )
    graphs = np.array([5, 2, 7, 0])
    replay([graphs])

    def places(batch):
        tensors = []
        batch.map(tensors.append)
        return [(tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16) for tensor in tensors]

    example = replay.example(graphs)
    assert places(example) == places(seen[0])
    assert torch.equal(example.x, seen[0].x)


@on_gpu
@pytest.mark.filterwarnings(
    "error:.*AccumulateGrad"
)  # of gradients that come about on a stream that is not their own
def test_a_replayed_step_is_a_plain_one(setting):
    plain, store = setting()
    captured, _ = setting()
    replay = Replay(store, 4, lambda batches: (captured(batches),))
    means = [0.0] * len(list(captured.model.parameters()))
    for number, chosen in enumerate(batches(store), 1):
        expected = plain([store.batch(chosen)])
        torch.testing.assert_close(replay([chosen])[0], expected, rtol=1e-4, atol=1e-5)
        share = max(1 - SHARE, 1 / number)
        weights = [parameter.detach().double() for parameter in captured.model.parameters()]
        means = [mean + share * (weight - mean) for mean, weight in zip(means, weights, strict=True)]
    assert replay._captured
    for (name, left), right in zip(plain.model.named_buffers(), captured.model.buffers(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5, msg=name)
    assert plain.average.steps == captured.average.steps == len(batches(store))
    # Of its own weights: where a gradient is nothing but rounding, AdamW makes whole steps of it, and other ones in each run.
    for mean, averaged in zip(means, captured.average.model.parameters(), strict=True):
        torch.testing.assert_close(averaged.double(), mean, rtol=1e-6, atol=1e-8)
    for left, right in zip(plain.optimizer.state.values(), captured.optimizer.state.values(), strict=True):
        assert left["step"] == right["step"]
        torch.testing.assert_close(left["exp_avg"], right["exp_avg"], rtol=1e-2, atol=1e-5)


@on_gpu
def test_a_replayed_step_draws_the_negatives_of_a_plain_one(links):
    prepared = prepare(links({"optim.lr": 1e-6, "model.sign_flip": False, "data.batch_size": 4}))
    store, found = prepared.stores["train"].to("cuda"), []
    loss = objective(prepared.config, prepared.task)[0]

    def build():
        torch.manual_seed(0)
        model = SFiFormer(prepared.config.model).cuda()
        optimizer = make_optimizer(model, prepared.config)
        return Step(Fabric(accelerator="cuda", devices=1), model, optimizer, loss, prepared.task, 1.0)

    plain, captured = build(), build()
    replay = Replay(
        store,
        4,
        lambda batches: (captured(batches),),
        draw=with_negatives,
        structure=captured.model.structure,
    )
    order = batches(store)
    for number, (chosen, then) in enumerate(zip(order, [*order[1:], None], strict=True)):
        expected = plain([with_negatives(store.batch(chosen), number)])
        got = replay(
            [chosen],
            None if then is None else [then],
            seeds=[number],
            then_seeds=[number + 1][: then is not None],
        )
        torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-5)
        found.append(float(expected[0]))
    assert replay._captured
    assert len(set(found)) == len(found)


@on_gpu
def test_after_a_rehearsal_only_the_optimiser_is_compiled(setting, monkeypatch):
    step, store = setting()
    replay = Replay(store, 4, lambda batches: (step(batches),), structure=step.model.structure)
    first = replay, batches(store)[0]
    rehearse(step.model, {"step": first, "train": first}, step.fabric.autocast)
    compiled = []
    monkeypatch.setattr(
        "triton.knobs.compilation.listener", lambda *, src, **event: compiled.append(src.name)
    )
    for chosen in batches(store)[: WARM_UPS + 2]:
        replay([chosen])
    assert replay._captured
    assert set(compiled) <= {"squares_kernel", "update_kernel"}


@on_gpu
def test_a_step_that_is_not_finite_changes_nothing_nor_does_any_after_it(setting):
    step, store = setting()
    replay = Replay(store, 4, lambda batches: (step(batches),))
    chosen = batches(store)
    for graphs in chosen[: WARM_UPS + 2]:
        assert replay([graphs])[0].isfinite().all()
    with torch.no_grad():
        step.model.head.mlp.out.bias[2] = float("nan")
        kept = step.model.head.mlp.out.weight.clone()
    assert not replay([chosen[-1]])[0].isfinite().all()
    assert "the loss" in str(step.explain([store.batch(chosen[-1])]))
    step.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        step.model.head.mlp.out.bias[2] = 0.0
    assert replay([chosen[-1]])[0].isfinite().all()
    assert torch.equal(step.model.head.mlp.out.weight, kept)


@on_gpu
def test_dropout_is_drawn_anew_and_again_with_the_same_seed(experiment):
    prepared = prepare(experiment({"model.dropout": 0.5, "data.batch_size": 4}))
    store = prepared.stores["train"].to("cuda")
    torch.manual_seed(0)
    model = SFiFormer(prepared.config.model).cuda().train()
    replay = Replay(store, 4, lambda batches: (model(batches[0]).detach(),))
    seen = []
    for seed in [0] * WARM_UPS + [1, 2, 1]:
        torch.manual_seed(seed)
        seen.append(replay([np.arange(4)])[0])
    assert torch.equal(seen[-1], seen[-3])
    assert not torch.equal(seen[-1], seen[-2])


@on_gpu
def test_works_with_memory_in_common_lie_on_top_of_one_another(setting):
    gc.collect()  # captures of other tests
    step, store = setting()
    memory = Memory()

    def measured(batches):
        with torch.no_grad():
            return (step.model(batches[0]),)

    def held_for(work, memory):
        torch.cuda.empty_cache()
        replay, before = Replay(store, 4, work, memory=memory), torch.cuda.memory_reserved()
        for chosen in batches(store):
            replay([chosen])
        torch.cuda.empty_cache()
        kept.append(replay)
        return (torch.cuda.memory_reserved() - before) / 2**20

    kept = []
    assert held_for(lambda batches: (step(batches),), memory) >= 32  # cuBLAS's work space, if nothing else
    assert held_for(measured, memory) < 32
    assert held_for(measured, None) >= 32


@on_gpu
@pytest.mark.parametrize("known", ["the next", "others", "nothing"])
def test_batches_gathered_ahead_are_those_asked_for(experiment, known):
    """With dropout: gathering beside the work must not touch its random numbers either."""
    prepared = prepare(experiment({"model.dropout": 0.5, "data.batch_size": 4}))
    store = prepared.stores["train"].to("cuda")
    torch.manual_seed(0)
    model = SFiFormer(prepared.config.model).cuda().train()
    order = batches(store) + batches(store)[::-1]
    following = {"the next": [*order[1:], None], "others": order, "nothing": [None] * len(order)}[known]
    replay = Replay(store, 4, lambda batches: (model(batches[0]).detach(),), structure=model.structure)
    alone = Replay(store, 4, lambda batches: (model(batches[0]).detach(),))
    for number, (chosen, then) in enumerate(zip(order, following, strict=True)):
        torch.manual_seed(number)
        expected = alone([chosen])[0]
        torch.cuda.synchronize()
        torch.manual_seed(number)
        got = replay([chosen], None if then is None else [then])[0]
        assert torch.equal(got, expected), number
    assert replay._captured


@on_gpu
def test_what_is_made_ahead_sees_the_sizes_of_its_own_batch(experiment):
    """λ*/n of each graph, with the structure found inside the captured work."""
    prepared = prepare(experiment({"model.lam_scaling": "graph", "data.batch_size": 4}))
    store = prepared.stores["train"].to("cuda")
    torch.manual_seed(0)
    model = SFiFormer(prepared.config.model).cuda().eval()

    @torch.no_grad()
    def work(batches):
        return (model(batches[0]),)

    inside, ahead = Replay(store, 4, work), Replay(store, 4, work, structure=model.structure)
    for chosen in batches(store):
        assert torch.equal(inside([chosen])[0], ahead([chosen])[0])
