"""The error follows GradScaler: with powers of two, the same bits as without a scaler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from loco_compile import LoCoBackend, LoCoConfig, error_state
from tests.ranks.features import LOCO, PARITY, FeatureTest, local, net, tokens, whole

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.features]


def train(
    model: nn.Module,
    call: Callable[..., Tensor],
    rank: int,
    scaler: GradScaler | None,
    *,
    overflow_at: int | None = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        loss = call(*tokens(rank, step)).pow(2).mean()
        if step == overflow_at and rank == 1:
            loss = loss * float("inf")
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        after_step(step)
        optimizer.zero_grad()
    return {n: local(p).detach().clone() for n, p in model.named_parameters()}


class TestLossScale(FeatureTest):
    world_size = 2

    def assert_same(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        self.assertTrue(expected)
        for name, value in expected.items():
            self.assertTrue(torch.equal(found[name], value), name)

    def test_a_growing_scale_changes_no_bit(self) -> None:
        with self.case(scaler="doubles every second step"):
            runs = []
            for scaler in (None, GradScaler("cpu", init_scale=2.0**6, growth_interval=2)):
                model = net()()
                torch._dynamo.reset()
                runs.append(train(model, whole(model, LOCO), self.rank, scaler))
                self.assertTrue(any(error_state(model).norms().values()))
            self.assertGreater(scaler.get_scale(), 2.0**6)
            self.assert_same(runs[1], runs[0])
        self.finish_cases()

    def test_an_overflow_drops_the_error_on_all_ranks(self) -> None:
        with self.case(overflow="on rank 1 in step 2"):
            model = net()()
            scaler = GradScaler("cpu", init_scale=2.0**6, growth_interval=100)
            norms: list[float] = []

            def note(step: int) -> None:
                norms.append(sum(error_state(model).norms().values()))

            found = train(
                model, whole(model, LOCO), self.rank, scaler, overflow_at=2, after_step=note
            )
            self.assertEqual([n == 0.0 for n in norms], [False, False, True, False, False])
            self.assertEqual(scaler.get_scale(), 2.0**5)
            self.assertTrue(all(v.isfinite().all() for v in found.values()))
        self.finish_cases()

    def test_parity_with_eager(self) -> None:
        with self.case(method="none"):
            scalers = [GradScaler("cpu", init_scale=2.0**6, growth_interval=2) for _ in range(2)]
            eager = net()()
            expected = train(eager, eager, self.rank, scalers[0], overflow_at=2)
            model = net()()
            call = whole(model, PARITY)
            found = train(model, call, self.rank, scalers[1], overflow_at=2)
            self.assert_same(found, expected)
        self.finish_cases()

    def test_fixed_scales_are_refused(self) -> None:
        with self.case(scale="fixed"):
            config = LoCoConfig(inner="aot_eager", min_numel=0, scale="fixed", error_scale="fixed")
            model = net()()
            with self.assertRaisesRegex(NotImplementedError, "scale='block'"):
                train(model, whole(model, LoCoBackend(config)), self.rank, GradScaler("cpu"))
        self.finish_cases()
