"""Which graphs (or nodes) are for training, validation and test."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .record import MASKS, Record

Fractions = tuple[float, float, float]
Split = dict[str, list[int]]  # "train", "val", "test" -> positions

_NAMES = {
    **dict.fromkeys(["train", "training"], "train"),
    **dict.fromkeys(["val", "valid", "validation", "dev"], "val"),
    **dict.fromkeys(["test", "testing"], "test"),
}


def split_name(text: str) -> str:
    """ "train", "val" or "test" from the word in a file.

    Raises:
        ValueError: for any other word.
    """
    try:
        return _NAMES[text.strip().lower()]
    except KeyError:
        raise ValueError(f"split {text!r} is none of train, val and test") from None


def split_by_column(records: Sequence[Record]) -> Split:
    """As each graph's own `split` says."""
    split: Split = {name: [] for name in MASKS}
    for position, record in enumerate(records):
        if record.split is None:
            raise ValueError(
                f"{record.place}: no split, where other graphs have one: give train, val or test"
            )
        split[split_name(record.split)].append(position)
    return split


def split_by_fractions(count: int, fractions: Fractions = (0.8, 0.1, 0.1), seed: int = 0) -> Split:
    """A seeded shuffle cut at the fractions; a part whose fraction is not 0 gets one item at least."""
    sizes = _sizes(count, fractions)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    cuts = [0, sizes[0], sizes[0] + sizes[1], count]
    return {name: sorted(order[cuts[i] : cuts[i + 1]]) for i, name in enumerate(MASKS)}


def split_by_scaffold(
    records: Sequence[Record], scaffold: Callable[[str], str], fractions: Fractions = (0.8, 0.1, 0.1)
) -> Split:
    """Molecules of one scaffold stay together: the commonest scaffolds go to training, rare ones to the test.

    Groups are taken by size (ties: the one that comes first), each into training while it fits, else
    validation while it fits, else the test. It is deterministic; a part may come out smaller or larger than
    its fraction.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for position, record in enumerate(records):
        if record.smiles is None:
            raise ValueError(f"{record.place}: a scaffold split needs molecules, and the graph has no smiles")
        try:
            groups[scaffold(record.smiles)].append(position)
        except ValueError as error:
            raise ValueError(f"{record.place}: {error}") from None
    room = dict(zip(MASKS[:2], _sizes(len(records), fractions), strict=False))
    split: Split = {name: [] for name in MASKS}
    for members in sorted(groups.values(), key=lambda group: (-len(group), group[0])):
        part = next((name for name in room if len(split[name]) + len(members) <= room[name]), "test")
        split[part].extend(members)
    return {name: sorted(members) for name, members in split.items()}


def node_masks(nodes: int, fractions: Fractions = (0.8, 0.1, 0.1), seed: int = 0) -> dict[str, Tensor]:
    """Seeded masks [n] over the nodes of a single graph."""
    masks = {}
    for name, chosen in split_by_fractions(nodes, fractions, seed).items():
        masks[name] = torch.zeros(nodes, dtype=torch.bool)
        masks[name][chosen] = True
    return masks


def _sizes(count: int, fractions: Fractions) -> list[int]:
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6 or fractions[0] == 0:
        raise ValueError(
            f"fractions are {fractions}; give three (train, val, test) that sum to 1, train above 0"
        )
    parts = sum(fraction > 0 for fraction in fractions)
    if count < parts:
        raise ValueError(
            f"only {count} to split into {parts} parts: give more graphs, or a split of your own"
        )
    held = [max(round(count * fraction), 1) if fraction else 0 for fraction in fractions[1:]]
    while sum(held) >= count:
        held[held.index(max(held))] -= 1
    return [count - sum(held), *held]
