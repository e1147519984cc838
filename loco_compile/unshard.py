"""The traceable twin of FSDP2's all-gather, its backward the reduce-scatter: one parameter each.

    shard -> cast -> pad -> all_gather -> wait -> full parameter
    gradient -> cast -> pad -> reduce_scatter -> wait -> cast -> the shard's gradient

The same casts, paddings, divisions and collectives as eager FSDP2, in the same order, so that
nothing but the grouping into one collective for each group (passes/bucket.py) is left to the
passes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .passes.markers import Tag, mark_full, mark_shard

c10d = torch.ops._c10d_functional
_DTYPES = {str(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """How FSDP2 gathers one parameter and reduces its gradient. Travels as JSON through Dynamo."""

    full_shape: tuple[int, ...]
    """Shape of the full parameter."""
    padded_rows: int
    """Rows of dimension 0 that each rank holds, padding included."""
    num_ranks: int
    """W, ranks of the shard mesh."""
    gather_group: str
    """Process group of the all-gather."""
    reduce_group: str
    """Process group of the reduce-scatter: FSDP2 can be told to use one of its own."""
    param_dtype: str
    """Dtype of the full parameter."""
    reduce_dtype: str
    """Dtype of the reduction; empty means the gradient's own."""
    divide_factor: float | None
    """What the summed gradient is divided by; None means W."""
    force_sum: bool
    """Whether the reduction is a sum with divisions around it."""
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
        if self.num_ranks == 1 and not has_overflow_risk and not self.force_sum:
            return Reduction("sum")
        if not has_overflow_risk and not self.force_sum:
            if factor is None or factor == self.num_ranks:
                return Reduction("avg")
            return Reduction("sum", multiply_before=1 / factor)
        factor = float(self.num_ranks) if factor is None else factor
        if has_overflow_risk:
            before = _balanced_divisor(factor)
            return Reduction("sum", divide_before=before, divide_after=factor / before)
        return Reduction("sum", divide_after=factor)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """A reduce-scatter and the scaling around it. None means: nothing to do."""

    op: str
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


class _Unshard(torch.autograd.Function):
    """Gathers a parameter; its backward reduces the gradient and names its error."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, spec: Spec, *error: Tensor) -> Tensor:
        ctx.spec, ctx.shard_shape, ctx.shard_dtype = spec, shard.shape, shard.dtype
        ctx.save_for_backward(*error)
        row_shape = spec.full_shape[1:]
        shard = shard.to(_DTYPES[spec.param_dtype])
        if missing := spec.padded_rows - shard.shape[0]:
            shard = F.pad(shard, [0, 0] * len(row_shape) + [0, missing])
        flat = shard.reshape(-1)
        if spec.num_ranks > 1 and flat.numel():
            flat = c10d.all_gather_into_tensor(flat, spec.num_ranks, spec.gather_group)
            flat = c10d.wait_tensor(flat)
        full = flat.reshape(spec.padded_rows * spec.num_ranks, *row_shape)[: spec.full_shape[0]]
        marked: Tensor = mark_full(full, spec.tag.dump())
        return marked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        spec: Spec = ctx.spec
        # Flat first: Inductor then reads what autograd left with one linear index, and casts it
        # on the fly.
        flat = grad.reshape(-1)
        if spec.reduce_dtype:
            flat = flat.to(_DTYPES[spec.reduce_dtype])
        padded_numel = spec.padded_rows * spec.num_ranks * math.prod(spec.full_shape[1:])
        if missing := padded_numel - flat.numel():
            flat = F.pad(flat, [0, missing])
        reduction = spec.reduction(flat.dtype)
        flat = _divide(flat, reduction.divide_before)
        if reduction.multiply_before is not None:
            flat = flat * reduction.multiply_before
        if spec.num_ranks > 1 and flat.numel():
            flat = c10d.reduce_scatter_tensor(flat, reduction.op, spec.num_ranks, spec.reduce_group)
            flat = c10d.wait_tensor(flat)
            error = list(ctx.saved_tensors)
            flat = mark_shard(flat, error, spec.tag.dump())
        elif spec.num_ranks == 1 and spec.divide_factor is not None:
            flat = flat / spec.divide_factor
        flat = _divide(flat, reduction.divide_after)
        shard = flat.to(ctx.shard_dtype)[: ctx.shard_shape.numel()].reshape(ctx.shard_shape)
        return (shard, None, *(None for _ in ctx.saved_tensors))


_library = torch.library.Library("loco_compile", "FRAGMENT")
_library.define("unshard(Tensor shard, Tensor[] error, str spec, str bucket) -> Tensor")


@torch.library.impl(_library, "unshard", "CompositeImplicitAutograd")
def _unshard(shard: Tensor, error: list[Tensor], spec: str, bucket: str) -> Tensor:
    """Be one node for Dynamo; AOTAutograd traces through it to the collectives."""
    loaded = Spec.load(spec)
    tag = dataclasses.replace(loaded.tag, bucket=bucket)
    full: Tensor = _Unshard.apply(shard, dataclasses.replace(loaded, tag=tag), *error)
    return full
