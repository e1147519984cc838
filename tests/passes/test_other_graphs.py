"""Graphs of replicas (HSDP), of gradients that are held, of other placements: their collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from expecttest import TestCase
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from loco_compile import LoCoBackend, explain
from loco_compile.passes.find import find_held_markers, find_shard_markers, find_sites
from loco_compile.passes.plan import Decline
from tests.graphs import Graphs, Stack, fake_group, outline, recorded, shard
from tests.passes.bare import LOCO


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_group(4):
        yield


def traced(
    model: Stack, prepare: Callable[[int], None] = lambda step: None, *, steps: int = 1
) -> Graphs:
    """Graphs of a model's steps; `prepare` is called before each of them."""
    with recorded() as graphs:
        model.compile(backend=LoCoBackend(LOCO))
        for step in range(steps):
            prepare(step)
            model(torch.randn(4, 64)).sum().backward()
    return graphs


def hybrid() -> Stack:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(Stack(num_blocks=1), mesh=mesh)


def collectives(graph: fx.Graph) -> str:
    """The outline without copies and waits."""
    rows = outline(graph).splitlines()
    return "\n".join(r for r in rows if not r.startswith(("copy_", "wait_tensor")))


class TestReplicas(TestCase):
    maxDiff = None

    def test_backward(self) -> None:
        """Of each group: one reduce-scatter, then codes, means and the exempt rest."""
        graphs = traced(hybrid())
        self.assertExpectedInline(
            collectives(graphs.modules[1].graph),
            """\
all_gather_into_tensor float32[16512]
reduce_scatter_tensor float32[8320]
all_to_all_single uint8[4224]
all_gather_into_tensor float32[8192]
all_reduce float32[128]
reduce_scatter_tensor float32[4096]
all_to_all_single uint8[2112]
all_gather_into_tensor float32[4096]""",
        )

    def test_reasons(self) -> None:
        choices = [c for e in traced(hybrid()).exchanges[1] for c in e.choices]
        inner = {c.decline for c in choices if c.site.kind == "reduce_scatter"}
        assert inner == {Decline.INSIDE_REPLICA}
        outer = {c.site.name: c.decline for c in choices if c.site.kind == "all_reduce"}
        assert outer["blocks.0.up.weight"] is None
        assert outer["blocks.0.norm.weight"] == Decline.ONE_DIMENSION

    def test_the_error_lies_on_the_shard(self) -> None:
        choices = [c for e in traced(hybrid()).exchanges[1] for c in e.compressed]
        layout = next(c.layout for c in choices if c.site.name == "blocks.0.up.weight")
        assert (layout.num_ranks, layout.chunk_numel) == (2, 128 * 64 // 4)

    def test_an_unmarked_all_reduce_is_none_of_ours(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.randn(4)
        op = torch.ops._c10d_functional.all_reduce.default
        reduced = graph.call_function(op, (x, "sum", "0"))
        graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))
        assert find_sites(graph) == []


class TestHeld(TestCase):
    maxDiff = None

    def test_held_and_added(self) -> None:
        """No exchange while gradients are held; then the sum is compressed where it is made."""
        model = shard(Stack(num_blocks=1))
        graphs = traced(model, lambda step: model.set_requires_gradient_sync(step > 0), steps=2)
        _, held, _, added = (g.graph for g in graphs.modules)
        self.assertExpectedInline(collectives(held), """all_gather_into_tensor float32[16512]""")
        self.assertExpectedInline(
            collectives(added),
            """\
all_gather_into_tensor float32[16512]
all_to_all_single uint8[8448]
reduce_scatter_tensor float32[64]
all_to_all_single uint8[4224]""",
        )
        for graph in (held, added):
            assert not find_held_markers(graph) and not find_shard_markers(graph)

    def test_switching_back_and_forth_compiles_nothing_new(self) -> None:
        model = shard(Stack(num_blocks=1))
        graphs = traced(
            model, lambda step: model.set_requires_gradient_sync(step % 2 == 1), steps=8
        )
        assert len(graphs.modules) == 4

    def test_leaves_take_no_memory_and_gradients_are_gone_after_a_step(self) -> None:
        model = shard(Stack(num_blocks=1))
        traced(model, lambda step: model.set_requires_gradient_sync(step > 0), steps=2)
        states = model._get_fsdp_state()._loco_states
        assert states
        for state in (p for s in states for p in s.parameters):
            assert state.held is not None
            assert state.held.untyped_storage().nbytes() == 0
            assert state.held.grad is None

    def test_explain_says_what_a_graph_that_reduces_does(self) -> None:
        model = shard(Stack(num_blocks=1))
        traced(model, lambda step: model.set_requires_gradient_sync(step % 2 == 1), steps=1)
        assert {row.reason for row in explain(model).rows} == {Decline.HELD.value}
        traced(model, lambda step: model.set_requires_gradient_sync(step % 2 == 1), steps=2)
        reduced = explain(model)
        assert "loco" in {row.method for row in reduced.rows}
        traced(model, lambda step: model.set_requires_gradient_sync(False), steps=1)
        assert explain(model) == reduced

    def test_one_block_may_hold_while_another_reduces(self) -> None:
        """One graph serves both under regional compile: what each ran with is its own."""
        model = shard(Stack(num_blocks=2))
        first, second = model.blocks
        model.set_requires_gradient_sync(False)
        for block in (first, second):
            block.compile(backend=LoCoBackend(LOCO))
        x = torch.randn(4, 64)
        second(first(x)).sum().backward()
        first.set_requires_gradient_sync(True, recurse=False)
        second(first(x)).sum().backward()
        states = [block._get_fsdp_state()._loco_states[0] for block in (first, second)]
        assert [s.parameters[2].held.grad is None for s in states] == [True, False]
        loss = second(first(x)).sum()
        second.set_requires_gradient_sync(True, recurse=False)
        with pytest.raises(RuntimeError, match=r"\(root\)' ran forward with"):
            loss.backward()


def test_columns_are_compressed_in_the_order_of_ranks() -> None:
    model = shard(
        Stack(num_blocks=1), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None
    )
    graphs = traced(model)
    assert collectives(graphs.modules[1].graph).count("all_to_all_single") == 2
    site = next(
        c.site
        for e in graphs.exchanges[1]
        for c in e.compressed
        if c.site.name == "blocks.0.up.weight"
    )
    assert site.chunk_numel == 128 * 64 // 4
