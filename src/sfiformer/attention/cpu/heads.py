"""The loops of `sfiformer.attention.heads`, for a CPU; float32 throughout. Each row is read while it is in the cache.

As in `loops`, no loop both adds up and writes.
"""

import numpy as np

from sfiformer.attention.cpu.jit import F, jitted


@jitted
def normalise(packed, eps, scales, part, out, first, last):
    """Nodes first … last − 1 of a part of packed [nodes, parts, heads, width]: x / √(mean(x²) + eps), and 1 over the root."""
    heads, width = packed.shape[2:]
    for i in range(first, last):
        for h in range(heads):
            squares = F(0.0)
            for d in range(width):
                squares += packed[i, part, h, d] * packed[i, part, h, d]
            scale = F(1.0) / np.sqrt(squares / F(width) + eps)
            scales[i, part, h] = scale
            for d in range(width):
                out[i, h, d] = packed[i, part, h, d] * scale
    return False


@jitted
def normalise_gradients(packed, scales, out, part, grad, first, last):
    """∂L/∂x of the same, scale · (g − x scale² mean(g x)), put where x is in packed."""
    heads, width = packed.shape[2:]
    for i in range(first, last):
        for h in range(heads):
            along = F(0.0)
            for d in range(width):
                along += grad[i, h, d] * packed[i, part, h, d]
            scale = scales[i, part, h]
            along *= scale * scale * scale / F(width)
            for d in range(width):
                out[i, part, h, d] = grad[i, h, d] * scale - packed[i, part, h, d] * along
    return False


def compile_all():
    """Call every loop on nothing at all."""
    packed, head, scales = (np.empty(shape, np.float32) for shape in ((1, 1, 1, 1), (1, 1, 1), (1, 1, 1)))
    normalise(packed, F(1.0), scales, 0, head, 0, 0)
    normalise_gradients(packed, scales, packed, 0, head, 0, 0)
