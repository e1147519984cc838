"""What a rank keeps of one tensor between two exchanges: which buffers, of which shape and dtype.

    planes   P times (W, B, H), the error's codes               if the recipe keeps an error
    scale    (W, B) bfloat16, the error's block scales          if they are dynamic
    noise    (1,) int64, where its next random numbers start    if codes are rounded stochastically
    known    (N,) float32, the mean that every sender tracks    if the recipe tracks the gradient

The first three belong to the sender of a gradient, the last one to the receiver of its chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout
from .recipe import Recipe


class Format(NamedTuple):
    """Shape and dtype of one buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Memory(NamedTuple):
    """The buffers of one tensor, or their new contents. Empty: the recipe keeps nothing."""

    planes: tuple[Tensor, ...] = ()
    scale: Tensor | None = None
    noise: Tensor | None = None
    known: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], recipe: Recipe) -> Memory:
        """Name tensors that come in the order of `formats`."""
        rest = list(tensors)
        planes = tuple(rest.pop(0) for _ in range(recipe.codes_per_byte * recipe.keeps_error))
        return cls(
            planes,
            scale=rest.pop(0) if recipe.has_error_scale else None,
            noise=rest.pop(0) if recipe.stochastic else None,
            known=rest.pop(0) if recipe.tracks_gradient else None,
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors in the order of `formats`."""
        return [*self.planes, *(t for t in self[1:] if isinstance(t, Tensor))]


def formats(layout: Layout, recipe: Recipe) -> list[Format]:
    """Return the format of each buffer of a tensor: planes, scale, noise, known."""
    buffers = []
    if recipe.keeps_error:
        buffers += [Format(layout.plane_shape, recipe.error_dtype)] * layout.codes_per_byte
    if recipe.has_error_scale:
        buffers += [Format(layout.scale_shape, torch.bfloat16)]
    if recipe.stochastic:
        buffers += [Format((1,), torch.int64)]
    if recipe.tracks_gradient:
        buffers += [Format((layout.chunk_numel,), torch.float32)]
    return buffers


def num_sender_buffers(recipe: Recipe) -> int:
    """Return how many buffers come before `known`."""
    planes = recipe.codes_per_byte * recipe.keeps_error
    return planes + recipe.has_error_scale + recipe.stochastic


def first_noise(name: str, rank: int) -> int:
    """Return where the random numbers of a parameter start: another place on every rank."""
    digest = hashlib.sha256(f"{name}/{rank}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
