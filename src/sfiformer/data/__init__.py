"""Graphs on disk, in memory and in batches."""

from sfiformer.data.batch import GraphBatch
from sfiformer.data.store import GraphStore

__all__ = ["GraphBatch", "GraphStore"]
