"""Gather all parameters of an FSDP group with one all-gather, as FSDP2 does.

    shard_i -> all_gather -> wait -> full_i                       for every parameter i
becomes
    shards -> concatenated -> all_gather -> wait -> rank chunks -> full_i
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import stable_topological_sort

from .bucket import bucket_gathers
from .find import Gather, c10d, find_full_markers, find_gathers, value
from .splice import splice


def gather(gm: fx.GraphModule) -> fx.GraphModule:
    """Merge the marked all-gathers of each group; remove the markers and gathers nobody uses."""
    graph = gm.graph
    _erase_unused(graph)
    _share_waits(graph)
    buckets = [b for b in bucket_gathers(find_gathers(graph)) if len(b) > 1]
    markers = find_full_markers(graph)
    if not markers:
        return gm
    for bucket in buckets:
        _merge(bucket)
    for marker in markers:
        marker.replace_all_uses_with(marker.args[0])  # type: ignore[arg-type]  # a node, by schema
        graph.erase_node(marker)
    stable_topological_sort(graph)
    graph.lint()
    gm.recompile()
    return gm


def _erase_unused(graph: fx.Graph) -> None:
    """Erase all-gathers without users: their waits count as side effects, so nothing else does.

    The partitioner leaves them in forward where only backward uses the full parameter.
    """
    waits = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    for wait in waits:
        gathered = wait.all_input_nodes[0]
        is_gather = gathered.target is c10d.all_gather_into_tensor.default
        if is_gather and not wait.users and len(gathered.users) == 1:
            graph.erase_node(wait)
            graph.erase_node(gathered)


def _share_waits(graph: fx.Graph) -> None:
    """Leave one wait for each all-gather: AOTAutograd merges equal gathers but not their waits.

    A module that is called twice has two.
    """
    for gathered in graph.find_nodes(
        op="call_function", target=c10d.all_gather_into_tensor.default
    ):
        first, *others = sorted(gathered.users)
        for wait in others:
            if wait.target is first.target is c10d.wait_tensor.default:
                wait.replace_all_uses_with(first)
                graph.erase_node(wait)


def _merge(bucket: Sequence[Gather]) -> None:
    first = min(bucket, key=lambda g: g.gather)
    num_ranks, group_name = first.num_ranks, first.group_name
    sizes = [value(g.shard).numel() for g in bucket]

    def launch(*shards: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([s.reshape(-1) for s in shards])
        return (c10d.all_gather_into_tensor(flat, num_ranks, group_name),)

    def finish(gathered: Tensor) -> tuple[Tensor, ...]:
        chunks = c10d.wait_tensor(gathered).reshape(num_ranks, -1).split(sizes, dim=1)
        return tuple(c.reshape(-1) for c in chunks)

    (gathered,) = splice(launch, [g.shard for g in bucket], before=first.gather)
    fulls = splice(finish, [gathered], before=first.wait)
    for member, full in zip(bucket, fulls, strict=True):
        member.wait.replace_all_uses_with(full)
        member.wait.graph.erase_node(member.wait)
        member.gather.graph.erase_node(member.gather)
