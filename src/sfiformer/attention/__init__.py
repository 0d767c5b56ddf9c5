"""Attention on packed graphs."""

from sfiformer.attention.adjacency import Adjacency
from sfiformer.attention.dense import dfi_attention
from sfiformer.attention.edges import EdgeOrder
from sfiformer.attention.functional import sfi_attention
from sfiformer.attention.layer import SFiAttention

__all__ = ["Adjacency", "EdgeOrder", "SFiAttention", "dfi_attention", "sfi_attention"]
