"""What the attention of a trained model does: records of single graphs, maps, statistics."""

from typing import TYPE_CHECKING

from sfiformer.lazy import lazy_names

if TYPE_CHECKING:
    from sfiformer.explain.record import GraphRecord, LayerRecord, record, record_run

__all__ = ["GraphRecord", "LayerRecord", "record", "record_run"]

__getattr__ = lazy_names(
    __name__,
    {
        "GraphRecord": "sfiformer.explain.record",
        "LayerRecord": "sfiformer.explain.record",
        "record": "sfiformer.explain.record",
        "record_run": "sfiformer.explain.record",
    },
)
