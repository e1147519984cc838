"""Decide what is compressed and how. The only file with policy; no graph is edited."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import hashlib
import json
from collections.abc import Sequence

import torch

from loco_compile.config import LoCoConfig
from loco_compile.kernels.layout import Layout
from loco_compile.kernels.memory import formats
from loco_compile.kernels.recipe import Recipe

from .bucket import Bucket
from .find import Site

COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)
"""Gradient dtypes that the kernels read."""


class Decline(str, enum.Enum):
    """Why a gradient goes out uncompressed. Every such gradient has exactly one reason."""

    METHOD_NONE = "method is 'none'"
    ONE_RANK = "one rank: nothing is exchanged"
    FROZEN = "frozen: has no gradient"
    ONE_DIMENSION = "has one dimension (exempt_1d)"
    EXEMPT = "name matches exempt"
    SMALL = "fewer elements than min_numel"
    DTYPE = "gradient dtype is not float32, bfloat16 or float16"
    START = "before start_step"
    INSIDE_REPLICA = "inside a replica (HSDP): the all-reduce between replicas is compressed"
    REDUCTION = "reduction is neither avg nor sum"
    NO_STATE = "no buffers are bound to this reduce-scatter"
    NOT_COMPILED = "runs outside every compiled region"
    UNUSED = "got no gradient in the compiled step"
    HELD = "held back: no backward with set_requires_gradient_sync(True) has run yet"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """The facts of one parameter that policy may look at: equal on all ranks."""

    name: str
    """Fully qualified name in the model."""
    shape: tuple[int, ...]
    """Full, unsharded shape."""
    grad_dtype: torch.dtype
    """Dtype in which the gradient is reduced."""
    num_ranks: int
    """W."""
    requires_grad: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """What happens to one site: a recipe, or a reason why not."""

    site: Site
    recipe: Recipe | None
    decline: Decline | None

    @property
    def layout(self) -> Layout:
        """Wire layout of a compressed site."""
        if self.recipe is None:
            raise AssertionError(f"expected a recipe for {self.site.name}, it is {self.decline}")
        return layout_of(self.site.num_ranks, self.site.chunk_numel, self.recipe)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """The plan of one bucket."""

    bucket: Bucket
    choices: tuple[Choice, ...]

    @property
    def compressed(self) -> tuple[Choice, ...]:
        """Choices that share the bucket's all-to-all."""
        return tuple(c for c in self.choices if c.recipe is not None)

    @property
    def plain(self) -> tuple[Choice, ...]:
        """Choices that share one uncompressed reduce-scatter."""
        return tuple(c for c in self.choices if c.recipe is None)


def layout_of(num_ranks: int, chunk_numel: int, recipe: Recipe) -> Layout:
    """Return the wire layout of chunks of `chunk_numel` elements under a recipe."""
    return Layout(
        num_ranks=num_ranks,
        chunk_numel=chunk_numel,
        block_numel=recipe.block_numel,
        codes_per_byte=recipe.codes_per_byte,
    )


def decide(parameter: Parameter, config: LoCoConfig) -> Decline | None:
    """Return why a parameter's gradient is sent uncompressed, None if it is compressed."""
    numel = 1
    for size in parameter.shape:
        numel *= size
    reasons = {
        Decline.FROZEN: not parameter.requires_grad,
        Decline.ONE_RANK: parameter.num_ranks == 1,
        Decline.METHOD_NONE: config.method == "none",
        Decline.EXEMPT: any(fnmatch.fnmatchcase(parameter.name, p) for p in config.exempt),
        Decline.ONE_DIMENSION: config.exempt_1d and len(parameter.shape) < 2,
        Decline.SMALL: numel < config.min_numel or numel == 0,
        Decline.DTYPE: parameter.grad_dtype not in COMPRESSIBLE,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def plan(buckets: Sequence[Bucket], config: LoCoConfig) -> list[Exchange]:
    """Give every site a recipe or a reason."""
    return [
        Exchange(bucket=b, choices=tuple(_choose(site, config) for site in b.sites))
        for b in buckets
    ]


def _choose(site: Site, config: LoCoConfig) -> Choice:
    recipe = config.arithmetic()
    decline: Decline | None = None
    if site.tag is not None and site.tag.plain:
        decline = Decline(site.tag.plain)
    elif config.method == "none":
        decline = Decline.METHOD_NONE
    elif site.num_ranks == 1:
        decline = Decline.ONE_RANK
    elif site.op not in ("avg", "sum"):
        decline = Decline.REDUCTION
    elif site.val.dtype not in COMPRESSIBLE:
        decline = Decline.DTYPE
    elif len(site.errors) != _num_buffers(site, recipe):
        decline = Decline.NO_STATE
    return Choice(site=site, recipe=None if decline else recipe, decline=decline)


def _num_buffers(site: Site, recipe: Recipe) -> int:
    return len(formats(layout_of(site.num_ranks, site.chunk_numel, recipe), recipe))


def fingerprint(exchanges: Sequence[Exchange]) -> str:
    """Return a hash of everything about the plan that all ranks must agree on (I6).

    The names of process groups are left out: ranks of different groups never meet.
    """
    rows = [
        [
            [e.bucket.name, e.bucket.kind, e.bucket.op, e.bucket.num_ranks],
            [
                [c.site.name, c.site.chunk_numel, str(c.site.val.dtype), str(c.decline)]
                + ([dataclasses.asdict(c.recipe)] if c.recipe else [])
                for c in e.choices
            ],
        ]
        for e in exchanges
    ]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
