import csv
import io
import json
import math
import resource
import signal
import stat
import sys

import pytest
import torch
import yaml

from sfiformer import SFiFormer
from sfiformer.config import ExperimentConfig
from sfiformer.data.dataset import Member
from sfiformer.errors import TrainingError, UserError
from sfiformer.training import RunFolder, evaluate, train
from sfiformer.training.interruption import Interrupted, Interruption
from sfiformer.training.launch import make_optimizer
from sfiformer.training.splits_table import read_splits, splits_text


@pytest.fixture
def quiet(experiment):
    """quiet(out, {settings}, …): train without output."""
    return lambda out, more=(), **options: train(experiment(more), out, progress=False, **options)


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_folder_holds_everything_and_twice_is_the_same(tmp_path, quiet, outcome):
    state = torch.get_rng_state()
    result = quiet(tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    quiet(tmp_path / "b")
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")

    run = tmp_path / "a"
    assert [record["epoch"] for record in records(run)] == [1, 2, 3]
    best = max(records(run), key=lambda record: record["val"])
    assert (result.val, result.test, result.best_epoch) == (best["val"], best["test"], best["epoch"])
    assert result.gap == pytest.approx(best["train"] - best["test"])
    assert json.loads((run / "result.json").read_text())["test"] == result.test
    assert 0 <= best["zero_share"] <= 1
    assert (run / "metrics.csv").read_text().startswith("epoch,lr,loss,train,val,test,zero_share,")
    assert list((run / "tensorboard").iterdir())
    about = json.loads((run / "about.json").read_text())
    assert about["versions"]["torch"] == torch.__version__
    assert about["device"] == "cpu"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["node_features"] == 7
    assert evaluate(run, split="val", device="cpu") == {"mean_recall": result.val}
    assert SFiFormer.from_pretrained(run / "best").num_parameters == result.parameters


def test_a_small_training_split_is_measured_whole(tmp_path, quiet, monkeypatch):
    settings = {"optim.lr": 0.03, "trainer.epochs": 4}
    whole = quiet(tmp_path / "whole", settings)  # 17 graphs, where validation has 6
    assert evaluate(tmp_path / "whole", split="train", device="cpu") == {"mean_recall": whole.train}
    monkeypatch.setattr("sfiformer.training.trainer.SUBSET", 2)
    part = quiet(tmp_path / "part", settings)
    assert part.val == whole.val
    assert part.train != whole.train  # it can tell


def test_ids_of_any_text_stay_in_their_rows(tmp_path):
    names = ["plain", "a,b", 'c"d', "e\nf", "g\rh", "i\ud800", "π"]
    members = [Member(name, 10 + number, "ab") for number, name in enumerate(names)]
    text = splits_text({"train": members}).encode().decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["id"] for row in rows] == [*names[:4], r"g\rh", r"i\ud800", "π"]
    assert [row["graph"] for row in rows] == [str(number) for number in range(7)]
    (tmp_path / "splits.csv").write_text(text, newline="")
    assert read_splits(tmp_path / "splits.csv")["train"][:4] == members[:4]


def test_accumulated_batches_are_one_step(tmp_path, quiet):
    without_noise = {
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
        "model.norm": "layer",
        "model.local": "none",
        "model.pe": "none",
        "optim.class_weights": False,
        "data.batch_size": 6,
    }
    quiet(tmp_path / "two", {**without_noise, "trainer.accumulate": 2})
    states = torch.load(tmp_path / "two" / "last" / "state.pt", weights_only=True)["optimizer"]["state"]
    assert states[0]["step"] == 3 * 2  # 17 graphs: 12 and 5


def test_losses_that_are_read_late_are_the_same(tmp_path, quiet, outcome, monkeypatch):
    quiet(tmp_path / "whole")
    monkeypatch.setattr("sfiformer.training.trainer.read_every", lambda device: math.inf)
    asked = 0

    def agreed(interruption):
        nonlocal asked
        asked += 1
        return signal.SIGTERM if asked in (3, 7) else 0  # with two steps unread, and while it is measured

    monkeypatch.setattr(Interruption, "agreed", agreed)
    run = tmp_path / "run"
    for expected in ("epoch-0000-step-000002", "epoch-0000-step-000003"):
        with pytest.raises(Interrupted):
            quiet(run, resume=True)
        assert (run / "last").resolve().name == expected
    quiet(run, resume=True)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_an_optimizer_of_another_device_is_taken_up():
    model = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(model.parameters(), lr=torch.tensor(7.0), fused=True, capturable=True)
    model(torch.ones(1, 3)).sum().backward()
    other.step()
    config = ExperimentConfig()
    optimizer = make_optimizer(model, config, {"optimizer": other.state_dict()})
    fresh = make_optimizer(model, config)
    for group, expected in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert {**group, "params": 0} == {**expected, "params": 0}
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 2


def test_the_state_of_the_optimizer_numbers_parameters_as_the_model_does():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.Linear(2, 50)
    )  # the large ones are not the first
    plain = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    optimizer = make_optimizer(model, ExperimentConfig())
    model(torch.ones(1, 3)).square().sum().backward()
    for each in (plain, optimizer):
        each.step()
    saved = optimizer.state_dict()
    assert sorted(saved["state"]) == [0, 1, 2, 3]
    for number, parameter in enumerate(model.parameters()):
        assert saved["state"][number]["exp_avg"].shape == parameter.shape
        assert torch.equal(saved["state"][number]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    again = make_optimizer(model, ExperimentConfig(), {"optimizer": plain.state_dict()})
    for parameter in model.parameters():
        assert torch.equal(again.state[parameter]["exp_avg"], plain.state[parameter]["exp_avg"])


def test_early_stopping(tmp_path, quiet):
    result = quiet(tmp_path / "run", {"trainer.patience": 1, "trainer.epochs": 30, "optim.lr": 1e-9})
    assert result.epochs == 2
    assert result.best_epoch == 1


def test_early_stopping_is_said(tmp_path, experiment, capsys):
    settings = {"trainer.patience": 1, "trainer.epochs": 30, "optim.lr": 1e-9}
    train(experiment(settings), tmp_path / "run", progress=None)
    assert "ended: not better for 1 epochs (trainer.patience)" in capsys.readouterr().out


def test_resuming_a_finished_run_and_going_on_with_it(tmp_path, quiet, outcome):
    run = tmp_path / "run"
    first = quiet(run, resume=True)  # nothing there yet: it starts
    before = outcome(run)
    assert quiet(run, resume=True) == first
    assert outcome(run) == before
    more = quiet(run, {"trainer.epochs": 4, "optim.lr": 1e-3}, resume=True)
    assert more.epochs == 4
    assert len(records(run)) == 4


def test_what_changes_on_resuming_is_noted(tmp_path, quiet, experiment, capsys):
    run = tmp_path / "run"
    quiet(run, {"trainer.epochs": 1})
    about = json.loads((run / "about.json").read_text())
    assert (about["resumed"], about["command"]) == ([], sys.argv)
    (run / "about.json").write_text(
        json.dumps({**about, "resumed": ["2026-11-01T00:00:00+00:00"]})
    )  # as once

    quiet(run, {"trainer.epochs": 2, "optim.lr": 1e-3}, resume=True)
    quiet(run, {"trainer.epochs": 3}, resume=True)
    train(experiment({"trainer.epochs": 2, "optim.lr": 0.5}), run, resume=True)  # nothing is left to train
    assert (
        f"\nnothing is left to train after epoch 3; left as in {run / 'config.yaml'}: optim.lr, trainer.epochs\n"
        in capsys.readouterr().out
    )
    assert RunFolder(run).config().trainer.epochs == 3
    assert RunFolder(run).config().optim.lr == 3e-3

    earlier, *resumed = json.loads((run / "about.json").read_text())["resumed"]
    assert earlier == {"time": "2026-11-01T00:00:00+00:00"}
    assert [(entry["epoch"], entry["step"], entry["command"]) for entry in resumed] == [
        (1, 0, sys.argv),
        (2, 0, sys.argv),
    ]
    assert [entry["changed"] for entry in resumed] == [
        {"optim.lr": [3e-3, 1e-3], "trainer.epochs": [1, 2]},
        {"optim.lr": [1e-3, 3e-3], "trainer.epochs": [2, 3]},
    ]


def test_a_change_is_noted_before_it_is_made(tmp_path, quiet, monkeypatch):
    run = tmp_path / "run"
    quiet(run, {"trainer.epochs": 1})

    def killed(*_):
        raise KeyboardInterrupt

    write = RunFolder._write
    monkeypatch.setattr(
        RunFolder, "_write", lambda *given: killed() if given[1] == "config.yaml" else write(*given)
    )
    with pytest.raises(KeyboardInterrupt):
        quiet(run, {"trainer.epochs": 2}, resume=True)
    assert RunFolder(run).config().trainer.epochs == 1
    assert json.loads((run / "about.json").read_text())["resumed"][-1]["changed"] == {
        "trainer.epochs": [1, 2]
    }


def test_sfi_former_plus_starts_from_a_dense_run(tmp_path, experiment, capsys):
    train(experiment({"model.attention": "dfi"}), tmp_path / "dense", progress=False)
    train(experiment({"trainer.epochs": 1}), tmp_path / "plus", init_from=tmp_path / "dense")
    report = json.loads((tmp_path / "plus" / "about.json").read_text())["init_from"]
    assert "started fresh: layers.*.attention.raw_lam_factor" in report
    assert f"starting from {report}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"cannot start from .*not of this model's dense twin"):
        train(experiment(), tmp_path / "wrong", init_from=tmp_path / "plus", progress=False)


def test_a_non_finite_loss_stops_and_tells(tmp_path, quiet, outcome, monkeypatch):
    quiet(tmp_path / "whole")
    run, calls, forward = tmp_path / "run", 0, SFiFormer.forward

    def overflow(model, batch):
        nonlocal calls
        calls += model.training
        out = forward(model, batch)
        return out * float("inf") if model.training and calls == 5 else out

    with monkeypatch.context() as patch:
        patch.setattr(SFiFormer, "forward", overflow)
        with pytest.raises(TrainingError) as caught:
            quiet(run)
    message = str(caught.value)
    assert message.startswith("epoch 2, step 2: not finite: ")
    assert "the loss (nan)" in message
    assert "of the model's" in message
    assert "the gradients of " in message
    graphs = message.split("training graphs are ")[1].split(";")[0].split(", ")
    assert len(set(graphs)) == 8
    assert "the checkpoint epoch-0001 is kept: continue from it with --resume" in message
    quiet(run, resume=True)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_weights_that_overflow_in_the_last_step_tell_it_too(tmp_path, quiet):
    with pytest.raises(TrainingError) as caught:
        quiet(tmp_path, {"optim.lr": 1e30, "optim.warmup_epochs": 0, "data.batch_size": 1000})
    message = str(caught.value)
    assert message.startswith("epoch 1, after its steps: not finite on graphs of train: inside the model: ")
    assert message.endswith("--resume and, for instance, a lower optim.lr or optim.clip_norm")


def test_a_disk_that_fills_up_keeps_the_last_whole_checkpoint(tmp_path, quiet, outcome):
    """A limit on the size of files lets the first checkpoint through, which has no moments of AdamW yet."""
    quiet(tmp_path / "whole")
    weights = (tmp_path / "whole" / "last" / "model.safetensors").stat().st_size
    run, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (weights + 4096, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"cannot write a checkpoint .* epoch-0000, is kept"):
            quiet(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run / "last").resolve().name == "epoch-0000"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["epoch-0000"]
    quiet(run, resume=True)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path, quiet):
    own = {"data.name": "custom", "data.path": str(tmp_path / "absent.jsonl")}
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(ValueError, match="there is no such file"):
            quiet(tmp_path / name, own)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_folders_that_will_not_do_are_told_before_training(tmp_path, quiet, monkeypatch):
    run = tmp_path / "run"
    quiet(run, {"trainer.epochs": 1})
    with pytest.raises(UserError, match="holds a run already"):
        quiet(run)
    with pytest.raises(UserError, match=r"has model.attention: sfi, and this one model.attention: dfi"):
        quiet(run, {"model.attention": "dfi"}, resume=True)
    with RunFolder(run).claim(resume=True), pytest.raises(UserError, match="another process is training"):
        quiet(run, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        quiet(tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.jpg").write_text("")
    with pytest.raises(UserError, match=r"is no run, but holds photo.jpg"):
        quiet(tmp_path / "other", resume=True)
    with pytest.raises(UserError, match="cannot write to"):
        quiet(tmp_path / "file" / "below")
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"has 0.0 MB left, and the checkpoints of this run need"):
        quiet(tmp_path / "full")


def test_damaged_files_are_named(tmp_path, quiet):
    run = tmp_path / "run"
    quiet(run, {"trainer.epochs": 1})
    weights = run / "last" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"last/model.safetensors is damaged"):
        quiet(run, resume=True)
    weights.write_bytes(whole)
    (run / "last" / "state.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"state.pt is damaged"):
        quiet(run, resume=True)


def test_bf16_trains(tmp_path, quiet):
    assert quiet(tmp_path / "run", {"trainer.precision": "bf16-mixed", "trainer.epochs": 1}).epochs == 1
