"""The model and its layers."""

from sfiformer.nn.config import ModelConfig
from sfiformer.nn.gated_gcn import GatedGCN
from sfiformer.nn.gps_layer import GPSLayer
from sfiformer.nn.model import LoadReport, SFiFormer, load_dense

__all__ = ["GPSLayer", "GatedGCN", "LoadReport", "ModelConfig", "SFiFormer", "load_dense"]
