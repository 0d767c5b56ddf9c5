"""What the attention of a trained model does.

explain_graph("runs/mine", 17)                         # maps of one graph, and a page: what `sfi explain` writes
explain_statistics("runs/mine", against="runs/dense")  # sparsity and reach over a split
record_run("runs/mine", 17).layers[0].flows()          # the flows themselves, [heads, n, n]
"""

from typing import TYPE_CHECKING

from sfiformer.lazy import lazy_names

if TYPE_CHECKING:
    from sfiformer.explain.pictures import explain_graph, explain_statistics
    from sfiformer.explain.record import GraphRecord, LayerRecord, record_run
    from sfiformer.explain.statistics import Statistics

__all__ = [
    "GraphRecord",
    "LayerRecord",
    "Statistics",
    "explain_graph",
    "explain_statistics",
    "record_run",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GraphRecord": "sfiformer.explain.record",
        "LayerRecord": "sfiformer.explain.record",
        "Statistics": "sfiformer.explain.statistics",
        "explain_graph": "sfiformer.explain.pictures",
        "explain_statistics": "sfiformer.explain.pictures",
        "record_run": "sfiformer.explain.record",
    },
)
