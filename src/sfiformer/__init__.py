"""Graph transformers with exact sparse-flow-induced attention."""

from typing import TYPE_CHECKING

from sfiformer.lazy import lazy_names

if TYPE_CHECKING:
    from sfiformer.attention import SFiAttention, dfi_attention, sfi_attention
    from sfiformer.config import ExperimentConfig
    from sfiformer.nn.config import ModelConfig
    from sfiformer.nn.gps_conv import SFiGPSConv
    from sfiformer.nn.model import SFiFormer
    from sfiformer.prediction import predict
    from sfiformer.training import evaluate, train

__all__ = [
    "ExperimentConfig",
    "ModelConfig",
    "SFiAttention",
    "SFiFormer",
    "SFiGPSConv",
    "dfi_attention",
    "evaluate",
    "predict",
    "sfi_attention",
    "train",
]

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ExperimentConfig": "sfiformer.config",
        "ModelConfig": "sfiformer.nn.config",
        "SFiAttention": "sfiformer.attention",
        "SFiFormer": "sfiformer.nn.model",
        "SFiGPSConv": "sfiformer.nn.gps_conv",
        "dfi_attention": "sfiformer.attention",
        "evaluate": "sfiformer.training",
        "predict": "sfiformer.prediction",
        "sfi_attention": "sfiformer.attention",
        "train": "sfiformer.training",
    },
)
