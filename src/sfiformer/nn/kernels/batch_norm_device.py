"""Batch normalisation on the device: two kernels forward, two backward, for rows of any width d.

A program owns COLS channels. Rows go in tiles of 8 · SUB: dropout takes 16 bits of one draw of Philox for each of the eight
parts of a tile, so that a draw serves eight entries. Sums over rows are made in at most PARTS pieces, cut by the number of
real rows alone, and put together in one order: padding and repetition change no bit of them. No atomics.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass the statistical batteries (Salmon et al., 2011)


@triton.jit
def real_rows(rows, size, MASKED: tl.constexpr):
    """The number of real rows: ``rows`` on the device, or all."""
    count = size
    if MASKED:
        count = tl.minimum(tl.maximum(tl.load(rows), 0), size).to(tl.int32)
    return count


@triton.jit
def piece_rows(count, PARTS: tl.constexpr, SUB: tl.constexpr):
    """Rows of each piece of a sum over ``count`` rows: whole tiles."""
    return tl.cdiv(count, PARTS * 8 * SUB) * 8 * SUB


@triton.jit
def piece_counts(count, PARTS: tl.constexpr, SUB: tl.constexpr):
    """[PARTS], rows in each piece."""
    each = piece_rows(count, PARTS, SUB)
    return tl.minimum(tl.maximum(count - tl.arange(0, PARTS) * each, 0), each)


@triton.jit
def draw(seed, start, columns, SUB: tl.constexpr):
    """Four random words for each SUB × COLS place of the tile from row ``start`` on."""
    places = start // 8 + tl.arange(0, SUB)  # distinct, as tiles are 8 · SUB rows
    zero = (places[:, None] + columns[None, :]).to(tl.uint32) * 0
    return tl.philox(
        tl.load(seed),
        zero + places[:, None].to(tl.uint32),
        zero + columns[None, :].to(tl.uint32),
        zero,
        zero,
        ROUNDS,
    )


@triton.jit
def kept(words, below, factor, J: tl.constexpr):
    """Dropout's factors for part J of a tile: 0 with probability below / 2¹⁶, or ``factor``."""
    bits = (words[J // 2] >> (16 * (J % 2))) & 0xFFFF
    return tl.where(bits.to(tl.int32) >= below, factor, 0.0)


@triton.jit
def load_part(base, start, end, columns, J: tl.constexpr, SUB: tl.constexpr, WIDTH: tl.constexpr):
    """Part J of the tile from row ``start`` on, [SUB, COLS]; 0 from row ``end`` on."""
    local = J * SUB + tl.arange(0, SUB)
    mask = (start + local < end)[:, None] & (columns < WIDTH)[None, :]
    at = (tl.full((), 0, tl.int64) + start) * WIDTH
    return tl.load(base + at + (local[:, None] * WIDTH + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def load_tile(base, start, end, columns, SUB: tl.constexpr, WIDTH: tl.constexpr):
    """All eight parts of a tile: all on their way at a time, as loads are not once something is written between them."""
    return (
        load_part(base, start, end, columns, 0, SUB, WIDTH),
        load_part(base, start, end, columns, 1, SUB, WIDTH),
        load_part(base, start, end, columns, 2, SUB, WIDTH),
        load_part(base, start, end, columns, 3, SUB, WIDTH),
        load_part(base, start, end, columns, 4, SUB, WIDTH),
        load_part(base, start, end, columns, 5, SUB, WIDTH),
        load_part(base, start, end, columns, 6, SUB, WIDTH),
        load_part(base, start, end, columns, 7, SUB, WIDTH),
    )


@triton.jit
def merged(counts, mean, square):
    """Mean and Σ (x − mean)² of all, from those of parts [K, COLS] of ``counts`` [K] rows."""
    weight = counts.to(tl.float32)[:, None]
    total = tl.sum(weight * mean, 0) / tl.maximum(tl.sum(weight, 0), 1.0)
    spread = mean - total[None, :]
    return total, tl.sum(square + weight * spread * spread, 0)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)  # else a GPU makes 0 of NaN
    if ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The activation's derivative."""
    out = z * 0 + 1
    if ACTIVATION == "relu":
        out = tl.where(z > 0, 1.0, 0.0)
    if ACTIVATION == "gelu":
        normal = tl.exp(-0.5 * z * z) * 0.3989422804014327
        out = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * normal
    return out


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
