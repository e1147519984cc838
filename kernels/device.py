"""Device functions of the Triton kernels: steps, rounding, block maxima, rotation, packing.

The same arithmetic as `reference`, in the same order, so the bits are the same.

Letters: T blocks of one program, P planes of a block, H elements of a plane.
"""

# Triton's functions are typed by their launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_step(absmax_T, LOG2_LEVELS: tl.constexpr):
    """Return absmax / 2^LOG2_LEVELS rounded up to bfloat16, and its inverse; 0 and 0 if too small.

    On the float's bits, as casts to bfloat16 truncate in the interpreter. 0x0D800000 is
    SMALLEST_ABSMAX, so the exponent never underflows.
    """
    bits_T = absmax_T.to(tl.int32, bitcast=True)
    step_T = (bits_T - (LOG2_LEVELS << 23) + 0xFFFF) & 0x7FFF0000
    return with_inverse(tl.where(bits_T < 0x0D800000, 0, step_T))


@triton.jit
def block_step_symmetric(absmax_T, LARGEST: tl.constexpr):
    """Return the same for absmax / LARGEST, any integer: one rounded multiplication."""
    step_T = ((absmax_T * (1.0 / LARGEST)).to(tl.int32, bitcast=True) + 0xFFFF) & 0x7FFF0000
    return with_inverse(tl.where(absmax_T.to(tl.int32, bitcast=True) < 0x0D800000, 0, step_T))


@triton.jit
def with_inverse(step_T):
    """Return a step, from its bits, and 1 / step, or 0 where it is 0."""
    divisor_T = tl.where(step_T > 0, step_T, 0x3F800000).to(tl.float32, bitcast=True)
    inverse_T = tl.div_rn(tl.full(step_T.shape, 1.0, tl.float32), divisor_T)
    return step_T.to(tl.float32, bitcast=True), tl.where(step_T > 0, inverse_T, 0.0)


@triton.jit
def round_to_code(x, BITS: tl.constexpr, IS_BOUNDED: tl.constexpr, ROUNDER: tl.constexpr):
    """Clip x to BITS-bit codes (E1) and add ROUNDER. IS_BOUNDED: the lower bound clips nothing.

    As a dynamic scale is rounded up, x >= -2^(BITS-1) but for the rounding of h / scale.
    """
    if not IS_BOUNDED:
        x = tl.maximum(x, -1.0 * (1 << (BITS - 1)))
    return tl.minimum(x, 1.0 * ((1 << (BITS - 1)) - 1)) + ROUNDER


@triton.jit
def _mix(x):
    """`reference.mix` on uint32, where products wrap."""
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def round_stochastic(x, noise, at, BITS: tl.constexpr, ROUNDER: tl.constexpr):
    """Clip x to BITS-bit codes, round it up with the probability of the rest (E1c), add ROUNDER."""
    low: tl.constexpr = -1.0 * (1 << (BITS - 1))
    x = tl.minimum(tl.maximum(x, low), 1.0 * ((1 << (BITS - 1)) - 1))
    random = (_mix(at ^ noise.to(tl.uint32)) >> 16).to(tl.int32).to(tl.float32)
    return tl.floor(x + (random + 0.5) * 0.0000152587890625) + ROUNDER


@triton.jit
def block_absmax(planes, P: tl.constexpr):
    """Return each block's largest magnitude; NaN wins, then Inf.

    Ordered as integers in the reduction: there NaN is the largest number on every backend.
    """
    x_TH = tl.abs(planes[0])
    for plane in tl.static_range(1, P):
        x_TH = tl.maximum(x_TH, tl.abs(planes[plane]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(x_TH.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def is_largest_positive(planes, absmax_T, P: tl.constexpr):
    """Return whether the largest magnitude of each block is that of a positive element."""
    x_TH = planes[0].to(tl.int32, bitcast=True)
    for plane in tl.static_range(1, P):
        x_TH = tl.maximum(x_TH, planes[plane].to(tl.int32, bitcast=True))
    return tl.max(x_TH, axis=1) == absmax_T.to(tl.int32, bitcast=True)


@triton.jit
def rotate_rows(x_TH, T: tl.constexpr, H: tl.constexpr):
    """Transform each run of 32 elements of the rows. H is a power of two, 32 or more."""
    N: tl.constexpr = T * H
    for stage in tl.static_range(5):
        STRIDE: tl.constexpr = 1 << stage
        pairs = tl.reshape(x_TH, (N // (2 * STRIDE), 2, STRIDE))
        a, b = tl.split(tl.trans(pairs, 0, 2, 1))
        x_TH = tl.reshape(tl.trans(tl.join(a + b, a - b), 0, 2, 1), (T, H))
    return x_TH


@triton.jit
def rotate_planes(planes, T: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    """Transform each plane (E3b)."""
    rotated = ()
    for plane in tl.static_range(P):
        rotated += (rotate_rows(planes[plane], T, H),)
    return rotated


@triton.jit
def pack_codes(sent, BITS: tl.constexpr):
    """Return the byte of P codes, each in the low bits of a float32 that `round_to_code` made."""
    byte = sent[0].to(tl.int32, bitcast=True)
    for plane in tl.static_range(1, 8 // BITS):
        # Above the code its byte is zero, and only the byte is stored.
        byte = byte | (sent[plane].to(tl.int32, bitcast=True) << (plane * BITS))
    return byte.to(tl.uint8)
