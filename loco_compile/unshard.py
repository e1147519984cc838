"""The traceable twin of FSDP2's all-gather, its backward the reduce-scatter: one parameter each.

    shard -> cast -> pad -> all_gather -> wait -> full parameter
    gradient -> cast -> pad -> reduce_scatter -> wait -> cast -> the shard's gradient

Without a reduction (`set_requires_gradient_sync(False)`) the gradient goes to a leaf of the full
shape instead, where autograd adds up those of several backwards until one reduces their sum.

The same casts, paddings, divisions and collectives as eager FSDP2, in the same order, so that
nothing but the grouping into one collective for each group (passes/bucket.py) is left to the
passes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .passes.markers import Tag, mark_full, mark_held, mark_shard
from .passes.plan import Decline

c10d = torch.ops._c10d_functional
_DTYPES = {str(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """How FSDP2 gathers one parameter and reduces its gradient. Travels as JSON through Dynamo."""

    full_shape: tuple[int, ...]
    """Shape of the full parameter; of this rank's part of it under tensor parallelism."""
    shard_dim: int
    """Dimension that is split over the ranks; evenly, if it is not 0."""
    padded_rows: int
    """Rows of dimension 0 that each rank holds, padding included."""
    num_ranks: int
    """W, ranks of the shard mesh."""
    gather_group: str
    """Process group of the all-gather."""
    reduce_group: str
    """Process group of the reduce-scatter: FSDP2 can be told to use one of its own."""
    num_replicas: int
    """R, ranks that hold the same shard (HSDP); 1 without replicas."""
    replicate_group: str
    """Process group of the all-reduce between replicas; empty without them."""
    param_dtype: str
    """Dtype of the full parameter."""
    reduce_dtype: str
    """Dtype of the reduction; empty means the gradient's own."""
    divide_factor: float | None
    """What the summed gradient is divided by; None means W * R."""
    force_sum: bool
    """Whether the reduction is a sum with divisions around it."""
    gradient: Literal["reduce", "hold", "hold_shard"] = "reduce"
    """Reduce the gradient; hold it back, unreduced; or reduce-scatter it and hold its shard."""
    tag: Tag
    """What the passes must know; its bucket is filled in while tracing."""

    def dump(self) -> str:
        """Return the spec as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Spec:
        """Read back what `dump` gave."""
        fields = json.loads(text)
        fields["full_shape"] = tuple(fields["full_shape"])
        fields["tag"] = Tag(**fields["tag"])
        return cls(**fields)

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """Return FSDP2's reduction for gradients of this dtype.

        The counterpart of FSDP2's own choice, which yields PREMUL_SUM where functional collectives
        need a multiplication in front of a sum.
        """
        factor = self.divide_factor
        has_overflow_risk = dtype not in (torch.float32, torch.bfloat16)
        if not has_overflow_risk and not self.force_sum:
            if factor is None:
                return Reduction("avg", "avg")
            if factor == self.num_ranks:
                return Reduction("avg", "sum")
            return Reduction("sum", "sum", multiply_before=1 / factor)
        factor = float(self.num_ranks * self.num_replicas) if factor is None else factor
        if has_overflow_risk:
            before = _balanced_divisor(factor)
            return Reduction("sum", "sum", divide_before=before, divide_after=factor / before)
        return Reduction("sum", "sum", divide_after=factor)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """A reduce-scatter, an all-reduce and the scaling around them. None means: nothing to do."""

    scatter_op: str
    all_reduce_op: str
    multiply_before: float | None = None
    divide_before: float | None = None
    divide_after: float | None = None


def _balanced_divisor(factor: float) -> float:
    """Power of two near sqrt(factor): keeps float16 sums from overflowing before the division."""
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before


def _divide(x: Tensor, divisor: float | None) -> Tensor:
    return x if divisor is None or divisor == 1 else x / divisor


def _in_rank_order(grad: Tensor, spec: Spec) -> Tensor:
    """Return the flat gradient with the ranks' chunks one after the other, without padding."""
    if spec.shard_dim:
        parts = (spec.num_ranks, spec.full_shape[spec.shard_dim] // spec.num_ranks)
        grad = grad.unflatten(spec.shard_dim, parts).movedim(spec.shard_dim, 0)
    return grad.reshape(-1)


def _from_rank_order(flat: Tensor, spec: Spec, shard_shape: torch.Size) -> Tensor:
    """Return the full parameter from the ranks' padded chunks."""
    if spec.shard_dim:
        chunks = flat.reshape(spec.num_ranks, *shard_shape).movedim(0, spec.shard_dim)
        return chunks.reshape(spec.full_shape)
    row_shape = spec.full_shape[1:]
    return flat.reshape(spec.padded_rows * spec.num_ranks, *row_shape)[: spec.full_shape[0]]


class _Unshard(torch.autograd.Function):
    """Gathers a parameter; its backward reduces the gradient and names its error."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        held: Tensor | None,
        held_shard: Tensor | None,
        spec: Spec,
        *error: Tensor,
    ) -> Tensor:
        ctx.spec, ctx.shard_shape, ctx.shard_dtype = spec, shard.shape, shard.dtype
        ctx.save_for_backward(held, held_shard, *error)
        shard = shard.to(_DTYPES[spec.param_dtype])
        if missing := spec.padded_rows - shard.shape[0]:
            shard = F.pad(shard, [0, 0] * (shard.dim() - 1) + [0, missing])
        flat = shard.reshape(-1)
        if spec.num_ranks > 1 and flat.numel():
            flat = c10d.all_gather_into_tensor(flat, spec.num_ranks, spec.gather_group)
            flat = c10d.wait_tensor(flat)
        full = _from_rank_order(flat, spec, ctx.shard_shape)
        marked: Tensor = mark_full(full, spec.tag.dump())
        return marked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        spec: Spec = ctx.spec
        held, held_shard, *error = ctx.saved_tensors
        no_other = (None, *(None for _ in error))
        # Flat first: Inductor then reads what autograd left with one linear index, and casts it
        # on the fly.
        flat = _in_rank_order(grad, spec) if spec.gradient != "hold" else grad.reshape(-1)
        if spec.reduce_dtype:
            flat = flat.to(_DTYPES[spec.reduce_dtype])
        if spec.gradient == "hold":
            return (None, flat.reshape(spec.full_shape), None, *no_other)
        if held is not None:
            flat = _in_rank_order(mark_held(held), spec) + flat
        flat, reduction = _scatter(flat, spec, error if spec.num_replicas == 1 else [])
        if spec.gradient == "hold_shard":
            return (None, None, flat, *no_other)
        if held_shard is not None:
            flat = flat + mark_held(held_shard)
        if spec.num_replicas > 1 and flat.numel():
            flat = c10d.all_reduce(flat, reduction.all_reduce_op, spec.replicate_group)
            flat = mark_shard(c10d.wait_tensor(flat), error, spec.tag.dump())
        flat = _divide(flat, reduction.divide_after)
        shard = flat.to(ctx.shard_dtype)[: ctx.shard_shape.numel()].reshape(ctx.shard_shape)
        return (shard, None, None, *no_other)


def _scatter(flat: Tensor, spec: Spec, error: Sequence[Tensor]) -> tuple[Tensor, Reduction]:
    """Pad a gradient and reduce it within the shard group."""
    padded_numel = math.prod((spec.padded_rows, spec.num_ranks, *spec.full_shape[1:]))
    if not spec.shard_dim and (missing := padded_numel - flat.numel()):
        flat = F.pad(flat, [0, missing])
    reduction = spec.reduction(flat.dtype)
    flat = _divide(flat, reduction.divide_before)
    if spec.num_ranks > 1 and flat.numel():
        if reduction.multiply_before is not None:
            flat = flat * reduction.multiply_before
        op = reduction.scatter_op
        flat = c10d.reduce_scatter_tensor(flat, op, spec.num_ranks, spec.reduce_group)
        tag = spec.tag
        if spec.num_replicas > 1:
            tag = dataclasses.replace(tag, plain=Decline.INSIDE_REPLICA.value)
        flat = mark_shard(c10d.wait_tensor(flat), list(error), tag.dump())
    elif spec.num_ranks == 1 and spec.divide_factor is not None:
        flat = flat / spec.divide_factor
    return flat, reduction


class _Join(torch.autograd.Function):
    """Returns its inputs; their gradients pass on together."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


_library = torch.library.Library("loco_compile", "FRAGMENT")
_library.define(
    "unshard(Tensor shard, Tensor? held, Tensor? held_shard, Tensor[] error, str spec, str bucket)"
    " -> Tensor"
)
_library.define("join(Tensor[] tensors) -> Tensor[]")


@torch.library.impl(_library, "unshard", "CompositeImplicitAutograd")
def _unshard(
    shard: Tensor,
    held: Tensor | None,
    held_shard: Tensor | None,
    error: list[Tensor],
    spec: str,
    bucket: str,
) -> Tensor:
    """Be one node for Dynamo; AOTAutograd traces through it to the collectives."""
    loaded = Spec.load(spec)
    tag = dataclasses.replace(loaded.tag, bucket=bucket)
    loaded = dataclasses.replace(loaded, tag=tag)
    full: Tensor = _Unshard.apply(shard, held, held_shard, loaded, *error)
    return full


@torch.library.impl(_library, "join", "CompositeImplicitAutograd")
def _join(tensors: list[Tensor]) -> list[Tensor]:
    """Be one node for Dynamo, and for autograd."""
    return list(_Join.apply(*tensors))
