"""One graph serves all equal blocks and trains as the whole model's graph does (I5); the error
buffers outlive recompiles, resets and the uncompressed first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loco_compile import LoCoBackend, LoCoConfig, error_state
from tests.graphs import Stack, recorded, shard
from tests.ranks.launch import RanksTest

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WIDTH = 48
# The root's parameters: regional compile leaves them to eager FSDP2.
ROOT = ("first*", "last*")


def config(**fields: Any) -> LoCoConfig:
    return LoCoConfig(min_numel=0, **{"inner": "aot_eager", **fields})


def whole(model: Stack, **options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, **options)


def regional(model: Stack, **options: Any) -> Callable[[Tensor], Tensor]:
    for block in model.blocks:
        block.compile(**options)
    return model


class Training:
    """A sharded model, compiled, and what a step of it needs."""

    def __init__(
        self,
        case: RanksTest,
        wrap: Callable[..., Callable[[Tensor], Tensor]],
        settings: LoCoConfig,
        *,
        num_optimizers: int = 1,
        dynamic: bool | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.rank = case.rank
        self.model = shard(Stack(width=WIDTH, num_blocks=3), mesh=case.mesh())
        self.compiled = wrap(self.model, backend=LoCoBackend(settings), dynamic=dynamic)
        parameters = list(self.model.parameters())
        self.optimizers = [
            torch.optim.AdamW(parameters[i::num_optimizers], lr=1e-2) for i in range(num_optimizers)
        ]

    def step(self, index: int, *, size: int = 4) -> None:
        generator = torch.Generator().manual_seed(100 * self.rank + index)
        x = torch.randn(size, WIDTH, generator=generator)
        (self.compiled(x) - x.flip(1)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        return {n: p.to_local().detach().clone() for n, p in self.model.named_parameters()}

    def errors(self) -> dict[str, Sequence[Tensor]]:
        return {state.name: state.error for state in error_state(self.model)}

    def pointers(self) -> dict[str, list[int]]:
        return {name: [t.data_ptr() for t in error] for name, error in self.errors().items()}

    def error_bytes(self) -> int:
        return sum(t.nbytes for error in self.errors().values() for t in error)


def is_zero(error: Sequence[Tensor]) -> bool:
    return not any(t.any() for t in error)


class TestRegional(RanksTest):
    world_size = 2

    def assert_bits_equal(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        self.assertEqual(list(found), list(expected))
        different = [n for n in found if not torch.equal(found[n], expected[n])]
        self.assertEqual(different, [])

    def test_regional_and_whole_model_train_alike(self) -> None:
        results = {}
        for wrap in (regional, whole):
            with self.case(wrap=wrap.__name__), recorded() as graphs:
                training = Training(self, wrap, config(exempt=ROOT))
                for index in range(10):
                    training.step(index)
                results[wrap.__name__] = training
                self.assertEqual(len(graphs.modules), 2, "1 forward and 1 backward graph")
                buckets = {e.bucket.name for g in graphs.exchanges for e in g if e.compressed}
                self.assertEqual(len(buckets), 1 if wrap is regional else 3)
                self.assert_own_errors(training)
        with self.case(compare="parameters"):
            found = results["regional"]
            self.assert_bits_equal(found.parameters(), results["whole"].parameters())
            for name, error in results["whole"].errors().items():
                for a, b in zip(found.errors()[name], error, strict=True):
                    self.assertTrue(torch.equal(a, b), name)
        self.finish_cases()

    def assert_own_errors(self, training: Training) -> None:
        """Two matrices in each of three blocks, each with buffers of its own and in use."""
        names = [f"blocks.{i}.{n}.weight" for i in range(3) for n in ("up", "down")]
        self.assertEqual(sorted(training.errors()), sorted(names))
        pointers = [p for own in training.pointers().values() for p in own]
        self.assertEqual(len(set(pointers)), len(pointers))
        for index in range(2):
            a, b = (training.errors()[f"blocks.{i}.up.weight"] for i in (index, index + 1))
            self.assertFalse(is_zero(a))
            self.assertFalse(torch.equal(a[0], b[0]))

    def test_a_smaller_batch_finds_the_same_errors(self) -> None:
        with self.case(sizes="4, 4, 3, 4, 2"), recorded() as graphs:
            # With the batch's size symbolic from the start there is no recompile.
            steady = Training(self, regional, config(), dynamic=True)
            for index, size in enumerate((4, 4, 3, 4, 2)):
                steady.step(index, size=size)
            num_before = len(graphs.modules)
            self.assertEqual(num_before, 2)

            training = Training(self, regional, config())
            training.step(0)
            pointers, num_bytes = training.pointers(), training.error_bytes()
            for index, size in enumerate((4, 3, 4, 2)):
                training.step(index + 1, size=size)
                self.assertEqual(training.pointers(), pointers)
            self.assertEqual(training.error_bytes(), num_bytes)
            self.assertEqual(len(graphs.modules) - num_before, 4, "one recompile")
            self.assert_bits_equal(training.parameters(), steady.parameters())
        self.finish_cases()

    def test_start_step(self) -> None:
        with self.case(start_step=3):
            plain = Training(self, whole, config(method="none"))
            training = Training(self, whole, config(start_step=3))
            for index in range(3):
                plain.step(index)
                training.step(index)
                self.assert_bits_equal(training.parameters(), plain.parameters())
                self.assertTrue(all(is_zero(e) for e in training.errors().values()))
            pointers = training.pointers()
            plain.step(3)
            training.step(3)
            self.assertFalse(any(is_zero(e) for e in training.errors().values()))
            self.assertEqual(training.pointers(), pointers)
            found, expected = training.parameters(), plain.parameters()
            self.assertFalse(torch.equal(found["first.weight"], expected["first.weight"]))
        self.finish_cases()

    def test_reset_interval(self) -> None:
        for wrap, num_optimizers in ((regional, 1), (whole, 2)):
            with self.case(wrap=wrap.__name__, num_optimizers=num_optimizers):
                other = Training(self, wrap, config(reset_interval=3))  # steps on its own
                training = Training(
                    self, wrap, config(reset_interval=3), num_optimizers=num_optimizers
                )
                other.step(0)
                for index in range(7):
                    training.step(index)
                    zero = {n: is_zero(e) for n, e in training.errors().items()}
                    self.assertEqual(set(zero.values()), {index % 3 == 2}, f"step {index}: {zero}")
                self.assertFalse(any(is_zero(e) for e in other.errors().values()))
        self.finish_cases()
