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


def wire_step(h, recipe) -> float:
    """(E1b) The step of a block, with the sign that "signed" gives it."""
    if recipe.fixed_scale:
        return 1 / recipe.fixed_scale
    largest = np.abs(h).max()
    if recipe.code_range == "symmetric":
        # absmax * float32(1 / largest code), rounded to float32, then up.
        product = np.float32(largest) * np.float32(1 / (2 ** (recipe.bits - 1) - 1))
        return step_of(float(product), 1) if largest >= SMALLEST else 0.0
    step = step_of(largest, recipe.bits)
    return -step if recipe.code_range == "signed" and h.max() == largest else step


def compressor(x: float, bits: int) -> int:
    """(E1) Python rounds ties to even."""
    return min(max(round(x), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)


def hash32(x: int) -> int:
    """(E1c) Two rounds of shift, XOR and multiplication modulo 2^32."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def stochastic(x: float, bits: int, element: int, noise: int) -> int:
    """(E1c) Rounded up with the probability of what is left."""
    u = ((hash32(element % 2**32 ^ noise) >> 16) + 0.5) / 2**16
    clipped = min(max(x, -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)
    return math.floor(float(np.float32(clipped) + np.float32(u)))


def hadamard(x):
    """(E3b) Runs of 32 elements times the matrix, in float64."""
    matrix = np.ones((1, 1))
    while len(matrix) < 32:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.reshape(-1, 32) @ matrix.T).reshape(x.shape)


def compress_block(grad, old_codes, old_scale, recipe, *, first_element=0, noise=0):
    """Return one block's codes, wire scale, error codes and error scale."""
    size = len(grad)
    if not recipe.keeps_error:
        old = np.zeros(size)
    elif recipe.error_bits == 32:
        old = old_codes
    elif recipe.fixed_error_scale:
        old = old_codes / recipe.fixed_error_scale
    else:
        old = old_codes * old_scale
    h = grad + old  # (E2)
    if not np.isfinite(h).all():
        kept = (old_codes, old_scale) if recipe.tracks_gradient else (np.zeros(size), 0.0)
        return np.zeros(size), math.nan, *kept
    x = hadamard(h) if recipe.rotates else h
    step = wire_step(x, recipe)
    q = np.zeros(size)
    for k in range(size if step else 0):
        if recipe.stochastic:
            q[k] = stochastic(x[k] / step, recipe.bits, first_element + k, noise)
        else:
            q[k] = compressor(x[k] / step, recipe.bits)
    wire = 1.0 if recipe.fixed_scale else step
    sent = hadamard(q * step) / 32 if recipe.rotates else q * step
    if recipe.tracks_gradient:
        residual = old - sent  # (E5b)
    else:
        residual = h - sent  # (E4)
        residual = recipe.error_decay * old + (1 - recipe.error_decay) * residual  # (E5)
    if recipe.error_bits == 32:
        return q, wire, residual, 0.0
    if recipe.fixed_error_scale:
        error_step = 1 / recipe.fixed_error_scale
    else:
        error_step = step_of(np.abs(residual).max(), recipe.error_bits)
    e = [compressor(x / error_step, recipe.error_bits) if error_step else 0 for x in residual]
    return q, wire, np.array(e, dtype=float), error_step  # (E6)


def compress(grad, codes, scales, *, layout, recipe, noise=0):
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
            element = (w * blocks + b) * size
            result = compress_block(
                padded[w, here],
                codes[w, here],
                scales[w, b],
                recipe,
                first_element=element,
                noise=noise,
            )
            sent[w, here], wire[w, b], error[w, here], error_scale[w, b] = result
    return sent, wire, error, error_scale


def decompress_mean(sent, wire, *, layout, recipe, divisor):
    """(E7), (E8) of the chunk that the ranks sent to one of them: sent (W, B * K), wire (W, B)."""
    terms = sent * np.repeat(wire, layout.block_numel, axis=1) / (recipe.fixed_scale or 1.0)
    total = terms.sum(0)
    if recipe.rotates:
        total = hadamard(total) / 32
    return total[: layout.chunk_numel] / divisor
