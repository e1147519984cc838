"""Backward graphs of hand-written functional collectives: the passes without Dynamo or FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from loco_compile import LoCoConfig
from loco_compile.kernels.layout import Layout
from loco_compile.passes.bucket import bucket_sites
from loco_compile.passes.find import find_sites
from loco_compile.passes.markers import Tag
from loco_compile.passes.plan import Exchange, layout_of, plan

c10d = torch.ops._c10d_functional
LOCO = LoCoConfig(inner="aot_eager")
PLAIN = LoCoConfig(method="none", inner="aot_eager")
RS = c10d.reduce_scatter_tensor.default
A2A = c10d.all_to_all_single.default
GATHER = c10d.all_gather_into_tensor.default
WAIT = c10d.wait_tensor.default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grad:
    """One gradient of a backward graph and what happens to it."""

    shape: tuple[int, ...] = (64, 128)
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    shard_dtype: torch.dtype | None = None
    op: str = "avg"
    name: str = "weight"
    bucket: str = "block"
    index: int = 0
    plain: str = ""
    is_marked: bool = True
    keeps_error: bool = True

    def padded_rows(self, num_ranks: int) -> int:
        return -(-self.shape[0] // num_ranks)

    def layout(self, num_ranks: int, config: LoCoConfig) -> Layout:
        row_numel = torch.Size(self.shape[1:]).numel()
        chunk_numel = self.padded_rows(num_ranks) * row_numel
        return layout_of(num_ranks, chunk_numel, config.arithmetic())

    def buffers(self, num_ranks: int, config: LoCoConfig) -> list[Tensor]:
        """Zeroed error planes and scales, as loco_compile/state.py makes them on CPU."""
        if not (self.is_marked and self.keeps_error):
            return []
        layout = self.layout(num_ranks, config)
        planes = [
            torch.zeros(layout.plane_shape, dtype=torch.int8) for _ in range(layout.codes_per_byte)
        ]
        if config.error_scale == "block":
            planes.append(torch.zeros(*layout.scale_shape, 2, dtype=torch.bfloat16))
        return planes


def parameters(*shapes: tuple[int, ...], **options: Any) -> list[Grad]:
    """The parameters of one group."""
    return [Grad(shape=s, name=f"weight{i}", index=i, **options) for i, s in enumerate(shapes)]


def launch(grad: Tensor, spec: Grad, num_ranks: int) -> Tensor:
    """What loco_compile/unshard.py does in front of a wait."""
    flat = grad.reshape(-1)
    if spec.reduce_dtype is not None:
        flat = flat.to(spec.reduce_dtype)
    padded = spec.padded_rows(num_ranks) * num_ranks * torch.Size(spec.shape[1:]).numel()
    if missing := padded - flat.numel():
        flat = F.pad(flat, [0, missing])
    return c10d.reduce_scatter_tensor(flat, spec.op, num_ranks, dist.group.WORLD.group_name)


def finish(scattered: Tensor, spec: Grad, errors: list[Tensor]) -> Tensor:
    """What loco_compile/unshard.py does from the wait on."""
    shard = c10d.wait_tensor(scattered)
    if spec.is_marked:
        tag = Tag(bucket=spec.bucket, name=spec.name, index=spec.index, plain=spec.plain)
        shard = torch.ops.loco_compile.mark_shard(shard, errors, tag.dump())
    if spec.shard_dtype is not None:
        shard = shard.to(spec.shard_dtype)
    return shard * 3  # some user of the shard


@dataclasses.dataclass
class Traced:
    """A graph and real inputs that it runs on."""

    gm: fx.GraphModule
    grads: list[Tensor]
    errors: list[list[Tensor]]

    @property
    def inputs(self) -> list[Tensor]:
        return [*self.grads, *(b for own in self.errors for b in own)]

    def exchanges(self, config: LoCoConfig) -> list[Exchange]:
        return plan(bucket_sites(find_sites(self.gm.graph)), config)

    def count(self, target: Any) -> int:
        return len(self.gm.graph.find_nodes(op="call_function", target=target))


def trace(
    specs: Sequence[Grad],
    config: LoCoConfig = LOCO,
    *,
    num_ranks: int = 2,
    overlaps: bool = False,
) -> Traced:
    """Trace a backward that scales each gradient by 2 and reduces it.

    With `overlaps`, work lies between the last reduce-scatter and the first wait.
    """
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(s.shape, generator=generator).to(s.dtype) for s in specs]
    errors = [s.buffers(num_ranks, config) for s in specs]

    def backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        left = [g * 2 for g in inputs[: len(specs)]]
        rest = iter(inputs[len(specs) :])
        own = [[next(rest) for _ in buffers] for buffers in errors]
        if not overlaps:
            return tuple(
                finish(launch(g, s, num_ranks), s, e)
                for g, s, e in zip(left, specs, own, strict=True)
            )
        scattered = [launch(g, s, num_ranks) for g, s in zip(left, specs, strict=True)]
        work = inputs[0].exp().relu().sin()
        shards = [finish(x, s, e) for x, s, e in zip(scattered, specs, own, strict=True)]
        return (*shards, work)

    traced = Traced(fx.GraphModule({}, fx.Graph()), grads, errors)
    traced.gm = make_fx(backward, tracing_mode="fake")(*traced.inputs)
    return traced


def text(gm: fx.GraphModule) -> str:
    """All nodes with their arguments: equal texts are equal graphs."""
    return "\n".join(node.format_node() or "output" for node in gm.graph.nodes) + gm.code


def facts(value: Any) -> Any:
    """What the metadata of a node promises."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride(), value.device, value.layout
    if isinstance(value, list | tuple):
        return [facts(v) for v in value]
    return value


def promised_and_real(gm: fx.GraphModule) -> Iterator[tuple[str, Any, Any]]:
    """(node, its metadata, what propagating fake tensors anew gives) for every node."""
    promised = {n: facts(n.meta["val"]) for n in gm.graph.nodes if "val" in n.meta}
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    mode = torch._guards.detect_fake_mode(fakes)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            yield node.name, promised[node], facts(node.meta["val"])


class _Rank(fx.Interpreter):
    """Runs a graph as one rank whose all-to-alls receive what it is given."""

    def __init__(self, gm: fx.GraphModule, received: Sequence[Tensor] | None) -> None:
        super().__init__(gm)
        self.sent: list[Tensor] = []
        self.received = None if received is None else list(received)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is A2A:
            self.sent.append(args[0].clone())
            return args[0] if self.received is None else self.received[len(self.sent) - 1]
        if target is WAIT:
            return args[0]
        if target is RS:
            raise AssertionError("expected no reduce-scatter in a graph that several ranks run")
        return super().call_function(target, args, kwargs)


def run_on_all_ranks(
    gm: fx.GraphModule, inputs: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensor, ...]]:
    """Run one graph as every rank and exchange its messages by hand. Updates the error inputs.

    What is sent depends on no message of the same graph, so a first run on copies collects it.
    """
    num_ranks, sent = len(inputs), []
    for own in inputs:
        rank = _Rank(gm, None)
        rank.run(*(t.clone() for t in own))
        sent.append(rank.sent)
    results = []
    for me, own in enumerate(inputs):
        received = [
            torch.cat([sent[peer][turn].chunk(num_ranks)[me] for peer in range(num_ranks)])
            for turn in range(len(sent[me]))
        ]
        results.append(_Rank(gm, received).run(*own))
    return results


def find(gm: fx.GraphModule, target: Callable[..., Any]) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target, sort=True))
