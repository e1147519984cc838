"""Traced functions are copied into graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.passes.splice import splice
from tests.passes.bare import promised_and_real

aten = torch.ops.aten


def graph_of_sin_cos() -> fx.GraphModule:
    return make_fx(lambda x: x.sin().cos(), tracing_mode="fake")(torch.randn(4, 3))


def test_nodes_stand_in_front_and_have_metadata() -> None:
    gm = graph_of_sin_cos()
    sin, cos = (n for n in gm.graph.nodes if n.op == "call_function")
    product, total = splice(lambda s: (s * 2, (s * 2).sum(0)), [sin], before=cos)
    nodes = list(gm.graph.nodes)
    assert nodes.index(sin) < nodes.index(product) < nodes.index(cos)
    assert nodes.index(sin) < nodes.index(total) < nodes.index(cos)
    assert product.meta["val"].shape == (4, 3)
    assert total.meta["val"].shape == (3,)
    cos.replace_input_with(sin, product)
    gm.graph.lint()
    gm.recompile()
    x = torch.randn(4, 3)
    assert torch.equal(gm(x), (x.sin() * 2).cos())
    assert all(promise == real for _, promise, real in promised_and_real(gm))


def test_dead_code_is_not_copied() -> None:
    gm = graph_of_sin_cos()
    sin, cos = (n for n in gm.graph.nodes if n.op == "call_function")
    before = len(gm.graph.nodes)

    def wasteful(s: Tensor) -> tuple[Tensor]:
        s.exp().tan()
        return (s + 1,)

    splice(wasteful, [sin], before=cos)
    assert len(gm.graph.nodes) == before + 1


def test_an_argument_may_be_returned() -> None:
    gm = graph_of_sin_cos()
    sin, cos = (n for n in gm.graph.nodes if n.op == "call_function")
    assert splice(lambda s: (s,), [sin], before=cos) == [sin]


def test_writes_in_place_become_values() -> None:
    gm = graph_of_sin_cos()
    sin, cos = (n for n in gm.graph.nodes if n.op == "call_function")

    def write(s: Tensor) -> tuple[Tensor]:
        out = torch.zeros_like(s)
        out.add_(s)
        return (out,)

    (out,) = splice(write, [sin], before=cos)
    assert all(not n.target._schema.is_mutable for n in gm.graph.nodes if n.op == "call_function")
    assert out.meta["val"].shape == (4, 3)


def test_inductors_decompositions_are_applied() -> None:
    gm = graph_of_sin_cos()
    sin, cos = (n for n in gm.graph.nodes if n.op == "call_function")
    splice(lambda s: (s.to(torch.bfloat16),), [sin], before=cos)
    targets = {n.target for n in gm.graph.nodes}
    assert torch.ops.prims.convert_element_type.default in targets
    assert aten._to_copy.default not in targets


def test_provenance_is_that_of_the_node_behind() -> None:
    gm = graph_of_sin_cos()
    sin, cos = (n for n in gm.graph.nodes if n.op == "call_function")
    cos.meta["custom"], cos.meta["stack_trace"] = {"a": 1}, "there"
    (node,) = splice(lambda s: (s * 2,), [sin], before=cos)
    assert node.meta["custom"] == {"a": 1}
    assert node.meta["stack_trace"] == "there"


def test_real_tensors_in_the_metadata_are_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.randn(2)
    output = graph.output(x)
    with pytest.raises(AssertionError, match="expected fake tensors"):
        splice(lambda s: (s + 1,), [x], before=output)
