"""The fused batch normalisation as operators, and with its gradient. The plain twin is `BatchNorm.forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfiformer.branches import ahead
from sfiformer.nn.kernels.batch_norm_device import apply_kernel, gradient_kernel, moments_kernel, sums_kernel
from sfiformer.nn.kernels.row_tiles import drop_numbers
from sfiformer.operators import on_its_device

SUB, COLS = 16, 32  # a tile is 8 · SUB rows of COLS channels
PARTS = 128  # pieces of a sum over rows
WARPS = 8


def fused_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    *,
    rows: Tensor | None = None,
    update: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    dropout: float = 0.0,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """residual + dropout(act(BatchNorm(x))), or residual + act(BatchNorm(x + dropout(update))), in training.

    The statistics are those of the first ``rows`` (int64 [], on the device) rows; the running ones and the number of
    ``batches`` are brought up to date. Rows beyond are padding: what they hold is not looked at, they come out as the residual
    (as 0 without one), and neither they nor the gradients that reach them give anything to a gradient of x, update or a
    parameter. Nothing waits for the device, and all can be captured in a CUDA graph.
    """
    seed = ahead(x, lambda: torch.randint(1 << 62, (), device=x.device)) if dropout else None
    return _FusedBatchNorm.apply(
        x, update, residual, weight, bias, running_mean, running_var, batches, rows, seed,
        activation, dropout, momentum, eps,
    )  # fmt: skip


class _FusedBatchNorm(torch.autograd.Function):
    # Operators that change their arguments take no gradient formula of their own, hence a function around them.

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, update, residual, weight, bias, *statistics, rows, seed, activation, dropout, momentum, eps = (
            inputs
        )
        x = x.contiguous()
        update = None if update is None else update.contiguous()
        residual = None if residual is None else residual.contiguous()
        out, added, mean, scale = batch_norm(
            x, update, residual, weight, bias, *statistics, rows, seed, activation, dropout, momentum, eps
        )
        ctx.save_for_backward(x if update is None else added, weight, bias, mean, scale, rows, seed)
        ctx.options = (activation, dropout)
        ctx.dtypes = (x.dtype, None if update is None else update.dtype)
        ctx.residual_dtype = None if residual is None else residual.dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        activation, dropout = ctx.options
        dtype, update_dtype = ctx.dtypes
        # Without dropout, x and update have one and the same gradient.
        shared = update_dtype == dtype and not dropout
        of_x, of_update, of_weight, of_bias = batch_norm_backward(
            grad_out.contiguous(), *ctx.saved_tensors, activation, dropout, dtype,
            None if shared else update_dtype, update_dtype is not None,
        )  # fmt: skip
        if update_dtype is None:
            of_update = None
        elif shared:
            of_update = of_x
        of_residual = None if ctx.residual_dtype is None else grad_out.to(ctx.residual_dtype)
        return of_x, of_update, of_residual, of_weight, of_bias, *[None] * 9


def _options(x: Tensor, rows: Tensor | None) -> dict[str, Any]:
    """Compile-time settings."""
    options = {"SUB": SUB, "COLS": COLS, "PARTS": PARTS, "MASKED": rows is not None, "num_warps": WARPS}
    if x.is_cuda:
        options["maxnreg"] = 128  # two programs at a time on a processor
    return options


def _grid(x: Tensor) -> tuple[int, int]:
    # No more pieces than tiles, and one that writes the statistics where there is no row at all.
    return max(1, min(PARTS, -(-x.size(0) // (8 * SUB)))), -(-x.size(1) // COLS)


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel must be given something for what it will not read."""
    return stand_in if tensor is None else tensor


@torch.library.custom_op("sfiformer::batch_norm", mutates_args=("running_mean", "running_var", "batches"))
@on_its_device
def batch_norm(
    x: Tensor,
    update: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    rows: Tensor | None,
    seed: Tensor | None,
    activation: str | None,
    dropout: float,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [N, d], x + dropout(update) [N, d] (empty without update), and mean and 1/deviation of each channel [d]."""
    out, added, mean, scale = _outputs(x, update, residual, weight)
    pivots, means, squares = weight.new_empty((1 + 2 * PARTS, x.size(1))).split((1, PARTS, PARTS))
    options, (below, factor) = _options(x, rows), drop_numbers(dropout)
    grid, add = _grid(x), update is not None
    moments_kernel[grid](
        x, _or(update, x), added, _or(rows, batches), _or(seed, batches), pivots, means, squares, below, factor, *x.shape,
        ADD=add, DROPOUT=dropout > 0 and add, **options,
    )  # fmt: skip
    apply_kernel[grid](
        added if add else x, _or(residual, x), out, weight, bias, pivots, means, squares, mean, scale,
        running_mean, running_var, batches, _or(rows, batches), _or(seed, batches),
        momentum, eps, below, factor, *x.shape,
        RESIDUAL=residual is not None, DROPOUT=dropout > 0 and not add, ACTIVATION=activation, **options,
    )  # fmt: skip
    return out, added, mean, scale


@torch.library.custom_op("sfiformer::batch_norm_backward", mutates_args=())
@on_its_device
def batch_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    rows: Tensor | None,
    seed: Tensor | None,
    activation: str | None,
    dropout: float,
    dtype: torch.dtype,
    update_dtype: torch.dtype | None,
    added: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x in ``dtype``, of update in ``update_dtype`` (None: empty), of weight and of bias.

    ``added`` says that x is x + dropout(update): dropout is then before the norm, not after it.
    """
    of_x, of_update, of_weight, of_bias = _gradients(x, weight, dtype, update_dtype)
    sums = weight.new_empty((2, PARTS, x.size(1)))
    options, (below, factor) = _options(x, rows), drop_numbers(dropout)
    options["ACTIVATION"] = activation
    grid = _grid(x)
    inputs = (x, grad_out, weight, bias, mean, scale, _or(rows, x), _or(seed, x), *sums)
    sums_kernel[grid](*inputs, below, factor, *x.shape, DROPOUT=dropout > 0 and not added, **options)
    gradient_kernel[grid](
        *inputs, of_x, of_update, of_weight, of_bias, below, factor, *x.shape,
        ADD=update_dtype is not None, DROPOUT=dropout > 0, **options,
    )  # fmt: skip
    return of_x, of_update, of_weight, of_bias


def _outputs(
    x: Tensor, update: Tensor | None, residual: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = x.dtype if update is None else torch.promote_types(x.dtype, update.dtype)
    added = x.new_empty(0 if update is None else x.shape, dtype=dtype)
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
    return torch.empty_like(x, dtype=dtype), added, torch.empty_like(weight), torch.empty_like(weight)


def _gradients(
    x: Tensor, weight: Tensor, dtype: torch.dtype, update_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_update = x.new_empty(0 if update_dtype is None else x.shape, dtype=update_dtype or dtype)
    return torch.empty_like(x, dtype=dtype), of_update, torch.empty_like(weight), torch.empty_like(weight)


@batch_norm.register_fake
def _(
    x: Tensor, update: Tensor | None, residual: Tensor | None, weight: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, update, residual, weight)


@batch_norm_backward.register_fake
def _(grad_out: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(x, weight, *args[-3:-1])
