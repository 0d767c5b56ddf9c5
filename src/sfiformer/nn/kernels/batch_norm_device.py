"""Batch normalisation on the device: two kernels forward, two backward, for rows of any width d.

A program owns COLS channels, and takes a tile of 8 · SUB rows of them at once, [8, SUB, COLS], so that all of it is on the
way from memory together; a thread holds eight entries that differ in the first place. Dropout takes 16 bits for each: one draw
of Philox serves them all. Sums over rows are made in at most PARTS pieces, cut by the number of real rows alone, and put
together in one order: padding and repetition change no bit of them. No atomics.
"""

import triton
import triton.language as tl

# Sums along the first place of a tile stay within a thread only where loads are of single entries: of rows whose alignment the
# compiler does not know.
UNKNOWN = ["size", "width", "x_stride", "update_stride", "grad_stride"]
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
def tile_rows(start, SUB: tl.constexpr):
    """The rows of the tile from ``start`` on, [8, SUB]."""
    return start + tl.arange(0, 8)[:, None] * SUB + tl.arange(0, SUB)[None, :]


@triton.jit
def at(x, start, stride, columns, SUB: tl.constexpr):
    """Pointers to the tile's entries, [8, SUB, COLS]."""
    first = x + (tl.full((), 0, tl.int64) + start) * stride
    return first + (tile_rows(0, SUB) * stride)[:, :, None] + columns[None, None, :]


@triton.jit
def kept(seed, start, columns, below, factor, SUB: tl.constexpr):
    """Dropout's factors for the tile, [8, SUB, COLS]: 0 with probability below / 2¹⁶, or ``factor``."""
    places = start // 8 + tl.arange(0, SUB)  # distinct, as tiles are 8 · SUB rows
    zero = (places[:, None] + columns[None, :]).to(tl.uint32) * 0
    a, b, c, d = tl.philox(
        tl.load(seed),
        zero + places[:, None].to(tl.uint32),
        zero + columns[None, :].to(tl.uint32),
        zero,
        zero,
        ROUNDS,
    )
    part = tl.arange(0, 8)[:, None, None]
    low = tl.where(part < 2, a[None, :, :], b[None, :, :])
    words = tl.where(part < 4, low, tl.where(part < 6, c[None, :, :], d[None, :, :]))
    bits = tl.where(part % 2 == 0, words & 0xFFFF, words >> 16)
    return tl.where(bits.to(tl.int32) >= below, factor, 0.0)


@triton.jit
def merged(counts, mean, square):
    """Mean and Σ (x − mean)² of all, from those of parts [K, COLS] of ``counts`` rows, [K, 1 or COLS]."""
    weight = counts.to(tl.float32)
    total = tl.sum(weight * mean, 0) / tl.maximum(tl.sum(weight, 0), 1.0)
    spread = mean - total[None, :]
    return total, tl.sum(square + weight * spread * spread, 0)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.maximum(z, 0.0)
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


@triton.jit(do_not_specialize=UNKNOWN)
def moments_kernel(
    x, update, added, rows, seed, pivots, means, squares, below, factor, size, width, x_stride, update_stride,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, ADD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Mean and Σ (x − mean)² of one piece of the real rows; with ADD of x + dropout(update), which is written to ``added``.

    All is measured from a pivot, about the first row: where a mean is large beside the deviation, nothing is lost.
    """
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < width
    count = real_rows(rows, size, MASKED)
    each = piece_rows(count, PARTS, SUB)
    pivot = tl.load(x + columns, mask=inside & (count > 0), other=0.0).to(tl.float32)
    if ADD:
        pivot += tl.load(update + columns, mask=inside & (count > 0), other=0.0).to(tl.float32)
    tl.store(pivots + columns, pivot, mask=inside & (part == 0))
    # Every one of the SUB × COLS places follows its own rows, eight of each tile; they are merged at the end.
    seen = tl.zeros([SUB, COLS], tl.float32)
    mean, square = tl.zeros([SUB, COLS], tl.float32), tl.zeros([SUB, COLS], tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, count), 8 * SUB):
        mask = (tile_rows(start, SUB) < count)[:, :, None] & inside[None, None, :]
        values = tl.load(at(x, start, x_stride, columns, SUB), mask=mask, other=0.0).to(tl.float32)
        if ADD:
            change = tl.load(at(update, start, update_stride, columns, SUB), mask=mask, other=0.0)
            change = change.to(tl.float32)
            if DROPOUT:
                change = change * kept(seed, start, columns, below, factor, SUB)
            rounded = (values + change).to(added.dtype.element_ty)
            tl.store(at(added, start, width, columns, SUB), rounded, mask=mask)
            values = rounded.to(tl.float32)
        values = tl.where(mask, values - pivot[None, None, :], 0.0)
        more = tl.sum(mask.to(tl.float32), 0)
        here = tl.sum(values, 0) / tl.maximum(more, 1.0)
        apart = tl.where(mask, values - here[None, :, :], 0.0)
        share = more / tl.maximum(seen + more, 1.0)
        delta = here - mean
        square += tl.sum(apart * apart, 0) + delta * delta * (seen * share)
        mean += delta * share
        seen += more
    mean_of_piece, square_of_piece = merged(seen, mean, square)
    tl.store(means + part * width + columns, mean_of_piece, mask=inside)
    tl.store(squares + part * width + columns, square_of_piece, mask=inside)


@triton.jit(do_not_specialize=["size"])
def apply_kernel(
    x, residual, out, weight, bias, pivots, means, squares, mean_out, scale_out, running_mean, running_var, batches, rows, seed,
    momentum, eps, below, factor, size, width, x_stride, residual_stride,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out = residual + dropout(act(x̂ w + b)), x̂ = (x − mean) · scale; out = residual for padding.

    Every program puts the pieces of its channels together; the first of them also writes the statistics.
    """
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < width
    count = real_rows(rows, size, MASKED)
    enough = count >= 2  # otherwise there is no variance, and the running statistics serve
    first = tl.program_id(0) == 0
    counts = piece_counts(count, PARTS, SUB)
    places = tl.arange(0, PARTS)[:, None] * width + columns[None, :]
    there = (counts > 0)[:, None] & inside[None, :]
    mean = tl.load(means + places, mask=there, other=0.0)
    square = tl.load(squares + places, mask=there, other=0.0)
    pivot = tl.load(pivots + columns, mask=inside, other=0.0)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0)
    # Only the first program changes the running statistics, and only where nobody uses them.
    needed = inside & (first | (count < 2))
    old_mean = tl.load(running_mean + columns, mask=needed, other=0.0)
    old_var = tl.load(running_var + columns, mask=needed, other=1.0)
    mean, square = merged(counts[:, None], mean, square)
    mean += pivot
    variance = square / tl.maximum(count, 1)
    unbiased = square / tl.maximum(count - 1, 1)
    tl.store(running_mean + columns, old_mean + momentum * (mean - old_mean), mask=inside & first & enough)
    tl.store(running_var + columns, old_var + momentum * (unbiased - old_var), mask=inside & first & enough)
    mean = tl.where(enough, mean, old_mean)
    scale = 1 / tl.sqrt(tl.where(enough, variance, old_var) + eps)
    tl.store(mean_out + columns, mean, mask=inside & first)
    tl.store(scale_out + columns, scale, mask=inside & first)

    mean, scale, gain, shift = (
        mean[None, None, :],
        scale[None, None, :],
        gain[None, None, :],
        shift[None, None, :],
    )
    for start in range(tl.program_id(0) * 8 * SUB, size, tl.num_programs(0) * 8 * SUB):
        real = (tile_rows(start, SUB) < count)[:, :, None] & inside[None, None, :]
        mask = (tile_rows(start, SUB) < size)[:, :, None] & inside[None, None, :]
        values = tl.load(at(x, start, x_stride, columns, SUB), mask=real, other=0.0).to(tl.float32)
        if RESIDUAL:
            old = tl.load(at(residual, start, residual_stride, columns, SUB), mask=mask, other=0.0)
        y = activated((values - mean) * scale * gain + shift, ACTIVATION)
        if DROPOUT:
            y = y * kept(seed, start, columns, below, factor, SUB)
        y = tl.where(real, y, 0.0)
        if RESIDUAL:
            y += old.to(tl.float32)
        tl.store(at(out, start, width, columns, SUB), y.to(out.dtype.element_ty), mask=mask)
    if first & (tl.program_id(1) == 0):  # last, as nothing here waits for it
        tl.store(batches, tl.load(batches) + enough.to(tl.int64))


@triton.jit
def gradient_of_z(x, grad_out, mask, mean, scale, gain, shift, ACTIVATION: tl.constexpr):
    """x̂, and ∂L/∂z for z = x̂ w + b where nothing is dropped, of one tile; 0 outside the mask."""
    normed = tl.load(x, mask=mask, other=0.0).to(tl.float32) - mean[None, None, :]
    grad = tl.load(grad_out, mask=mask, other=0.0).to(tl.float32)
    normed = tl.where(mask, normed * scale[None, None, :], 0.0)
    return normed, grad * slope(normed * gain[None, None, :] + shift[None, None, :], ACTIVATION)


@triton.jit(do_not_specialize=UNKNOWN)
def sums_kernel(
    x, grad_out, weight, bias, mean_in, scale_in, rows, seed, of_bias, of_weight,
    below, factor, size, width, x_stride, grad_stride,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Σ ∂L/∂z and Σ x̂ ∂L/∂z over one piece of the real rows."""
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < width
    count = real_rows(rows, size, MASKED)
    each = piece_rows(count, PARTS, SUB)
    mean = tl.load(mean_in + columns, mask=inside, other=0.0)
    scale = tl.load(scale_in + columns, mask=inside, other=0.0)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0)
    plain, by_normed = tl.zeros([SUB, COLS], tl.float32), tl.zeros([SUB, COLS], tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, count), 8 * SUB):
        mask = (tile_rows(start, SUB) < count)[:, :, None] & inside[None, None, :]
        normed, grad = gradient_of_z(
            at(x, start, x_stride, columns, SUB), at(grad_out, start, grad_stride, columns, SUB), mask,
            mean, scale, gain, shift, ACTIVATION,
        )  # fmt: skip
        if DROPOUT:
            grad = grad * kept(seed, start, columns, below, factor, SUB)
        plain += tl.sum(grad, 0)
        by_normed += tl.sum(grad * normed, 0)
    tl.store(of_bias + part * width + columns, tl.sum(plain, 0), mask=inside)
    tl.store(of_weight + part * width + columns, tl.sum(by_normed, 0), mask=inside)


@triton.jit(do_not_specialize=["size"])
def gradient_kernel(
    x, grad_out, weight, bias, mean_in, scale_in, rows, seed, of_bias, of_weight,
    grad_x, grad_update, grad_weight, grad_bias, below, factor, size, width, x_stride, grad_stride,
    SUB: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, ADD: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """∂L/∂x = w · scale · (g − (Σ g + x̂ Σ x̂ g) / n), g = ∂L/∂z, with constant statistics w · scale · g; 0 for padding.

    With ADD, x is x + dropout(update), of which both get the gradient.
    """
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < width
    count = real_rows(rows, size, MASKED)
    places = tl.arange(0, PARTS)[:, None] * width + columns[None, :]
    there = (piece_counts(count, PARTS, SUB) > 0)[:, None] & inside[None, :]
    plain = tl.load(of_bias + places, mask=there, other=0.0)
    by_normed = tl.load(of_weight + places, mask=there, other=0.0)
    mean = tl.load(mean_in + columns, mask=inside, other=0.0)
    scale = tl.load(scale_in + columns, mask=inside, other=0.0)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0)
    plain, by_normed = tl.sum(plain, 0), tl.sum(by_normed, 0)
    first = tl.program_id(0) == 0
    tl.store(grad_bias + columns, plain, mask=inside & first)
    tl.store(grad_weight + columns, by_normed, mask=inside & first)
    share = tl.where(count >= 2, 1 / tl.maximum(count, 1).to(tl.float32), 0.0)
    plain, by_normed = plain * share, by_normed * share
    for start in range(tl.program_id(0) * 8 * SUB, size, tl.num_programs(0) * 8 * SUB):
        real = (tile_rows(start, SUB) < count)[:, :, None] & inside[None, None, :]
        mask = (tile_rows(start, SUB) < size)[:, :, None] & inside[None, None, :]
        normed, grad = gradient_of_z(
            at(x, start, x_stride, columns, SUB), at(grad_out, start, grad_stride, columns, SUB), real,
            mean, scale, gain, shift, ACTIVATION,
        )  # fmt: skip
        if DROPOUT:
            factors = kept(seed, start, columns, below, factor, SUB)
            if not ADD:
                grad = grad * factors
        grad = grad - plain[None, None, :] - normed * by_normed[None, None, :]
        grad = tl.where(real, grad * (gain * scale)[None, None, :], 0.0)
        tl.store(at(grad_x, start, width, columns, SUB), grad.to(grad_x.dtype.element_ty), mask=mask)
        if ADD:
            if DROPOUT:
                grad = grad * factors
            of_update = grad.to(grad_update.dtype.element_ty)
            tl.store(at(grad_update, start, width, columns, SUB), of_update, mask=mask)
