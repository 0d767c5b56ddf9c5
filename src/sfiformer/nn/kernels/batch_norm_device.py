"""Batch normalisation on the device: two kernels forward, two backward, for rows in tiles. No atomics."""

import triton
import triton.language as tl

from sfiformer.nn.kernels.row_tiles import (
    activated,
    draw,
    kept,
    load_tile,
    merged,
    piece_counts,
    piece_rows,
    real_rows,
    slope,
)


@triton.jit(do_not_specialize=["size"])
def moments_kernel(
    x, update, added, rows, seed, pivots, means, squares, below, factor, size, WIDTH: tl.constexpr,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, ADD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Mean and Σ (x − mean)² of one piece of the real rows; with ADD of x + dropout(update), which is written to ``added``.

    All is measured from a pivot, about the first row: where a mean is large beside the deviation, nothing is lost.
    """
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < WIDTH
    count = real_rows(rows, size, MASKED)
    each = piece_rows(count, PARTS, SUB)
    pivot = tl.load(x + columns, mask=inside & (count > 0), other=0.0).to(tl.float32)
    if ADD:
        pivot += tl.load(update + columns, mask=inside & (count > 0), other=0.0).to(tl.float32)
    tl.store(pivots + columns, pivot, mask=inside & (part == 0))
    # Every one of the SUB × COLS places follows its own rows (Welford); they are merged at the end.
    seen = tl.zeros([SUB], tl.float32)
    mean, square = tl.zeros([SUB, COLS], tl.float32), tl.zeros([SUB, COLS], tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, count), 8 * SUB):
        at = (tl.full((), 0, tl.int64) + start) * WIDTH
        if DROPOUT:
            words = draw(seed, start, columns, SUB)
        tile = load_tile(x, start, count, columns, SUB, WIDTH)
        if ADD:
            changes = load_tile(update, start, count, columns, SUB, WIDTH)
        for j in tl.static_range(8):
            local = j * SUB + tl.arange(0, SUB)
            real = start + local < count
            mask = real[:, None] & inside[None, :]
            values = tile[j].to(tl.float32)
            if ADD:
                offsets = local[:, None] * WIDTH + columns[None, :]
                change = changes[j].to(tl.float32)
                if DROPOUT:
                    change = change * kept(words, below, factor, j)
                rounded = (values + change).to(added.dtype.element_ty)
                tl.store(added + at + offsets, rounded, mask=mask)
                values = rounded.to(tl.float32)
            values -= pivot[None, :]
            seen += real.to(tl.float32)
            delta = tl.where(mask, values - mean, 0.0)
            mean += delta * (1 / tl.maximum(seen, 1.0))[:, None]
            square += delta * tl.where(mask, values - mean, 0.0)
    mean_of_piece, square_of_piece = merged(seen, mean, square)
    tl.store(means + part * WIDTH + columns, mean_of_piece, mask=inside)
    tl.store(squares + part * WIDTH + columns, square_of_piece, mask=inside)


@triton.jit(do_not_specialize=["size"])
def apply_kernel(
    x, residual, out, weight, bias, pivots, means, squares, mean_out, scale_out, running_mean, running_var, batches, rows, seed,
    momentum, eps, below, factor, size, WIDTH: tl.constexpr,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out = residual + dropout(act(x̂ w + b)), x̂ = (x − mean) · scale; out = residual for padding.

    Every program puts the pieces of its channels together; the first of them also writes the statistics.
    """
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < WIDTH
    count = real_rows(rows, size, MASKED)
    counts = piece_counts(count, PARTS, SUB)
    places = tl.arange(0, PARTS)[:, None] * WIDTH + columns[None, :]
    there = (counts > 0)[:, None] & inside[None, :]
    mean, square = merged(
        counts,
        tl.load(means + places, mask=there, other=0.0),
        tl.load(squares + places, mask=there, other=0.0),
    )
    mean += tl.load(pivots + columns, mask=inside, other=0.0)
    variance = square / tl.maximum(count, 1)
    enough = count >= 2  # otherwise there is no variance, and the running statistics serve
    first = tl.program_id(0) == 0
    # Only the first program changes the running statistics, and only where nobody uses them.
    needed = inside & (first | (count < 2))
    old_mean = tl.load(running_mean + columns, mask=needed, other=0.0)
    old_var = tl.load(running_var + columns, mask=needed, other=1.0)
    unbiased = square / tl.maximum(count - 1, 1)
    tl.store(running_mean + columns, old_mean + momentum * (mean - old_mean), mask=inside & first & enough)
    tl.store(running_var + columns, old_var + momentum * (unbiased - old_var), mask=inside & first & enough)
    if first & (tl.program_id(1) == 0):
        tl.store(batches, tl.load(batches) + enough.to(tl.int64))
    mean = tl.where(enough, mean, old_mean)
    scale = 1 / tl.sqrt(tl.where(enough, variance, old_var) + eps)
    tl.store(mean_out + columns, mean, mask=inside & first)
    tl.store(scale_out + columns, scale, mask=inside & first)

    gain = tl.load(weight + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0)
    for start in range(tl.program_id(0) * 8 * SUB, size, tl.num_programs(0) * 8 * SUB):
        at = (tl.full((), 0, tl.int64) + start) * WIDTH
        if DROPOUT:
            words = draw(seed, start, columns, SUB)
        tile = load_tile(x, start, count, columns, SUB, WIDTH)
        if RESIDUAL:
            residuals = load_tile(residual, start, size, columns, SUB, WIDTH)
        for j in tl.static_range(8):
            local = j * SUB + tl.arange(0, SUB)
            real = (start + local < count)[:, None] & inside[None, :]
            mask = (start + local < size)[:, None] & inside[None, :]
            offsets = local[:, None] * WIDTH + columns[None, :]
            y = activated(
                (tile[j].to(tl.float32) - mean[None, :]) * scale[None, :] * gain[None, :] + shift[None, :],
                ACTIVATION,
            )
            if DROPOUT:
                y = y * kept(words, below, factor, j)
            y = tl.where(real, y, 0.0)
            if RESIDUAL:
                y += residuals[j].to(tl.float32)
            tl.store(out + at + offsets, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gradient_of_z(x, grad_out, mask, mean, scale, gain, shift, ACTIVATION: tl.constexpr):
    """x̂, and ∂L/∂z for z = x̂ w + b where nothing is dropped, of one part of a tile; 0 outside the mask."""
    normed = tl.where(mask, (x.to(tl.float32) - mean[None, :]) * scale[None, :], 0.0)
    return normed, grad_out.to(tl.float32) * slope(normed * gain[None, :] + shift[None, :], ACTIVATION)


@triton.jit(do_not_specialize=["size"])
def sums_kernel(
    x, grad_out, weight, bias, mean_in, scale_in, rows, seed, of_bias, of_weight, below, factor, size, WIDTH: tl.constexpr,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Σ ∂L/∂z and Σ x̂ ∂L/∂z over one piece of the real rows."""
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < WIDTH
    count = real_rows(rows, size, MASKED)
    each = piece_rows(count, PARTS, SUB)
    mean = tl.load(mean_in + columns, mask=inside, other=0.0)
    scale = tl.load(scale_in + columns, mask=inside, other=0.0)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0)
    plain, by_normed = tl.zeros([SUB, COLS], tl.float32), tl.zeros([SUB, COLS], tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, count), 8 * SUB):
        if DROPOUT:
            words = draw(seed, start, columns, SUB)
        tile = load_tile(x, start, count, columns, SUB, WIDTH)
        grads = load_tile(grad_out, start, count, columns, SUB, WIDTH)
        for j in tl.static_range(8):
            real = (start + j * SUB + tl.arange(0, SUB) < count)[:, None] & inside[None, :]
            normed, grad = gradient_of_z(tile[j], grads[j], real, mean, scale, gain, shift, ACTIVATION)
            if DROPOUT:
                grad = grad * kept(words, below, factor, j)
            plain += grad
            by_normed += grad * normed
    tl.store(of_bias + part * WIDTH + columns, tl.sum(plain, 0), mask=inside)
    tl.store(of_weight + part * WIDTH + columns, tl.sum(by_normed, 0), mask=inside)


@triton.jit(do_not_specialize=["size"])
def gradient_kernel(
    x, grad_out, weight, bias, mean_in, scale_in, rows, seed, of_bias, of_weight,
    grad_x, grad_update, grad_weight, grad_bias, below, factor, size, WIDTH: tl.constexpr,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, ADD: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """∂L/∂x = w · scale · (g − (Σ g + x̂ Σ x̂ g) / n), g = ∂L/∂z, with constant statistics w · scale · g; 0 for padding.

    With ADD, x is x + dropout(update), of which both get the gradient.
    """
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < WIDTH
    count = real_rows(rows, size, MASKED)
    places = tl.arange(0, PARTS)[:, None] * WIDTH + columns[None, :]
    there = (piece_counts(count, PARTS, SUB) > 0)[:, None] & inside[None, :]
    plain = tl.sum(tl.load(of_bias + places, mask=there, other=0.0), 0)
    by_normed = tl.sum(tl.load(of_weight + places, mask=there, other=0.0), 0)
    first = tl.program_id(0) == 0
    tl.store(grad_bias + columns, plain, mask=inside & first)
    tl.store(grad_weight + columns, by_normed, mask=inside & first)
    share = tl.where(count >= 2, 1 / tl.maximum(count, 1).to(tl.float32), 0.0)
    plain, by_normed = plain * share, by_normed * share

    mean = tl.load(mean_in + columns, mask=inside, other=0.0)
    scale = tl.load(scale_in + columns, mask=inside, other=0.0)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0)
    for start in range(tl.program_id(0) * 8 * SUB, size, tl.num_programs(0) * 8 * SUB):
        at = (tl.full((), 0, tl.int64) + start) * WIDTH
        if DROPOUT:
            words = draw(seed, start, columns, SUB)
        tile = load_tile(x, start, count, columns, SUB, WIDTH)
        grads = load_tile(grad_out, start, count, columns, SUB, WIDTH)
        for j in tl.static_range(8):
            local = j * SUB + tl.arange(0, SUB)
            real = (start + local < count)[:, None] & inside[None, :]
            mask = (start + local < size)[:, None] & inside[None, :]
            offsets = local[:, None] * WIDTH + columns[None, :]
            normed, grad = gradient_of_z(tile[j], grads[j], real, mean, scale, gain, shift, ACTIVATION)
            if DROPOUT and not ADD:
                grad = grad * kept(words, below, factor, j)
            grad = (grad - plain[None, :] - normed * by_normed[None, :]) * (gain * scale)[None, :]
            grad = tl.where(real, grad, 0.0)
            tl.store(grad_x + at + offsets, grad.to(grad_x.dtype.element_ty), mask=mask)
            if ADD:
                if DROPOUT:
                    grad = grad * kept(words, below, factor, j)
                tl.store(grad_update + at + offsets, grad.to(grad_update.dtype.element_ty), mask=mask)
