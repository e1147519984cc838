"""The exchanges that LoCo is compared with, each in a graph that our backend captured.

fp32, bf16   what a good network library would do without compression: every gradient in that dtype
             to its owner, who adds in float32. Gloo's own reduce-scatter sends the bytes of an
             all-reduce, so beating it would prove nothing.
free         LoCo's messages and collectives with nothing computed: a codec that costs no time.
none, loco   what the backend makes of a graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

import loco_compile.backend as backend_module
from loco_compile import LoCoConfig
from loco_compile.kernels.layout import message_bytes
from loco_compile.passes import rewrite as rewrite_module
from loco_compile.passes.find import Site, c10d, find_sites, value
from loco_compile.passes.message import Part
from loco_compile.passes.splice import splice

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PIECE_BYTES = 256 * 1024
"""Gloo's all-to-all is half duplex between two ranks for more than this: it is sent in pieces."""

_KINDS = {
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.all_to_all_single.default: "all_to_all",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a graph, to be run again without the graph."""

    kind: str
    numel: int
    """Of this rank's input."""
    dtype: torch.dtype

    def payload(self, num_ranks: int) -> float:
        """Bytes that a rank has to send for it at least."""
        numel = self.numel * self.dtype.itemsize
        return numel * ((num_ranks - 1) if self.kind == "all_gather" else 1 - 1 / num_ranks)

    def start(self, num_ranks: int, group: str) -> Tensor:
        """Run it on zeros; wait for the result with `c10d.wait_tensor`."""
        data = torch.zeros(self.numel, dtype=self.dtype)
        if self.kind == "all_gather":
            return c10d.all_gather_into_tensor(data, num_ranks, group)
        if self.kind == "all_to_all":
            splits = [self.numel // num_ranks] * num_ranks
            return c10d.all_to_all_single(data, splits, splits, group)
        return c10d.reduce_scatter_tensor(data, "avg", num_ranks, group)


def config_of(mode: str) -> LoCoConfig:
    """Return the config that a mode compiles with."""
    return LoCoConfig(method="loco" if mode in ("loco", "free") else "none")


@contextlib.contextmanager
def compiled_as(mode: str) -> Iterator[list[Collective]]:
    """Let graphs that are compiled here exchange by `mode`; yields the collectives they hold."""
    found: list[Collective] = []
    run_product = backend_module.run_passes

    def run(gm: fx.GraphModule, config: LoCoConfig) -> Any:
        exchanges = run_product(gm, config)
        if mode in DTYPES:
            exchange_uncompressed(gm, DTYPES[mode])
        found.extend(collectives(gm.graph))
        return exchanges

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend_module, "run_passes", run))
        if mode == "free":
            free = {"compress_all": _compress_nothing, "unpack_mean": _unpack_nothing}
            stack.enter_context(mock.patch.multiple(rewrite_module, **free))
        yield found


def collectives(graph: fx.Graph) -> list[Collective]:
    """Return the gathers and exchanges of a graph, in its order."""
    found = []
    for node in graph.nodes:
        if node.target in _KINDS:
            val = value(node.args[0])
            found.append(Collective(_KINDS[node.target], val.numel(), val.dtype))
    return found


def exchange_uncompressed(gm: fx.GraphModule, dtype: torch.dtype) -> None:
    """Turn each reduce-scatter of a graph into all-to-alls of `dtype`, added up in float32."""
    for site in find_sites(gm.graph):
        _exchange(site, dtype)
    gm.graph.lint()
    gm.recompile()


def _exchange(site: Site, dtype: torch.dtype) -> None:
    divisor = site.num_ranks if site.op == "avg" else 1
    result = value(site.wait)
    length = PIECE_BYTES // dtype.itemsize

    def launch(grad: Tensor) -> tuple[Tensor, ...]:
        rows = grad.reshape(site.num_ranks, -1)
        sent = []
        for piece in rows.split(length, dim=1):
            splits = [piece.shape[1]] * site.num_ranks
            flat = piece.to(dtype).reshape(-1)
            sent.append(c10d.all_to_all_single(flat, splits, splits, site.group_name))
        return tuple(sent)

    def finish(*sent: Tensor) -> tuple[Tensor, ...]:
        means = []
        for piece in sent:
            rows = c10d.wait_tensor(piece).reshape(site.num_ranks, -1)
            total = rows[0].float()
            for row in rows[1:]:
                total = total + row.float()
            means.append(total / divisor)
        return (torch.cat(means).to(result.dtype).reshape(result.shape),)

    sent = splice(launch, [site.grad], before=site.collective)
    (mean,) = splice(finish, sent, before=site.wait)
    site.wait.replace_all_uses_with(mean)
    for node in (site.wait, site.collective):
        node.graph.erase_node(node)


def _compress_nothing(
    grads: Sequence[Tensor], buffers: Sequence[Tensor], parts: Sequence[Part]
) -> tuple[Tensor, list[Tensor]]:
    """Return a message of the right size that depends on the gradients, so it leaves no earlier."""
    empty = grads[0].new_zeros(parts[0].layout.num_ranks, message_bytes([p.layout for p in parts]))
    reads = sum(g.reshape(-1)[0] * 0 for g in grads)
    return (empty + reads).to(torch.uint8), list(buffers)


def _unpack_nothing(
    received: Tensor, known: Sequence[Tensor], parts: Sequence[Part], *, divisor: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return zeros that depend on the message."""
    del divisor
    zero = received[0, 0].float() * 0
    means = [zero.expand(p.layout.chunk_numel).to(p.dtype) for p in parts]
    return means, list(known)


def run_again(found: Sequence[Collective], num_ranks: int, group: str) -> None:
    """Start all of the collectives, then wait for them, as an ideal step would."""
    pending = [c.start(num_ranks, group) for c in found]
    for tensor in pending:
        c10d.wait_tensor(tensor)


def split_by_kind(found: Sequence[Collective]) -> tuple[list[Collective], list[Collective]]:
    """Return the gathers of parameters and the exchanges of gradients."""
    gathers = [c for c in found if c.kind == "all_gather"]
    return gathers, [c for c in found if c.kind != "all_gather"]
