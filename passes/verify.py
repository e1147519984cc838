"""Check a rewritten graph before anything runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .find import c10d, find_full_markers, find_shard_markers
from .plan import Exchange


def verify(gm: fx.GraphModule, *, exchanges: Sequence[Exchange]) -> fx.GraphModule:
    """Raise AssertionError if a marker or a planned reduce-scatter is left, or a wait missing."""
    graph = gm.graph
    left = [*find_full_markers(graph), *find_shard_markers(graph)]
    if left:
        raise AssertionError(f"expected no markers after the passes, got {left}")
    alive = set(graph.nodes)
    for exchange in exchanges:
        for choice in exchange.compressed:
            if choice.site.collective in alive:
                raise AssertionError(
                    f"expected {choice.site.name} to be rewritten, it is still there"
                )
    waited = {
        n.args[0] for n in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    }
    for node in graph.nodes:
        if _is_collective(node) and node not in waited:
            raise AssertionError(f"expected a wait for {node.name}, found none")
        if _returns_a_value(node) and "val" not in node.meta:
            raise AssertionError(f"expected node {node.name} to carry meta['val']")
    return gm


def _returns_a_value(node: fx.Node) -> bool:
    """Whether it is an operator with a result: asserts have none, nor random state's own nodes."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.returns)


def _is_collective(node: fx.Node) -> bool:
    return node.target in (
        c10d.all_to_all_single.default,
        c10d.reduce_scatter_tensor.default,
        c10d.all_reduce.default,
        c10d.all_gather_into_tensor.default,
    )


def collective_order(graph: fx.Graph) -> list[tuple[str, str]]:
    """Return (op, process group) of every collective in graph order: equal on all ranks (R12)."""
    rows = []
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _is_collective(node):
            rows.append((node.target._opname, str(node.args[-1])))
    return rows
