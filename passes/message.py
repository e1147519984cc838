"""Turn the gradients of a bucket into one message, and the message that came in into shards.

    gradients, error buffers -> compress_all -> message (W, M) uint8, new error buffers
    message (W, M) uint8 -> unpack_mean -> averaged shards

On CPU both are the plain torch of kernels/reference.py, for Inductor to fuse; elsewhere they are
the Triton ops, which write straight into the message and over the old error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loco_compile import kernels
from loco_compile.kernels.layout import ALIGNMENT, Layout, message_bytes, section_bytes
from loco_compile.kernels.recipe import Recipe
from loco_compile.kernels.reference import Compressed, Error, compress, decompress_mean


class Part(NamedTuple):
    """One tensor of a message."""

    layout: Layout
    recipe: Recipe
    dtype: torch.dtype
    """Dtype of the shard that arrives."""

    @property
    def num_buffers(self) -> int:
        """Error buffers of the tensor: its planes, and the scales unless they are fixed."""
        if not self.recipe.keeps_error:
            return 0
        return self.layout.codes_per_byte + (self.recipe.fixed_error_scale is None)


def compress_all(
    grads: Sequence[Tensor], buffers: Sequence[Tensor], parts: Sequence[Part]
) -> tuple[Tensor, list[Tensor]]:
    """Compress each gradient; return the message (W, M) and the new contents of `buffers`.

    Shapes: grads: any shape with at most W * N elements; buffers: for each part its planes
            (W, B, H) int8, then its scales (W, B, slots) bfloat16 if it has them.
    """
    own = _split_buffers(buffers, parts)
    if grads[0].device.type != "cpu":
        return _compress_with_triton(grads, own, parts), list(buffers)
    done = [
        compress(g, _as_error(b, slot=0), layout=p.layout, recipe=p.recipe)
        for g, b, p in zip(grads, own, parts, strict=True)
    ]
    new = [t for d, b in zip(done, own, strict=True) for t in _as_buffers(d.error, like=b)]
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
            _as_error(own, slot=None),
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


def _as_error(buffers: Sequence[Tensor], *, slot: int | None) -> Error | None:
    """Name one tensor's buffers. `slot`: the copy of each scale to read, None for all of them."""
    if not buffers:
        return None
    planes = tuple(b for b in buffers if b.dtype == torch.int8)
    scale = buffers[-1] if len(buffers) > len(planes) else None
    if scale is not None and slot is not None:
        scale = scale.select(-1, slot)
    return Error(planes, scale)


def _as_buffers(error: Error | None, *, like: Sequence[Tensor]) -> list[Tensor]:
    """Return a new error in the shapes of the buffers that it goes into."""
    if error is None:
        return []
    scales = [] if error.scale is None else [error.scale.unsqueeze(-1).expand(like[-1].shape)]
    return [*error.planes, *scales]


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
    layouts = [p.layout for p in parts]
    if received.device.type != "cpu":
        return [
            kernels.decompress_mean_from(
                received,
                layout=part.layout,
                recipe=part.recipe,
                code_offset=code_offset,
                scale_offset=scale_offset,
                divisor=divisor,
                dtype=part.dtype,
            )
            for part, (code_offset, scale_offset) in zip(parts, _offsets(layouts), strict=True)
        ]
    sections = received.split(section_bytes(layouts), dim=1)
    shards = []
    for index, part in enumerate(parts):
        codes = sections[index].reshape(part.layout.plane_shape)
        scales = _bytes_to_scale(sections[len(parts) + index])
        shard = decompress_mean(
            codes, scales, layout=part.layout, recipe=part.recipe, divisor=divisor
        )
        shards.append(shard.to(part.dtype))
    return shards
