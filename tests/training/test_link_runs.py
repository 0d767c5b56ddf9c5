"""What a run of link prediction draws: by link, over ranks, over a resumed epoch, ahead of the next step."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sfiformer import SFiFormer
from sfiformer.data import GraphStore
from sfiformer.data.shapes import Ladder
from sfiformer.training import prepare, replay, replays, train, trainer
from sfiformer.training.examples import answers, with_negatives
from sfiformer.training.mrr import link_mrrs
from sfiformer.training.replay import Replay
from sfiformer.training.sampling import Stream, derived_seed
from sfiformer.training.step import NonFinite

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def drawn(batch):
    """(graph in the store, head, tail) of each negative, sorted."""
    heads, tails = batch.edge_label_index[:, batch.edge_label == 0]
    graphs = batch.batch[heads]
    first = batch.ptr[graphs]
    return sorted(
        zip(batch.graph_ids[graphs].tolist(), (heads - first).tolist(), (tails - first).tolist(), strict=True)
    )


@pytest.fixture
def noted(monkeypatch):
    """By seed, the negatives that plain steps and replayed ones draw."""
    found = {}

    def noting(batch, seed):
        made = with_negatives(batch, seed)
        found[int(seed)] = drawn(made)
        return made

    monkeypatch.setattr(trainer, "with_negatives", noting)
    monkeypatch.setattr(replays, "with_negatives", noting)
    return found


def test_links_of_a_graph_draw_independently():
    """Of one head and of several, of one tail and of several; one link anew with each seed."""
    pairs = [(0, 1), (0, 2), (1, 0), (2, 0), (3, 2), (3, 1)]
    store = GraphStore(
        torch.tensor([0, 1004]), torch.tensor([0, 0]), torch.zeros(2, 0, dtype=torch.int64),
        link_ptr=torch.tensor([0, len(pairs)]), link={"edge_label_index": torch.tensor(pairs)},
    )  # fmt: skip
    batch, seeds = store.batch([0]), range(2000)
    columns = []
    for seed in seeds:
        made = with_negatives(batch, (seed << 32) + seed)
        columns.append(made.edge_label_index[1, len(pairs) :])
    table = torch.stack(columns).double().numpy()  # [seeds, 2 links]
    correlation = np.corrcoef(np.hstack([table[1:], table[:-1]]).T) - np.eye(24)
    assert abs(correlation).max() < 4.5 / len(seeds) ** 0.5
    assert abs(table.mean(0) - 502).max() < 4 * 290 / len(seeds) ** 0.5


@pytest.mark.parametrize("count", [2, 3, 5])
def test_ranks_draw_what_one_process_draws(links, monkeypatch, count):
    """With more ranks than graphs in a batch, too: then a rank's is empty."""
    prepared = prepare(links())
    here = SimpleNamespace(
        stores=prepared.stores, task=prepared.task, config=prepared.config, device=torch.device("cpu"),
        state=SimpleNamespace(epoch=3),
    )  # fmt: skip
    here._seeds = lambda *given: trainer.Trainer._seeds(here, *given)
    order = np.random.default_rng(0).permutation(len(prepared.stores["train"]))
    parts = [order[:11], order[11:13]]

    def found(rank, ranks):
        monkeypatch.setattr("sfiformer.ranks.rank", lambda: rank)
        monkeypatch.setattr("sfiformer.ranks.count", lambda: ranks)
        return list(map(drawn, trainer.Trainer._batches(here, parts, 5)))

    whole = found(0, 1)
    shares = [found(rank, count) for rank in range(count)]
    assert [sorted(chain(*part)) for part in zip(*shares, strict=True)] == whole
    assert whole[0]


def test_a_run_resumed_within_an_epoch_draws_what_the_whole_one_does(tmp_path, links, noted, monkeypatch):
    config = links({"trainer.checkpoint_steps": 1, "trainer.epochs": 2})
    train(config, tmp_path / "whole", progress=False)
    whole = dict(noted)
    noted.clear()
    assert len({tuple(map(tuple, rows)) for rows in whole.values() if rows}) == len(
        list(filter(None, whole.values()))
    )
    step, calls = trainer.Trainer._step, []

    def killed(self, *graphs):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(1)
        return step(self, *graphs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parts", progress=False)
    before = dict(noted)
    noted.clear()
    train(config, tmp_path / "parts", progress=False, resume=True)
    assert before
    assert not before.keys() & noted.keys()
    assert {**before, **noted} == whole


@pytest.fixture
def captured(monkeypatch):
    """All that a GPU does but the capture: what is prefetched is counted, by whether it was what the next call asked for."""
    counts = {"held": 0, "wrong": 0}

    class Plain:
        def __init__(self, gathered, work, staging, buffer, ids, memory):
            self.gathered, self.work, self.staging, self.buffer = gathered, work, staging, buffer
            self.mark, self.next = object(), replay.BatchBuffer(buffer.batches, staging.next)

        def gather(self, ids):
            self.next.fill(self.gathered(torch.from_numpy(ids)))
            self.staging.held = self.mark, ids

        def __call__(self, ids):
            held = self.staging.held is not None and self.staging.held[0] is self.mark
            if self.staging.holds(self.mark, ids):
                counts["held"] += 1
            else:
                counts["wrong"] += held
                self.gather(ids)
            self.staging.held = None
            self.buffer.memory.copy_(self.next.memory)
            return replay._own(self.work(self.buffer.batches))

    monkeypatch.setattr(replay, "_Captured", Plain)
    monkeypatch.setattr(replay, "WARM_UPS", 1)
    monkeypatch.setattr(replays, "replayable", lambda *_: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return counts


def test_what_is_gathered_ahead_has_the_seeds_of_the_next_step(tmp_path, links, captured, noted):
    train(links({"data.batch_size": 4, "trainer.epochs": 4}), tmp_path / "run", progress=False)
    assert captured["wrong"] == 0
    assert captured["held"] > 0


def test_a_padded_step_that_is_not_finite_is_explained_on_what_it_drew(
    tmp_path, links, captured, noted, monkeypatch
):
    """(On a GPU a step does not raise: what it gives says so.)"""
    explained, step = [], trainer.Step.__call__

    def spoilt(self, batches):
        return step(self, batches) * torch.nan

    def explain(self, batches):
        explained.extend(map(drawn, batches))
        return NonFinite("here")

    monkeypatch.setattr(trainer.Step, "__call__", spoilt)
    monkeypatch.setattr(trainer.Step, "explain", explain)
    with pytest.raises(Exception, match="step 1: not finite: here"):
        train(links(), tmp_path / "run", progress=False)
    seeds = [derived_seed(links().seed, Stream.NEGATIVES, 0, 0, number) for number in range(2)]
    assert explained == [noted[seed] for seed in seeds]


@pytest.mark.parametrize("true", [1.0, 0.3, 0.0])
def test_a_ranking_is_measured_alike_on_padded_batches(links, captured, true):
    """On every rung that holds them, also where no link of a batch is true."""
    prepared = prepare(links())
    store = prepared.stores["train"]
    count = len(store.link["edge_label_index"])
    torch.manual_seed(0)
    store.link["edge_label"] = (torch.rand(count) < true).to(torch.uint8)
    model = SFiFormer(prepared.config.model).double().eval()
    store.node = {name: x.double() for name, x in store.node.items()}
    ladder = Ladder(store, 4)
    plain, padded = link_mrrs(), {rung: link_mrrs() for rung in ladder.rungs[-3:]}
    replayed, work = link_mrrs(), lambda batches: answers(model, batches[0], prepared.task)
    again = Replay(store, 4, work, structure=model.structure)
    with torch.no_grad():
        for first in range(0, len(store), 4):
            chosen = np.arange(first, min(first + 4, len(store)))
            plain.update(*answers(model, store.batch(chosen), prepared.task))
            replayed.update(*again([chosen]))
            for rung, metric in padded.items():
                metric.update(*answers(model, store.batch(chosen, rung), prepared.task))
    for metric in (replayed, *padded.values()):
        assert metric.compute() == pytest.approx(plain.compute(), rel=1e-9, nan_ok=True)
    assert bool(plain["mrr"].graphs) == (true > 0)


@on_gpu
def test_answers_to_a_ranking_are_replayed(links):
    """And steps as a run takes them: with the structure found where negatives are drawn, two batches at a time."""
    prepared = prepare(links({"model.local": "gatedgcn"}))
    store = prepared.stores["train"].to("cuda")
    torch.manual_seed(0)
    model = SFiFormer(prepared.config.model).cuda().eval()
    memory = replay.Memory()
    measured = Replay(
        store,
        4,
        lambda batches: answers(model, batches[0], prepared.task),
        structure=model.structure,
        memory=memory,
    )
    scored = Replay(
        store, 4, lambda batches: tuple(t for b in batches for t in (model(b), b.edge_label_index, b.edge_label)),
        draw=with_negatives, structure=model.structure, memory=memory,
    )  # fmt: skip
    chosen = np.arange(4)
    with torch.no_grad():
        for number in range(replay.WARM_UPS + 3):
            x, pairs, ptr, true = answers(model, store.batch(chosen), prepared.task)
            found = measured([chosen], [chosen])
            torch.testing.assert_close(found[0][: len(x)], x, rtol=1e-4, atol=1e-5)
            assert torch.equal(found[1][:, found[3]], pairs[:, true])
            assert torch.equal(found[2][: len(ptr)], ptr)
            seeds, following = [2 * number, 2**62 + number], [2 * number + 2, 2**62 + number + 1]
            got = scored([chosen, chosen[:2]], [chosen, chosen[:2]], seeds=seeds, then_seeds=following)
            for place, (graphs, seed) in enumerate(zip((chosen, chosen[:2]), seeds, strict=True)):
                expected = with_negatives(store.batch(graphs), seed)
                _, pairs, label = got[3 * place : 3 * place + 3]
                for value in (0, 1):
                    assert torch.equal(
                        pairs[:, label == value], expected.edge_label_index[:, expected.edge_label == value]
                    )
    assert measured._captured
    assert scored._captured
