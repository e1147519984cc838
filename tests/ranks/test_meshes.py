"""Meshes of docs/fsdp2.md on four real ranks: parity without, conservation with compression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from loco_compile import explain
from tests.ranks.features import LOCO, Feature, FeatureTest, Net, local, net, shard, tokens, whole

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.features]

BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def all_reduce_on(last: int) -> Callable[[nn.Module, int], None]:
    """Nothing in the first micro-batch, within replicas in the next, everywhere in the last."""

    def switch(model: nn.Module, index: int) -> None:
        model.set_requires_gradient_sync(index > 0)
        model.set_requires_all_reduce(index == last)

    return switch


def hybrid(shape: tuple[int, int], **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        return net(mesh=mesh, **options)()

    return build


def on_columns(**options: Any) -> Callable[[], nn.Module]:
    def placement(parameter: Tensor) -> Shard:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % 4 == 0 else Shard(0)

    return net(shard_placement_fn=placement, **options)


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
    return shard(model, mesh=mesh["data"])


def on_two_meshes() -> nn.Module:
    """Each block's matrices are sharded over 2 ranks, as experts are; the rest over all."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    everyone = init_device_mesh("cpu", (4,))
    narrow = common.FSDPMeshInfo(meshes["inner"], shard_mesh_dim=0)
    wide = common.FSDPMeshInfo(everyone, shard_mesh_dim=0)
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        experts = {block.up.weight, block.down.weight}

        def place(parameter: nn.Parameter, experts: set[Tensor] = experts) -> Any:
            info = narrow if parameter in experts else wide
            return common.ShardPlacementResult(Shard(0), info)

        fully_shard(block, mesh=everyone, shard_placement_fn=place)
    return fully_shard(model, mesh=everyone)


def without_clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clipping cannot mix parameters of different meshes."""
    optimizer.step()
    optimizer.zero_grad()


class TestOnFourRanks(FeatureTest):
    world_size = 4

    def test_replicas(self) -> None:
        self.check("HSDP, 2 x 2", Feature(hybrid((2, 2))))
        with self.case(feature="HSDP, 4 x 1, bfloat16"):
            self.assert_parity(Feature(hybrid((4, 1), mp_policy=BF16_FP32)))
        partial = Feature(hybrid((2, 2)), micro_batches=all_reduce_on(2), num_micro_batches=3)
        self.check("HSDP, set_requires_all_reduce", partial)
        self.finish_cases()

    def test_explain_lists_both_reductions(self) -> None:
        with self.case(feature="HSDP, 2 x 2"):
            model = hybrid((2, 2))()
            whole(model, LOCO)(*tokens(self.rank, 0)).sum().backward()
            rows = [r for r in explain(model).rows if "blocks.0.up.weight" in r.parameters]
            found = {r.collective: r for r in rows}
            self.assertEqual(len(rows), len(found))
            inner, outer = found["reduce-scatter"], found["all-reduce"]
            self.assertIn("inside a replica", inner.reason)
            # Two matrices of 512 elements: a rank holds 256 of each, and all-reduces 128 twice.
            self.assertEqual((outer.method, outer.bytes_before), ("loco", 2 * 2 * 128 * 4))
            message = 2 * 128 // 2 + 2 * 2  # codes of two chunks of 128 elements, a scale for each
            padded = -(-message // 16) * 16
            self.assertEqual(outer.bytes_on_wire, padded + 2 * 128 * 4)
            self.assertEqual(inner.bytes_on_wire, inner.bytes_before)
        self.finish_cases()

    def test_replicas_hold_the_same(self) -> None:
        with self.case(feature="HSDP, 2 x 2"):
            model = hybrid((2, 2))()
            call = whole(model, LOCO)
            call(*tokens(self.rank, 0)).sum().backward()
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for name, parameter in model.named_parameters():
                own = local(parameter.grad).contiguous()
                both = [torch.empty_like(own) for _ in range(2)]
                torch.distributed.all_gather(both, own, group=mesh.get_group("replicate"))
                self.assertTrue(torch.equal(*both), name)
        self.finish_cases()

    def test_placements(self) -> None:
        self.check("Shard(1)", Feature(on_columns()))
        self.finish_cases()

    def test_other_meshes(self) -> None:
        self.check(
            "tensor parallel",
            Feature(
                tensor_parallel,
                data=lambda rank, step: tokens(rank // 2, step),
                around_step=without_clipping,
            ),
        )
        self.check("two meshes", Feature(on_two_meshes, around_step=without_clipping))
        self.finish_cases()
