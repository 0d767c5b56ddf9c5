"""The nine benchmark datasets of the paper, by name."""

from sfiformer.data.official.fetching import fetch
from sfiformer.data.official.loading import Facts, facts, load
from sfiformer.data.official.registry import DATASETS, SPLITS, Dataset, find

__all__ = ["DATASETS", "SPLITS", "Dataset", "Facts", "facts", "fetch", "find", "load"]
