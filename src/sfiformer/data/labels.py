"""What labels look like as they were written."""

from collections.abc import Set

TRUTH = {"false": 0, "true": 1}


def are_few(odd: int, others: int) -> bool:
    """Whether so many labels unlike the others are slips among them: at most one in twenty, or one of more than ten."""
    return odd <= (odd + others) // 20 or (odd == 1 and others >= 10)


def as_number(text: str) -> float | None:
    """What a text says as a number, None for other text: also for 1_000, which Python would take."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def is_number(label: str | float) -> bool:
    """Whether a label is a number, also one that stands among text."""
    return not isinstance(label, str) or as_number(label) is not None


def is_truth(label: str | float) -> bool:
    """Whether a label is a truth value in words."""
    return isinstance(label, str) and label.lower() in TRUTH


def with_one_truth(names: Set[str]) -> Set[str]:
    """Names of classes, with True and False for truth values where one of these is written in several ways."""
    truths = {name for name in names if is_truth(name)}
    if len({name.lower() for name in truths}) == len(truths):
        return names
    return (names - truths) | {name.capitalize() for name in truths}
