"""Structural formulas from features: against RDKit's own reading of the SMILES."""

from types import SimpleNamespace

import pytest
import torch

from sfiformer.data.smiles import molecule_graph
from sfiformer.explain.molecule import SYMBOLS, atom_labels, layout

Chem = pytest.importorskip("rdkit.Chem")

SMILES = [
    "CC(=O)Oc1ccccc1C(=O)O",  # aspirin
    "C[C@H](N)C(=O)N[C@@H](Cc1c[nH]c2ccccc12)C([O-])=O",  # alanyl tryptophan: an aromatic N with its hydrogen
    "NC(=[NH2+])NCCC[C@H]([NH3+])C(=O)NCC#N",
    "[Na+].[Cl-]",  # two parts, no bond
    "[13CH4]",
]


def graph(smiles: str) -> SimpleNamespace:
    fields = {name: torch.from_numpy(values) for name, values in molecule_graph(smiles).items()}
    return SimpleNamespace(atoms=fields["x"], bonds=fields["edge_attr"], edge_index=fields["edge_index"])


@pytest.mark.parametrize("smiles", SMILES)
def test_atoms_and_bonds_are_those_of_the_smiles(smiles):
    formula = layout(graph(smiles))
    molecule = Chem.MolFromSmiles(smiles)
    Chem.Kekulize(molecule, clearAromaticFlags=True)
    assert len(formula.labels) == len(formula.positions) == molecule.GetNumAtoms()
    expected = {
        frozenset((bond.GetBeginAtomIdx(), bond.GetEndAtomIdx())): bond.GetBondTypeAsDouble()
        for bond in molecule.GetBonds()
    }
    found = {frozenset(ends): order for *ends, order in formula.bonds}
    assert len(found) == len(formula.bonds)
    assert found.keys() == expected.keys()
    # Which bonds of a ring are double is a choice; how many are is not.
    assert sorted(found.values()) == sorted(expected.values())


def test_bonds_have_unit_length_and_atoms_do_not_touch():
    formula = layout(graph("CC(C)C[C@H](NC(=O)CNC(=O)C)C(=O)N[C@@H](CO)C(=O)NCC(=O)N"))
    ends = torch.tensor([bond[:2] for bond in formula.bonds])
    lengths = (formula.positions[ends[:, 0]] - formula.positions[ends[:, 1]]).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), atol=0.15, rtol=0)
    assert torch.pdist(formula.positions).min() > 0.5


def test_labels_are_a_chemists():
    assert (SYMBOLS[5], SYMBOLS[16], SYMBOLS[117], len(SYMBOLS)) == ("C", "Cl", "Og", 119)
    atoms = graph("CC(N)C(=O)O.[NH4+].[Ca+2].[CH3-].[O-]C").atoms
    assert atom_labels(atoms) == ["", "", "NH₂", "", "O", "OH", "NH₄⁺", "Ca²⁺", "CH₃⁻", "O⁻", ""]


def test_rings_without_an_assignment_of_double_bonds_stay_aromatic():
    broken = graph("c1ccccc1")
    broken.atoms[0, 0] = SYMBOLS.index("N")  # with a hydrogen, in six members: no Kekulé structure
    assert {order for *_, order in layout(broken).bonds} == {1.5}


def test_other_graphs_are_no_molecules():
    assert layout(SimpleNamespace(atoms=None, bonds=None)) is None


@pytest.mark.parametrize("smiles", ["[H][H]", "[H+]", "C"])
def test_the_smallest_have_places_too(smiles):
    molecule = layout(graph(smiles))
    assert molecule.positions.isfinite().all()
