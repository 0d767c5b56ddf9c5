"""Fused Triton kernels of the exact attention, for graphs of up to 1,024 nodes: an operator with `packed_attention`'s meaning.

`sfi_attention` does not choose them yet.
"""
