"""A file that is given to a run is read as the run read its own."""

import json
import warnings
from dataclasses import replace

import pytest

pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")

from sfiformer.config import ExperimentConfig
from sfiformer.errors import UserError
from sfiformer.explain.runs import ExplainedRun
from sfiformer.prediction import Predictor, predict, write_predictions
from sfiformer.training import RunFolder, evaluate, train
from small_runs import SMALL

MOLECULES = [("C" * (1 + i % 7)) + ("O" if i % 2 else "N") for i in range(20)]


def table(path, columns):
    """A CSV of columns by name, written in their order."""
    rows = zip(*columns.values(), strict=True)
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in [tuple(columns), *rows]))
    return path


@pytest.fixture
def trained(tmp_path):
    """trained(columns): the run of a model trained on a table of them."""

    def make(columns, more=()):
        file = table(tmp_path / "train.csv", columns)
        settings = {**SMALL, "data.path": str(file), "data.root": str(tmp_path / "root"), **dict(more)}
        return train(ExperimentConfig.from_preset("custom", settings), tmp_path / "run", progress=False).run

    return make


def test_rows_that_were_left_out_are_listed_in_the_run(trained, tmp_path):
    file = {"smiles": ["what?", "C(", *MOLECULES], "logP": [i / 2 for i in range(22)]}
    run = trained(file, {"data.skip_bad": True})
    assert (run / "skipped.csv").read_text().splitlines() == [
        "place,reason",
        f"\"{tmp_path / 'train.csv'}, line 2\",RDKit cannot read the SMILES 'what?'",
        f"\"{tmp_path / 'train.csv'}, line 3\",RDKit cannot read the SMILES 'C('",
    ]


def test_a_run_notes_whether_edges_have_their_reverses(trained):
    run = trained({"smiles": MOLECULES, "logP": [i / 2 for i in range(20)]})
    assert RunFolder(run).both_ways() is True
    assert Predictor.from_run(run, device="cpu").both_ways is True


def test_a_run_without_bad_rows_lists_none(trained):
    assert not (trained({"smiles": MOLECULES, "logP": [i / 2 for i in range(20)]}) / "skipped.csv").exists()


NUMBERS = {
    "smiles": MOLECULES,
    "logP": [i / 2 for i in range(20)],
    "mass": [100 + i for i in range(20)],
}
NAMES = {"smiles": MOLECULES, "colour": ["red" if i % 2 else "blue" for i in range(20)]}


@pytest.mark.parametrize("columns", [NUMBERS, NAMES])
def test_labels_are_read_by_the_names_of_their_columns(trained, tmp_path, columns):
    run = trained(columns)
    scores = evaluate(run, data=tmp_path / "train.csv", device="cpu")
    turned = dict(reversed(columns.items()))
    assert evaluate(run, data=table(tmp_path / "turned.csv", turned), device="cpu") == scores
    more = {"price": range(20), "label": ["?"] * 20, **columns}
    assert evaluate(run, data=table(tmp_path / "more.csv", more), device="cpu") == scores


def test_several_targets_have_an_error_each(trained):
    run = trained(NUMBERS)
    scores = evaluate(run, device="cpu")
    assert list(scores) == ["relative_mae", "mae:logP", "mae:mass"]
    task, *_ = RunFolder(run).task()
    parts = zip((scores["mae:logP"], scores["mae:mass"]), task.target_std, strict=True)
    assert scores["relative_mae"] == pytest.approx(sum(error / std for error, std in parts) / 2)
    assert scores["relative_mae"] == pytest.approx(RunFolder(run).result()["test"])


def test_a_run_that_was_judged_otherwise_does_not_go_on(trained, tmp_path):
    folder = RunFolder(trained(NUMBERS))
    about = folder.about()
    assert about.pop("metric") == "relative_mae"
    folder.write_json("about.json", about)  # as before it was noted
    result = folder.result() | {"metric": "mae"}
    folder.write_json("result.json", result)
    assert train(folder.config(), folder.path, resume=True, progress=False).metric == "mae", "it is over"
    assert folder.result() == result
    config = replace(folder.config(), trainer=replace(folder.config().trainer, epochs=2))
    with pytest.raises(UserError, match="was judged by mae, and from now on would be by relative_mae"):
        train(config, folder.path, resume=True, progress=False)
    folder.write_json("about.json", {**about, "metric": "relative_mae"})
    assert train(config, folder.path, resume=True, progress=False).epochs == 2


def test_a_run_whose_labels_would_be_taken_otherwise_today_is_read_as_it_was(trained, monkeypatch):
    monkeypatch.setattr("sfiformer.data.infer._are_numbers_of_classes", lambda labels: True)
    run = trained({"smiles": MOLECULES, "level": [100 + i for i in range(20)]})
    monkeypatch.undo()
    task, *_ = RunFolder(run).task()
    assert (task.kind, task.outputs) == ("classification", 20)
    assert evaluate(run, device="cpu").keys() == {"accuracy"}
    assert len(ExplainedRun(run)) == 2
    config = RunFolder(run).config()
    assert (config.data.kind, config.data.level) == (None, None)
    longer = replace(config, trainer=replace(config.trainer, epochs=2))
    assert train(longer, run, resume=True, progress=False).epochs == 2
    assert (RunFolder(run).task()[0], RunFolder(run).config().data) == (task, config.data)
    other = replace(
        config, data=replace(config.data, kind="regression"), model=replace(config.model, outputs=None)
    )
    with pytest.raises(UserError, match=r"has model\.outputs: 20, and this one model\.outputs: 1"):
        train(other, run, resume=True, progress=False)


def test_a_run_from_before_splits_had_a_seed_goes_on(trained):
    run = RunFolder(trained(NAMES))
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("  split_seed: 0\n", ""))
    assert run.config().data.split_seed is None
    config = ExperimentConfig.from_preset(str(run.path / "config.yaml"), {"data.split_seed": 0})
    train(config, run.path, resume=True, progress=False)
    other = replace(config, data=replace(config.data, split_seed=7))
    with pytest.raises(UserError, match=r"has data\.split_seed: 0, and this one data\.split_seed: 7"):
        train(other, run.path, resume=True, progress=False)


def test_atoms_that_training_has_not_seen_are_told(trained, tmp_path):
    run = trained(NAMES)
    new = {"smiles": ["CCO", "[Se]C", "C[Si](C)(C)C", "CCN"], "id": ["ethanol", "seleno", "tms", "amine"]}
    with pytest.warns(
        UserWarning, match=r"2 graphs .*: seleno \(atomic number 34\), tms \(atomic number 14\)$"
    ):
        predict(run, table(tmp_path / "new.csv", new), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(run, table(tmp_path / "known.csv", {"smiles": MOLECULES}), device="cpu")


def test_explained_graphs_of_a_file_are_called_as_predictions_call_them(trained, tmp_path):
    run = trained(NAMES, {"data.skip_bad": True})
    new = table(tmp_path / "new.csv", {"smiles": ["CC", "no SMILES", "CCCC"]})
    with pytest.warns(UserWarning, match="skipped: 1 bad"):
        assert predict(run, new, device="cpu")["graph"] == ["0", "2"]
    explained = ExplainedRun(run, data=new)
    with pytest.warns(UserWarning, match="skipped: 1 bad"):
        assert (explained.record(2).name, explained.record(2).num_nodes) == ("new.csv[2]", 4)
    with pytest.raises(
        UserError, match=r"no graph '1' in new\.csv: its graphs are called 0, 2, as sfi predict"
    ):
        explained.record(1)
    named = table(tmp_path / "named.csv", {"smiles": ["CC", "CCC"], "id": ["ethane", "propane"]})
    for graph in ("propane", 1):
        assert ExplainedRun(run, data=named).record(graph).num_nodes == 3
    with pytest.raises(UserError, match=r"no graph '001' in named\.csv"):
        ExplainedRun(run, data=named).record("001")
    numbered = table(tmp_path / "numbered.csv", {"smiles": ["CC", "CCC"], "id": ["056", "57"]})
    assert ExplainedRun(run, data=numbered).record("056").num_nodes == 2


def test_a_number_that_is_an_id_is_told_so(trained):
    run = trained({**NAMES, "id": range(1000, 1020)})
    explained = ExplainedRun(run)
    own = RunFolder(run).ids()["test"][1]
    with pytest.raises(
        UserError, match=rf"no graph {own} in test: .* the one whose id is {own} has number 1"
    ):
        explained.record(int(own))


def test_a_file_is_measured_whole(trained, tmp_path):
    run = trained(NAMES)
    with pytest.raises(UserError, match=r"is measured whole: give it without --split val"):
        evaluate(run, data=tmp_path / "train.csv", split="val", device="cpu")
    with pytest.warns(UserWarning, match="its training graphs are measured, too"):
        evaluate(run, data=tmp_path / "train.csv", device="cpu")


def test_another_file_is_evaluated_by_its_own_column_and_without_its_bad_rows(trained, tmp_path):
    run = trained(NAMES)
    other = {"mol": [*MOLECULES, "no SMILES"], "colour": [*NAMES["colour"], "red"]}
    new = table(tmp_path / "new.csv", other)
    with pytest.raises(ValueError, match="--smiles-column elsewhere"):
        evaluate(run, data=new, device="cpu")
    with pytest.raises(ValueError, match="line 22: the SMILES"):
        evaluate(run, data=new, smiles_column="mol", device="cpu")
    with pytest.warns(UserWarning, match="skipped: 1 bad"):
        scores = evaluate(run, data=new, smiles_column="mol", skip_bad=True, device="cpu")
    assert scores == evaluate(run, data=table(tmp_path / "good.csv", NAMES), device="cpu")
    with pytest.warns(UserWarning, match="skipped: 1 bad"):
        assert len(ExplainedRun(run, data=new, smiles_column="mol", skip_bad=True)) == 20


@pytest.mark.parametrize("reading", [{"skip_bad": True}, {"smiles_column": "smiles"}])
def test_how_a_file_is_read_is_said_with_a_file(trained, reading):
    run = trained(NAMES)
    option = f"^--{next(iter(reading)).replace('_', '-')} is for a file: name it with --data"
    with pytest.raises(UserError, match=option):
        evaluate(run, device="cpu", **reading)
    with pytest.raises(UserError, match=option):
        len(ExplainedRun(run, **reading))


def test_graphs_that_are_not_made_of_smiles_are_told(trained, tmp_path):
    run = trained(NAMES)
    line = json.dumps({"x": [[5, 0, 4, 5, 3, 0, 2, 0, 0]], "edges": []})
    (tmp_path / "new.jsonl").write_text(line)
    with pytest.warns(
        UserWarning, match="these are graphs with features of their own, and the model was trained on SMILES"
    ):
        predict(run, tmp_path / "new.jsonl", device="cpu")


def test_no_target_counts_for_more_because_its_numbers_are_larger(trained, tmp_path):
    small = RunFolder(trained(NUMBERS)).result()
    (tmp_path / "run").rename(tmp_path / "small")
    large = RunFolder(trained(NUMBERS | {"mass": [1e6 * mass for mass in NUMBERS["mass"]]})).result()
    assert large["best_epoch"] == small["best_epoch"]
    assert large["val"] == pytest.approx(small["val"], rel=1e-3)


def test_labels_of_a_table_that_has_none_of_them_or_not_all(trained, tmp_path):
    run = trained(NUMBERS)
    some = table(tmp_path / "some.csv", {"smiles": MOLECULES, "mass": range(20)})
    with pytest.raises(ValueError, match=r"some.csv: no column 'logP'; the columns are smiles, mass"):
        evaluate(run, data=some, device="cpu")
    none = table(tmp_path / "none.csv", {"smiles": MOLECULES, "price": range(20)})
    with pytest.raises(
        ValueError, match=r"none.csv has no labels to evaluate against in logP, mass; sfi pre"
    ):
        evaluate(run, data=none, device="cpu")
    assert len(ExplainedRun(run, data=none)) == 20  # a picture needs no label


def test_settings_of_reading_are_those_of_the_run(trained, tmp_path):
    molecules = ["oops", *MOLECULES]
    columns = {"molecule": molecules, "smiles": ["-"] * 21, "colour": ["red", *NAMES["colour"]]}
    settings = {"data.smiles_column": "molecule", "data.targets": ["colour"], "data.skip_bad": True}
    run = trained(columns, settings)
    file = table(tmp_path / "more.csv", {**columns, "molecule": ["what?", *MOLECULES]})

    skipped = r"^skipped: 1 bad, the first .*more.csv, line 2: RDKit cannot read the SMILES 'what\?'$"
    with pytest.warns(UserWarning, match=skipped):
        assert evaluate(run, data=file, device="cpu").keys() == {"roc_auc"}
    with pytest.warns(UserWarning, match=skipped):
        assert len(ExplainedRun(run, data=file)) == 20
    with pytest.warns(UserWarning, match=skipped):
        assert len(predict(run, file, device="cpu")["graph"]) == 20
    rows, bad = write_predictions(run, file, tmp_path / "out.csv", device="cpu")
    assert (rows, len(bad)) == (20, 1)
    with pytest.warns(UserWarning, match=r"skipped: 1 bad, the first .*train.csv, line 2"):
        evaluate(run, device="cpu")


def test_a_file_that_was_changed_is_not_taken_for_the_runs_own(trained, tmp_path, capsys):
    run = trained(NAMES)
    file, before = tmp_path / "train.csv", (tmp_path / "train.csv").read_text()
    again = RunFolder(run).config()
    scores = evaluate(run, device="cpu")
    file.write_text(before + "CCCCC,green\n")
    changed = rf"^{file} was changed since the run in {run} began.*: put the file back as it was, "
    with pytest.raises(UserError, match=changed + "give it with --data"):
        evaluate(run, device="cpu")
    with pytest.raises(UserError, match=changed + "give it with --data"):
        len(ExplainedRun(run))
    with pytest.raises(UserError, match=changed + "or train anew in another folder"):
        train(again, run, resume=True, progress=False)
    with pytest.raises(ValueError, match=r"line 22: label 'green' is not among the 2 classes \(blue, red\)"):
        evaluate(run, data=file, device="cpu")
    file.write_text(before)
    assert evaluate(run, device="cpu") == scores
    train(again, run, resume=True, progress=False)
    moved = file.rename(tmp_path / "moved.csv")
    with pytest.raises(
        UserError,
        match=r"train.csv, which the run in .* was trained on, is not there: put it back, name its new place to the run "
        rf"\(sfi train {run}/config.yaml --data.path FILE --out {run} --resume\)",
    ):
        evaluate(run, device="cpu")
    capsys.readouterr()
    train(replace(again, data=replace(again.data, path=moved)), run, resume=True)
    assert (
        f"\nnothing is left to train after epoch 1\ndata.path is now {moved}, was {file}\n"
        in capsys.readouterr().out
    )
    assert evaluate(run, device="cpu") == scores
    copy = tmp_path / "copy.csv"
    copy.write_text(before)
    moved.write_text(before + "CCCCC,red\n")
    train(replace(again, data=replace(again.data, path=copy)), run, resume=True, progress=False)
    assert evaluate(run, device="cpu") == scores
    copy.rename(moved)
    train(replace(again, data=replace(again.data, path=moved)), run, resume=True, progress=False)
    moved.write_text(before + "CCCCC,red\n")
    with pytest.raises(UserError, match="was changed since the run"):
        evaluate(run, device="cpu")


def test_a_file_that_would_be_split_otherwise_today_is_not_read(trained, tmp_path):
    """A run of an earlier release may not have known the column of the split."""
    columns = {**NUMBERS, "Split": ["train"] * 10 + ["val", "test"] * 5}
    run = trained(columns, {"data.split": "random"})
    before, config = evaluate(run, device="cpu"), run / "config.yaml"
    config.write_text(config.read_text().replace("split: random", "split: auto"))
    for read in (
        lambda: evaluate(run, device="cpu"),
        lambda: train(ExperimentConfig.from_preset(str(config)), run, resume=True, progress=False),
        lambda: ExplainedRun(run).stores,
    ):
        with pytest.raises(
            UserError, match=r"would not be split as it was .* in .*config.yaml set data.split to"
        ):
            read()
    config.write_text(config.read_text().replace("split: auto", "split: random"))
    assert evaluate(run, device="cpu") == before


def test_a_file_without_graphs_is_said_to_have_none(trained, tmp_path):
    run = trained(NAMES)
    (tmp_path / "empty.csv").write_text((tmp_path / "train.csv").read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"empty.csv holds no graphs"):
        evaluate(run, data=tmp_path / "empty.csv", device="cpu")


def test_runs_of_earlier_releases_know_their_file_by_its_task(trained, tmp_path):
    run = trained(NAMES)
    about = json.loads((run / "about.json").read_text())
    assert len(about.pop("data_sha256")) == 64
    (run / "about.json").write_text(json.dumps(about))
    file = tmp_path / "train.csv"
    file.write_text(file.read_text().replace("C,", "CC,"))
    assert evaluate(run, device="cpu").keys() == {"roc_auc"}
    file.write_text(file.read_text().replace("red", "green"))
    with pytest.raises(UserError, match=r"is not what the run .* \(blue, green\), not .* \(blue, red\)"):
        evaluate(run, device="cpu")
