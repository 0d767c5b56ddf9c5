import gzip
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")

from sfiformer.data import smiles

SHARED = Path(os.environ.get("SFIFORMER_SHARED", Path(__file__).parents[2].parent / "shared")) / "data"


def test_a_small_molecule_by_hand():
    graph = smiles.molecule_graph("C[NH3+]")
    # atomic number - 1, chirality, degree, charge + 5, hydrogens, radicals, SP3, aromatic, ring
    assert graph["x"].tolist() == [[5, 0, 4, 5, 3, 0, 2, 0, 0], [6, 0, 4, 6, 3, 0, 2, 0, 0]]
    assert graph["edge_index"].tolist() == [[0, 1], [1, 0]]
    assert graph["edge_attr"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert smiles.molecule_graph("F/C=C/F")["edge_attr"][2:4].tolist() == [[1, 2, 0], [1, 2, 0]]
    benzene = smiles.molecule_graph("c1ccccc1")
    assert (benzene["edge_attr"] == [3, 0, 1]).all()
    assert (benzene["x"][:, 6:] == [1, 1, 1]).all()
    chiral = smiles.molecule_graph("N[C@@H](C)O")["x"][1, 1], smiles.molecule_graph("N[C@H](C)O")["x"][1, 1]
    assert sorted(chiral) == [1, 2]


def test_values_outside_the_lists_take_the_last_category():
    x = smiles.molecule_graph("*[U+6]")["x"]
    assert x[0, 0] == 118  # no element
    assert x[1, 3] == 11  # charge 6
    assert (smiles.molecule_graph("[Na+].[Cl-]")["edge_index"]).shape == (2, 0)


@pytest.mark.parametrize(("text", "message"), [("C1CC", "cannot read the SMILES 'C1CC'"), ("", "no atoms")])
def test_unreadable(text, message, capfd):
    with pytest.raises(ValueError, match=message):
        smiles.molecule_graph(text)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data at {SHARED}; set SFIFORMER_SHARED")
def test_rebuilds_peptides():
    path = SHARED / "peptides-func-smiles.csv.gz"
    with np.load(SHARED / "peptides-func.npz") as archive:
        real = {name: archive[name] for name in archive}
    columns = smiles.find_columns(path)
    assert columns == smiles.Columns("smiles", ("labels",), None, "identifier")
    for g, (_, build) in enumerate(islice(smiles.rows(path, columns), 0, 3000)):
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
    assert smiles.find_columns(write(tmp_path, f"{header}\n{row}\n")).targets == targets


def test_the_table_of_the_documents(tmp_path):
    section = (
        (Path(__file__).parents[2] / "docs" / "commands.md").read_text().split("### A CSV of molecules")[1]
    )
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    columns = smiles.find_columns(write(tmp_path, "\n".join(lines)))
    assert columns == smiles.Columns("smiles", ("toxic", "soluble"), "split", "id")


def test_columns_by_name(tmp_path):
    path = write(tmp_path, "a,b,c\nC,1,2\n")
    assert smiles.find_columns(path, smiles="a", targets=["c"]).targets == ("c",)
    with pytest.raises(ValueError, match="no column 'smiles' among a, b, c"):
        smiles.find_columns(path)
    with pytest.raises(ValueError, match="no column 'd'; the columns are a, b, c"):
        smiles.find_columns(path, smiles="a", targets=["d"])


def test_several_columns_of_text_are_no_targets_together(tmp_path):
    path = write(tmp_path, "smiles,toxic,soluble\nC,yes,no\n")
    with pytest.raises(
        ValueError, match=r"m.csv: toxic, soluble hold text, .* name one column \(--data.targets"
    ):
        smiles.find_columns(path)
    ((_, build),) = smiles.rows(path, smiles.Columns("smiles", ("toxic", "soluble")))
    with pytest.raises(
        ValueError,
        match=r"^'yes' in column toxic: .* choose others \(--data.targets of sfi train, --targets of sfi data info\)",
    ):
        build()


def test_truth_values(tmp_path):
    path = write(tmp_path, "smiles,toxic,soluble\nC,True,0\nCC,,false\n")
    first, second = (build() for _, build in smiles.rows(path, smiles.find_columns(path)))
    assert first.y.values.tolist() == [1, 0]
    assert second.y.values[1] == 0
    ((_, alone), _) = smiles.rows(path, smiles.find_columns(path, targets=["toxic"]))
    assert alone().y.values == "True"  # the name of a class


def test_rows_of_a_zipped_file(tmp_path):
    path = write(tmp_path, 'smiles,y,split,id\nCC,"[1, null]",val,first\n\nCCC,,,\n', "m.csv.gz")
    (place, first), (later, second) = smiles.rows(path, smiles.find_columns(path))
    assert place == f"{path}, line 2"
    assert later == f"{path}, line 4"
    assert first().y.values.tolist()[0] == 1
    assert (first().split, first().id, first().smiles) == ("val", "first", "CC")
    assert second().y is None
    assert second().num_nodes == 3


def test_a_row_is_found_by_the_line_that_it_begins_on(tmp_path):
    path = write(tmp_path, 'smiles,y,remark\nC,1,"two\nlines"\nCC,0,\n')
    assert [place for place, _ in smiles.rows(path, smiles.find_columns(path))] == [
        f"{path}, line {n}" for n in (2, 4)
    ]


def test_broken_files(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        smiles.find_columns(write(tmp_path, ""))
    path = write(tmp_path, "smiles,y\nC\n")
    ((_, build),) = smiles.rows(path, smiles.Columns("smiles", ("y",)))
    with pytest.raises(ValueError, match="1 cells under 2 columns"):
        build()
    path = write(tmp_path, "smiles,y\n" + "CCCNCO,1\n" * 5000, "cut.csv.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        list(smiles.rows(path, smiles.Columns("smiles", ("y",))))


def test_scaffolds():
    assert smiles.scaffold("Cc1ccccc1") == smiles.scaffold("OCc1ccccc1") == "c1ccccc1"
    assert smiles.scaffold("CCO") == ""
