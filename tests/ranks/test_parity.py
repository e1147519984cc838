"""`method="none"` changes no numerics (I1): bit for bit the parameters of eager FSDP2.

Eager FSDP2 trains the same model on the same data in the same process; every rank compares its own
shards, its losses and which parameters got a gradient. The one exception is stated where it is
tested: several forwards before one backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from loco_compile import LoCoBackend, LoCoConfig
from tests.ranks.launch import RanksTest
from tests.ranks.models import AwkwardModel, batch, loss_of, shard_awkward

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

BACKEND = LoCoBackend(LoCoConfig(method="none", inner="aot_eager"))
NUM_STEPS = 10
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Step = Callable[[nn.Module, int, int], Tensor]
"""(model, rank, step) -> loss, after its backward."""


@dataclasses.dataclass
class Trained:
    """What one training run left on this rank."""

    losses: list[float]
    with_gradient: list[str]
    parameters: dict[str, Tensor]


def one_backward(model: Callable[..., Tensor], rank: int, step: int) -> Tensor:
    loss = loss_of(model, *batch(rank, step))
    loss.backward()
    return loss


def two_forwards_one_backward(model: Callable[..., Tensor], rank: int, step: int) -> Tensor:
    loss = loss_of(model, *batch(rank, step)) + loss_of(model, *batch(rank, step + 100))
    loss.backward()
    return loss


def two_forwards_two_backwards(model: Callable[..., Tensor], rank: int, step: int) -> Tensor:
    """Gradients accumulate over two micro-batches of one optimizer step."""
    return one_backward(model, rank, step) + one_backward(model, rank, step + 100)


def train(
    sharded: nn.Module, compiled: Callable[..., Tensor], rank: int, *, step: Step = one_backward
) -> Trained:
    """Take 10 AdamW steps with clipping."""
    named = dict(sharded.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, weight_decay=0.1)
    losses: list[float] = []
    with_gradient: list[str] = []
    for index in range(NUM_STEPS):
        losses.append(step(compiled, rank, index).item())
        with_gradient = [n for n, p in named.items() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {n: p.to_local().detach() for n, p in named.items()}
    return Trained(losses, with_gradient, parameters)


def whole(model: AwkwardModel) -> Callable[..., Tensor]:
    return torch.compile(model, backend=BACKEND)


def in_place(model: AwkwardModel) -> Callable[..., Tensor]:
    model.compile(backend=BACKEND)
    return model


def regional(model: AwkwardModel) -> Callable[..., Tensor]:
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


class ParityCase(RanksTest):
    """Compares runs; the subclasses say at how many ranks."""

    def check(
        self,
        *,
        num_ranks: int | None = None,
        wrap: Callable[[AwkwardModel], Callable[..., Tensor]] = whole,
        step: Step = one_backward,
        eager_step: Step | None = None,
        prepare: Callable[[AwkwardModel], None] = lambda model: None,
        prepare_eager: Callable[[AwkwardModel], None] | None = None,
        **options: Any,
    ) -> None:
        """Train eagerly and compiled; `prepare` and `options` set up both models."""
        mesh = self.mesh(num_ranks)
        if mesh.get_coordinate() is None:
            return  # this rank is not in it
        eager = shard_awkward(mesh, **options)
        (prepare_eager or prepare)(eager)
        expected = train(eager, eager, self.rank, step=eager_step or step)
        model = shard_awkward(mesh, **options)
        prepare(model)
        found = train(model, wrap(model), self.rank, step=step)
        self.assert_equal(found, expected)

    def assert_equal(self, found: Trained, expected: Trained) -> None:
        self.assertEqual(found.with_gradient, expected.with_gradient)
        unused = [n for n in expected.parameters if "unused" in n or "frozen" in n]
        self.assertTrue(unused and not set(unused) & set(found.with_gradient))
        different = {
            name: (parameter - found.parameters[name]).abs().max().item()
            for name, parameter in expected.parameters.items()
            if not torch.equal(parameter, found.parameters[name])
        }
        self.assertFalse(different, "largest difference of each parameter")
        self.assertEqual(found.losses, expected.losses, rtol=0, atol=0)


class TestParityOnOneAndTwoRanks(ParityCase):
    world_size = 2

    def test_ways_to_compile(self) -> None:
        with self.case(wrap="whole", precision="bfloat16, reduced in float32"):
            self.check(mp_policy=BF16_FP32)
        for wrap in (whole, in_place, regional):
            with self.case(wrap=wrap.__name__, precision="float32"):
                self.check(wrap=wrap)
        with self.case(wrap="torch.compile(train_step), backward outside"):
            self.check(wrap=lambda m: m, step=compiled_loss(), eager_step=one_backward)
        with self.case(wrap="torch.compile(train_step), backward inside"):
            step = torch.compile(one_backward, backend=BACKEND)
            self.check(wrap=lambda m: m, step=step, eager_step=one_backward)
        self.finish_cases()

    def test_one_rank(self) -> None:
        with self.case(precision="float32"):
            self.check(num_ranks=1)
        with self.case(precision="bfloat16, reduced in float32"):
            self.check(num_ranks=1, mp_policy=BF16_FP32)
        with self.case(divide_factor=4.0):
            self.check(num_ranks=1, num_blocks=1, prepare=lambda m: set_factor(m, 4.0))
        self.finish_cases()

    def test_policies(self) -> None:
        half, full = torch.bfloat16, torch.float32
        policies = {
            "reduced in bfloat16": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half),
            "reduced as it comes": MixedPrecisionPolicy(param_dtype=half),
            "reduced in float16": MixedPrecisionPolicy(reduce_dtype=torch.float16),
            "float16": MixedPrecisionPolicy(param_dtype=torch.float16),
            "inputs not cast": MixedPrecisionPolicy(
                param_dtype=half, reduce_dtype=full, cast_forward_inputs=False
            ),
        }
        for name, policy in policies.items():
            with self.case(policy=name):
                self.check(num_blocks=1, mp_policy=policy)
        output = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full, output_dtype=full)
        with self.case(policy="output in float32"):
            self.check(num_blocks=1, mp_policy=output)
        self.finish_cases()

    def test_reshard_after_forward(self) -> None:
        for value in (True, False):
            with self.case(reshard_after_forward=value):
                self.check(num_blocks=1, reshard_after_forward=value)
        self.finish_cases()

    def test_divide_factors(self) -> None:
        # gloo has no PREMUL_SUM, which eager FSDP2 asks for: let it sum and divide afterwards.
        # With a power of two both are exact.
        with self.case(divide_factor=8.0):
            self.check(
                num_blocks=1,
                prepare=lambda m: set_factor(m, 8.0),
                prepare_eager=lambda m: set_factor(m, 8.0, sums=True),
            )
        with self.case(divide_factor="W"):
            self.check(num_blocks=1, prepare=lambda m: set_factor(m, 2.0))
        with self.case(divide_factor=3.0, sums=True):
            self.check(num_blocks=1, prepare=lambda m: set_factor(m, 3.0, sums=True))
        self.finish_cases()

    def test_orders_of_forward_and_backward(self) -> None:
        for wrap in (whole, regional):
            with self.case(step="evaluate_between", wrap=wrap.__name__):
                self.check(num_blocks=1, step=evaluate_between, wrap=wrap)
        with self.case(step="two_forwards_two_backwards"):
            self.check(num_blocks=1, step=two_forwards_two_backwards)
        with self.case(step="two_forwards_one_backward"):
            self.check_two_forwards_one_backward()
        self.finish_cases()

    def check_two_forwards_one_backward(self) -> None:
        """Eager FSDP2 adds both gradients and reduces the sum; a graph reduces each, then adds.

        So the last bits differ: at most 2 W roundings (W - 1 additions and a division of each
        exchange, W or fewer; one more addition) of sums of 2 W terms, divided by W.
        """
        largest = torch.zeros(())
        for step in (0, 100):
            torch.manual_seed(0)
            plain = AwkwardModel(num_blocks=1)
            one_backward(plain, self.rank, step)
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    largest = torch.maximum(largest, parameter.grad.abs().max())
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        bound = 2 * self.world_size * 2**-24 * 2 * largest.item()

        eager = shard_awkward(self.mesh(), num_blocks=1)
        model = shard_awkward(self.mesh(), num_blocks=1)
        two_forwards_one_backward(eager, self.rank, 0)
        two_forwards_one_backward(whole(model), self.rank, 0)
        for (name, a), b in zip(eager.named_parameters(), model.parameters(), strict=True):
            self.assertEqual(a.grad is None, b.grad is None, name)
            if a.grad is not None:
                difference = (a.grad.to_local() - b.grad.to_local()).abs()
                self.assertTrue((difference <= bound).all(), name)


class TestParityOnThreeAndFourRanks(ParityCase):
    world_size = 4

    def test_core(self) -> None:
        for num_ranks in (3, 4):
            with self.case(num_ranks=num_ranks, precision="float32"):
                self.check(num_ranks=num_ranks)
            with self.case(num_ranks=num_ranks, precision="bfloat16, reduced in float32"):
                self.check(num_ranks=num_ranks, mp_policy=BF16_FP32)
        with self.case(reshard_after_forward=2):
            self.check(num_blocks=1, reshard_after_forward=2, mp_policy=BF16_FP32)
        with self.case(divide_factor=6.0, reduced="float16"):
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
            self.check(num_blocks=1, prepare=lambda m: set_factor(m, 6.0), mp_policy=policy)
        self.finish_cases()


def compiled_loss() -> Step:
    compiled = torch.compile(loss_of, backend=BACKEND)

    def step(model: Callable[..., Tensor], rank: int, index: int) -> Tensor:
        loss: Tensor = compiled(model, *batch(rank, index))
        loss.backward()
        return loss

    return step


def evaluate_between(model: Any, rank: int, step: int) -> Tensor:
    """A training step, then a forward in eval mode without gradients: its loss is returned."""
    one_backward(model, rank, step)
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, *batch(rank, step + 100))
    # Eager FSDP2 keeps the root gathered after a forward without backward: stale after the step.
    model.reshard()
    model.train()
    return loss


def set_factor(model: AwkwardModel, factor: float, *, sums: bool = False) -> None:
    for block in model.blocks:
        for module in (block, block.gain):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(sums)
    model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(sums)
