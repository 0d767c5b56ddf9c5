"""Tables on disk: CSV and Parquet, whole or not at all."""

import csv
import os

import pytest

from sfiformer.prediction.tables import table_file

PARTS = [{"graph": ["a", "b, c"], "score": [0.1, 1 / 3]}, {"graph": ['"d"'], "score": [2e-9]}]


def test_csv(tmp_path):
    with table_file(tmp_path / "t.csv") as write:
        for part in PARTS:
            write(part)
    assert (tmp_path / "t.csv").read_text() == ('graph,score\na,0.1\n"b, c",0.333333333333\n"""d""",2e-09\n')


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    with table_file(tmp_path / "t.parquet") as write:
        for part in PARTS:
            write(part)
    table = parquet.read_table(tmp_path / "t.parquet").to_pydict()
    assert table == {"graph": ["a", "b, c", '"d"'], "score": [0.1, 1 / 3, 2e-9]}


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_any_text_stays_in_its_row(tmp_path, name):
    if name == "t.parquet":
        pytest.importorskip("pyarrow")
    texts = ["plain", "a,b", "c\nd", "e\rf", "g\ud800", "π"]
    with table_file(tmp_path / name) as write:
        write({"graph": texts, "probability:h\udc00": [0.5] * 6})
    if name == "t.csv":
        with (tmp_path / name).open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        found = [row[0] for row in rows]
    else:
        from pyarrow import parquet

        table = parquet.read_table(tmp_path / name).to_pydict()
        header, found = list(table), table["graph"]
    assert header == ["graph", r"probability:h\udc00"]
    assert found == [*texts[:3], r"e\rf", r"g\ud800", "π"]


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_failure_leaves_the_old_table(tmp_path, name):
    (tmp_path / name).write_text("old")

    def fail():
        with table_file(tmp_path / name) as write:
            write(PARTS[0])
            raise ValueError("a bad graph")

    with pytest.raises(ValueError, match="a bad graph"):
        fail()
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "old"


@pytest.mark.parametrize(
    ("name", "message"), [("t.txt", r"\.csv or \.parquet"), ("folder.csv", "is a folder")]
)
def test_other_names_are_refused(tmp_path, name, message):
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match=message), table_file(tmp_path / name):
        pass
