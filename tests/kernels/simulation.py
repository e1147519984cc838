"""The method written a second time, element by element in float64, from docs/equations.md alone.

Nothing here is shared with `loco_compile.kernels.reference` but the names of a recipe's fields.
"""

import math

import numpy as np

SMALLEST = 2.0**-100


def step_of(largest: float, bits: int) -> float:
    """(E1b) The smallest bfloat16 that is at least largest / 2^(bits-1); 0 for a silent block."""
    if largest < SMALLEST:
        return 0.0
    mantissa, exponent = math.frexp(largest / 2 ** (bits - 1))
    return math.ldexp(math.ceil(mantissa * 256), exponent - 8)


def compressor(x: float, bits: int) -> int:
    """(E1) Python rounds ties to even."""
    return min(max(round(x), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)


def compress_block(grad, old_codes, old_scale, recipe):
    """Return one block's codes, wire scale, error codes and error scale."""
    size = len(grad)
    if not recipe.keeps_error:
        old = np.zeros(size)
    elif recipe.fixed_error_scale:
        old = old_codes / recipe.fixed_error_scale
    else:
        old = old_codes * old_scale
    h = grad + old  # (E2)
    if not np.isfinite(h).all():
        return np.zeros(size), math.nan, np.zeros(size), 0.0
    step = 1 / recipe.fixed_scale if recipe.fixed_scale else step_of(np.abs(h).max(), recipe.bits)
    q = np.array([compressor(x / step, recipe.bits) if step else 0 for x in h])
    wire = 1.0 if recipe.fixed_scale else step
    residual = h - q * step  # (E4)
    residual = recipe.error_decay * old + (1 - recipe.error_decay) * residual  # (E5)
    if recipe.fixed_error_scale:
        error_step = 1 / recipe.fixed_error_scale
    else:
        error_step = step_of(np.abs(residual).max(), 8)
    e = np.array([compressor(x / error_step, 8) if error_step else 0 for x in residual])  # (E6)
    return q, wire, e, error_step


def compress(grad, codes, scales, *, layout, recipe):
    """Run every block of every chunk. Elements come in and go out in their flat order.

    Shapes: grad (n,); codes (W, B * K); scales (W, B). Returns four arrays of these two shapes.
    """
    ranks, blocks, size = layout.num_ranks, layout.num_blocks, layout.block_numel
    padded = np.zeros((ranks, blocks * size))
    for at, value in enumerate(grad):
        padded[at // layout.chunk_numel, at % layout.chunk_numel] = value
    sent, error = np.zeros_like(padded), np.zeros_like(padded)
    wire, error_scale = np.zeros((ranks, blocks)), np.zeros((ranks, blocks))
    for w in range(ranks):
        for b in range(blocks):
            here = slice(b * size, (b + 1) * size)
            result = compress_block(padded[w, here], codes[w, here], scales[w, b], recipe)
            sent[w, here], wire[w, b], error[w, here], error_scale[w, b] = result
    return sent, wire, error, error_scale


def decompress_mean(sent, wire, *, layout, recipe, divisor):
    """(E7), (E8) of the chunk that the ranks sent to one of them: sent (W, B * K), wire (W, B)."""
    terms = sent * np.repeat(wire, layout.block_numel, axis=1) / (recipe.fixed_scale or 1.0)
    return terms.sum(0)[: layout.chunk_numel] / divisor
