"""`sfi data`: in this process, since its commands need no more of the command line than their words."""

import pytest

from sfiformer.cli import main


@pytest.fixture
def sfi_data(capsys):
    def run(*arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["data", *map(str, arguments)])
        assert stop.value.code == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def test_list_names_all_datasets(sfi_data):
    lines = sfi_data("list").splitlines()
    assert len(lines) == 10
    assert lines[3].split() == [
        "peptides-func",
        "15,535",
        "150.9",
        "307.3",
        "graph",
        "multilabel",
        "CC",
        "BY-NC",
        "4.0",
    ]


def test_info_of_a_dataset_and_of_a_file(sfi_data, own_graphs, tmp_path):
    text = sfi_data("info", "MNIST", "--root", tmp_path)
    assert "55,000 / 5,000 / 10,000 graphs" in text
    assert f"not in {tmp_path} yet" in text
    text = sfi_data("info", own_graphs)
    assert "train 32, val 4, test 4 graphs" in text
    assert "graph binary classification (path, ring)" in text


def test_info_reads_a_file_as_training_is_told_to(sfi_data, tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    rows = [f"{'C' * (1 + i)},{'CO'[i % 2]},{i % 2},{['train', 'val', 'test'][i % 3]}\n" for i in range(9)]
    file = tmp_path / "m.csv"
    file.write_text("molecule,end,toxic,fold\noops,C,0,val\n" + "".join(rows))
    options = [
        "--smiles-column",
        "molecule",
        "--targets",
        "toxic",
        "--split-column",
        "fold",
        "--level",
        "graph",
    ]
    assert "RDKit cannot read the SMILES 'oops'" in sfi_data("info", file, *options, code=2)
    text = sfi_data("info", file, *options, "--skip-bad")
    assert "train 3, val 3, test 3 graphs" in text
    assert "\nlabels: column toxic\nsplit: as the file says\nnot used: end\nskipped: 1 bad, the first" in text


def test_info_lists_all_bad_rows(tmp_path, capsys):
    file = tmp_path / "m.jsonl"
    graph = '{"num_nodes": 2, "edges": [], "y": %s}\n'
    file.write_text("".join(graph % (i / 7) for i in range(20)) + "oops\n" * 9)
    with pytest.raises(SystemExit):
        main(["data", "info", str(file), "--skip-bad"])
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.err.splitlines()] == [
        f"skipped {file}, line {number}" for number in range(21, 30)
    ]
    assert said.out.endswith("not valid JSON: Expecting value at character 1\n")


def test_info_names_its_own_options(sfi_data, tmp_path):
    file = tmp_path / "m.jsonl"
    graph = '{"num_nodes": 2, "edges": [], "y": %s}\n'
    file.write_text("".join(graph % y for y in ['"<4.0"', *(i / 7 for i in range(20))]))
    message = sfi_data("info", file, code=2)
    assert message.endswith("or say --kind classification\n")
    assert "graph classification, 21 classes" in sfi_data("info", file, "--kind", "classification")
    file.write_text("".join(graph % y for y in ("[0, 1]", "[1, 0]")))
    assert "say --level node (one label a node) or --level graph" in sfi_data("info", file, code=2)
    file.write_text("".join(graph % f'"name {i}"' for i in range(20)))
    assert "name another column (--targets), or say --kind" in sfi_data("info", file, code=2)


def test_fetch(sfi_data, tmp_path):
    assert "nothing to fetch" in sfi_data("fetch", "cluster")
    message = sfi_data("fetch", "mnist", "--root", tmp_path, "--mirror", tmp_path, code=1)
    assert message == f"sfi: the mirror folder {tmp_path} holds no MNIST_v2.zip\n"


def test_mistakes(sfi_data):
    assert "did you mean 'mnist'?" in sfi_data("info", "mnis", code=2)
    assert sfi_data("info", "mine.jsonl", code=2) == "sfi: mine.jsonl: there is no such file\n"
