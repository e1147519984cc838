"""Nothing is silent (I4), all ranks make one plan (I6), and what is not ours stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loco_compile import (
    LoCoBackend,
    LoCoConfig,
    PlanMismatchError,
    UncapturedError,
    error_state,
    explain,
)
from tests.graphs import Block, Stack, shard
from tests.ranks.launch import RanksTest

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WIDTH = 48


class BrokenBlock(Block):
    """Sends the rest of its forward, and its hooks, back to eager."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return self.down(x)


class RoutedBlock(Block):
    """Leaves a part out when told to."""

    skips_down = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x if self.skips_down else self.down(hidden)


def make(case: RanksTest, *, broken: bool = False) -> Stack:
    torch.manual_seed(0)
    model = Stack(width=WIDTH, num_blocks=2)
    if broken:
        model.blocks[1] = BrokenBlock(WIDTH)
    return shard(model, mesh=case.mesh())


def config(**fields: Any) -> LoCoConfig:
    return LoCoConfig(min_numel=0, **{"inner": "aot_eager", **fields})


def train(model: nn.Module, compiled: Callable[[Tensor], Tensor], rank: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.to_local().detach() for n, p in model.named_parameters()}


class TestGuards(RanksTest):
    world_size = 2

    def assert_bits_equal(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        different = [n for n in expected if not torch.equal(found[n], expected[n])]
        self.assertEqual(different, [])

    def test_graph_break(self) -> None:
        for inner in ("aot_eager", "inductor"):
            with self.case(inner=inner, on_uncaptured="error"):
                model = make(self, broken=True)
                compiled = torch.compile(model, backend=LoCoBackend(config(inner=inner)))
                with self.assertRaisesRegex(UncapturedError, "blocks.1"):
                    train(model, compiled, self.rank)
        with self.case(on_uncaptured="warn"):
            model = make(self, broken=True)
            backend = LoCoBackend(config(method="none", on_uncaptured="warn"))
            with self.assertLogs("loco_compile", "WARNING") as logs:
                found = train(model, torch.compile(model, backend=backend), self.rank)
            self.assertTrue(any("blocks.1" in line for line in logs.output), logs.output)
            eager = make(self, broken=True)
            self.assert_bits_equal(found, train(eager, eager, self.rank))
        with self.case(on_uncaptured="warn", method="loco"):
            model = make(self, broken=True)
            compiled = torch.compile(model, backend=LoCoBackend(config(on_uncaptured="warn")))
            train(model, compiled, self.rank)
        self.finish_cases()

    def test_ranks_that_plan_differently(self) -> None:
        """All ranks raise, so none waits in an exchange."""
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("aot_eager", {"bits": 8}),
            ("aot_eager", {"exempt": ("blocks.0*",)}),
            ("aot_eager", {"method": "none"}),
            ("inductor", {"bits": 8}),
        )
        with self.case(different="nothing"):
            model = make(self)
            train(model, torch.compile(model, backend=LoCoBackend(config())), self.rank)
        for inner, fields in cases:
            with self.case(different=fields, inner=inner):
                # Rank 0 plans what it planned before: known, but not of this model.
                model = make(self)
                own = config(inner=inner, **(fields if self.rank == 1 else {}))
                with self.assertRaisesRegex(PlanMismatchError, "LoCoConfig"):
                    train(model, torch.compile(model, backend=LoCoBackend(own)), self.rank)
        with self.case(different="nothing any more, on the same model"):
            train(model, torch.compile(model, backend=LoCoBackend(config())), self.rank)
        self.finish_cases()

    def test_a_parameter_that_one_rank_leaves_out(self) -> None:
        """An expert behind an `if` has no gradient, and no gather, where it gets no tokens."""
        for inner in ("aot_eager", "inductor"):
            with self.case(inner=inner):
                torch.manual_seed(0)
                model = Stack(width=WIDTH, num_blocks=2)
                model.blocks[1] = RoutedBlock(WIDTH)
                model.blocks[1].skips_down = self.rank == 1
                shard(model, mesh=self.mesh())
                compiled = torch.compile(model, backend=LoCoBackend(config(inner=inner)))
                with self.assertRaisesRegex(PlanMismatchError, "through a mask of zeros"):
                    train(model, compiled, self.rank)
        self.finish_cases()

    def test_explain(self) -> None:
        for is_regional in (True, False):
            with self.case(regional=is_regional):
                model = make(self)
                backend = LoCoBackend(config())
                compiled: Any = model
                if is_regional:
                    for block in model.blocks:
                        block.compile(backend=backend)
                else:
                    compiled = torch.compile(model, backend=backend)
                train(model, compiled, self.rank)
                self.assert_explained(model, is_regional)
        with self.case(model="never compiled"):
            with self.assertRaisesRegex(ValueError, "run a step"):
                explain(make(self))
        self.finish_cases()

    def assert_explained(self, model: Stack, is_regional: bool) -> None:
        report = explain(model)
        rows = json.loads(report.to_json())
        listed = [name for row in rows for name in row["parameters"]]
        self.assertEqual(sorted(listed), sorted(n for n, _ in model.named_parameters()))
        self.assertEqual({r["name"] for r in rows}, {"(root)", "blocks.0", "blocks.1"})
        for row in rows:
            is_matrix = row["parameters"][0].endswith(("up.weight", "first.weight"))
            if is_regional and row["name"] == "(root)":
                self.assertEqual(row["reason"], "runs outside every compiled region")
                self.assertEqual(row["bytes_on_wire"], row["bytes_before"])
            elif is_matrix:
                self.assertEqual((row["method"], row["reason"]), ("loco", ""))
                self.assertLess(row["bytes_on_wire"], 0.2 * row["bytes_before"])
            else:
                self.assertEqual(row["reason"], "has one dimension (exempt_1d)")
        text = str(report)
        for name in ("(root)", "blocks.0", "blocks.1"):
            self.assertIn(name, text)
        compressed = [n for n in error_state(model).names()]
        self.assertEqual("first.weight" in compressed, not is_regional)

    def test_other_backends(self) -> None:
        with self.case(backend="loco first"):
            model = make(self)
            train(model, torch.compile(model, backend=LoCoBackend(config())), self.rank)
        eager = make(self)
        expected = train(eager, eager, self.rank)
        for backend in ("eager", "aot_eager"):
            for in_place in (True, False):
                with self.case(backend=backend, in_place=in_place):
                    model = make(self)
                    compiled: Any = model
                    if in_place:
                        model.compile(backend=backend)
                    else:
                        compiled = torch.compile(model, backend=backend)
                    self.assert_bits_equal(train(model, compiled, self.rank), expected)
                    self.assert_untouched(model)
        with self.case(backend="inductor"):
            model = make(self)
            found = train(model, torch.compile(model), self.rank)
            # Inductor's own kernels round differently: float32 over three steps.
            for name, parameter in found.items():
                torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)
            self.assert_untouched(model)
        with self.case(backend="none, after all others"):
            model = make(self)
            self.assert_bits_equal(train(model, model, self.rank), expected)
        self.finish_cases()

    def assert_untouched(self, model: Stack) -> None:
        self.assertFalse(torch._dynamo.config.wrap_top_frame)
        self.assertEqual(len(error_state(model)), 0)
        with self.assertRaisesRegex(ValueError, "run a step"):
            explain(model)
