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
from .recipe import SMALLEST_ABSMAX, Recipe

_BF16_ROUND_UP = 0xFFFF
_BF16_MASK = -0x10000  # the upper half of a float32: what is left is a bfloat16


class Error(NamedTuple):
    """Error feedback state of one tensor, as stored.

    Shapes: planes: P times (W, B, H) int8; scale: (W, B) bfloat16, None with a fixed error scale.
    """

    planes: tuple[Tensor, ...]
    scale: Tensor | None


class Compressed(NamedTuple):
    """What goes on the wire, and the error to keep (None if the recipe keeps none).

    Shapes: codes (W, B, H) uint8; scales (W, B) bfloat16.
    """

    codes: Tensor
    scales: Tensor
    error: Error | None


def _float_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Round non-negative finite float32 up to the next bfloat16, kept as float32."""
    return ((_float_bits(x) + _BF16_ROUND_UP) & _BF16_MASK).view(torch.float32)


def _block_step(absmax_WB: Tensor, code_min: int) -> Tensor:
    """Return the step of each block: absmax / 2^(bits-1), rounded up to bfloat16; 0 if too small.

    Source: docs/equations.md (E1b). Dividing by a power of two is exact, so the step is the same
    on every backend.
    """
    step = _round_up_to_bfloat16(absmax_WB * (1.0 / -code_min))
    return torch.where(absmax_WB < SMALLEST_ABSMAX, torch.zeros_like(step), step)


def _inverse(step: Tensor) -> Tensor:
    """1 / step, and 0 where the step is 0."""
    return torch.where(step > 0, 1.0 / torch.where(step > 0, step, torch.ones_like(step)), step)


def _quantise(x: Tensor, low: int, high: int) -> Tensor:
    """Round to nearest, ties to even, and clip (E1). Returns float32 integers.

    Clipping first and rounding then gives the same code as (E1), since the bounds are integers, and
    keeps infinities out of the rounding.
    """
    return torch.round(torch.clamp(x, low, high))


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


def decompress_error(error: Error, recipe: Recipe) -> list[Tensor]:
    """Return the error in gradient units: P planes (W, B, H) float32 (E2)."""
    codes = [p.to(torch.int32).to(torch.float32) for p in error.planes]
    if recipe.fixed_error_scale is not None:
        return [c * (1.0 / recipe.fixed_error_scale) for c in codes]
    assert_scale = error.scale
    if assert_scale is None:
        raise AssertionError("expected an error scale for every block, got None")
    scale_WB1 = assert_scale.to(torch.float32).unsqueeze(-1)
    return [c * scale_WB1 for c in codes]


def _store_error(residuals: list[Tensor], finite_WB: Tensor, recipe: Recipe) -> Error:
    """Round the new error to int8 (E6). A block that held NaN or Inf keeps no error."""
    finite_WB1 = finite_WB.unsqueeze(-1)
    residuals = [torch.where(finite_WB1, r, torch.zeros_like(r)) for r in residuals]
    if recipe.fixed_error_scale is not None:
        scale = None
        codes = [r * recipe.fixed_error_scale for r in residuals]
    else:
        step_WB = _block_step(_block_absmax(residuals), -128)
        scale = step_WB.to(torch.bfloat16)
        inverse_WB1 = _inverse(step_WB).unsqueeze(-1)
        codes = [r * inverse_WB1 for r in residuals]
    planes = (_quantise(c, -128, 127).to(torch.int32).to(torch.int8) for c in codes)
    return Error(tuple(planes), scale)


def _block_absmax(planes: list[Tensor]) -> Tensor:
    """(W, B) largest magnitude of each block. Not NaN-propagating: see `_is_finite_block`."""
    largest = planes[0].abs()
    for plane in planes[1:]:
        largest = torch.maximum(largest, plane.abs())
    return largest.amax(-1)


def compress(grad: Tensor, error: Error | None, *, layout: Layout, recipe: Recipe) -> Compressed:
    """Quantise the compensated gradient and return what was left unsent.

    Shapes:  grad: any shape with at most W * N elements, float32, bfloat16 or float16, read in its
             flat order; what is missing at the end reads as 0. codes (W, B, H) uint8.
    Keeps:   grad + error_in == sent + error_out up to the error's own rounding, at error_decay 0.
    NaN/Inf: a block that holds one is sent with the scale NaN, codes 0, and keeps no error.
    Source:  docs/equations.md (E1) to (E6).
    """
    compensated = _split_planes(grad, layout)
    old = [torch.zeros_like(g) for g in compensated]
    if error is not None:
        old = decompress_error(error, recipe)
        compensated = [g + e for g, e in zip(compensated, old, strict=True)]

    absmax_WB = _block_absmax(compensated)
    finite_WB = absmax_WB < torch.inf  # false for Inf and, as amax keeps it, NaN
    absmax_WB = torch.where(finite_WB, absmax_WB, torch.zeros_like(absmax_WB))
    if recipe.fixed_scale is None:
        step_WB = _block_step(absmax_WB, recipe.code_min)
        inverse_WB = _inverse(step_WB)
        wire_scale_WB = step_WB
    else:
        step_WB = torch.full_like(absmax_WB, 1.0 / recipe.fixed_scale)
        inverse_WB = torch.full_like(absmax_WB, recipe.fixed_scale)
        wire_scale_WB = torch.ones_like(absmax_WB)
    scales_WB = torch.where(finite_WB, wire_scale_WB, torch.nan).to(torch.bfloat16)

    finite_WB1 = finite_WB.unsqueeze(-1)
    compensated = [torch.where(finite_WB1, h, torch.zeros_like(h)) for h in compensated]
    inverse_WB1, step_WB1 = inverse_WB.unsqueeze(-1), step_WB.unsqueeze(-1)
    quantised = [_quantise(h * inverse_WB1, recipe.code_min, recipe.code_max) for h in compensated]

    codes = torch.zeros_like(quantised[0], dtype=torch.int32)
    for plane, q in enumerate(quantised):
        codes = codes | ((q.to(torch.int32) - recipe.code_min) << (plane * recipe.bits))
    if not recipe.keeps_error:
        return Compressed(codes.to(torch.uint8), scales_WB, None)

    residuals = [h - q * step_WB1 for h, q in zip(compensated, quantised, strict=True)]
    if recipe.error_decay:
        new, decay = 1.0 - recipe.error_decay, recipe.error_decay
        residuals = [decay * e + new * r for e, r in zip(old, residuals, strict=True)]
    return Compressed(codes.to(torch.uint8), scales_WB, _store_error(residuals, finite_WB, recipe))


def decompress_mean(
    codes: Tensor, scales: Tensor, *, layout: Layout, recipe: Recipe, divisor: float
) -> Tensor:
    """Decompress what every rank sent and return sum / divisor, added in rank order in float32.

    Shapes: codes (W, B, H) uint8; scales (W, B) bfloat16; result (N,) float32.
    Units:  `divisor` is W for an averaging reduce-scatter and 1 for a summing one.
    Source: docs/equations.md (E7), (E8).
    """
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
    unit = 1.0 if recipe.fixed_scale is None else 1.0 / recipe.fixed_scale
    return (total * (unit / divisor)).reshape(-1)[: layout.chunk_numel]
