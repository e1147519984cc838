"""Compress one gradient into a message on a GPU: Triton kernel, op, and the function around them.

One pass over the data: the gradient and the error are read once, the new error and the codes are
written once, the codes straight into the message that goes out. One program takes whole blocks of
one rank's chunk, so a block's scale never leaves it.

Letters: W ranks, N elements of a chunk, B blocks, K elements of a block, H = K / P elements of one
of its P planes, T blocks of one program, M bytes of a row of the message.

Rounding: half to even, by adding 1.5 * 2^23 + offset to a clipped float32. The low byte of the sum
is then the offset-binary code: no float-to-int conversion.
"""

# Triton's functions are typed by their launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .layout import Layout
from .recipe import Recipe
from .reference import Error

_ELEMENTS_PER_PROGRAM = 4096
_NUM_WARPS = 4
"""32 elements for each thread: its share of each of two planes is one 16-byte access of int8."""
_MUTATED = ("message", "error_0", "error_1", "error_scale")


@triton.jit
def _block_step(absmax_T, LOG2_LEVELS: tl.constexpr):
    """Return absmax / 2^LOG2_LEVELS rounded up to bfloat16, and its inverse; 0 and 0 if too small.

    On the float's bits, as casts to bfloat16 truncate in the interpreter. 0x0D800000 is
    SMALLEST_ABSMAX, so the exponent never underflows.
    """
    bits_T = absmax_T.to(tl.int32, bitcast=True)
    step_T = (bits_T - (LOG2_LEVELS << 23) + 0xFFFF) & 0x7FFF0000
    step_T = tl.where(bits_T < 0x0D800000, 0, step_T)
    divisor_T = tl.where(step_T > 0, step_T, 0x3F800000).to(tl.float32, bitcast=True)
    inverse_T = tl.div_rn(tl.full(step_T.shape, 1.0, tl.float32), divisor_T)
    return step_T.to(tl.float32, bitcast=True), tl.where(step_T > 0, inverse_T, 0.0)


@triton.jit
def _compensate(grad_ptr, error_ptr, at, is_grad, is_row, unit_T1, KEEPS_ERROR: tl.constexpr):
    """Load one plane: h = g + e (E2) and the error codes, both float32. `at`: where in each."""
    h_TH = tl.load(grad_ptr + at[0], mask=is_grad, other=0.0).to(tl.float32)
    e_TH = h_TH
    if KEEPS_ERROR:
        e_TH = tl.load(error_ptr + at[1], mask=is_row, other=0).to(tl.float32)
        h_TH += e_TH * unit_T1
    return h_TH, e_TH


@triton.jit
def _round(x, BITS: tl.constexpr, IS_BOUNDED: tl.constexpr, ROUNDER: tl.constexpr):
    """Clip x to BITS-bit codes (E1) and add ROUNDER. IS_BOUNDED: the lower bound clips nothing.

    As a dynamic scale is rounded up, x >= -2^(BITS-1) but for the rounding of h / scale.
    """
    if not IS_BOUNDED:
        x = tl.maximum(x, -1.0 * (1 << (BITS - 1)))
    return tl.minimum(x, 1.0 * ((1 << (BITS - 1)) - 1)) + ROUNDER


@triton.jit
def _absmax(x_0, x_1, P: tl.constexpr):
    """Return each block's largest magnitude; NaN wins, then Inf.

    Ordered as integers in the reduction: there NaN is the largest number on every backend.
    """
    x_TH = tl.abs(x_0)
    if P == 2:
        x_TH = tl.maximum(x_TH, tl.abs(x_1), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(x_TH.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _wire_scale(absmax_T, BITS: tl.constexpr, FIXED_SCALE: tl.constexpr):
    """Return each block's step, its inverse and the bits of its scale on the wire (E1), (E1b)."""
    is_finite_T = absmax_T.to(tl.int32, bitcast=True) < 0x7F800000
    if FIXED_SCALE == 0.0:
        step_T, inverse_T = _block_step(tl.where(is_finite_T, absmax_T, 0.0), BITS - 1)
        scale_T = step_T.to(tl.int32, bitcast=True)
    else:
        step_T = tl.full(absmax_T.shape, 1.0 / FIXED_SCALE, tl.float32)
        inverse_T = tl.full(absmax_T.shape, FIXED_SCALE, tl.float32)
        scale_T = tl.full(absmax_T.shape, 0x3F800000, tl.int32)
    scale_T = tl.where(is_finite_T, scale_T, 0x7FC00000) >> 16
    return is_finite_T, step_T, inverse_T, scale_T.to(tl.int16)


@triton.jit
def _error_scale(
    scale_ptr, r_0, r_1, is_row_T, P: tl.constexpr, NEW: tl.constexpr, FIXED_SCALE: tl.constexpr
):
    """Return what turns r into error codes (E6). Stores the block scales, if they are dynamic."""
    if FIXED_SCALE == 0.0:
        step_T, inverse_T = _block_step(_absmax(r_0, r_1, P) * NEW, 7)
        tl.store(scale_ptr, step_T.to(tl.bfloat16), mask=is_row_T)
    else:
        inverse_T = tl.full(is_row_T.shape, FIXED_SCALE, tl.float32)
    return (inverse_T * NEW)[:, None]


@triton.jit
def _compress_kernel(
    grad_ptr,
    message_ptr,
    error_0_ptr,
    error_1_ptr,
    error_scale_ptr,
    grad_numel,
    chunk_numel,
    num_blocks,
    message_stride,
    code_offset,
    scale_offset,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    T: tl.constexpr,
    BITS: tl.constexpr,
    KEEPS_ERROR: tl.constexpr,
    FIXED_SCALE: tl.constexpr,
    FIXED_ERROR_SCALE: tl.constexpr,
    ERROR_DECAY: tl.constexpr,
):
    """Compress T blocks of the chunk for rank program_id(1). A fixed scale of 0 means dynamic."""
    P: tl.constexpr = 8 // BITS
    K: tl.constexpr = H * P
    NEW: tl.constexpr = 1.0 - ERROR_DECAY
    ROUNDER: tl.constexpr = 12582912.0 + (1 << (BITS - 1))
    ERROR_ROUNDER: tl.constexpr = 12582912.0
    IS_DYNAMIC: tl.constexpr = FIXED_SCALE == 0.0
    IS_ERROR_BOUNDED: tl.constexpr = IS_DYNAMIC and FIXED_ERROR_SCALE == 0.0

    rank = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * T
    row = rank * num_blocks + block
    # Elements of this tile that exist: neither past the chunk nor past the gradient.
    numel = tl.minimum(grad_numel - rank * chunk_numel, chunk_numel) - block * K
    numel = tl.maximum(tl.minimum(numel, T * K), 0).to(tl.int32)
    t_T = tl.arange(0, T)
    h_1H = tl.arange(0, H_PADDED)[None, :]
    is_row_T = t_T < tl.minimum(num_blocks - block, T).to(tl.int32)
    is_code = is_row_T[:, None] & (h_1H < H)
    is_grad = (t_T[:, None] * K + h_1H < numel) & (h_1H < H)
    at = (t_T[:, None] * K + h_1H, t_T[:, None] * H + h_1H)

    unit_T1 = 0.0
    if KEEPS_ERROR:
        error_0_ptr += row * H
        if P == 2:
            error_1_ptr += row * H
        unit_T1 = tl.full((T, 1), 1.0 / (FIXED_ERROR_SCALE or 1.0), tl.float32)
        if FIXED_ERROR_SCALE == 0.0:
            error_scale_ptr += row + t_T
            unit_T1 = tl.load(error_scale_ptr, mask=is_row_T, other=0.0).to(tl.float32)[:, None]
    grad_ptr += rank * chunk_numel + block * K
    h_0, e_0 = _compensate(grad_ptr, error_0_ptr, at, is_grad, is_code, unit_T1, KEEPS_ERROR)
    h_1, e_1 = h_0, e_0
    if P == 2:
        grad_ptr += H
        is_grad = (t_T[:, None] * K + h_1H + H < numel) & (h_1H < H)
        h_1, e_1 = _compensate(grad_ptr, error_1_ptr, at, is_grad, is_code, unit_T1, KEEPS_ERROR)

    is_finite_T, step_T, inverse_T, scale_T = _wire_scale(_absmax(h_0, h_1, P), BITS, FIXED_SCALE)
    is_finite, step, inverse = is_finite_T[:, None], step_T[:, None], inverse_T[:, None]
    message_ptr += rank * message_stride
    scale_ptr = (message_ptr + scale_offset + block * 2).to(tl.pointer_type(tl.int16))
    tl.store(scale_ptr + t_T, scale_T, mask=is_row_T)

    h_0 = tl.where(is_finite, h_0, 0.0)
    q_0 = _round(h_0 * inverse, BITS, IS_DYNAMIC, ROUNDER)
    byte = q_0.to(tl.int32, bitcast=True)
    if P == 2:
        h_1 = tl.where(is_finite, h_1, 0.0)
        q_1 = _round(h_1 * inverse, BITS, IS_DYNAMIC, ROUNDER)
        # Above the nibble of q_0 its byte is zero, and only the byte is stored.
        byte = byte | (q_1.to(tl.int32, bitcast=True) << 4)
    tl.store(message_ptr + code_offset + block * H + at[1], byte.to(tl.uint8), mask=is_code)

    if KEEPS_ERROR:
        # r is the new error / NEW: one multiplication less, exact as NEW is a power of two.
        unit_T1 = tl.where(is_finite, unit_T1 * (ERROR_DECAY / NEW), 0.0)
        r_0 = h_0 - (q_0 - ROUNDER) * step + e_0 * unit_T1
        r_1 = r_0
        if P == 2:
            r_1 = h_1 - (q_1 - ROUNDER) * step + e_1 * unit_T1
        inverse = _error_scale(error_scale_ptr, r_0, r_1, is_row_T, P, NEW, FIXED_ERROR_SCALE)
        y_0 = _round(r_0 * inverse, 8, IS_ERROR_BOUNDED, ERROR_ROUNDER)
        tl.store(error_0_ptr + at[1], y_0.to(tl.int32, bitcast=True).to(tl.int8), mask=is_code)
        if P == 2:
            y_1 = _round(r_1 * inverse, 8, IS_ERROR_BOUNDED, ERROR_ROUNDER)
            tl.store(error_1_ptr + at[1], y_1.to(tl.int32, bitcast=True).to(tl.int8), mask=is_code)


@triton_op("loco_compile::compress", mutates_args=_MUTATED)
def _compress(
    grad: Tensor,
    message: Tensor,
    error_0: Tensor | None,
    error_1: Tensor | None,
    error_scale: Tensor | None,
    chunk_numel: int,
    block_numel: int,
    bits: int,
    fixed_scale: float,
    fixed_error_scale: float,
    error_decay: float,
    code_offset: int,
    scale_offset: int,
) -> None:
    codes_per_byte = 8 // bits
    num_blocks = -(-chunk_numel // block_numel)
    if num_blocks == 0 or message.shape[0] == 0:
        return
    plane_numel = block_numel // codes_per_byte
    plane_padded = triton.next_power_of_2(plane_numel)
    tile_blocks = max(1, _ELEMENTS_PER_PROGRAM // (plane_padded * codes_per_byte))
    wrap_triton(_compress_kernel)[(-(-num_blocks // tile_blocks), message.shape[0], 1)](
        grad,
        message,
        error_0,
        error_1,
        error_scale,
        grad.numel(),
        chunk_numel,
        num_blocks,
        message.stride(0),
        code_offset,
        scale_offset,
        H=plane_numel,
        H_PADDED=plane_padded,
        T=tile_blocks,
        BITS=bits,
        KEEPS_ERROR=error_0 is not None,
        FIXED_SCALE=fixed_scale,
        FIXED_ERROR_SCALE=fixed_error_scale,
        ERROR_DECAY=error_decay,
        num_warps=_NUM_WARPS,
    )


def compress_into(
    message: Tensor,
    grad: Tensor,
    error: Error | None,
    *,
    layout: Layout,
    recipe: Recipe,
    code_offset: int,
    scale_offset: int,
) -> None:
    """Write codes and scales of one gradient into `message`, and the new error over the old one.

    Shapes:  message (W, M) uint8, rows contiguous: codes at byte `code_offset` of each row, scales
             at `scale_offset` (even). grad: as `reference.compress`, contiguous. error: contiguous.
    Keeps:   bit for bit what `reference.compress` returns, if 1 - error_decay and the fixed scales
             are powers of two; with others the error may differ by one code, on a tie.
    Source:  docs/equations.md (E1) to (E6).
    """
    if recipe.keeps_error != (error is not None):
        raise ValueError(
            f"compress_into: Recipe.keeps_error is {recipe.keeps_error}, so the error must be "
            f"{'given' if recipe.keeps_error else 'None'}"
        )
    planes = error.planes if error is not None else ()
    _compress(
        grad.reshape(-1),
        message,
        planes[0] if planes else None,
        planes[1] if len(planes) > 1 else None,
        error.scale if error is not None else None,
        layout.chunk_numel,
        layout.block_numel,
        recipe.bits,
        recipe.fixed_scale or 0.0,
        recipe.fixed_error_scale or 0.0,
        recipe.error_decay,
        code_offset,
        scale_offset,
    )
