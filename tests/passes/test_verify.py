"""The last check in front of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.passes.markers import Tag
from loco_compile.passes.rewrite import rewrite
from loco_compile.passes.verify import collective_order, verify
from tests.graphs import fake_group
from tests.passes.bare import LOCO, RS, Grad, Traced, c10d, find, parameters, trace


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


def rewritten() -> tuple[Traced, list]:
    traced = trace(parameters((64, 128)))
    exchanges = traced.exchanges(LOCO)
    rewrite(traced.gm, exchanges=exchanges)
    return traced, exchanges


def test_a_rewritten_graph_passes() -> None:
    traced, exchanges = rewritten()
    assert verify(traced.gm, exchanges=exchanges) is traced.gm


def test_a_marker_that_is_left_is_refused() -> None:
    traced = trace(parameters((64, 128)))
    with pytest.raises(AssertionError, match=r"expected no markers after the passes, got \[mark"):
        verify(traced.gm, exchanges=[])
    tag = Tag(bucket="", name="w", index=0).dump()
    gm = make_fx(lambda x: torch.ops.loco_compile.mark_full(x, tag), tracing_mode="fake")(
        torch.randn(2)
    )
    with pytest.raises(AssertionError, match="expected no markers"):
        verify(gm, exchanges=[])


def test_a_reduce_scatter_that_should_be_gone_is_refused() -> None:
    traced = trace([Grad(is_marked=False)])
    planned = trace(parameters((64, 128))).exchanges(LOCO)
    (choice,) = planned[0].choices
    object.__setattr__(choice.site, "collective", find(traced.gm, RS)[0])
    with pytest.raises(AssertionError, match=r"expected block\.weight0 to be rewritten"):
        verify(traced.gm, exchanges=planned)


def graph_of(*collectives: str, waits: bool = True) -> fx.GraphModule:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        outs = []
        for name in collectives:
            if name == "all_to_all_single":
                out = c10d.all_to_all_single(x, [2, 2], [2, 2], "0")
            elif name == "reduce_scatter_tensor":
                out = c10d.reduce_scatter_tensor(x, "avg", 2, "0")
            else:
                out = c10d.all_gather_into_tensor(x, 2, "0")
            outs.append(c10d.wait_tensor(out) if waits else out)
        return tuple(outs)

    return make_fx(fn, tracing_mode="fake")(torch.randn(4))


@pytest.mark.parametrize(
    "name", ["all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor"]
)
def test_a_collective_without_a_wait_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match=f"expected a wait for {name}"):
        verify(graph_of(name, waits=False), exchanges=[])
    verify(graph_of(name), exchanges=[])


def test_a_node_without_metadata_is_refused() -> None:
    traced, exchanges = rewritten()
    node = next(n for n in traced.gm.graph.nodes if n.op == "call_function")
    del node.meta["val"]
    with pytest.raises(AssertionError, match=f"expected node {node.name} to carry"):
        verify(traced.gm, exchanges=exchanges)


def test_a_node_without_a_result_needs_no_metadata() -> None:
    gm = make_fx(torch.neg, tracing_mode="fake")(torch.randn(2))
    first, *_ = gm.graph.nodes
    with gm.graph.inserting_after(first):
        gm.graph.call_function(torch.ops.aten._assert_async.default, (first,))
    assert verify(gm, exchanges=[]) is gm


def test_order_of_collectives() -> None:
    names = ["all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"]
    for order in (names, names[::-1]):
        assert collective_order(graph_of(*order).graph) == [(name, "0") for name in order]
