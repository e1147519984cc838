"""The numbers that fix one tensor's arithmetic: everything a compress kernel must know."""

from __future__ import annotations

import dataclasses

SMALLEST_ABSMAX = 2.0**-100
"""Blocks whose largest magnitude is below this are zero, on the wire and in the error.

A power of two near 1e-30: without it, a block that stops receiving gradient decays until the
inverse of its scale overflows and 0 * Inf poisons it (docs/equations.md, trap "silent blocks").
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one gradient is sent and what is kept of it. Source: docs/equations.md (E1) to (E6).

    The arithmetic is exact in float32 but for one rounding each in `h = g + e` and in the moving
    average, provided that `1 - error_decay` and the fixed scales are powers of two. Then eager
    torch, Inductor's C++ and Triton agree bit for bit, with or without fused multiply-add.
    """

    bits: int = 4
    """Width of one code on the wire, in bits: 4 or 8."""
    block_numel: int = 128
    """Elements that share one scale."""
    fixed_scale: float | None = None
    """s of (E1); None means one dynamic scale per block, (E1b)."""
    keeps_error: bool = True
    """Whether what was not sent is kept and added to the next gradient."""
    error_decay: float = 0.5
    """Weight of the old error in the moving average (E5)."""
    fixed_error_scale: float | None = None
    """s_e of (E2); None means one dynamic scale per block."""

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
