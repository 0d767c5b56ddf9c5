"""Graph transformers with exact sparse-flow-induced attention."""

from typing import TYPE_CHECKING

from sfiformer.attention import SFiAttention, dfi_attention, sfi_attention
from sfiformer.nn import ModelConfig, SFiFormer

if TYPE_CHECKING:
    from sfiformer.nn.gps_conv import SFiGPSConv

__all__ = ["ModelConfig", "SFiAttention", "SFiFormer", "SFiGPSConv", "dfi_attention", "sfi_attention"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "SFiGPSConv":  # the only name that needs PyTorch Geometric, whose import takes seconds
        from sfiformer.nn.gps_conv import SFiGPSConv

        return SFiGPSConv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
