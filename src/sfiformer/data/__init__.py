"""Graphs on disk, in memory and in batches."""

from sfiformer.data.batch import GraphBatch
from sfiformer.data.encoding_cache import add_encodings
from sfiformer.data.encodings import AddEncodings, ESLapPE, LapPE, RandomWalkSE, flip_signs
from sfiformer.data.shapes import BatchShape, Ladder
from sfiformer.data.standardize import Standardizer
from sfiformer.data.store import GraphStore
from sfiformer.data.synthetic import cluster, pattern

__all__ = [
    "AddEncodings",
    "BatchShape",
    "ESLapPE",
    "GraphBatch",
    "GraphStore",
    "Ladder",
    "LapPE",
    "RandomWalkSE",
    "Standardizer",
    "add_encodings",
    "cluster",
    "flip_signs",
    "pattern",
]
