"""Averaged weights: what they are, that they are what is measured and kept, and that a run goes on with them."""

import json

import pytest
import torch

from sfiformer.config import OptimConfig
from sfiformer.nn.model import SFiFormer
from sfiformer.training import evaluate, train
from sfiformer.training.average import Average


def _model(experiment):
    torch.manual_seed(0)
    return SFiFormer(experiment({"model.lam_scaling": "largest"}).model)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_mean_of_all_steps_first_then_of_the_last_ones(experiment, in_float64, share):
    model = _model(experiment)
    average = Average(model, share)
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    generator, expected = torch.Generator().manual_seed(0), {}
    for step in range(1, 8):
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype))
                before = expected.get(name, torch.zeros_like(value))
                new = max(1 - share, 1 / step)
                expected[name] = (1 - new) * before + new * value
            else:
                value.fill_(step)
                expected[name] = value.clone()
        average.update()
    found = average.model.state_dict()
    assert found.keys() == expected.keys()
    assert any(not value.is_floating_point() for value in found.values())
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_what_is_measured_and_kept_is_the_average(tmp_path, experiment):
    for folder, settings in {"plain": {}, "averaged": {"optim.average": 0.9}}.items():
        settings = {"optim.lr": 0.03, "trainer.epochs": 5, **settings}
        train(experiment(settings), tmp_path / folder, progress=False)
    plain, averaged = (
        [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        for folder in ("plain", "averaged")
    )
    assert [record["loss"] for record in plain] == [record["loss"] for record in averaged]  # trained alike
    assert [record["test"] for record in plain] != [record["test"] for record in averaged]
    state = torch.load(tmp_path / "averaged" / "last" / "state.pt", weights_only=True)["average"]
    trained = SFiFormer.from_pretrained(tmp_path / "plain" / "last").state_dict()
    assert all(torch.equal(state["weights"][name], value) for name, value in trained.items())
    assert state["steps"] == 15
    kept = SFiFormer.from_pretrained(tmp_path / "averaged" / "last").state_dict()
    assert any(not torch.equal(kept[name], value) for name, value in trained.items())
    scores = evaluate(tmp_path / "averaged", checkpoint="last", device="cpu")
    assert next(iter(scores.values())) == pytest.approx(averaged[-1]["test"])


def test_a_run_that_was_stopped_ends_as_a_whole_one(tmp_path, drive, outcome):
    plans = {tmp_path / "whole": [None], tmp_path / "stopped": [{"signal": 15}, None]}
    settings = {"trainer.epochs": 4, "trainer.checkpoint_steps": 2, "optim.average": 0.9}
    codes, stderr = drive(plans, settings)
    assert codes == [[0], [143, 0]], stderr
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_average_is_a_share():
    with pytest.raises(ValueError, match=r"optim\.average is 1\.0; it must be at least 0 and less than 1"):
        OptimConfig(average=1.0)
