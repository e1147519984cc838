"""`loco_compile.eager`: the root that stays eager under regional compile is compressed, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from loco_compile import LoCoBackend, LoCoConfig, PlanMismatchError, eager, error_state, explain
from tests.ranks.features import (
    LOCO,
    Feature,
    FeatureTest,
    local,
    net,
    regional,
    sync_on,
    tokens,
    whole,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.features]


def regional_with_root(model: nn.Module, backend: LoCoBackend) -> Callable[..., Any]:
    eager.compress(model, backend.config)
    return regional(model, backend)


def only_root(model: nn.Module, backend: LoCoBackend) -> Callable[..., Any]:
    """No compiled region at all."""
    eager.compress(model, backend.config)
    return model


class TestEager(FeatureTest):
    world_size = 2

    def test_features(self) -> None:
        self.check("regional, root eager", Feature(net(), wrap=regional_with_root))
        self.check("nothing compiled", Feature(net(), wrap=only_root))
        held = Feature(
            net(), wrap=regional_with_root, micro_batches=sync_on(1), num_micro_batches=2
        )
        self.check("no_sync", held)
        self.finish_cases()

    def test_the_same_bits_as_a_compiled_root(self) -> None:
        for fields in (
            {},
            {"bits": 8, "scale": "fixed", "error_scale": "fixed"},
            {"start_step": 2},
        ):
            with self.case(**fields):
                config = LoCoConfig(inner="aot_eager", min_numel=100, reset_interval=3, **fields)
                feature = Feature(net())
                runs = []
                for wrap in (whole, regional_with_root):
                    model = feature.build()
                    call = wrap(model, LoCoBackend(config))
                    runs.append(self._train(feature, model, call, steps=5))
                    torch._dynamo.reset()
                for name, value in runs[0].parameters.items():
                    self.assertTrue(torch.equal(value, runs[1].parameters[name]), name)
        self.finish_cases()

    def test_explain_says_which_way(self) -> None:
        with self.case(compiled="blocks"):
            model = net()()
            regional_with_root(model, LOCO)(*tokens(self.rank, 0)).sum().backward()
            ways = {(row.name, row.way, row.method) for row in explain(model).rows}
            self.assertIn(("(root)", "eager", "loco"), ways)
            self.assertIn(("blocks.0", "compiled", "loco"), ways)
            matrices = {n for n, p in model.named_parameters() if p.dim() > 1}
            self.assertEqual(set(error_state(model).names()), matrices)
        self.finish_cases()

    def test_a_root_that_is_compiled_after_all_is_refused(self) -> None:
        with self.case(compiled="the root"):
            model = net()()
            eager.compress(model)
            with self.assertRaisesRegex(NotImplementedError, "eager.compress"):
                whole(model, LOCO)(*tokens(self.rank, 0))
        self.finish_cases()

    def test_ranks_that_plan_differently(self) -> None:
        with self.case(different="bits"):
            model = net()()
            eager.compress(model, LoCoConfig(min_numel=0, bits=8 if self.rank else 4))
            loss = model(*tokens(self.rank, 0)).sum()
            with self.assertRaisesRegex(PlanMismatchError, "LoCoConfig"):
                loss.backward()
        self.finish_cases()

    def test_refused(self) -> None:
        with self.case(module="not sharded"):
            with self.assertRaisesRegex(ValueError, "fully_shard"):
                eager.compress(nn.Linear(2, 2))
            with self.assertRaisesRegex(TypeError, "LoCoConfig"):
                eager.compress(net()(), {"bits": 4})
        with self.case(mesh="replicas"):
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            with self.assertRaisesRegex(NotImplementedError, "replicas"):
                eager.compress(net(mesh=mesh)())
        with self.case(twice=True):
            model = net()()
            eager.compress(model)
            with self.assertRaisesRegex(NotImplementedError, "custom reduce-scatter"):
                eager.compress(model)
        self.finish_cases()

    def test_gradients_are_those_of_fsdp2_with_one_reduction_op_more(self) -> None:
        """A factor is a premultiplied sum in FSDP2, which gloo has not: sums are forced here."""
        with self.case(factor=2.0):
            gradients = []
            for factor in (None, 2.0):
                model = net()()
                eager.compress(model, LOCO.config)
                model.set_force_sum_reduction_for_comms(True)
                model.set_gradient_divide_factor(factor)
                model(*tokens(self.rank, 0)).sum().backward()
                gradients.append(local(model.head.weight.grad))
            self.assertTrue(torch.equal(*gradients))
        self.finish_cases()
