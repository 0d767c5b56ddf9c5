import pytest

pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")

from sfiformer.data import smiles


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


def test_a_molecule_has_one_canonical_smiles():
    one, other, mirrored = (
        smiles.canonical(smiles.parse_smiles(text)) for text in ("C[C@H](N)O", "O[C@H](C)N", "C[C@@H](N)O")
    )
    assert one == other != mirrored


def test_scaffolds():
    assert smiles.scaffold("Cc1ccccc1") == smiles.scaffold("OCc1ccccc1") == "c1ccccc1"
    assert smiles.scaffold("CCO") == ""


def test_what_stands_behind_a_blank_is_not_left_unread():
    for text in ("CCO hello", "CCO\tCCN", "CCO\nCCN"):
        with pytest.raises(ValueError, match="has a blank in it, behind which RDKit reads nothing"):
            smiles.molecule_graph(text)
    assert len(smiles.molecule_graph("CCO |$;;x$|")["x"]) == 3  # an extension that RDKit knows
