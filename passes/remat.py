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
    """Tag the gathers of a joint graph for the partitioner. Edits metadata only."""
    for marker in find_full_markers(graph):
        if Tag.load(str(marker.args[1])).regathers:
            for node in (*_gather_chain(marker), *_derived(marker)):
                _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        else:
            _tag(marker, CheckpointPolicy.MUST_SAVE)
    return graph


def _tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = AC_GRAPH_ID


def _gather_chain(marker: fx.Node) -> list[fx.Node]:
    """Return the marker and the nodes that lead from the shard to it."""
    chain, node = [], marker
    while node.op == "call_function":
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain


def _derived(marker: fx.Node) -> list[fx.Node]:
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
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        derived[node] = None
        todo.extend(node.users)
    return list(derived)
