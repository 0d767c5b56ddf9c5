"""Graph transformers with exact sparse-flow-induced attention."""

from sfiformer.nn import ModelConfig, SFiFormer

__all__ = ["ModelConfig", "SFiFormer"]
