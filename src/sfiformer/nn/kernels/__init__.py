"""Fused Triton kernels of the layers."""
