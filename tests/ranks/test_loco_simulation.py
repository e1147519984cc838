"""LoCo on 2 and 4 ranks is the simulated LoCo, code for code (E1 to E8; I2, I3, I9).

The loss is the sum of `parameter * given`, so that each gradient is exactly what a test gives.
"""

from __future__ import annotations

import math
import unittest
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from loco_compile import LoCoBackend, LoCoConfig, error_state
from tests.ranks.launch import RanksTest
from tests.ranks.simulation import Array, Method, Sender, mean

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Rows that 2 or 4 do not divide, ranks with an empty shard, chunks shorter than a block, of one
# block, and with a short last one.
INNER_SHAPES = {"wide": (37, 130), "row": (1, 700)}
SHAPES = {"tall": (150, 6), "even": (8, 512), "tiny": (3, 7), "vector": (40,)}
FIXED = {"scale": "fixed", "fixed_scale": 2.0**5}
FIXED_ERROR = {"error_scale": "fixed", "fixed_error_scale": 2.0**8}


class Given(nn.Module):
    """Parameters of given shapes; forward sums `parameter * given`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return sum((p * given[n].to(p.dtype)).sum().float() for n, p in self.named_parameters())


class Nested(Given):
    """A group of its own within the root's."""

    def __init__(self) -> None:
        super().__init__(SHAPES)
        self.inner = Given(INNER_SHAPES)

    def forward(self, given: dict[str, Tensor], given_inner: dict[str, Tensor]) -> Tensor:
        own = [(getattr(self, n) * g.to(getattr(self, n).dtype)).sum() for n, g in given.items()]
        return sum(x.float() for x in own) + self.inner(given_inner)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """A rank's gradients of one step: rows of very different size, silent rows, silent steps."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = {}
    for name, shape in {**SHAPES, **INNER_SHAPES}.items():
        size = 10 ** -(3 * torch.rand(shape[0], generator=generator))
        size[torch.rand(shape[0], generator=generator) < 0.1] = 0.0
        size = size.reshape(-1, *[1] * (len(shape) - 1))
        found[name] = size * torch.randn(shape, generator=generator)
        if step % 5 == 4 and name in ("tall", "row"):
            found[name] = torch.zeros(shape)
    return found


class SimulationCase(RanksTest):
    """Runs the model and the simulation of all ranks side by side."""

    def start(self, config: LoCoConfig, **options: Any) -> None:
        self.config = config
        self.model = Nested()
        mesh = self.mesh()
        fully_shard(self.model.inner, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)
        self.compiled = torch.compile(self.model, backend=LoCoBackend(config))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        method = Method(
            bits=config.bits,
            block=config.block_numel,
            decay=config.error_decay,
            scale=config.fixed_scale if config.scale == "fixed" else None,
            error_scale=config.fixed_error_scale if config.error_scale == "fixed" else None,
        )
        compressed = {n: s for n, s in {**SHAPES, **INNER_SHAPES}.items() if len(s) > 1}
        self.senders = {
            name: [
                Sender(self.world_size, self.chunk(shape), method) for _ in range(self.world_size)
            ]
            for name, shape in compressed.items()
        }

    def chunk(self, shape: tuple[int, ...]) -> int:
        """N: FSDP2 gives each rank ceil(rows / W) rows, the last ones fewer or none."""
        return -(-shape[0] // self.world_size) * math.prod(shape[1:])

    def backward(self, given: list[dict[str, Tensor]]) -> None:
        """Run a backward on this rank, and the simulation of all."""
        own = given[self.rank]
        loss = self.compiled({n: own[n] for n in SHAPES}, {n: own[n] for n in INNER_SHAPES})
        loss.backward()
        for name, senders in self.senders.items():
            for rank, sender in enumerate(senders):
                sender.send(given[rank][name].double().numpy())

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shards(self) -> Iterator[tuple[str, Array]]:
        """This rank's shard of each compressed gradient, padded to the whole chunk with zeros."""
        for full_name, parameter in self.model.named_parameters():
            name = full_name.removeprefix("inner.")
            if name in self.senders:
                local = parameter.grad.to_local().double().numpy().ravel()
                yield name, np.pad(local, (0, self.senders[name][0].chunk - local.size))

    def errors(self) -> Iterator[tuple[str, Array, Array]]:
        """Stored codes (W, B, K) and scales (W, B, 1) of each compressed parameter."""
        num_planes = 8 // self.config.bits
        for state in error_state(self.model):
            planes = torch.stack(list(state.error[:num_planes]), dim=2).double()
            ranks, blocks, *_ = planes.shape
            scales = np.zeros((ranks, blocks, 1))
            if len(state.error) > num_planes:
                scales = (
                    state.error[num_planes].double().numpy().reshape(ranks, blocks, -1)[..., :1]
                )
            yield (
                state.name.removeprefix("inner."),
                planes.reshape(ranks, blocks, -1).numpy(),
                scales,
            )

    def assert_errors_equal(self) -> None:
        names = []
        for name, codes, scales in self.errors():
            sender = self.senders[name][self.rank]
            np.testing.assert_array_equal(codes, sender.codes, name)
            np.testing.assert_array_equal(scales, sender.error_steps, name)
            names.append(name)
        self.assertEqual(sorted(names), sorted(self.senders))

    def assert_shards_equal(self) -> None:
        """Sums of W exact terms in float32: W - 1 roundings, one more of the division."""
        for name, shard in self.shards():
            expected, magnitude = mean(self.senders[name], self.rank, self.world_size)
            np.testing.assert_array_equal(np.isnan(shard), np.isnan(expected), name)
            bound = self.world_size * 2.0**-24 * magnitude * (1 + 2.0**-20)
            self.assertTrue((np.abs(shard - expected) <= bound)[~np.isnan(expected)].all(), name)

    def check(self, *, policy: MixedPrecisionPolicy | None = None, **fields: Any) -> None:
        """20 steps with resets after the 7th and the 14th."""
        config = LoCoConfig(min_numel=0, reset_interval=7, **{"inner": "aot_eager", **fields})
        self.start(config, **({"mp_policy": policy} if policy else {}))
        for step in range(20):
            given = [gradients(rank, step) for rank in range(self.world_size)]
            if policy:
                given = [{n: g.to(policy.param_dtype) for n, g in each.items()} for each in given]
            self.backward(given)
            self.assert_errors_equal()
            self.assert_shards_equal()
            self.optimizer_step()
            if (step + 1) % 7 == 0:
                for sender in self.all_senders():
                    sender.reset()
                self.assert_errors_equal()

    def all_senders(self) -> list[Sender]:
        return [s for senders in self.senders.values() for s in senders]


class TestSimulationOnTwoRanks(SimulationCase):
    world_size = 2

    def test_code_for_code(self) -> None:
        cases: dict[str, dict[str, Any]] = {
            "block scale": {},
            "block scale, last error only": {"error_decay": 0.0},
            "fixed scale": {**FIXED, **FIXED_ERROR},
            "fixed scale, last error only": {**FIXED, **FIXED_ERROR, "error_decay": 0.0},
            "fixed scale, block scale of the error": FIXED,
        }
        for name, fields in cases.items():
            with self.case(config=name):
                self.check(**fields)
        self.finish_cases()

    def test_code_for_code_of_other_formats(self) -> None:
        with self.case(config="8 bits"):
            self.check(bits=8)
        with self.case(config="short blocks, inductor"):
            self.check(block_numel=64, inner="inductor")
        for dtype in (torch.bfloat16, torch.float16):
            half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            with self.case(config=f"gradients in {dtype}"):
                self.check(policy=half)
        self.finish_cases()

    def test_divide_factors(self) -> None:
        """I2: any factor divides the sum, and over constant gradients the mean is the mean."""
        sums = {"factor": 3.0, "sums": True}
        for settings in ({}, {"factor": 8.0}, {"factor": 2.0}, {"factor": 0.3}, sums):
            with self.case(**settings):
                self.check_mean(**settings)
        half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        with self.case(reduced="float16"):
            self.check_mean(mp_policy=half)
        self.finish_cases()

    def check_mean(
        self, *, factor: float | None = None, sums: bool = False, **options: Any
    ) -> None:
        """|sum of K shards - K * mean| is a mean of errors at error_decay 0, whatever K.

        An element's residual is at most one step t (the clipped positive end; half a step else),
        with t <= max|h| / 8 * (1 + 2^-7), and |h| <= |g| + the last residual, so t <= max|g| / 6.8.
        Each step loses at most one error step, t / 128. float16 rounds every exchange by 2^-11 of
        its gradients three times (as they come, divided, the shard): t / 64 each.
        """
        num_steps = 32
        config = LoCoConfig(
            min_numel=0, reset_interval=0, inner="aot_eager", error_decay=0.0, block_numel=64
        )
        self.start(config, **options)
        for module in (self.model.inner, self.model):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(sums)
        given = [gradients(rank, 0) for rank in range(self.world_size)]
        lost = 1 / 128 + (3 / 64 if options else 0)
        totals: dict[str, Array] = {}
        for step in range(num_steps):
            self.backward(given)
            for name, shard in self.shards():
                totals[name] = totals.get(name, 0.0) + shard
                if step == 0 or step == num_steps - 1:
                    average, bound = totals[name] / (step + 1), 1 / (step + 1) + lost
                    self.assert_is_mean(name, average, given, factor, bound)
            self.optimizer_step()

    def assert_is_mean(
        self, name: str, shard: Array, given: list[dict[str, Tensor]], factor: Any, bound: float
    ) -> None:
        """Compare with the plain mean; `bound` is in wire steps."""
        sender = self.senders[name][0]
        blocks = np.stack([sender.blocks(g[name].double().numpy())[self.rank] for g in given])
        divisor = factor or self.world_size
        expected = sender.flat(np.broadcast_to(blocks.sum(0), sender.codes.shape), 0) / divisor
        steps = (np.abs(blocks).max(-1, keepdims=True) / 6.8).sum(0) / divisor
        steps = sender.flat(np.broadcast_to(steps, sender.codes.shape), 0)
        self.assertTrue((np.abs(shard - expected) <= steps * bound).all(), name)

    def test_conservation(self) -> None:
        """I3: what was not sent is in the error, and stays bounded."""
        config = LoCoConfig(min_numel=0, reset_interval=0, error_decay=0.0, inner="aot_eager")
        with self.case(steps=20):
            self.start(config)
            unsent: dict[str, Array] = {}
            lost: dict[str, Array] = {}
            largest: dict[str, float] = {}
            for step in range(20):
                given = [gradients(rank, step) for rank in range(self.world_size)]
                self.backward(given)
                for name, shard in self.shards():
                    sender = self.senders[name][self.rank]
                    own = [sender.blocks(g[name].double().numpy())[self.rank] for g in given]
                    expected = np.mean(own, 0).ravel()[: sender.chunk]
                    unsent[name] = unsent.get(name, 0.0) + expected - shard
                    lost[name] = lost.get(name, 0.0) + self.error_steps(name)
                    steps = [s.steps.max() for s in self.senders[name]]
                    largest[name] = max(largest.get(name, 0.0), *steps)
                self.optimizer_step()
            for name, error in self.mean_errors().items():
                # Each step stores the error to one error step (its clipped end; half a step else);
                # float32 rounds h and the mean to 2^-24 of gradients below 4.
                bound = lost[name] + 20 * 3 * 2.0**-22
                self.assertTrue((np.abs(unsent[name] - error) <= bound).all(), name)
                # A residual is at most one wire step; 20 error steps of a 128th of it are lost.
                self.assertLess(np.abs(unsent[name]).max(), largest[name] * (1 + 20 / 128), name)
        self.finish_cases()

    def error_steps(self, name: str) -> Array:
        """Mean over the senders of the error's step in this rank's chunk, from the simulation."""
        senders = self.senders[name]
        return np.mean([s.flat(s.error_steps, self.rank) for s in senders], 0)

    def mean_errors(self) -> dict[str, Array]:
        """The product's own errors, averaged over the ranks, in this rank's chunk."""
        own = {n: codes * scales for n, codes, scales in self.errors()}
        all_ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(all_ranks, own)
        return {
            name: np.mean([self.senders[name][0].flat(e[name], self.rank) for e in all_ranks], 0)
            for name in own
        }

    def test_nan_and_inf(self) -> None:
        """I9: they arrive as NaN, in their own block only, and are gone in the next step."""
        with self.case(parameters="wide, even"):
            self.start(LoCoConfig(min_numel=0, inner="aot_eager"))
            for step in range(4):
                given = [gradients(rank, step) for rank in range(self.world_size)]
                if step == 1:
                    given[1]["wide"][3, 5] = math.nan  # in the chunk of rank 0
                    given[1]["even"][6, 7] = math.inf  # in the chunk of rank 1
                self.backward(given)
                self.assert_errors_equal()
                self.assert_shards_equal()
                poisoned = {name: int(np.isnan(s).sum()) for name, s in self.shards()}
                owned = {"wide": 0, "even": 1}
                for name, count in poisoned.items():
                    hit = step == 1 and owned.get(name) == self.rank
                    self.assertEqual(
                        count, self.config.block_numel if hit else 0, f"{name} in step {step}"
                    )
                self.optimizer_step()
        self.finish_cases()


class TestSimulationOnFourRanks(SimulationCase):
    world_size = 4

    def test_code_for_code(self) -> None:
        with self.case(config="block scale"):
            self.check()
        with self.case(config="fixed scale, last error only"):
            self.check(**FIXED, **FIXED_ERROR, error_decay=0.0)
        self.finish_cases()


class TestSimulation(unittest.TestCase):
    """What the comparison rests on."""

    def test_float32_changes_few_codes(self) -> None:
        """The roundings of float32, which the simulation follows, are of no consequence.

        They move x / t by 2^-23 of at most 128: 2^-16, on either side of a tie, so fewer than one
        code in 2^15 differs from the exact one.
        """
        codes, different = 0, 0
        single, exact = (Sender(1, 37 * 130, Method(single=s)) for s in (True, False))
        for step in range(20):
            grad = gradients(0, step)["wide"].double().numpy()
            exact.codes, exact.error_steps = single.codes, single.error_steps
            single.send(grad)
            exact.send(grad)
            codes += grad.size
            different += int((single.codes != exact.codes).sum())
        self.assertLess(different, codes * 2.0**-15 + 3 * (codes * 2.0**-15) ** 0.5)
