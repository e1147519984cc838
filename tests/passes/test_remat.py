"""Which full parameters live from forward to backward: seen in what the forward graph returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from loco_compile import LoCoBackend, LoCoConfig
from loco_compile.passes.find import find_full_markers
from loco_compile.passes.markers import Tag
from loco_compile.passes.remat import AC_GRAPH_ID, remat
from tests.graphs import Graphs, Stack, fake_group, recorded, shard
from tests.passes.bare import GATHER, LOCO, PLAIN, c10d, text

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = {(128, 64), (64, 128), (64, 64), (8192,), (4096,)}
"""Shapes of the full matrices of a Stack, transposed and flat. Its batch has 4 rows."""


class Powers(nn.Module):
    """Uses its matrix only through what is computed from it: a cast, a product, a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (self.weight.double() * 2).sin().float()
        return torch.relu(x @ scaled) @ self.weight.t().exp()


def traced(model: Callable[[], nn.Module], config: LoCoConfig = LOCO) -> Graphs:
    with fake_group(2), recorded() as graphs:
        compiled = torch.compile(model(), backend=LoCoBackend(config))
        compiled(torch.randn(4, 64, requires_grad=True)).sum().backward()
    return graphs


def sharded_stack(**options: Any) -> Callable[[], nn.Module]:
    return lambda: shard(Stack(num_blocks=2), **options)


def saved(graphs: Graphs) -> list[fx.Node]:
    outputs = graphs.modules[0].graph.output_node().args[0]
    return [n for n in outputs if isinstance(n, fx.Node)]


def ancestors(node: fx.Node) -> set[fx.Node]:
    found, todo = {node}, [node]
    while todo:
        for parent in todo.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                todo.append(parent)
    return found


def saved_full_parameters(graphs: Graphs) -> list[tuple[int, ...]]:
    """Shapes of saved tensors that are a full parameter or computed from full parameters alone."""
    shapes = []
    for node in saved(graphs):
        above = ancestors(node)
        uses_input = any(n.op == "placeholder" and n.meta["val"].shape == (4, 64) for n in above)
        if any(n.target is GATHER for n in above) and not uses_input:
            shapes.append(tuple(node.meta["val"].shape))
    return shapes


def num_gathers(graphs: Graphs, which: int) -> int:
    return len(graphs.modules[which].graph.find_nodes(op="call_function", target=GATHER))


@pytest.mark.parametrize("config", [LOCO, PLAIN])
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}])
def test_true_frees_every_parameter_and_gathers_it_again(
    config: LoCoConfig, options: dict[str, Any]
) -> None:
    graphs = traced(sharded_stack(reshard_after_forward=True, **options), config)
    assert saved_full_parameters(graphs) == []
    shapes = {tuple(n.meta["val"].shape) for n in saved(graphs) if n.op != "placeholder"}
    assert not shapes & FULL
    assert num_gathers(graphs, 0) == 3
    assert num_gathers(graphs, 1) == 3


@pytest.mark.parametrize("config", [LOCO, PLAIN])
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}])
def test_false_keeps_every_parameter_and_gathers_none_again(
    config: LoCoConfig, options: dict[str, Any]
) -> None:
    graphs = traced(sharded_stack(reshard_after_forward=False, **options), config)
    assert num_gathers(graphs, 1) == 0
    # first, last; up, down and norm.weight, norm.bias of two blocks.
    numels = sorted(torch.Size(s).numel() for s in saved_full_parameters(graphs))
    assert numels == sorted([4096, 4096] + 2 * [8192, 8192, 64, 64])


def test_by_default_the_root_is_kept_and_blocks_are_freed() -> None:
    graphs = traced(sharded_stack())
    assert sorted(saved_full_parameters(graphs)) == [(64, 64), (64, 64)]
    assert num_gathers(graphs, 1) == 2


@pytest.mark.parametrize("reshards", [True, False])
def test_what_is_computed_from_a_parameter_alone_is_not_saved_either(reshards: bool) -> None:
    graphs = traced(lambda: fully_shard(Powers(), reshard_after_forward=reshards))
    assert num_gathers(graphs, 1) == int(reshards)
    if reshards:
        assert saved_full_parameters(graphs) == []


def test_checkpointed_blocks_save_no_parameter() -> None:
    model = Stack(num_blocks=2)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)  # inside the sharded module, as torchtitan does
    graphs = traced(lambda: shard(model, reshard_after_forward=True))
    assert saved_full_parameters(graphs) == []
    # The inner activations are recomputed too: only the blocks' inputs are saved.
    assert not [n for n in saved(graphs) if tuple(n.meta["val"].shape) == (4, 128)]


# --- on a bare graph


def joint(tag: Tag) -> fx.GraphModule:
    def forward(shard: Tensor, x: Tensor) -> Tensor:
        full = c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, "0")).reshape(8, 4)
        full = torch.ops.loco_compile.mark_full(full, tag.dump())
        return (x @ full.bfloat16().float()).sin() @ full.t().sin()

    with fake_group(2):
        return make_fx(forward, tracing_mode="fake")(torch.randn(16), torch.randn(3, 8))


def tagged(gm: fx.GraphModule) -> dict[str, CheckpointPolicy]:
    return {n.name: n.meta["recompute"] for n in gm.graph.nodes if "recompute" in n.meta}


def test_the_gather_and_all_that_depends_on_it_alone_is_recomputed() -> None:
    gm = joint(Tag(bucket="b", name="w", index=0, regathers=True))
    before = text(gm)
    assert remat(gm.graph) is gm.graph
    assert text(gm) == before  # metadata only
    policies = tagged(gm)
    assert set(policies.values()) == {CheckpointPolicy.MUST_RECOMPUTE}
    left = {n.name for n in gm.graph.nodes if n.op == "call_function"} - set(policies)
    # The two products and the sine between them: they depend on x.
    assert len(left) == 3
    assert all(n.meta["ac_graph_id"] == AC_GRAPH_ID for n in gm.graph.nodes if n.name in policies)


def test_a_parameter_that_is_kept_is_saved_at_its_marker() -> None:
    gm = joint(Tag(bucket="b", name="w", index=0, regathers=False))
    (marker,) = find_full_markers(remat(gm.graph))
    assert tagged(gm) == {marker.name: CheckpointPolicy.MUST_SAVE}


def test_a_parameter_with_a_smaller_mesh_is_left_to_reshard() -> None:
    gm = joint(Tag(bucket="b", name="w", index=0, regathers=True, smaller_ranks=2))
    remat(gm.graph)
    assert tagged(gm) == {}


def test_a_graph_without_markers_is_left_alone() -> None:
    gm = make_fx(lambda x: x.sin(), tracing_mode="fake")(torch.randn(3))
    remat(gm.graph)
    assert tagged(gm) == {}
