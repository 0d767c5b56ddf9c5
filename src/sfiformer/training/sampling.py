"""Which graphs come when, and all that is drawn at random, as functions of the seed and the place in training.

Nothing depends on what was drawn before, so a run that is resumed in the middle draws what the uninterrupted
run does, and no state of a random generator need be kept.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What a seed is for."""

    WEIGHTS = 0
    ORDER = 1
    STEP = 2  # dropout, sign flips
    NEGATIVES = 3
    TRAIN_SUBSET = 4


def derived_seed(seed: int, stream: Stream, *place: int) -> int:
    """A seed of 63 bits for one stream at one place."""
    state = np.random.SeedSequence([seed, stream, *place]).generate_state(1, np.uint64)
    return int(state[0] >> 1)


def epoch_order(graphs: int, seed: int, epoch: int) -> np.ndarray:
    """The order [graphs] in which an epoch takes the training graphs."""
    return np.random.default_rng(derived_seed(seed, Stream.ORDER, epoch)).permutation(graphs)


def train_subset(graphs: int, size: int, seed: int) -> np.ndarray:
    """The training graphs, ascending, on which the training metric is measured: the same in all epochs."""
    rng = np.random.default_rng(derived_seed(seed, Stream.TRAIN_SUBSET))
    return np.sort(rng.permutation(graphs)[:size])


def in_batches(indices: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """`indices` cut after every `size`; the last batch may be smaller."""
    return (indices[first : first + size] for first in range(0, len(indices), size))


def share(batch: np.ndarray, rank: int, ranks: int) -> slice:
    """The part of a global batch that a rank takes, none where there are more ranks than graphs."""
    return slice(len(batch) * rank // ranks, len(batch) * (rank + 1) // ranks)
