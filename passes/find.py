"""Find the gradient reductions and the all-gathers of a graph. Reads only.

grad -> reduce_scatter_tensor -> wait_tensor [-> mark_shard] [-> cast]     is a Site
grad -> all_reduce -> wait_tensor -> mark_shard [-> cast]                  is a Site, too
shard -> all_gather_into_tensor -> wait_tensor -> view ... -> mark_full    is a Gather
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx

from .markers import Tag

c10d = torch.ops._c10d_functional
CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Site:
    """One reduction of a gradient in a graph: a reduce-scatter, or an all-reduce over replicas."""

    kind: Literal["reduce_scatter", "all_reduce"]
    collective: fx.Node
    """The `reduce_scatter_tensor` or `all_reduce` node."""
    wait: fx.Node
    """Its `wait_tensor`."""
    shard: fx.Node
    """The node whose users get this rank's gradient: the marker if there is one, else the wait."""
    cast: fx.Node | None
    """A dtype cast that is the shard's only user: the exchange can give that dtype at once."""
    op: str
    """"avg" or "sum" (or another op, which is never compressed)."""
    num_ranks: int
    """W."""
    group_name: str
    """Process group, as the collective names it."""
    errors: tuple[fx.Node, ...]
    """Nodes of the error planes and scales bound to the site, in the order of `Error`."""
    tag: Tag | None
    """What capture said of the parameter; None in graphs of other front ends."""
    val: torch.Tensor
    """Fake tensor of `grad`."""

    @property
    def grad(self) -> fx.Node:
        """Flat input: what autograd left, cast and padded as the front end asked.

        (W * N,), and for an all-reduce W * N elements or fewer.
        """
        return _node(self.collective.args[0])

    @property
    def source(self) -> fx.Node:
        """What autograd left: the gradient in its own dtype, before exact casts and padding.

        Its flat order is that of `grad`, of which it may miss the padding at the end.
        """
        return _find_source(self.grad)

    @property
    def name(self) -> str:
        """Name for messages and reports."""
        if self.tag is None:
            return self.collective.name
        return f"{self.tag.bucket}.{self.tag.name}" if self.tag.bucket else self.tag.name

    @property
    def chunk_numel(self) -> int:
        """N, elements of this rank's chunk: its shard, or its part of an all-reduce."""
        return -(-self.val.numel() // self.num_ranks)

    @property
    def out(self) -> fx.Node:
        """The node that the exchange replaces."""
        return self.cast or self.shard


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gather:
    """One marked all-gather in a graph."""

    shard: fx.Node
    """Flat input (N,)."""
    gather: fx.Node
    """The `all_gather_into_tensor` node."""
    wait: fx.Node
    """Its `wait_tensor`."""
    num_ranks: int
    """W."""
    group_name: str
    """Process group, as the collective names it."""
    tag: Tag
    """What capture said of the parameter."""


def value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise AssertionError(f"expected node {node.name} to carry a tensor in meta['val']")
    return val


def find_sites(graph: fx.Graph) -> list[Site]:
    """Return every reduce-scatter, and every marked all-reduce, that has a wait; in graph order.

    An all-reduce without a marker may reduce anything, activations under tensor parallelism say.
    """
    sites = []
    for scatter in _calls(graph, c10d.reduce_scatter_tensor.default):
        _, op, num_ranks, group_name = _arguments(scatter, 4)
        for wait in _users(scatter, c10d.wait_tensor.default):
            sites.append(_site("reduce_scatter", wait, op, num_ranks, group_name))
    for reduce in _calls(graph, c10d.all_reduce.default):
        _, op, group_name = _arguments(reduce, 3)
        for wait in _users(reduce, c10d.wait_tensor.default):
            for marker in _users(wait, torch.ops.loco_compile.mark_shard.default):
                num_ranks = Tag.load(str(marker.args[2])).num_replicas
                sites.append(_site("all_reduce", wait, op, num_ranks, group_name))
    return sorted(sites, key=lambda s: s.collective)


def _site(
    kind: Literal["reduce_scatter", "all_reduce"],
    wait: fx.Node,
    op: Any,
    num_ranks: Any,
    group_name: Any,
) -> Site:
    collective = _node(wait.args[0])
    markers = _users(wait, torch.ops.loco_compile.mark_shard.default)
    shard, errors, tag = wait, (), None
    if markers:
        shard = markers[0]
        _, bound, text = _arguments(shard, 3)
        errors, tag = tuple(bound), Tag.load(text)
    users = list(shard.users)
    cast = users[0] if len(users) == 1 and users[0].target in CASTS else None
    return Site(
        kind=kind,
        collective=collective,
        wait=wait,
        shard=shard,
        cast=cast,
        op=str(op),
        num_ranks=int(num_ranks),
        group_name=str(group_name),
        errors=errors,
        tag=tag,
        val=value(_node(collective.args[0])),
    )


def _find_source(node: fx.Node) -> fx.Node:
    """Walk back over what leaves the flat order and every value of a gradient as they are."""
    while node.op == "call_function":
        is_view = node.target in VIEWS and value(_node(node.args[0])).is_contiguous()
        is_wider = node.target in CASTS and _is_exact_cast(node)
        if not (is_view or is_wider or _is_padding_at_end(node)):
            break
        node = _node(node.args[0])
    return node


def _is_exact_cast(node: fx.Node) -> bool:
    before, after = value(_node(node.args[0])), value(node)
    is_half = before.dtype in (torch.bfloat16, torch.float16)
    return before.device == after.device and is_half and after.dtype == torch.float32


def _is_padding_at_end(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.constant_pad_nd.default:
        return False
    pad, fill = node.args[1], node.args[2] if len(node.args) > 2 else 0
    is_flat = value(_node(node.args[0])).dim() == 1
    return bool(is_flat and isinstance(pad, Sequence) and pad[0] == 0 and fill == 0)


def find_gathers(graph: fx.Graph) -> list[Gather]:
    """Return every marked all-gather, in graph order."""
    gathers = []
    for marker in find_full_markers(graph):
        node = _node(marker.args[0])
        while node.op == "call_function" and node.target is not c10d.wait_tensor.default:
            node = node.all_input_nodes[0]
        if node.op != "call_function":
            continue  # one rank: nothing was gathered
        wait, gather = node, _node(node.args[0])
        shard, num_ranks, group_name = _arguments(gather, 3)
        gathers.append(
            Gather(
                shard=shard,
                gather=gather,
                wait=wait,
                num_ranks=num_ranks,
                group_name=str(group_name),
                tag=Tag.load(str(marker.args[1])),
            )
        )
    return gathers


def find_full_markers(graph: fx.Graph) -> list[fx.Node]:
    """Return the `mark_full` nodes, in graph order."""
    return _calls(graph, torch.ops.loco_compile.mark_full.default)


def find_shard_markers(graph: fx.Graph) -> list[fx.Node]:
    """Return the `mark_shard` nodes, in graph order."""
    return _calls(graph, torch.ops.loco_compile.mark_shard.default)


def find_held_markers(graph: fx.Graph) -> list[fx.Node]:
    """Return the `mark_held` nodes, in graph order."""
    return _calls(graph, torch.ops.loco_compile.mark_held.default)


def _calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target, sort=True))


def _users(node: fx.Node, target: Any) -> list[fx.Node]:
    return [user for user in node.users if user.target is target]


def _arguments(node: fx.Node, count: int) -> tuple[Any, ...]:
    if len(node.args) != count:
        raise AssertionError(f"expected {count} arguments of {node.name}, got {node.args}")
    return tuple(node.args)


def _node(argument: Any) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise AssertionError(f"expected a node, got {argument!r}")
    return argument
