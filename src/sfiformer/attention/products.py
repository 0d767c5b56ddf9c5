"""Products with weights, whose gradients need not hold up anything else."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.branches import stream_ahead

# Bytes of a product. A larger one fills a GPU by itself, and its memory, which two streams look at, is not used again.
LARGE = 8 * 2**20


def product(x: Tensor, weight: Tensor) -> Tensor:
    """y = x Wᵀ, [N, in] → [N, out].

    In a captured step (`sfiformer.branches`) the gradient of a weight that was made ahead comes about on the stream that made
    it, beside all that waits for the gradient of x alone.
    """
    side = stream_ahead(x)
    trained = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    small = x.dtype == weight.dtype and x.size(0) * weight.size(0) * x.element_size() <= LARGE
    if side is None or not trained or not small:
        return F.linear(x, weight)
    with torch.cuda.stream(side):
        place = _OfWeight.apply(weight, x.detach())
    x.record_stream(side)
    return _OfInput.apply(x, weight.detach(), place)


class _OfWeight(torch.autograd.Function):
    """Where the gradient of y arrives that the weight's is made of: no numbers, and a derivative on the stream of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return weight.new_empty(()).expand(x.size(0), weight.size(0))

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        # Held for as long as the graph is: what nobody holds autograd may add to in place, while this is still being read.
        ctx.held = of_y
        return of_y.t() @ x, None


class _OfInput(torch.autograd.Function):
    """The product, and the gradient of x; that of y is handed on to `_OfWeight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, None, Tensor]:
        (weight,) = ctx.saved_tensors
        return of_y @ weight, None, of_y
