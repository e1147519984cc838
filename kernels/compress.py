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
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .device import (
    block_absmax,
    block_step,
    block_step_symmetric,
    is_largest_positive,
    pack_codes,
    rotate_planes,
    rotate_rows,
    round_stochastic,
    round_to_code,
)
from .layout import Layout
from .memory import Memory
from .recipe import Recipe

_ELEMENTS_PER_PROGRAM = 4096
_NUM_WARPS = 4
"""32 elements for each thread: its share of each of two planes is one 16-byte access of int8."""
_MUTATED = ("message", "error_0", "error_1", "error_2", "error_3", "error_scale")


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
def _wire_scale(
    planes, absmax_T, BITS: tl.constexpr, FIXED_SCALE: tl.constexpr, CODE_RANGE: tl.constexpr
):
    """Return each block's step, its inverse and the bits of its scale on the wire (E1), (E1b)."""
    is_finite_T = absmax_T.to(tl.int32, bitcast=True) < 0x7F000000  # LARGEST_ABSMAX
    if FIXED_SCALE == 0.0:
        finite_T = tl.where(is_finite_T, absmax_T, 0.0)
        if CODE_RANGE == "symmetric":
            step_T, inverse_T = block_step_symmetric(finite_T, (1 << (BITS - 1)) - 1)
        else:
            step_T, inverse_T = block_step(finite_T, BITS - 1)
        if CODE_RANGE == "signed":
            is_positive_T = is_largest_positive(planes, absmax_T, 8 // BITS) & (step_T > 0)
            step_T = tl.where(is_positive_T, -step_T, step_T)
            inverse_T = tl.where(is_positive_T, -inverse_T, inverse_T)
        scale_T = step_T.to(tl.int32, bitcast=True)
    else:
        step_T = tl.full(absmax_T.shape, 1.0 / FIXED_SCALE, tl.float32)
        inverse_T = tl.full(absmax_T.shape, FIXED_SCALE, tl.float32)
        scale_T = tl.full(absmax_T.shape, 0x3F800000, tl.int32)
    scale_T = tl.where(is_finite_T, scale_T, 0x7FC00000) >> 16
    return is_finite_T, step_T, inverse_T, scale_T.to(tl.int16)


@triton.jit
def _error_scale(
    scale_ptr,
    residuals,
    is_row_T,
    P: tl.constexpr,
    NEW: tl.constexpr,
    FIXED_SCALE: tl.constexpr,
    ERROR_BITS: tl.constexpr,
):
    """Return what turns r into error codes (E6). Stores the block scales, if they are dynamic."""
    if FIXED_SCALE == 0.0:
        step_T, inverse_T = block_step(block_absmax(residuals, P) * NEW, ERROR_BITS - 1)
        tl.store(scale_ptr, step_T.to(tl.bfloat16), mask=is_row_T)
    else:
        inverse_T = tl.full(is_row_T.shape, FIXED_SCALE, tl.float32)
    return (inverse_T * NEW)[:, None]


@triton.jit
def _residuals(
    found,
    is_finite,
    step,
    kept_T1,
    T: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    ROUNDER: tl.constexpr,
    ROTATES: tl.constexpr,
    TRACKS: tl.constexpr,
):
    """Return r, the new error / (1 - decay): one multiplication less (E4), (E5), (E5b).

    Exact, as 1 - decay is a power of two. `found`: h, codes plus ROUNDER, e.
    """
    planes, sent, errors = found
    residuals = ()
    for plane in tl.static_range(P):
        s_TH = (sent[plane] - ROUNDER) * step
        if ROTATES:
            s_TH = rotate_rows(s_TH, T, H) * 0.03125
        if TRACKS:
            residuals += (errors[plane] - s_TH,)
        else:
            h_TH = tl.where(is_finite, planes[plane], 0.0)
            residuals += (h_TH - s_TH + errors[plane] * kept_T1,)
    return residuals


@triton.jit
def _compress_kernel(
    grad_ptr,
    message_ptr,
    error_0_ptr,
    error_1_ptr,
    error_2_ptr,
    error_3_ptr,
    error_scale_ptr,
    noise_ptr,
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
    CODE_RANGE: tl.constexpr,
    ROTATES: tl.constexpr,
    TRACKS: tl.constexpr,
    FIXED_SCALE: tl.constexpr,
    ERROR_BITS: tl.constexpr,
    FIXED_ERROR_SCALE: tl.constexpr,
    ERROR_DECAY: tl.constexpr,
):
    """Compress T blocks of the chunk for rank program_id(1). A fixed scale of 0 means dynamic."""
    P: tl.constexpr = 8 // BITS
    K: tl.constexpr = H * P
    NEW: tl.constexpr = 1.0 - ERROR_DECAY
    ROUNDER: tl.constexpr = 12582912.0 + (1 << (BITS - 1))
    IS_DYNAMIC: tl.constexpr = FIXED_SCALE == 0.0
    IS_ERROR_BOUNDED: tl.constexpr = IS_DYNAMIC and FIXED_ERROR_SCALE == 0.0
    KEEPS_ERROR: tl.constexpr = error_0_ptr is not None
    error_ptrs = (error_0_ptr, error_1_ptr, error_2_ptr, error_3_ptr)

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
    in_tile = t_T[:, None] * K + h_1H
    at_code = t_T[:, None] * H + h_1H

    unit_T1 = tl.full((T, 1), 1.0 / (FIXED_ERROR_SCALE or 1.0), tl.float32)
    if error_scale_ptr is not None:
        error_scale_ptr += row + t_T
        unit_T1 = tl.load(error_scale_ptr, mask=is_row_T, other=0.0).to(tl.float32)[:, None]
    compensated = ()
    errors = ()
    for plane in tl.static_range(P):
        h_TH, e_TH = _compensate(
            grad_ptr + (rank * chunk_numel + block * K + plane * H),
            error_ptrs[plane] + row * H if KEEPS_ERROR else None,
            (in_tile, at_code),
            (in_tile + plane * H < numel) & (h_1H < H),
            is_code,
            unit_T1,
            KEEPS_ERROR,
        )
        compensated += (h_TH,)
        errors += (e_TH,)
    rotated = rotate_planes(compensated, T, H_PADDED, P) if ROTATES else compensated

    is_finite_T, step_T, inverse_T, scale_T = _wire_scale(
        rotated, block_absmax(rotated, P), BITS, FIXED_SCALE, CODE_RANGE
    )
    is_finite, step, inverse = is_finite_T[:, None], step_T[:, None], inverse_T[:, None]
    message_ptr += rank * message_stride
    scale_ptr = (message_ptr + scale_offset + block * 2).to(tl.pointer_type(tl.int16))
    tl.store(scale_ptr + t_T, scale_T, mask=is_row_T)

    sent = ()
    for plane in tl.static_range(P):
        x = tl.where(is_finite, rotated[plane], 0.0) * inverse
        if noise_ptr is not None:
            at = (row * K + plane * H).to(tl.uint32) + in_tile.to(tl.uint32)
            sent += (round_stochastic(x, tl.load(noise_ptr), at, BITS, ROUNDER),)
        else:
            sent += (round_to_code(x, BITS, IS_DYNAMIC, ROUNDER),)
    code_ptr = message_ptr + code_offset + block * H + at_code
    tl.store(code_ptr, pack_codes(sent, BITS), mask=is_code)

    if KEEPS_ERROR:
        kept_T1 = tl.where(is_finite, unit_T1 * (ERROR_DECAY / NEW), 0.0)
        found = (compensated, sent, errors)
        residuals = _residuals(
            found, is_finite, step, kept_T1, T, H_PADDED, P, ROUNDER, ROTATES, TRACKS
        )
        inverse = tl.full((T, 1), NEW, tl.float32)
        if ERROR_BITS < 32:
            inverse = _error_scale(
                error_scale_ptr, residuals, is_row_T, P, NEW, FIXED_ERROR_SCALE, ERROR_BITS
            )
        for plane in tl.static_range(P):
            new = residuals[plane] * inverse
            if ERROR_BITS < 32:
                new = round_to_code(new, ERROR_BITS, IS_ERROR_BOUNDED, 12582912.0)
                new = new.to(tl.int32, bitcast=True).to(error_0_ptr.dtype.element_ty)
            tl.store(error_ptrs[plane] + row * H + at_code, new, mask=is_code)


@triton_op("loco_compile::compress", mutates_args=_MUTATED)
def _compress(
    grad: Tensor,
    message: Tensor,
    error_0: Tensor | None,
    error_1: Tensor | None,
    error_2: Tensor | None,
    error_3: Tensor | None,
    error_scale: Tensor | None,
    noise: Tensor | None,
    chunk_numel: int,
    block_numel: int,
    bits: int,
    code_range: str,
    rotates: bool,
    tracks_gradient: bool,
    fixed_scale: float,
    error_bits: int,
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
        error_2,
        error_3,
        error_scale,
        noise,
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
        CODE_RANGE=code_range,
        ROTATES=rotates,
        TRACKS=tracks_gradient,
        FIXED_SCALE=fixed_scale,
        ERROR_BITS=error_bits,
        FIXED_ERROR_SCALE=fixed_error_scale,
        ERROR_DECAY=error_decay,
        num_warps=_NUM_WARPS,
    )


def compress_into(
    message: Tensor,
    grad: Tensor,
    memory: Memory,
    *,
    layout: Layout,
    recipe: Recipe,
    code_offset: int,
    scale_offset: int,
) -> None:
    """Write codes and scales of one gradient into `message`, and the new error over the old one.

    Shapes:  message (W, M) uint8, rows contiguous: codes at byte `code_offset` of each row, scales
             at `scale_offset` (even). grad: as `reference.compress`, contiguous. memory: as there,
             contiguous; its noise is read, and left as it is.
    Keeps:   bit for bit what `reference.compress` returns, if 1 - error_decay and the fixed scales
             are powers of two; with others the error may differ by one code, on a tie.
    Source:  docs/equations.md (E1) to (E6).
    """
    if len(memory.planes) != recipe.codes_per_byte * recipe.keeps_error:
        raise ValueError(
            f"compress_into: Recipe.keeps_error is {recipe.keeps_error} with {recipe.bits} bits, "
            f"so the memory must have {recipe.codes_per_byte * recipe.keeps_error} planes, got "
            f"{len(memory.planes)}"
        )
    planes: list[Tensor | None] = [*memory.planes, *[None] * (4 - len(memory.planes))]
    _compress(
        grad.reshape(-1),
        message,
        *planes,
        memory.scale,
        memory.noise,
        layout.chunk_numel,
        layout.block_numel,
        recipe.bits,
        recipe.code_range,
        recipe.rotates,
        recipe.tracks_gradient,
        recipe.fixed_scale or 0.0,
        recipe.error_bits,
        recipe.fixed_error_scale or 0.0,
        recipe.error_decay,
        code_offset,
        scale_offset,
    )
