"""Compress and decompress-and-average in plain torch: the spec that every kernel is compared with.

Suffix letters: N elements of a chunk, W ranks, B blocks, K elements of a block, P planes of a
block, H = K / P. On CPU these functions are also the product: spliced into the backward graph,
Inductor turns `compress` into one loop for each tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout
from .memory import Memory
from .recipe import LARGEST_ABSMAX, ROTATION, SMALLEST_ABSMAX, Recipe

_BF16_ROUND_UP = 0xFFFF
_BF16_MASK = -0x10000  # the upper half of a float32: what is left is a bfloat16
_UINT32 = 0xFFFFFFFF
_NOTHING = Memory()


class Compressed(NamedTuple):
    """What goes on the wire, and what the sender keeps: `Memory` without `known`.

    Shapes: codes (W, B, H) uint8; scales (W, B) bfloat16.
    """

    codes: Tensor
    scales: Tensor
    memory: Memory


def _float_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Round non-negative finite float32 up to the next bfloat16, kept as float32."""
    return ((_float_bits(x) + _BF16_ROUND_UP) & _BF16_MASK).view(torch.float32)


def _block_step(absmax_WB: Tensor, largest_code: int) -> Tensor:
    """Return the step of each block: absmax / largest_code, rounded up to bfloat16; 0 if too small.

    Source: docs/equations.md (E1b). One multiplication, exact if the code is a power of two, so the
    step is the same on every backend.
    """
    step = _round_up_to_bfloat16(absmax_WB * (1.0 / largest_code))
    return torch.where(absmax_WB < SMALLEST_ABSMAX, torch.zeros_like(step), step)


def _inverse(step: Tensor) -> Tensor:
    """1 / step, and 0 where the step is 0."""
    return torch.where(step != 0, 1.0 / torch.where(step != 0, step, torch.ones_like(step)), step)


def _quantise(x: Tensor, low: int, high: int) -> Tensor:
    """Round to nearest, ties to even, and clip (E1). Returns float32 integers.

    Clipping first and rounding then gives the same code as (E1), since the bounds are integers, and
    keeps infinities out of the rounding.
    """
    return torch.round(torch.clamp(x, low, high))


def mix(x: Tensor) -> Tensor:
    """Hash integers below 2^32 (E1c): two rounds of shift and multiply, modulo 2^32.

    In int64, as no product overflows there: a 32-bit one does, which C++ leaves undefined. The
    second multiplier is negative for that reason; modulo 2^32 it is 0x846CA68B.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _UINT32
    x = x ^ (x >> 15)
    x = (x * -0x7B935975) & _UINT32
    return x ^ (x >> 16)


def next_noise(noise: Tensor) -> Tensor:
    """Return where the random numbers of the next exchange start (E1c)."""
    return mix((noise + 0x9E3779B9) & _UINT32)


def _uniform(noise: Tensor, layout: Layout, plane: int) -> Tensor:
    """Return (W, B, H) random numbers in (0, 1), multiples of 2^-17: exact when added to a code."""
    w, b, h = (torch.arange(n, dtype=torch.int64, device=noise.device) for n in layout.plane_shape)
    row_WB1 = (w[:, None, None] * layout.num_blocks + b[None, :, None]) * layout.block_numel
    at_WBH = row_WB1 + (plane * layout.plane_numel + h)
    bits_WBH = mix((at_WBH & _UINT32) ^ noise) >> 16
    return (bits_WBH.to(torch.float32) + 0.5) * 2.0**-16


def rotate(x: Tensor) -> Tensor:
    """Hadamard transform of every run of 32 elements (E3b), without a factor. Any shape, flat."""
    flat = x.reshape(-1, ROTATION)
    stride = 1
    while stride < ROTATION:
        a, b = flat.reshape(-1, ROTATION // (2 * stride), 2, stride).unbind(2)
        flat = torch.stack([a + b, a - b], dim=2).reshape(-1, ROTATION)
        stride *= 2
    return flat.reshape(x.shape)


def _split_planes(grad: Tensor, layout: Layout) -> list[Tensor]:
    """View a flat gradient as P planes (W, B, H) float32; missing elements are 0."""
    w, n = layout.num_ranks, layout.chunk_numel
    flat = grad.reshape(-1)
    if missing := w * n - flat.numel():
        flat = F.pad(flat, (0, missing))
    chunks_WN = flat.reshape(w, n)
    if missing := layout.padded_numel - n:
        chunks_WN = F.pad(chunks_WN, (0, missing))
    planes_WBPH = chunks_WN.reshape(*layout.scale_shape, layout.codes_per_byte, layout.plane_numel)
    return [p.to(torch.float32) for p in planes_WBPH.unbind(2)]


def decompress_error(memory: Memory, recipe: Recipe) -> list[Tensor]:
    """Return the error in gradient units: P planes (W, B, H) float32 (E2)."""
    if recipe.error_bits == 32:
        return list(memory.planes)
    codes = [p.to(torch.int32).to(torch.float32) for p in memory.planes]
    if recipe.fixed_error_scale is not None:
        return [c * (1.0 / recipe.fixed_error_scale) for c in codes]
    if memory.scale is None:
        raise AssertionError("expected an error scale for every block, got None")
    scale_WB1 = memory.scale.to(torch.float32).unsqueeze(-1)
    return [c * scale_WB1 for c in codes]


def _store_error(residuals: list[Tensor], recipe: Recipe) -> tuple[list[Tensor], Tensor | None]:
    """Round the new error to its codes (E6); return them and their block scales, if dynamic."""
    if recipe.error_bits == 32:
        return residuals, None
    limit = 1 << (recipe.error_bits - 1)
    if recipe.fixed_error_scale is not None:
        scale = None
        codes = [r * recipe.fixed_error_scale for r in residuals]
    else:
        step_WB = _block_step(_block_absmax(residuals), limit)
        scale = step_WB.to(torch.bfloat16)
        inverse_WB1 = _inverse(step_WB).unsqueeze(-1)
        codes = [r * inverse_WB1 for r in residuals]
    rounded = [_quantise(c, -limit, limit - 1).to(torch.int32) for c in codes]
    return [c.to(recipe.error_dtype) for c in rounded], scale


def _block_absmax(planes: list[Tensor]) -> Tensor:
    """(W, B) largest magnitude of each block. A NaN stays one."""
    largest = planes[0].abs()
    for plane in planes[1:]:
        largest = torch.maximum(largest, plane.abs())
    return largest.amax(-1)


def _wire_step(
    planes: list[Tensor], absmax_WB: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each block's step, its inverse and its scale on the wire (E1), (E1b)."""
    if recipe.fixed_scale is not None:
        step_WB = torch.full_like(absmax_WB, 1.0 / recipe.fixed_scale)
        return step_WB, torch.full_like(absmax_WB, recipe.fixed_scale), torch.ones_like(absmax_WB)
    largest_code = recipe.code_max if recipe.code_range == "symmetric" else -recipe.code_min
    step_WB = _block_step(absmax_WB, largest_code)
    if recipe.code_range == "signed":
        largest = planes[0]
        for plane in planes[1:]:
            largest = torch.maximum(largest, plane)
        is_positive_WB = (largest.amax(-1) == absmax_WB) & (step_WB > 0)
        step_WB = torch.where(is_positive_WB, -step_WB, step_WB)
    return step_WB, _inverse(step_WB), step_WB


def _wire_codes(
    x: Tensor, noise: Tensor | None, plane: int, layout: Layout, recipe: Recipe
) -> Tensor:
    """Round one plane, in units of the step, to codes: (E1) or (E1c). Returns float32 integers."""
    if noise is None:
        return _quantise(x, recipe.code_min, recipe.code_max)
    clipped = torch.clamp(x, recipe.code_min, recipe.code_max)
    return torch.floor(clipped + _uniform(noise, layout, plane))


def compress(
    grad: Tensor, memory: Memory = _NOTHING, *, layout: Layout, recipe: Recipe
) -> Compressed:
    """Quantise the compensated gradient and return what was left unsent.

    Shapes:  grad: any shape with at most W * N elements, float32, bfloat16 or float16, read in its
             flat order; what is missing at the end reads as 0. memory: an empty one stands for an
             error of 0. codes (W, B, H) uint8.
    Keeps:   grad + error_in == sent + error_out up to the error's own rounding, at error_decay 0.
    NaN/Inf: a block that holds one is sent with the scale NaN, codes 0, and keeps no error, or with
             `tracks_gradient` the one it had.
    Source:  docs/equations.md (E1) to (E6).
    """
    compensated = _split_planes(grad, layout)
    old = [torch.zeros_like(g) for g in compensated]
    if memory.planes:
        old = decompress_error(memory, recipe)
        compensated = [g + e for g, e in zip(compensated, old, strict=True)]
    rotated = [rotate(h) for h in compensated] if recipe.rotates else compensated

    absmax_WB = _block_absmax(rotated)
    finite_WB = absmax_WB < LARGEST_ABSMAX  # false for Inf and, as amax keeps it, NaN
    absmax_WB = torch.where(finite_WB, absmax_WB, torch.zeros_like(absmax_WB))
    step_WB, inverse_WB, wire_scale_WB = _wire_step(rotated, absmax_WB, recipe)
    scales_WB = torch.where(finite_WB, wire_scale_WB, torch.nan).to(torch.bfloat16)

    finite_WB1 = finite_WB.unsqueeze(-1)
    inverse_WB1, step_WB1 = inverse_WB.unsqueeze(-1), step_WB.unsqueeze(-1)
    rotated = [torch.where(finite_WB1, h, torch.zeros_like(h)) for h in rotated]
    quantised = [
        _wire_codes(h * inverse_WB1, memory.noise, plane, layout, recipe)
        for plane, h in enumerate(rotated)
    ]
    codes = torch.zeros_like(quantised[0], dtype=torch.int32)
    for plane, q in enumerate(quantised):
        codes = codes | ((q.to(torch.int32) - recipe.code_min) << (plane * recipe.bits))
    noise = None if memory.noise is None else next_noise(memory.noise)
    if not recipe.keeps_error:
        return Compressed(codes.to(torch.uint8), scales_WB, Memory(noise=noise))

    sent = [q * step_WB1 for q in quantised]
    if recipe.rotates:
        sent = [rotate(s) * (1.0 / ROTATION) for s in sent]
        compensated = [torch.where(finite_WB1, h, torch.zeros_like(h)) for h in compensated]
    else:
        compensated = rotated
    if recipe.tracks_gradient:
        residuals = [e - s for e, s in zip(old, sent, strict=True)]
    else:
        residuals = [h - s for h, s in zip(compensated, sent, strict=True)]
        if recipe.error_decay:
            new, decay = 1.0 - recipe.error_decay, recipe.error_decay
            residuals = [decay * e + new * r for e, r in zip(old, residuals, strict=True)]
        residuals = [torch.where(finite_WB1, r, torch.zeros_like(r)) for r in residuals]
    planes, scale = _store_error(residuals, recipe)
    return Compressed(codes.to(torch.uint8), scales_WB, Memory(tuple(planes), scale, noise))


def _sum_over_ranks(codes: Tensor, scales: Tensor, layout: Layout, recipe: Recipe) -> Tensor:
    """Add what every rank sent, in rank order: (B, P, H) float32 in gradient units times s."""
    mask = (1 << recipe.bits) - 1
    shifts_P1 = (
        torch.arange(recipe.codes_per_byte, dtype=torch.int32, device=codes.device) * recipe.bits
    ).reshape(-1, 1)
    codes_WBPH = (codes.to(torch.int32).unsqueeze(2) >> shifts_P1) & mask
    terms = (codes_WBPH + recipe.code_min).to(torch.float32) * scales.to(torch.float32)[
        :, :, None, None
    ]
    total = terms[0]
    for rank in range(1, layout.num_ranks):
        total = total + terms[rank]
    return rotate(total) if recipe.rotates else total


def mean_factor(recipe: Recipe, divisor: float) -> float:
    """Return what the sum over ranks is multiplied by (E8)."""
    unit = 1.0 if recipe.fixed_scale is None else 1.0 / recipe.fixed_scale
    return unit / divisor / (ROTATION if recipe.rotates else 1)


def decompress_mean(
    codes: Tensor, scales: Tensor, *, layout: Layout, recipe: Recipe, divisor: float
) -> Tensor:
    """Decompress what every rank sent and return sum / divisor, added in rank order in float32.

    Shapes: codes (W, B, H) uint8; scales (W, B) bfloat16; result (N,) float32.
    Units:  `divisor` is W for an averaging reduce-scatter and 1 for a summing one.
    Source: docs/equations.md (E7), (E8).
    """
    total = _sum_over_ranks(codes, scales, layout, recipe)
    return (total * mean_factor(recipe, divisor)).reshape(-1)[: layout.chunk_numel]


def decompress_change(
    codes: Tensor, scales: Tensor, known: Tensor, *, layout: Layout, recipe: Recipe, divisor: float
) -> tuple[Tensor, Tensor]:
    """Add the mean change that every rank sent to the mean that is known; return mean and known.

    A block that any rank sent as NaN is NaN in the mean, and known gets what the others sent: their
    own errors have moved on by that.

    Shapes: known (N,) float32; else as `decompress_mean`.
    Source: docs/equations.md (E8b).
    """
    scales = scales.to(torch.float32)
    is_lost_WB = scales.isnan()
    scales = torch.where(is_lost_WB, torch.zeros_like(scales), scales)
    total = _sum_over_ranks(codes, scales, layout, recipe)
    change = (total * mean_factor(recipe, divisor)).reshape(-1)[: layout.chunk_numel]
    known = known + change
    is_lost = is_lost_WB.any(0)[:, None].expand(layout.num_blocks, layout.block_numel)
    is_lost = is_lost.reshape(-1)[: layout.chunk_numel]
    return torch.where(is_lost, torch.nan, known), known
