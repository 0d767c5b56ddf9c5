"""Fused Triton kernels of the exact attention: an operator with `packed_attention`'s meaning.

Graphs of up to 1,024 nodes keep their rows on chip (`forward`, `backward`); larger ones are streamed in blocks
(`stream_forward`, `stream_backward`), and their few rows of extreme scores once more (`pivot_forward`, `pivot_backward`).
`sfi_attention` does not choose these kernels yet.
"""
