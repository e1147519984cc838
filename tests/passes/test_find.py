"""What is found in a graph, and how far a gradient is followed back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.passes.find import find_gathers, find_sites, value
from loco_compile.passes.markers import Tag
from tests.graphs import fake_group
from tests.passes.bare import GATHER, PLAIN, RS, WAIT, Grad, c10d, find, trace

GROUP = "0"
BF16, FP32 = torch.bfloat16, torch.float32
TAG = Tag(bucket="block", name="weight", index=0)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


def traced(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs)


def source_of(prepare: Callable[[Tensor], Tensor], grad: Tensor) -> fx.Node:
    """The source of a site whose gradient `prepare` flattens; `sin` is what autograd left."""

    def backward(x: Tensor) -> Tensor:
        flat = prepare(x.sin())
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(flat, "avg", 2, GROUP))

    (site,) = find_sites(traced(backward, grad).graph)
    return site.source


def is_what_autograd_left(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sin.default


@pytest.mark.parametrize(
    ("prepare", "dtype"),
    [
        (lambda x: x.reshape(-1), FP32),
        (lambda x: x.reshape(-1).float(), BF16),
        (lambda x: x.float().reshape(-1), BF16),
        (lambda x: x.reshape(-1).float(), torch.float16),
        (lambda x: F.pad(x.reshape(-1), [0, 6]), FP32),
        (lambda x: F.pad(x.reshape(-1).float(), [0, 6]), BF16),
        (lambda x: x.reshape(8, 6).reshape(-1), FP32),
    ],
)
def test_exact_casts_views_and_padding_are_walked_through(
    prepare: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    assert is_what_autograd_left(source_of(prepare, torch.randn(6, 8, dtype=dtype)))


@pytest.mark.parametrize(
    ("prepare", "dtype"),
    [
        (lambda x: x.reshape(-1).bfloat16(), FP32),  # loses bits
        (lambda x: x.reshape(-1).half(), BF16),
        (lambda x: x.reshape(-1) * 0.5, FP32),  # changes values
        (lambda x: F.pad(x.reshape(-1), [6, 0]), FP32),  # shifts
        (lambda x: F.pad(x.reshape(-1), [0, 6], value=1.0), FP32),  # no zeros
        (lambda x: F.pad(x, [0, 2]).reshape(-1), FP32),  # columns: order changes
        (lambda x: x.t().contiguous().reshape(-1), FP32),  # order changes
    ],
)
def test_everything_else_stops_the_walk(
    prepare: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    assert not is_what_autograd_left(source_of(prepare, torch.randn(6, 8, dtype=dtype)))


def test_a_transposed_gradient_is_read_in_its_flat_order() -> None:
    # reshape(-1) of a transposed tensor copies: the source may be that copy, not the tensor.
    source = source_of(lambda x: x.t().reshape(-1), torch.randn(6, 8))
    assert not is_what_autograd_left(source)
    assert value(source).numel() == 48


def test_a_gradient_that_is_a_graph_input_is_its_own_source() -> None:
    gm = traced(
        lambda x: c10d.wait_tensor(c10d.reduce_scatter_tensor(x.reshape(-1), "sum", 2, GROUP)),
        torch.randn(4, 4),
    )
    (site,) = find_sites(gm.graph)
    assert site.source.op == "placeholder"
    assert (site.op, site.num_ranks, site.group_name, site.chunk_numel) == ("sum", 2, GROUP, 8)


def test_a_marked_site_has_what_the_marker_says() -> None:
    graph = trace([Grad(shape=(33, 96), shard_dtype=BF16)]).gm.graph
    (site,) = find_sites(graph)
    assert site.tag == TAG
    assert site.name == "block.weight"
    assert [e.op for e in site.errors] == ["placeholder"] * 3
    assert site.shard.target is torch.ops.loco_compile.mark_shard.default
    assert site.cast is not None
    assert site.out is site.cast
    assert (site.collective.target, site.wait.target) == (RS, WAIT)
    assert site.val.numel() == 34 * 96


def test_the_root_has_no_name_in_front() -> None:
    (site,) = find_sites(trace([Grad(bucket="")]).gm.graph)
    assert site.name == "weight"


def test_an_unmarked_site_ends_at_its_wait() -> None:
    (site,) = find_sites(trace([Grad(is_marked=False)]).gm.graph)
    assert site.tag is None
    assert site.errors == ()
    assert site.shard is site.wait is site.out
    assert site.name == site.collective.name


def test_a_cast_with_company_is_no_part_of_the_site() -> None:
    def backward(x: Tensor) -> tuple[Tensor, Tensor]:
        shard = c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "avg", 2, GROUP))
        return shard.bfloat16(), shard * 2

    (site,) = find_sites(traced(backward, torch.randn(16)).graph)
    assert site.cast is None


def test_every_reduce_scatter_is_found_in_graph_order() -> None:
    specs = [Grad(bucket=str(i), is_marked=i % 2 == 0) for i in range(4)]
    graph = trace(specs, PLAIN).gm.graph
    assert [s.collective for s in find_sites(graph)] == [n for n in graph.nodes if n.target is RS]


def test_gathers_are_found_through_views() -> None:
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        full = c10d.wait_tensor(c10d.all_gather_into_tensor(x.reshape(-1), 2, GROUP))
        full = torch.ops.loco_compile.mark_full(full.reshape(8, 4)[:7], TAG.dump())
        plain = c10d.wait_tensor(c10d.all_gather_into_tensor(y, 2, GROUP))  # not marked
        return full.sin(), plain

    gm = traced(forward, torch.randn(4, 4), torch.randn(6))
    (gather,) = find_gathers(gm.graph)
    assert gather.gather is find(gm, GATHER)[0]
    assert gather.wait is find(gm, WAIT)[0]
    assert (gather.num_ranks, gather.group_name, gather.tag) == (2, GROUP, TAG)
    assert value(gather.shard).shape == (16,)


def test_on_one_rank_nothing_was_gathered() -> None:
    gm = traced(
        lambda x: torch.ops.loco_compile.mark_full(x.reshape(4, 4), TAG.dump()), torch.ones(16)
    )
    assert find_gathers(gm.graph) == []


def test_a_node_without_a_tensor_is_refused() -> None:
    graph = fx.Graph()
    with pytest.raises(AssertionError, match="expected node x to carry a tensor"):
        value(graph.placeholder("x"))
