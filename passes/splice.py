"""Put a traced torch function into a graph, in front of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx


def splice(fn: Callable[..., Any], args: Sequence[fx.Node], *, before: fx.Node) -> list[fx.Node]:
    """Trace `fn` on the fake tensors of `args` and copy its nodes in front of `before`.

    `fn` takes one tensor for each node and returns a tuple of tensors; their nodes are returned.
    Inductor's own decompositions are applied, since the graph is past AOTAutograd: without them it
    meets ops that it has no lowering for.
    """
    values = [node.meta["val"] for node in args]
    mode = torch._guards.detect_fake_mode(values)
    if mode is None:
        raise AssertionError("expected fake tensors in meta['val'] of the spliced arguments")
    with mode:
        # Without mutation: what a Triton op writes becomes a value, which Inductor's reinplacing
        # puts back into the input that it is copied to at the end of the graph.
        functional = dispatch_functionalize(fn)
        body = make_fx(functional, decomposition_table=select_decomp_table())(*values)
    body.graph.eliminate_dead_code()
    copied: dict[fx.Node, fx.Node] = dict(
        zip(body.graph.find_nodes(op="placeholder"), args, strict=True)
    )
    graph = before.graph
    with graph.inserting_before(before):
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copied[node] = graph.node_copy(node, copied.__getitem__)
                if "val" not in node.meta:
                    raise AssertionError(f"expected {node.name} to be traced with meta['val']")
                _copy_provenance(before, copied[node])
    results = body.graph.output_node().args[0]
    return [copied[node] for node in results]  # type: ignore[union-attr,index]  # fx output args


def _copy_provenance(source: fx.Node, target: fx.Node) -> None:
    for key in ("custom", "stack_trace", "from_node", "partitioner_tag"):
        if key in source.meta:
            target.meta[key] = source.meta[key]
