"""LoCo on all ranks, written in numpy from docs/equations.md alone; nothing of the package.

Everything is float64. `single=True` rounds to float32 where the kernels, which compute in float32,
cannot be exact: h (E2), 1 / t (E1b), the two products x * s (E1) and the moving average (E5). All
other intermediate results are exact in float32: a code times a bfloat16 step has 16 bits at most.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SMALLEST = 2.0**-100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What the equations leave open. A scale of None is one step for each block (E1b)."""

    bits: int = 4
    block: int = 256
    decay: float = 0.75
    scale: float | None = None
    error_scale: float | None = None
    single: bool = True


@dataclasses.dataclass
class Sender:
    """One rank's side of one parameter: its error, and what it sent last."""

    num_ranks: int
    chunk: int
    method: Method

    def __post_init__(self) -> None:
        blocks = -(-self.chunk // self.method.block)
        self.codes = np.zeros((self.num_ranks, blocks, self.method.block))
        self.error_steps = np.zeros((self.num_ranks, blocks, 1))
        self.sent = self.codes
        self.steps = self.error_steps

    def error(self) -> Array:
        """The stored error in gradient units."""
        if self.method.error_scale is not None:
            return self.codes / self.method.error_scale
        return self.codes * self.error_steps

    def reset(self) -> None:
        self.codes = np.zeros_like(self.codes)
        self.error_steps = np.zeros_like(self.error_steps)

    def send(self, grad: Array) -> None:
        """(E1) to (E6) for a flat gradient."""
        m = self.method
        old = self.error()
        h = self._round(self.blocks(grad) + old)  # E2
        finite = np.isfinite(h).all(-1, keepdims=True)
        h = np.where(finite, h, 0.0)
        self.steps = self._steps(h, m.bits, m.scale)
        q = self._code(h, self.steps, m.bits)  # E3
        self.sent = np.where(finite, q * self.steps, np.nan)
        new = self._round(m.decay * old + (1 - m.decay) * (h - q * self.steps))  # E4, E5
        new = np.where(finite, new, 0.0)
        self.error_steps = self._steps(new, 8, m.error_scale)
        self.codes = self._code(new, self.error_steps, 8)  # E6
        if m.error_scale is not None:
            self.error_steps = np.zeros_like(self.error_steps)

    def blocks(self, grad: Array) -> Array:
        """(W, B, K): chunks of N elements, padded to whole blocks with zeros."""
        w, n = self.num_ranks, self.chunk
        flat = np.concatenate([grad.ravel(), np.zeros(w * n - grad.size)]).reshape(w, n)
        return np.pad(flat, ((0, 0), (0, self.codes[0].size - n))).reshape(self.codes.shape)

    def flat(self, blocks: Array, rank: int) -> Array:
        """The (N,) elements of a rank's chunk."""
        return np.broadcast_to(blocks, self.codes.shape)[rank].ravel()[: self.chunk]

    def _round(self, x: Array) -> Array:
        return x.astype(np.float32).astype(np.float64) if self.method.single else x

    def _steps(self, x: Array, bits: int, scale: float | None) -> Array:
        largest = np.abs(x).max(-1, keepdims=True)
        if scale is not None:
            return np.full_like(largest, 1 / scale)
        mantissa, exponent = np.frexp(largest / 2 ** (bits - 1))
        up = np.ldexp(np.ceil(mantissa * 2**8), exponent - 8)  # bfloat16: 8 bits of mantissa
        return np.where(largest < SMALLEST, 0.0, up)

    def _code(self, x: Array, steps: Array, bits: int) -> Array:
        with np.errstate(divide="ignore"):
            inverse = np.where(steps > 0, self._round(1 / steps), 0.0)
        return np.clip(np.rint(self._round(x * inverse)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def mean(senders: list[Sender], rank: int, divisor: float) -> tuple[Array, Array]:
    """(E7), (E8): what a rank receives, and the mean of the magnitudes, to bound its roundings."""
    sent = np.stack([s.flat(s.sent, rank) for s in senders])
    return sent.sum(0) / divisor, np.abs(sent).sum(0) / divisor
