"""The numbers that fix one tensor's arithmetic: everything a compress kernel must know."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

CodeRange = Literal["full", "symmetric", "signed"]

SMALLEST_ABSMAX = 2.0**-100
"""Blocks whose largest magnitude is below this are zero, on the wire and in the error.

A power of two near 1e-30: without it, a block that stops receiving gradient decays until the
inverse of its scale overflows and 0 * Inf poisons it (docs/equations.md, trap "silent blocks").
"""
LARGEST_ABSMAX = 2.0**127
"""Blocks that reach this count as holding an Inf: the value of an outermost code would overflow."""
ROTATION = 32
"""Elements of one Hadamard transform (E3b)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one gradient is sent and what is kept of it. Source: docs/equations.md (E1) to (E6).

    The arithmetic is exact in float32 but for one rounding each in `h = g + e` and in the moving
    average, provided that `1 - error_decay` and the fixed scales are powers of two. Then eager
    torch, Inductor's C++ and Triton agree bit for bit, with or without fused multiply-add.
    """

    bits: int = 4
    """Width of one code on the wire, in bits: 2, 4 or 8."""
    block_numel: int = 128
    """Elements that share one scale."""
    fixed_scale: float | None = None
    """s of (E1); None means one dynamic scale per block, (E1b)."""
    code_range: CodeRange = "full"
    """What the element of a block with the largest magnitude becomes (E1b): +-2^(bits-1), the
    positive one then clipped ("full"); +-(2^(bits-1) - 1) ("symmetric"); or always -2^(bits-1), by
    a scale with the other sign where that element is positive ("signed")."""
    stochastic: bool = False
    """Whether codes are rounded up with the probability of what is left, (E1c)."""
    rotates: bool = False
    """Whether runs of 32 elements are sent as their Hadamard transform, (E3b)."""
    keeps_error: bool = True
    """Whether what was not sent is kept and added to the next gradient."""
    tracks_gradient: bool = False
    """Whether the error is that of EF21: minus what the receivers know of the gradient, (E5b)."""
    error_decay: float = 0.5
    """Weight of the old error in the moving average (E5)."""
    error_bits: int = 8
    """Width of one stored error code, in bits: 8 or 16; 32 means float32 itself."""
    fixed_error_scale: float | None = None
    """s_e of (E2); None means one dynamic scale per block."""

    @property
    def has_error_scale(self) -> bool:
        """Whether every block of the error has a scale of its own."""
        return self.keeps_error and self.error_bits < 32 and self.fixed_error_scale is None

    @property
    def error_dtype(self) -> torch.dtype:
        """Dtype of the stored error."""
        return {8: torch.int8, 16: torch.int16, 32: torch.float32}[self.error_bits]

    @property
    def code_min(self) -> int:
        """Smallest code, -2^(bits-1)."""
        return -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        """Largest code, 2^(bits-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def codes_per_byte(self) -> int:
        """Codes packed in one byte of the wire."""
        return 8 // self.bits
