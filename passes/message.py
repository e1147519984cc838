"""Turn the gradients of a bucket into one message, and the message that came in into shards.

    gradients, error buffers -> compress_all -> message (W, M) uint8, new error buffers
    message (W, M) uint8 -> unpack_mean -> averaged shards

On CPU both are the plain torch of kernels/reference.py, for Inductor to fuse; elsewhere they are
the Triton ops, which write straight into the message and over the old error.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loco_compile import kernels
from loco_compile.kernels.layout import ALIGNMENT, Layout, message_bytes, section_bytes
from loco_compile.kernels.memory import Memory, num_sender_buffers
from loco_compile.kernels.recipe import Recipe
from loco_compile.kernels.reference import (
    Compressed,
    compress,
    decompress_change,
    decompress_mean,
    next_noise,
)


class Part(NamedTuple):
    """One tensor of a message."""

    layout: Layout
    recipe: Recipe
    dtype: torch.dtype
    """Dtype of the shard that arrives."""

    @property
    def num_buffers(self) -> int:
        """Buffers that the sender of the tensor keeps."""
        return num_sender_buffers(self.recipe)


def compress_all(
    grads: Sequence[Tensor], buffers: Sequence[Tensor], parts: Sequence[Part]
) -> tuple[Tensor, list[Tensor]]:
    """Compress each gradient; return the message (W, M) and the new contents of `buffers`.

    Shapes: grads: any shape with at most W * N elements; buffers: for each part those of
            kernels/memory.py without `known`, the scales as (W, B, slots).
    """
    own = _split_buffers(buffers, parts)
    if grads[0].device.type != "cpu":
        return _compress_with_triton(grads, own, parts), [_after_triton(b) for b in buffers]
    done = [
        compress(g, _as_memory(b, p, slot=0), layout=p.layout, recipe=p.recipe)
        for g, b, p in zip(grads, own, parts, strict=True)
    ]
    new = [t for d, b in zip(done, own, strict=True) for t in _as_buffers(d.memory, like=b)]
    return pack(done), new


def _compress_with_triton(
    grads: Sequence[Tensor], buffers: Sequence[Sequence[Tensor]], parts: Sequence[Part]
) -> Tensor:
    layouts = [p.layout for p in parts]
    message = grads[0].new_empty(layouts[0].num_ranks, message_bytes(layouts), dtype=torch.uint8)
    for grad, own, part, (code_offset, scale_offset) in zip(
        grads, buffers, parts, _offsets(layouts), strict=True
    ):
        kernels.compress_into(
            message,
            grad,
            _as_memory(own, part, slot=None),
            layout=part.layout,
            recipe=part.recipe,
            code_offset=code_offset,
            scale_offset=scale_offset,
        )
    return message


def _offsets(layouts: Sequence[Layout]) -> list[tuple[int, int]]:
    """Return where the codes and the scales of each tensor start in a row of the message."""
    starts = list(itertools.accumulate(section_bytes(layouts), initial=0))
    return [(starts[i], starts[len(layouts) + i]) for i in range(len(layouts))]


def _split_buffers(buffers: Sequence[Tensor], parts: Sequence[Part]) -> list[Sequence[Tensor]]:
    starts = list(itertools.accumulate((p.num_buffers for p in parts), initial=0))
    return [buffers[a:b] for a, b in itertools.pairwise(starts)]


def _after_triton(buffer: Tensor) -> Tensor:
    """Return a buffer's new contents: the kernel wrote over the error, and only read the noise."""
    return next_noise(buffer) if buffer.dtype == torch.int64 else buffer


def _as_memory(buffers: Sequence[Tensor], part: Part, *, slot: int | None) -> Memory:
    """Name one tensor's buffers. `slot`: the copy of each scale to read, None for all of them."""
    memory = Memory.of(buffers, dataclasses.replace(part.recipe, tracks_gradient=False))
    if memory.scale is not None and slot is not None:
        memory = memory._replace(scale=memory.scale.select(-1, slot))
    return memory


def _as_buffers(memory: Memory, *, like: Sequence[Tensor]) -> list[Tensor]:
    """Return what a sender keeps in the shapes of the buffers that it goes into."""
    return [
        new if new.dim() == old.dim() else new.unsqueeze(-1).expand(old.shape)
        for new, old in zip(memory.tensors(), like, strict=True)
    ]


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


def unpack_mean(
    received: Tensor, known: Sequence[Tensor], parts: Sequence[Part], *, divisor: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return each tensor's averaged shard (N,) from the message (W, M) that came in.

    `known`: the (N,) means of the parts that track the gradient; their new contents come back too.
    """
    tracked = iter(known)
    own = [next(tracked) if p.recipe.tracks_gradient else None for p in parts]
    unpack = _unpack if received.device.type == "cpu" else _unpack_with_triton
    means, new = [], []
    for mean, after in unpack(received, own, parts, divisor):
        means.append(mean)
        if after is not None:
            new.append(after)
    return means, new


def _unpack(
    received: Tensor, known: Sequence[Tensor | None], parts: Sequence[Part], divisor: float
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the mean of each part, and what is known after it."""
    sections = received.split(section_bytes([p.layout for p in parts]), dim=1)
    for index, (part, before) in enumerate(zip(parts, known, strict=True)):
        codes = sections[index].reshape(part.layout.plane_shape)
        scales = _bytes_to_scale(sections[len(parts) + index])
        after = None
        if before is None:
            mean = decompress_mean(
                codes, scales, layout=part.layout, recipe=part.recipe, divisor=divisor
            )
        else:
            mean, after = decompress_change(
                codes, scales, before, layout=part.layout, recipe=part.recipe, divisor=divisor
            )
        yield mean.to(part.dtype), after


def _unpack_with_triton(
    received: Tensor, known: Sequence[Tensor | None], parts: Sequence[Part], divisor: float
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the same, with what is known written over."""
    offsets = _offsets([p.layout for p in parts])
    for part, before, (code_offset, scale_offset) in zip(parts, known, offsets, strict=True):
        mean = kernels.decompress_mean_from(
            received,
            before,
            layout=part.layout,
            recipe=part.recipe,
            code_offset=code_offset,
            scale_offset=scale_offset,
            divisor=divisor,
            dtype=part.dtype,
        )
        yield mean, before
