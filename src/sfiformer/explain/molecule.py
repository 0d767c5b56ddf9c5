"""Molecules drawn as molecules: rebuilt from the atom and bond features of a graph, laid out in the plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sfiformer.explain.record import GraphRecord

_ELEMENTS = """
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr
    Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir
    Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl
    Mc Lv Ts Og *
"""
SYMBOLS = _ELEMENTS.split()  # by atomic number less one, as the first atom feature has it; * is any other
SUBSCRIPTS, SUPERSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"), str.maketrans("23456789", "²³⁴⁵⁶⁷⁸⁹")


class Molecule(NamedTuple):
    """A structural formula, atom by atom in the order of the graph's nodes."""

    positions: Tensor  # [n, 2] in bond lengths, to the right and down
    labels: list[str]  # as chemists write them: "" for a carbon, "NH₂", "O⁻"
    bonds: list[tuple[int, int, float]]  # each once: its two atoms, and its order; 1.5 where aromatic


def layout(record: GraphRecord) -> Molecule | None:
    """The structural formula of a graph of atoms; None where the nodes are no atoms or RDKit is not installed.

    Rings are drawn with single and double bonds in turn where that can be done, else their bonds are aromatic.
    """
    if record.atoms is None or record.bonds is None:
        return None
    try:
        from rdkit.Chem import rdCoordGen, rdDepictor
    except ImportError:
        return None
    molecule = _rebuilt(record.atoms, record.edge_index, record.bonds)
    rdCoordGen.AddCoords(molecule)  # stretches chains out where RDKit's other layout crowds them
    places = torch.from_numpy(molecule.GetConformer().GetPositions())[:, :2].float()
    if not places.isfinite().all():  # it has none for hydrogen alone
        rdDepictor.Compute2DCoords(molecule)
        places = torch.from_numpy(molecule.GetConformer().GetPositions())[:, :2].float()
    bonds = [
        (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), bond.GetBondTypeAsDouble())
        for bond in molecule.GetBonds()
    ]
    length = _bond_length(places, bonds)
    return Molecule(places * torch.tensor([1.0, -1.0]) / length, atom_labels(record.atoms), bonds)


def atom_labels(atoms: Tensor) -> list[str]:
    """What is written at each atom [n, 9] of a structural formula."""
    labels = []
    for number, charge, hydrogens in atoms[:, [0, 3, 4]].tolist():
        symbol, charge = SYMBOLS[number], charge - 5
        if symbol == "C" and charge == 0:
            labels.append("")
            continue
        attached = f"H{hydrogens if hydrogens > 1 else ''}".translate(SUBSCRIPTS) if hydrogens else ""
        size = f"{abs(charge) if abs(charge) > 1 else ''}".translate(SUPERSCRIPTS)
        labels.append(symbol + attached + (size + ("⁺" if charge > 0 else "⁻") if charge else ""))
    return labels


def _rebuilt(atoms: Tensor, edge_index: Tensor, bonds: Tensor) -> Any:
    """RDKit's molecule of the features that `sfiformer.data.smiles.molecule_graph` makes; stereochemistry is left out."""
    from rdkit import Chem
    from rdkit.rdBase import BlockLogs

    kinds = Chem.BondType
    kind_of = (kinds.SINGLE, kinds.DOUBLE, kinds.TRIPLE, kinds.AROMATIC, kinds.SINGLE)
    molecule = Chem.RWMol()
    for number, charge, hydrogens, aromatic in atoms[:, [0, 3, 4, 7]].tolist():
        atom = Chem.Atom((number + 1) % len(SYMBOLS))  # 0 is RDKit's any atom
        atom.SetFormalCharge(charge - 5 if charge < 11 else 0)
        atom.SetNumExplicitHs(hydrogens)
        atom.SetNoImplicit(True)
        atom.SetIsAromatic(bool(aromatic))
        molecule.AddAtom(atom)
    for (source, target), kind in zip(edge_index.t().tolist(), bonds[:, 0].tolist(), strict=True):
        if source < target and molecule.GetBondBetweenAtoms(source, target) is None:
            molecule.AddBond(source, target, kind_of[kind])
            molecule.GetBondBetweenAtoms(source, target).SetIsAromatic(kind_of[kind] == kinds.AROMATIC)
    with BlockLogs():
        molecule.UpdatePropertyCache(strict=False)
        Chem.FastFindRings(molecule)
        try:
            alternating = Chem.RWMol(molecule)
            Chem.Kekulize(alternating, clearAromaticFlags=True)
        except Chem.KekulizeException:  # the features are of no whole molecule
            return molecule
    return alternating


def _bond_length(places: Tensor, bonds: list[tuple[int, int, float]]) -> float:
    if not bonds:
        return 1.0
    ends = torch.tensor([bond[:2] for bond in bonds])  # [bonds, 2]
    return float((places[ends[:, 0]] - places[ends[:, 1]]).norm(dim=-1).median())
