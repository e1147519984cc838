r"""Keep parameters sharded over a smaller mesh between forward and backward, in the joint graph.

    shard -> all_gather -> wait -> ... -> mark_full -> forward, backward
becomes, for `reshard_after_forward=k`,
    shard -> all_gather -> wait -> ... -> mark_full -> forward
                            \-> own part of k -> all_gather over k ranks -> ... -> backward

Forward keeps 1/k of the parameter, backward gathers it over k ranks: the fast links, if the k ranks
share a host.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils.checkpoint import CheckpointPolicy

from .find import c10d, find_full_markers, value
from .markers import Tag
from .remat import derived_nodes, tag_node
from .splice import splice


def reshard(graph: fx.Graph) -> fx.Graph:
    """Give backward its own copy of each parameter that has a smaller mesh to return to."""
    backward = _backward_nodes(graph)
    for marker in find_full_markers(graph):
        tag = Tag.load(str(marker.args[1]))
        nodes = [marker, *derived_nodes(marker)]
        if tag.smaller_ranks and any(u in backward for n in nodes for u in n.users):
            _reshard(marker, tag, backward)
    stable_topological_sort(graph)
    graph.lint()
    return graph


def _backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on a tangent."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(n in backward for n in node.all_input_nodes):
            backward.add(node)
    return backward


def _reshard(marker: fx.Node, tag: Tag, backward: set[fx.Node]) -> None:
    views = []  # from the wait, which is left out, to the marker
    wait = marker
    while wait.target is not c10d.wait_tensor.default:
        views.append(wait)
        wait = wait.all_input_nodes[0]
    part_numel = value(wait).numel() // tag.smaller_ranks

    def keep(full: Tensor) -> tuple[Tensor, ...]:
        # A clone: a view would keep the full parameter alive.
        return (full.narrow(0, part_numel * tag.smaller_rank, part_numel).clone(),)

    def gather(part: Tensor) -> tuple[Tensor, ...]:
        full = c10d.all_gather_into_tensor(part, tag.smaller_ranks, tag.smaller_group)
        return (c10d.wait_tensor(full),)

    derived = derived_nodes(marker)
    (part,) = splice(keep, [wait], before=marker.next)
    (again,) = splice(gather, [part], before=marker.next)
    copies = {wait: again}
    for node in (*reversed(views), *derived):
        with node.graph.inserting_after(again):
            copies[node] = node.graph.node_copy(node, lambda n: copies.get(n, n))
    again_tag = dataclasses.replace(tag, smaller_ranks=0)
    copies[marker].args = (copies[marker].args[0], again_tag.dump())
    for node in (marker, *derived):
        for user in list(node.users):
            if user in backward:
                user.replace_input_with(node, copies[node])
    tag_node(part, CheckpointPolicy.MUST_SAVE)
    # Never recomputed: what backward needs is the part.
    tag_node(wait, CheckpointPolicy.MUST_SAVE)
