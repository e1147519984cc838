"""Identity ops that carry facts from capture to the passes, and are gone before anything runs.

    shard -> all_gather -> wait -> view -> mark_full -> use of the full parameter
    gradient -> reduce_scatter -> wait -> mark_shard(error) -> the parameter's gradient
    shard of the gradient -> all_reduce -> wait -> mark_shard(error) -> the same, over replicas
    gradients of earlier backwards -> mark_held -> added to this backward's gradient

A collective in a graph says nothing about the FSDP group or the parameter that it serves, nor which
error buffers belong to it. The markers do, in a form that survives AOTAutograd's tracing and
partitioning: as arguments of nodes.
"""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """What a marker says of one parameter. Travels as JSON in the graph."""

    bucket: str
    """Name of the FSDP group; collectives with one name travel together."""
    name: str
    """Name of the parameter, relative to the group's module."""
    index: int
    """Place of the parameter in its group: fixes the layout of merged collectives."""
    regathers: bool = False
    """Whether the full parameter is freed after forward and gathered again for backward."""
    smaller_ranks: int = 0
    """Ranks of the mesh that the parameter returns to after forward; 0 if that is the whole one."""
    smaller_rank: int = 0
    """This rank's place in that mesh."""
    smaller_group: str = ""
    """Its process group."""
    num_replicas: int = 1
    """Ranks that an all-reduce of this gradient runs over."""
    plain: str = ""
    """Why the gradient goes out uncompressed; empty if it is compressed."""

    def dump(self) -> str:
        """Return the tag as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Tag:
        """Read back what `dump` gave."""
        return cls(**json.loads(text))


@torch.library.custom_op("loco_compile::mark_full", mutates_args=())
def mark_full(full: Tensor, tag: str) -> Tensor:
    """Mark a full parameter that was just gathered. Returns a copy; passes remove the op."""
    return full.clone()


@mark_full.register_fake
def _(full: Tensor, tag: str) -> Tensor:
    return torch.empty_like(full)


@torch.library.custom_op("loco_compile::mark_shard", mutates_args=())
def mark_shard(shard: Tensor, error: list[Tensor], tag: str) -> Tensor:
    """Mark the output of a gradient's reduce-scatter and bind its error buffers to it.

    Shapes: shard (N,), the averaged gradient of this rank; error: P planes (W, B, H) int8, then the
            block scales (W, B) bfloat16 if the recipe has them; empty where nothing is kept.
    """
    return shard.clone()


@mark_shard.register_fake
def _(shard: Tensor, error: list[Tensor], tag: str) -> Tensor:
    return torch.empty_like(shard)


@torch.library.custom_op("loco_compile::mark_held", mutates_args=())
def mark_held(held: Tensor) -> Tensor:
    """Mark a leaf whose `.grad` takes its place when the graph runs. Returns a copy, as the others.

    The leaf has a full parameter's shape and no memory.
    """
    return held.clone()


@mark_held.register_fake
def _(held: Tensor) -> Tensor:
    return torch.empty_like(held)
