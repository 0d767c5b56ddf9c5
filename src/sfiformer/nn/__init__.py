"""The model and its layers."""

from typing import TYPE_CHECKING

from sfiformer.lazy import lazy_names
from sfiformer.nn.config import ModelConfig

if TYPE_CHECKING:
    from sfiformer.nn.edge_gcn import EdgeGCN
    from sfiformer.nn.gated_gcn import GatedGCN
    from sfiformer.nn.gps_layer import GPSLayer
    from sfiformer.nn.model import LoadReport, SFiFormer, load_dense

__all__ = ["EdgeGCN", "GPSLayer", "GatedGCN", "LoadReport", "ModelConfig", "SFiFormer", "load_dense"]

# The settings alone (a command line's help, a preset's check) need no PyTorch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GatedGCN": "sfiformer.nn.gated_gcn",
        "EdgeGCN": "sfiformer.nn.edge_gcn",
        "GPSLayer": "sfiformer.nn.gps_layer",
        "LoadReport": "sfiformer.nn.model",
        "SFiFormer": "sfiformer.nn.model",
        "load_dense": "sfiformer.nn.model",
    },
)
