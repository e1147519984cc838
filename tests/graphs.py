"""Trace models on the fake process group and print the outline of what the passes did."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import loco_compile.backend as backend_module
from loco_compile import LoCoConfig
from loco_compile.passes.plan import Exchange


@contextlib.contextmanager
def fake_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Run with a process group that exchanges nothing: one process plays one of many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


@dataclasses.dataclass
class Graphs:
    """Outlines of every graph, in the order of compilation."""

    before: list[str] = dataclasses.field(default_factory=list)
    after: list[str] = dataclasses.field(default_factory=list)
    modules: list[fx.GraphModule] = dataclasses.field(default_factory=list)
    exchanges: list[list[Exchange]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[Graphs]:
    """Record the outline of each graph in front of the passes and behind them."""
    graphs, run = Graphs(), backend_module.run_passes

    def run_and_record(gm: fx.GraphModule, config: LoCoConfig) -> list[Exchange]:
        graphs.before.append(outline(gm.graph))
        exchanges = run(gm, config)
        graphs.after.append(outline(gm.graph))
        graphs.modules.append(gm)
        graphs.exchanges.append(exchanges)
        return exchanges

    with mock.patch.object(backend_module, "run_passes", run_and_record):
        yield graphs


def outline(graph: fx.Graph) -> str:
    """One line for each collective and each copy into an input: op, dtype, shape."""
    rows = []
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        namespace, name = node.target.namespace, node.target._opname
        if namespace in ("_c10d_functional", "loco_compile") or name == "copy_":
            val = node.meta["val"]
            rows.append(f"{name} {str(val.dtype)[6:]}{list(val.shape)}")
    return "\n".join(rows)


class Block(nn.Module):
    """Two matrices and a norm: two parameters to compress, one exempt group of three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an input and an output matrix that belong to the root group."""

    def __init__(self, width: int = 64, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.last = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def shard(model: Stack, **options: object) -> Stack:
    """Shard every block and the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
