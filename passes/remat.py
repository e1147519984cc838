"""Say in the joint graph which full parameters are freed after forward (`reshard_after_forward`).

    mark_full(regathers=True)  and all that is computed from it alone:  recomputed in backward
    mark_full(regathers=False):                                         saved for backward

AOTAutograd's partitioner reads the tags when it cuts the joint graph in two.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .find import find_full_markers
from .markers import Tag

AC_GRAPH_ID = 1 << 20
"""Larger than any id that activation checkpointing hands out: the partitioner saves a node that
feeds a checkpointed region with a larger id than its own."""


def remat(graph: fx.Graph) -> fx.Graph:
    """Tag the gathers of a joint graph for the partitioner. Edits metadata only.

    A parameter with a smaller mesh to return to is not needed by backward at all: see `reshard`.
    """
    for marker in find_full_markers(graph):
        tag = Tag.load(str(marker.args[1]))
        if tag.smaller_ranks:
            continue
        if tag.regathers:
            for node in (*_gather_chain(marker), *derived_nodes(marker)):
                tag_node(node, CheckpointPolicy.MUST_RECOMPUTE)
        else:
            tag_node(marker, CheckpointPolicy.MUST_SAVE)
    return graph


def tag_node(node: fx.Node, policy: CheckpointPolicy) -> None:
    """Tell the partitioner what to do with a node."""
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = AC_GRAPH_ID


def _gather_chain(marker: fx.Node) -> list[fx.Node]:
    """Return the marker and the nodes that lead to it from the shard, or from a saved node."""
    chain, node = [], marker
    while node.op == "call_function" and "recompute" not in node.meta:
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain


def derived_nodes(marker: fx.Node) -> list[fx.Node]:
    """Return the nodes computed from this full parameter and nothing else: views, casts.

    Saving one of them instead would keep the full parameter alive all the same.
    """
    derived: dict[fx.Node, None] = {}
    todo = list(marker.users)
    while todo:
        node = todo.pop()
        is_alone = all(n is marker or n in derived for n in node.all_input_nodes)
        if node.op != "call_function" or not is_alone or node in derived:
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor) or _is_random(node):
            continue
        derived[node] = None
        todo.extend(node.users)
    return list(derived)


def _is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers: computed again, it would draw others."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
