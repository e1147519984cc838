"""Pack the codes and scales of a bucket into one message, and read them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loco_compile.kernels.layout import ALIGNMENT, Layout, section_bytes
from loco_compile.kernels.recipe import Recipe
from loco_compile.kernels.reference import Compressed, Error, compress, decompress_mean


class Part(NamedTuple):
    """One tensor of a message."""

    layout: Layout
    recipe: Recipe
    dtype: torch.dtype
    """Dtype of the shard that arrives."""


def pack(parts: Sequence[Compressed]) -> Tensor:
    """Return the message (W, M) uint8: all codes, then all scales (kernels/layout.py)."""
    num_ranks = parts[0].codes.shape[0]
    codes = [p.codes.reshape(num_ranks, -1) for p in parts]
    scales = [_scale_bytes(p.scales) for p in parts]
    filling = -sum(x.shape[1] for x in (*codes, *scales)) % ALIGNMENT
    tail = [codes[0].new_zeros(num_ranks, filling)] if filling else []
    return torch.cat([*codes, *scales, *tail], dim=1)


def _scale_bytes(scales: Tensor) -> Tensor:
    """(W, B) bfloat16 -> (W, 2 B) uint8, little endian."""
    shifts = torch.arange(2, dtype=torch.int32, device=scales.device) * 8
    bits = scales.view(torch.int16).to(torch.int32).unsqueeze(-1)
    return ((bits >> shifts) & 0xFF).to(torch.uint8).reshape(scales.shape[0], -1)


def _bytes_to_scale(raw: Tensor) -> Tensor:
    """(W, 2 B) uint8 -> (W, B) float32, the exact value of each bfloat16."""
    pairs = raw.reshape(raw.shape[0], -1, 2).to(torch.int32)
    bits = (pairs[:, :, 0] << 16) | (pairs[:, :, 1] << 24)
    return bits.view(torch.float32)


def unpack_mean(received: Tensor, parts: Sequence[Part], *, divisor: float) -> list[Tensor]:
    """Return each tensor's averaged shard (N,) from the message (W, M) that came in."""
    sizes = section_bytes([p.layout for p in parts])
    sections = received.split(sizes, dim=1)
    shards = []
    for index, part in enumerate(parts):
        codes = sections[index].reshape(part.layout.plane_shape)
        scales = _bytes_to_scale(sections[len(parts) + index])
        shard = decompress_mean(
            codes, scales, layout=part.layout, recipe=part.recipe, divisor=divisor
        )
        shards.append(shard.to(part.dtype))
    return shards


def compress_all(
    grads: Sequence[Tensor], errors: Sequence[Error], parts: Sequence[Part]
) -> tuple[Tensor, list[Error]]:
    """Compress each gradient; return the message (W, M) and the new errors."""
    done = [
        compress(grad, error, layout=part.layout, recipe=part.recipe)
        for grad, error, part in zip(grads, errors, parts, strict=True)
    ]
    return pack(done), [d.error for d in done if d.error is not None]
