"""Molecules from SMILES, with the Open Graph Benchmark's atom and bond features."""

from functools import cache
from typing import Any

import numpy as np

ATOM_SIZES = (119, 5, 12, 12, 10, 6, 6, 2, 2)  # categories of each of the 9 atom features
BOND_SIZES = (5, 6, 2)  # and of the 3 bond features
_ELEMENT = {number: number - 1 for number in range(1, 119)}
_CHARGE = {charge: charge + 5 for charge in range(-5, 6)}


@cache
def _rdkit() -> tuple[Any, dict, dict, dict, dict]:
    """RDKit's Chem and the four tables from its enumerations to category numbers."""
    try:
        from rdkit import Chem
    except ImportError:
        raise ImportError("reading SMILES needs RDKit: pip install 'sfiformer[chem]'") from None

    def table(enumeration: Any, names: str) -> dict:
        return {getattr(enumeration, name): number for number, name in enumerate(names.split())}

    chirality = table(Chem.ChiralType, "CHI_UNSPECIFIED CHI_TETRAHEDRAL_CW CHI_TETRAHEDRAL_CCW CHI_OTHER")
    hybridization = table(Chem.HybridizationType, "SP SP2 SP3 SP3D SP3D2")
    bond = table(Chem.BondType, "SINGLE DOUBLE TRIPLE AROMATIC")
    stereo = table(Chem.BondStereo, "STEREONONE STEREOZ STEREOE STEREOCIS STEREOTRANS STEREOANY")
    return Chem, chirality, hybridization, bond, stereo


def parse_smiles(smiles: str) -> Any:
    """RDKit's molecule of a SMILES string.

    Raises:
        ValueError: where RDKit cannot read it, or it has no atoms.
    """
    chem = _rdkit()[0]
    from rdkit.rdBase import BlockLogs

    with BlockLogs():  # what RDKit cannot read is reported with its row instead
        molecule = chem.MolFromSmiles(smiles)
    shown = smiles if len(smiles) <= 60 else smiles[:57] + "..."
    rest = smiles.split(maxsplit=1)[1:]
    if rest and not rest[0].startswith("|"):  # ChemAxon's extensions are written there
        raise ValueError(f"the SMILES {shown!r} has a blank in it, behind which RDKit reads nothing")
    if molecule is None:
        raise ValueError(f"RDKit cannot read the SMILES {shown!r}")
    if molecule.GetNumAtoms() == 0:
        raise ValueError(f"the SMILES {shown!r} has no atoms")
    return molecule


def molecule_graph(smiles: str) -> dict[str, np.ndarray]:
    """x [atoms, 9], edge_index [2, 2·bonds], edge_attr [2·bonds, 3], all int64; each bond in both directions.

    Atoms: atomic number - 1, chirality, degree, formal charge + 5, hydrogens, radical electrons,
    hybridization, aromatic, in a ring. Bonds: type, stereo, conjugated. The last category of a list stands
    for all other values.
    """
    return graph_of(parse_smiles(smiles))


def graph_of(molecule: Any) -> dict[str, np.ndarray]:
    """`molecule_graph` of a molecule that RDKit has read."""
    _, chirality, hybridization, bond_type, stereo = _rdkit()
    x = np.array(
        [
            (
                _ELEMENT.get(atom.GetAtomicNum(), 118),
                chirality.get(atom.GetChiralTag(), 4),
                min(atom.GetTotalDegree(), 11),
                _CHARGE.get(atom.GetFormalCharge(), 11),
                min(atom.GetTotalNumHs(), 9),
                min(atom.GetNumRadicalElectrons(), 5),
                hybridization.get(atom.GetHybridization(), 5),
                atom.GetIsAromatic(),
                atom.IsInRing(),
            )
            for atom in molecule.GetAtoms()
        ],
        dtype=np.int64,
    )
    bonds = [
        (
            bond.GetBeginAtomIdx(),
            bond.GetEndAtomIdx(),
            bond_type.get(bond.GetBondType(), 4),
            stereo.get(bond.GetStereo(), 5),
            bond.GetIsConjugated(),
        )
        for bond in molecule.GetBonds()
    ]
    table = np.array(bonds, dtype=np.int64).reshape(-1, 5)
    both = np.stack([table[:, :2], table[:, 1::-1]], axis=1).reshape(-1, 2)  # i→j, then j→i, bond by bond
    return {"x": x, "edge_index": both.T.copy(), "edge_attr": np.repeat(table[:, 2:], 2, axis=0)}


def canonical(molecule: Any) -> str:
    """RDKit's own SMILES of a molecule, which is the same however the molecule was written."""
    return _rdkit()[0].MolToSmiles(molecule)


def scaffold(smiles: str) -> str:
    """The Murcko scaffold (rings and their linkers), without chirality; "" for a molecule without rings."""
    molecule = parse_smiles(smiles)
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    return MurckoScaffoldSmiles(mol=molecule, includeChirality=False)
