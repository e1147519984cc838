"""Several models, configs, shapes and loads in one process: each finds its own error again."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import register_fsdp_forward_method

from loco_compile import LoCoBackend, LoCoConfig, error_state
from tests.ranks.features import (
    LOCO,
    PARITY,
    Feature,
    FeatureTest,
    local,
    net,
    regional,
    tokens,
    whole,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.features]


def pointers(model: nn.Module) -> list[int]:
    return [t.data_ptr() for state in error_state(model) for t in state.error]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: local(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


class TestLives(FeatureTest):
    world_size = 2

    def assert_equal(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        self.assertEqual(sorted(found), sorted(expected))
        self.assertTrue(expected)
        different = [n for n, v in expected.items() if not torch.equal(found[n], v)]
        self.assertEqual(different, [])

    def step(self, call: Callable[..., Tensor], index: int, **shape: int) -> None:
        call(*tokens(self.rank, index, **shape)).pow(2).mean().backward()

    def test_two_roots_one_of_ours(self) -> None:
        """A student trained by us, a teacher that stays eager or goes to Inductor."""
        alone = net()()
        call = whole(alone, PARITY)
        self.step(call, 0)
        expected = gradients(alone)
        for backend in (None, "aot_eager"):
            with self.case(teacher=str(backend)):
                student, teacher = net()(), net()()
                of_student = whole(student, PARITY)
                of_teacher = teacher
                if backend is not None:
                    of_teacher = torch.compile(teacher, backend=backend)
                with torch.no_grad():
                    of_teacher(*tokens(self.rank, 5))
                self.step(of_student, 0)
                self.step(of_teacher, 0)
                self.assert_equal(gradients(student), expected)
                self.assertEqual(len(error_state(student)), 0)
                self.assert_equal(gradients(teacher), expected)
                self.assertEqual(len(error_state(teacher)), 0)
        self.finish_cases()

    def test_both_roots_in_one_graph(self) -> None:
        with self.case(graph="student and teacher"):
            student, teacher = net()(), net()()

            @torch.compile(backend=LOCO)
            def loss_of(batch: Tensor) -> Tensor:
                with torch.no_grad():
                    target = teacher(batch)
                return (student(batch) - target).pow(2).mean() + student(batch).sum()

            loss_of(*tokens(self.rank, 0)).backward()
            self.assertTrue(all(p.grad is not None for p in student.parameters()))
            self.assertTrue(all(p.grad is None for p in teacher.parameters()))
            self.assertTrue(len(error_state(student)))
        self.finish_cases()

    def test_another_config_on_the_same_model(self) -> None:
        with self.case(configs="loco, none, loco"):
            model = net()()
            self.step(whole(model, LOCO), 0)
            gradients(model)
            before = pointers(model)
            other = LoCoBackend(
                LoCoConfig(inner="aot_eager", min_numel=0, error_decay=0.0, reset_interval=7)
            )
            self.step(whole(model, other), 1)
            gradients(model)
            self.assertEqual(pointers(model), before)  # the format is the same: so is the error
            self.step(whole(model, PARITY), 2)
            eager = net()()
            self.step(eager, 2)
            self.assert_equal(gradients(model), gradients(eager))
        self.finish_cases()

    def test_dynamic_shapes_keep_the_error(self) -> None:
        shapes = ((2, 5), (2, 7), (1, 6), (2, 5))
        for dynamic in (None, True):
            with self.case(dynamic=dynamic):
                model = net()()
                call = torch.compile(model, backend=LOCO, dynamic=dynamic)
                addresses = []
                for index, shape in enumerate(shapes if dynamic is None else shapes[1:3]):
                    self.step(call, index, size=shape[0], length=shape[1])
                    gradients(model)
                    addresses.append(pointers(model))
                self.assertEqual(addresses, addresses[:1] * len(addresses))
                self.assertTrue(any(error_state(model).norms().values()))
        with self.case(shapes="mark_dynamic"):
            model = net()()
            call = whole(model, LOCO)
            for index, length in enumerate((4, 6)):
                (batch,) = tokens(self.rank, index, length=length)
                torch._dynamo.mark_dynamic(batch, 1)
                call(batch).sum().backward()
        self.finish_cases()

    def test_dynamic_shapes_change_no_bit(self) -> None:
        """Parity and conservation while the batch shrinks and grows."""

        def data(rank: int, step: int) -> tuple[Tensor, ...]:
            return tokens(rank, step, size=1 + step % 3, length=4 + step % 2)

        self.check("shapes that change", Feature(net(), data=data), steps=4)
        self.finish_cases()

    def test_steps_take_no_more_memory(self) -> None:
        with self.case(steps=6):
            model = net()()
            call = whole(model, LOCO)
            counts = []
            for index in range(6):
                self.step(call, index, length=4 + index % 2)
                model.zero_grad()
                gc.collect()
                counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
            self.assertEqual(counts[2:], counts[2:3] * 4)
        self.finish_cases()

    def test_dynamo_reset(self) -> None:
        with self.case(reset="between steps"):
            model = net()()
            self.step(whole(model, LOCO), 0)
            before = pointers(model)
            norms = error_state(model).norms()
            torch._dynamo.reset()
            call = whole(model, LOCO)
            with torch.no_grad():
                call(*tokens(self.rank, 1))
            self.assertEqual(pointers(model), before)
            self.assertEqual(error_state(model).norms(), norms)
        self.finish_cases()

    def test_state_dicts_are_those_of_eager_fsdp2(self) -> None:
        with self.case(state="after two steps"):
            states: list[tuple[Any, ...]] = []
            for compiles in (False, True):
                model = net()()
                call: Any = whole(model, PARITY) if compiles else model
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                for index in range(2):
                    self.step(call, index)
                    optimizer.step()
                    optimizer.zero_grad()
                states.append((model.state_dict(), *get_state_dict(model, optimizer)))
            self.assertEqual(sorted(states[1][0]), sorted(states[0][0]))  # no error in it
            for eager, compiled in zip(*states, strict=True):
                buffers = []
                for state in (eager, compiled):
                    torch.save(state, buffer := io.BytesIO())
                    buffers.append(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))
                self.assertEqual(buffers[1], buffers[0], rtol=0, atol=0)
        self.finish_cases()

    def test_loading_into_a_compiled_model(self) -> None:
        source = net()()
        with torch.no_grad():
            for parameter in source.parameters():
                local(parameter).mul_(0.5)
        eager = copy.deepcopy(get_model_state_dict(source))
        reference = net()()
        set_model_state_dict(reference, eager)
        self.step(reference, 1)
        expected = gradients(reference)
        for way in ("set_model_state_dict", "assign"):
            with self.case(way=way):
                model = net()()
                call = whole(model, PARITY)
                self.step(call, 0)
                gradients(model)
                if way == "set_model_state_dict":
                    set_model_state_dict(model, eager)
                else:
                    model.load_state_dict(copy.deepcopy(eager), assign=way == "assign")
                self.step(call, 1)
                self.assert_equal(gradients(model), expected)
        self.finish_cases()

    def test_unshard_and_reshard_by_hand(self) -> None:
        for wrap in (whole, regional):
            with self.case(wrap=wrap.__name__):
                found = []
                for compiles in (False, True):
                    model = net()()
                    call: Any = wrap(model, PARITY) if compiles else model
                    model(*tokens(self.rank, 9)) if not compiles else call(*tokens(self.rank, 9))
                    model.unshard()
                    total = sum(p.sum().item() for p in model.blocks[0].up.parameters())
                    self.step(call, 0)
                    model.reshard()
                    found.append((total, gradients(model)))
                self.assert_equal(found[1][1], found[0][1])
        self.finish_cases()

    def test_a_registered_forward_method(self) -> None:
        with self.case(method="score"):
            found = []
            for compiles in (False, True):
                model = net()()

                def score(batch: Tensor, model: nn.Module = model) -> Tensor:
                    return model(batch).pow(2).mean()

                model.score = score
                register_fsdp_forward_method(model, "score")
                call = torch.compile(model.score, backend=PARITY) if compiles else model.score
                call(*tokens(self.rank, 0)).backward()
                found.append(gradients(model))
            self.assert_equal(found[1], found[0])
        self.finish_cases()
