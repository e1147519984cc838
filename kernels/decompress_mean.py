"""Decompress what every rank sent and average it, on a GPU: Triton kernel, op, and function.

One program takes whole blocks and walks over the ranks: it reads each code byte and each scale
once, adds in float32 in rank order, and writes each element once. `code * scale` is exact in
float32, so fused multiply-add changes no bit.

Letters: W ranks, N elements of a chunk, B blocks, K elements of a block, H = K / P elements of one
of its P planes, T blocks of one program, M bytes of a row of the message.
"""

# Triton's functions are typed by their launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .device import rotate_rows
from .layout import Layout
from .recipe import Recipe
from .reference import mean_factor

_ELEMENTS_PER_PROGRAM = 4096
_NUM_WARPS = 4
"""32 elements for each thread: with two codes in a byte it loads 16 bytes from each rank."""


@triton.jit
def _code(byte_TH, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Return the code at bit SHIFT as float32, by its place in the mantissa of 2^23 + code."""
    low_TH = (byte_TH >> SHIFT) & ((1 << BITS) - 1)
    return (low_TH | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))


@triton.jit
def _add_rank(sums, byte_TH, scale_T1, BITS: tl.constexpr):
    """Add what one rank sent to the P sums (T, H)."""
    added = ()
    for plane in tl.static_range(8 // BITS):
        added += (sums[plane] + _code(byte_TH, plane * BITS, BITS) * scale_T1,)
    return added


@triton.jit
def _decompress_mean_kernel(
    message_ptr,
    out_ptr,
    known_ptr,
    out_numel,
    num_ranks,
    message_stride,
    code_offset,
    scale_offset,
    multiplier,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    T: tl.constexpr,
    BITS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Sum T blocks over the ranks and multiply. Source: docs/equations.md (E7), (E8), (E8b)."""
    P: tl.constexpr = 8 // BITS
    K: tl.constexpr = H * P
    TRACKS: tl.constexpr = known_ptr is not None
    block = tl.program_id(0).to(tl.int64) * T
    numel = tl.minimum(out_numel - block * K, T * K).to(tl.int32)
    t_T = tl.arange(0, T)
    h_1H = tl.arange(0, H_PADDED)[None, :]
    is_row_T = t_T * K < numel
    is_code = is_row_T[:, None] & (h_1H < H)

    scale_ptr = (message_ptr + scale_offset + block * 2).to(tl.pointer_type(tl.int16)) + t_T
    code_ptr = message_ptr + code_offset + block * H + (t_T[:, None] * H + h_1H)
    zero_TH = tl.full((T, H_PADDED), 0.0, tl.float32)
    sums = (zero_TH,) * P
    is_lost_T = tl.full((T,), 0, tl.int32)
    rank_stride = tl.full((), message_stride, tl.int64)
    for _ in range(num_ranks):
        byte_TH = tl.load(code_ptr, mask=is_code, other=0).to(tl.int32)
        scale_T = tl.load(scale_ptr, mask=is_row_T, other=0).to(tl.int32) << 16
        if TRACKS:
            is_nan_T = (scale_T & 0x7FFFFFFF) > 0x7F800000
            is_lost_T = tl.where(is_nan_T, 1, is_lost_T)
            scale_T = tl.where(is_nan_T, 0, scale_T)
        sums = _add_rank(sums, byte_TH, scale_T.to(tl.float32, bitcast=True)[:, None], BITS)
        code_ptr += rank_stride
        scale_ptr += rank_stride // 2

    at = t_T[:, None] * K + h_1H
    factor = tl.full((), multiplier, tl.float32)
    for plane in tl.static_range(P):
        mean_TH = sums[plane]
        if ROTATES:
            mean_TH = rotate_rows(mean_TH, T, H_PADDED)
        mean_TH *= factor
        is_out = (at < numel) & (h_1H < H)
        if TRACKS:
            mean_TH += tl.load(known_ptr + block * K + at, mask=is_out, other=0.0)
            tl.store(known_ptr + block * K + at, mean_TH, mask=is_out)
            mean_TH = tl.where(is_lost_T[:, None] != 0, float("nan"), mean_TH)
        tl.store(out_ptr + block * K + at, mean_TH.to(out_ptr.dtype.element_ty), mask=is_out)
        at += H


@triton_op("loco_compile::decompress_mean", mutates_args=("known",))
def _decompress_mean(
    message: Tensor,
    known: Tensor | None,
    out_numel: int,
    block_numel: int,
    bits: int,
    rotates: bool,
    multiplier: float,
    dtype: torch.dtype,
    code_offset: int,
    scale_offset: int,
) -> Tensor:
    out = torch.empty(out_numel, dtype=dtype, device=message.device)
    if out_numel == 0:
        return out
    codes_per_byte = 8 // bits
    plane_numel = block_numel // codes_per_byte
    plane_padded = triton.next_power_of_2(plane_numel)
    tile_blocks = max(1, _ELEMENTS_PER_PROGRAM // (plane_padded * codes_per_byte))
    num_blocks = -(-out_numel // block_numel)
    wrap_triton(_decompress_mean_kernel)[(-(-num_blocks // tile_blocks), 1, 1)](
        message,
        out,
        known,
        out_numel,
        message.shape[0],
        message.stride(0),
        code_offset,
        scale_offset,
        multiplier,
        H=plane_numel,
        H_PADDED=plane_padded,
        T=tile_blocks,
        BITS=bits,
        ROTATES=rotates,
        num_warps=_NUM_WARPS,
    )
    return out


def decompress_mean_from(
    message: Tensor,
    known: Tensor | None = None,
    *,
    layout: Layout,
    recipe: Recipe,
    code_offset: int,
    scale_offset: int,
    divisor: float,
    dtype: torch.dtype,
    out_numel: int | None = None,
) -> Tensor:
    """Return sum / divisor of what every rank sent in `message`, cast once to `dtype`.

    Shapes:  message (W, M) uint8, rows contiguous, codes and scales as `compress_into` wrote them;
             result (out_numel,): the first elements of the chunk, all N of them by default.
    Units:   `divisor` is W for an averaging reduce-scatter and 1 for a summing one.
    Keeps:   bit for bit what `reference.decompress_mean(...).to(dtype)` returns. With `known` (N,)
             float32, what `decompress_change` returns, if `divisor` is a power of two; `known` is
             written over.
    Source:  docs/equations.md (E7), (E8), (E8b).
    """
    if recipe.tracks_gradient != (known is not None):
        raise ValueError(
            f"decompress_mean_from: Recipe.tracks_gradient is {recipe.tracks_gradient}, so known "
            f"must be {'given' if recipe.tracks_gradient else 'None'}"
        )
    mean: Tensor = _decompress_mean(
        message,
        known,
        layout.chunk_numel if out_numel is None else out_numel,
        layout.block_numel,
        recipe.bits,
        recipe.rotates,
        mean_factor(recipe, divisor),
        dtype,
        code_offset,
        scale_offset,
    )
    return mean
