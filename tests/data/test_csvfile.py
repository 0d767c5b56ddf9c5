import gzip
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")

from sfiformer.data import csvfile

SHARED = Path(os.environ.get("SFIFORMER_SHARED", Path(__file__).parents[2].parent / "shared")) / "data"


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data at {SHARED}; set SFIFORMER_SHARED")
def test_rebuilds_peptides():
    path = SHARED / "peptides-func-smiles.csv.gz"
    with np.load(SHARED / "peptides-func.npz") as archive:
        real = {name: archive[name] for name in archive}
    columns = csvfile.find_columns(path)
    assert columns == csvfile.Columns("smiles", ("labels",), None, "identifier")
    for g, (_, build) in enumerate(islice(csvfile.rows(path, columns), 0, 3000)):
        if g % 50:
            continue
        record = build()
        nodes, edges = slice(*real["node_ptr"][g : g + 2]), slice(*real["edge_ptr"][g : g + 2])
        assert np.array_equal(record.x, real["x"][nodes])
        assert np.array_equal(record.edge_index, real["edge_index"][:, edges])
        assert np.array_equal(record.edge_attr, real["edge_attr"][edges])
        assert np.array_equal(record.y.values, real["y"][g])


def write(folder, text, name="m.csv"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("header", "row", "targets"),
    [
        ("smiles,y,other", "C,1,2", ("y",)),
        ("mol_id,smiles,NR-AR,NR-AhR", "a7,C,0,", ("NR-AR",)),
        ("SMILES,logP,MW", "C,0.5,16", ("logP", "MW")),
        ("smiles,colour", "C,red", ("colour",)),
        ("smiles,toxic,soluble", "C,True,FALSE", ("toxic", "soluble")),
        ("smiles,remark,toxic", "C,good,true", ("toxic",)),
        ("smiles,colour,empty", "C,red,", ("colour",)),
        ("smiles,split", "C,train", ()),
        ("name,smiles", "methane,C", ()),
    ],
)
def test_finds_targets(tmp_path, header, row, targets):
    assert csvfile.find_columns(write(tmp_path, f"{header}\n{row}\n")).targets == targets


@pytest.mark.parametrize(
    ("header", "identifier"),
    [
        ("compound_id,SMILES,y", "compound_id"),
        ("Molecule ChEMBL ID,Smiles,y", "Molecule ChEMBL ID"),
        ("smiles_id,canonical_smiles,y", "smiles_id"),
        ("name,CAS-Number,smiles,y", "CAS-Number"),
        (",smiles,InChIKey", "InChIKey"),
        ("row,name,smiles,y", "name"),
        ("id,id,cid,smiles,y", "cid"),
        ("plate_id,smiles,y", None),
    ],
)
def test_finds_the_identifier(tmp_path, header, identifier):
    columns = csvfile.find_columns(write(tmp_path, f"{header}\n"))
    assert columns.id == identifier
    assert identifier not in columns.targets


def test_the_table_of_the_documents(tmp_path):
    commands = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    section = commands.split("### A CSV of molecules")[1]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    columns = csvfile.find_columns(write(tmp_path, "\n".join(lines)))
    assert columns == csvfile.Columns("smiles", ("toxic", "soluble"), "split", "id")


def test_columns_by_name(tmp_path):
    path = write(tmp_path, "a,b,c\nC,1,2\n")
    assert csvfile.find_columns(path, smiles="a", targets=["c"]).targets == ("c",)
    with pytest.raises(ValueError, match="no column 'smiles' among a, b, c"):
        csvfile.find_columns(path)
    with pytest.raises(ValueError, match="no column 'd'; the columns are a, b, c"):
        csvfile.find_columns(path, smiles="a", targets=["d"])


def test_several_columns_of_text_are_no_targets_together(tmp_path):
    path = write(tmp_path, "smiles,toxic,soluble\nC,yes,no\n")
    with pytest.raises(
        ValueError, match=r"m.csv: toxic, soluble hold text, .* name one column \(--data.targets"
    ):
        csvfile.find_columns(path)
    ((_, build),) = csvfile.rows(path, csvfile.Columns("smiles", ("toxic", "soluble")))
    with pytest.raises(
        ValueError,
        match=r"^'yes' in column toxic: .* choose others \(--data.targets of sfi train\)",
    ):
        build()


def table(folder, *columns):
    """A CSV file of molecules with these columns: the name of each, and its cells."""
    names, cells = zip(*columns, strict=True)
    rows = [f"{'C' * (1 + i)},{','.join(row)}" for i, row in enumerate(zip(*cells, strict=True))]
    return write(folder, "\n".join([",".join(["smiles", *names]), *rows]) + "\n")


@pytest.mark.parametrize("odd", [">250", "ND"])
@pytest.mark.parametrize("others", [["0", "1"], ["16.5", "17"], ["True", "False"]])
def test_a_stray_text_drops_no_column(tmp_path, odd, others):
    mw = [odd if i == 7 else others[i % 2] for i in range(20)]
    path = table(tmp_path, ("logp", ["0.5"] * 20), ("mw", mw))
    with pytest.raises(
        ValueError,
        match=rf"m.csv, line 9: '{odd}' in column mw is text, and 19 others are numbers: correct it, leave it empty "
        r"where it is missing, or name the columns to be predicted \(--data.targets of sfi train\)$",
    ):
        csvfile.find_columns(path)
    assert csvfile.find_columns(path, targets=["logp"]).targets == ("logp",)
    assert csvfile.find_columns(path, labelled=False, targets=()).targets == ()


def test_a_column_with_more_than_a_few_texts_is_one_of_text(tmp_path):
    texts = ["a"] * 3 + ["1"] * 17
    assert csvfile.find_columns(table(tmp_path, ("logp", ["0.5"] * 20), ("batch", texts))).targets == (
        "logp",
    )
    alone = ["a"] + ["1"] * 19  # whose labels are judged together
    assert csvfile.find_columns(table(tmp_path, ("batch", alone))).targets == ("batch",)


def test_cells_of_a_bad_row_are_no_stray_text(tmp_path):
    path = table(tmp_path, ("logp", ["0.5"] * 20), ("mw", ["1"] * 20))
    path.write_text(path.read_text() + "C,name,0.5,1\n")
    assert csvfile.find_columns(path).targets == ("logp", "mw")


def test_a_decimal_comma_among_several_targets(tmp_path):
    path = write(tmp_path, 'smiles,mw,logP\nC,"16,04",1\n')
    ((_, build),) = csvfile.rows(path, csvfile.Columns("smiles", ("mw", "logP")))
    with pytest.raises(ValueError, match=r"^'16,04' in column mw: .*; write decimals with a point$"):
        build()


def test_truth_values(tmp_path):
    path = write(tmp_path, "smiles,toxic,soluble\nC,True,0\nCC,,false\n")
    first, second = (build() for _, build in csvfile.rows(path, csvfile.find_columns(path)))
    assert first.y.values.tolist() == [1, 0]
    assert second.y.values[1] == 0
    ((_, alone), _) = csvfile.rows(path, csvfile.find_columns(path, targets=["toxic"]))
    assert alone().y.values == "True"  # the name of a class


def test_rows_of_a_zipped_file(tmp_path):
    path = write(tmp_path, 'smiles,y,split,id\nCC,"[1, null]",val,first\n\nCCC,,,\n', "m.csv.gz")
    (place, first), (later, second) = csvfile.rows(path, csvfile.find_columns(path))
    assert place == f"{path}, line 2"
    assert later == f"{path}, line 4"
    assert first().y.values.tolist()[0] == 1
    assert (first().split, first().id, first().smiles) == ("val", "first", "CC")
    assert second().y is None
    assert second().num_nodes == 3


def test_a_row_is_found_by_the_line_that_it_begins_on(tmp_path):
    path = write(tmp_path, 'smiles,y,remark\nC,1,"two\nlines"\nCC,0,\n')
    assert [place for place, _ in csvfile.rows(path, csvfile.find_columns(path))] == [
        f"{path}, line {n}" for n in (2, 4)
    ]


def test_broken_files(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        csvfile.find_columns(write(tmp_path, ""))
    path = write(tmp_path, "smiles,y\nC\n")
    ((_, build),) = csvfile.rows(path, csvfile.Columns("smiles", ("y",)))
    with pytest.raises(ValueError, match="1 cells under 2 columns"):
        build()
    path = write(tmp_path, "smiles,y\n" + "CCCNCO,1\n" * 5000, "cut.csv.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        list(csvfile.rows(path, csvfile.Columns("smiles", ("y",))))


def csv_file(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "m.csv"
    path.write_bytes(text.encode(encoding))
    return path


def read_all(path):
    return [record() for _, record in csvfile.rows(path, csvfile.find_columns(path))]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('a,C,1\n"b,CC,2\nc,CCC,3\n"d,O,4\ne,CO,5\n', 3),  # between two lone marks all would be one text
        ('a,C,1\nb,CC,2\n"c,CCC,3\nd,O,4\n', 4),  # open to the end
        ('a,C,1\n"b"x,CC,2\n', 3),
    ],
)
def test_a_lone_quotation_mark_takes_no_rows_with_it(tmp_path, rows, line):
    path = csv_file(tmp_path, "id,smiles,y\n" + rows)
    with pytest.raises(
        ValueError, match=rf"m.csv, line {line}: not valid CSV: .*; a quotation mark within a text"
    ):
        read_all(path)


def test_quotation_marks_that_are_closed_are_read(tmp_path):
    path = csv_file(tmp_path, 'id,smiles,y\n"a ""b"", c",C,1\n"two\nlines",CC,2\n')
    assert [record.id for record in read_all(path)] == ['a "b", c', "two\nlines"]


@pytest.mark.parametrize(("encoding", "line"), [("latin-1", 3), ("utf-16", 1)])
def test_a_file_in_another_encoding_is_not_guessed_at(tmp_path, encoding, line):
    path = csv_file(tmp_path, "smiles,y\nC,e\nCC,é\nCCC,è\n", encoding)
    with pytest.raises(ValueError, match=rf"m.csv, line {line} is not UTF-8: save the file as UTF-8"):
        read_all(path)


@pytest.mark.parametrize("header", ["smiles,y,smiles", "smiles,y,y", "smiles,split,split,y"])
def test_two_columns_of_a_name_that_is_needed(tmp_path, header):
    path = csv_file(tmp_path, f"{header}\n" + ",".join(["C"] * header.count(",")) + ",C\n")
    with pytest.raises(
        ValueError, match=r"2 columns are called '(smiles|y|split)', and only one can be meant"
    ):
        csvfile.find_columns(path)


def test_other_columns_may_share_a_name(tmp_path):
    path = csv_file(tmp_path, "id,id,smiles,y,,\na,b,C,1,,\nc,d,CC,2,,\n")
    columns = csvfile.find_columns(path, targets=["y"])
    assert columns == csvfile.Columns("smiles", ("y",))
    assert [record.y.values.item() for record in read_all(path)] == [1, 2]


def test_a_target_that_is_named_twice(tmp_path):
    path = csv_file(tmp_path, "smiles,a\nC,1\n")
    with pytest.raises(ValueError, match="the target 'a' is named twice"):
        csvfile.find_columns(path, targets=["a", "a"])


def test_targets_are_found_in_upper_and_lower_case(tmp_path):
    path = csv_file(tmp_path, "SMILES,Label\nC,1\n")
    assert csvfile.find_columns(path, targets=["label"]).targets == ("Label",)
    assert csvfile.find_columns(path, targets=["label"], labelled=False).targets == ("Label",)


@pytest.mark.parametrize(("header", "asked"), [("Split", "split"), ("SPLIT", "split"), ("Fold", "fold")])
def test_the_split_is_found_in_upper_and_lower_case(tmp_path, header, asked):
    path = csv_file(tmp_path, f"smiles,y,{header}\nC,1,Train\n")
    columns = csvfile.find_columns(path, split=asked)
    assert columns.split == header
    ((_, build),) = csvfile.rows(path, columns)
    assert build().split == "Train"


def test_of_two_columns_the_split_is_the_one_that_is_written_so(tmp_path):
    path = csv_file(tmp_path, "smiles,y,Split,split\nC,1,1,train\n")
    assert csvfile.find_columns(path).split == "split"


@pytest.mark.parametrize("text", ["N/A", "#N/A", "<NA>", " n/a ", "NULL"])
def test_what_spreadsheets_write_for_a_missing_label(text):
    assert csvfile.parse_cell(text) is None


@pytest.mark.parametrize("text", ["1_1", "2024_01", "1_0.5", "1e1_0"])
def test_an_underscore_makes_no_number(tmp_path, text):
    assert csvfile.parse_cell(text) == text
    path = table(tmp_path, ("logp", ["0.5"] * 20), ("batch", [text] * 20))
    assert csvfile.find_columns(path).targets == ("logp",)


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_file_that_other_signs_part_is_named(tmp_path, sign, name):
    path = write(tmp_path, f"id{sign}SMILES{sign}y\na{sign}CCO{sign}1,5\n")
    with pytest.raises(ValueError, match=f"its columns are separated by {name}; save it with commas"):
        csvfile.find_columns(path)
