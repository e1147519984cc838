"""Decompress what every rank sent and average it, on a GPU: Triton kernel, op, and function.

One program takes whole blocks and walks over the ranks: it reads each code byte and each scale
once, adds in float32 in rank order, and writes each element once. `code * scale` is exact in
float32, so fused multiply-add changes no bit.

Letters: W ranks, N elements of a chunk, B blocks, K elements of a block, H = K / P elements of one
of its P planes, T blocks of one program, M bytes of a row of the message.
"""

# Triton's functions are typed by their launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .layout import Layout
from .recipe import Recipe

_ELEMENTS_PER_PROGRAM = 4096
_NUM_WARPS = 4
"""32 elements for each thread: with two codes in a byte it loads 16 bytes from each rank."""


@triton.jit
def _code(byte_TH, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Return the code at bit SHIFT as float32, by its place in the mantissa of 2^23 + code."""
    low_TH = (byte_TH >> SHIFT) & ((1 << BITS) - 1)
    return (low_TH | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))


@triton.jit
def _decompress_mean_kernel(
    message_ptr,
    out_ptr,
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
):
    """Sum T blocks over the ranks and multiply. Source: docs/equations.md (E7), (E8)."""
    P: tl.constexpr = 8 // BITS
    K: tl.constexpr = H * P
    block = tl.program_id(0).to(tl.int64) * T
    numel = tl.minimum(out_numel - block * K, T * K).to(tl.int32)
    t_T = tl.arange(0, T)
    h_1H = tl.arange(0, H_PADDED)[None, :]
    is_row_T = t_T * K < numel
    is_code = is_row_T[:, None] & (h_1H < H)

    scale_ptr = (message_ptr + scale_offset + block * 2).to(tl.pointer_type(tl.int16)) + t_T
    code_ptr = message_ptr + code_offset + block * H + (t_T[:, None] * H + h_1H)
    sum_0 = tl.full((T, H_PADDED), 0.0, tl.float32)
    sum_1 = sum_0
    rank_stride = tl.full((), message_stride, tl.int64)
    for _ in range(num_ranks):
        byte_TH = tl.load(code_ptr, mask=is_code, other=0).to(tl.int32)
        scale_T = tl.load(scale_ptr, mask=is_row_T, other=0).to(tl.int32) << 16
        scale_T1 = scale_T.to(tl.float32, bitcast=True)[:, None]
        sum_0 += _code(byte_TH, 0, BITS) * scale_T1
        if P == 2:
            sum_1 += _code(byte_TH, 4, BITS) * scale_T1
        code_ptr += rank_stride
        scale_ptr += rank_stride // 2

    out_ptr += block * K
    at = t_T[:, None] * K + h_1H
    factor = tl.full((), multiplier, tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (sum_0 * factor).to(dtype), mask=(at < numel) & (h_1H < H))
    if P == 2:
        at += H
        tl.store(out_ptr + at, (sum_1 * factor).to(dtype), mask=(at < numel) & (h_1H < H))


@triton_op("loco_compile::decompress_mean", mutates_args=())
def _decompress_mean(
    message: Tensor,
    out_numel: int,
    block_numel: int,
    bits: int,
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
        num_warps=_NUM_WARPS,
    )
    return out


def decompress_mean_from(
    message: Tensor,
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
    Keeps:   bit for bit what `reference.decompress_mean(...).to(dtype)` returns.
    Source:  docs/equations.md (E7), (E8).
    """
    mean: Tensor = _decompress_mean(
        message,
        layout.chunk_numel if out_numel is None else out_numel,
        layout.block_numel,
        recipe.bits,
        (1.0 if recipe.fixed_scale is None else 1.0 / recipe.fixed_scale) / divisor,
        dtype,
        code_offset,
        scale_offset,
    )
    return mean
