"""The life of the error feedback state. Gradients are zeroed in front of each optimizer step: the
fake process group leaves what was never received in them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, Optimizer

from loco_compile import LoCoBackend, LoCoConfig, error_state
from loco_compile.kernels.reference import decompress_error
from tests.graphs import Stack, fake_group, recorded, shard

CONFIG = LoCoConfig(inner="aot_eager")
COMPRESSED = ["first.weight", "last.weight", "blocks.0.up.weight", "blocks.0.down.weight"]


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    torch.manual_seed(0)
    with fake_group(2):
        yield


def sharded() -> Stack:
    return shard(Stack(num_blocks=1))


def compiled(model: nn.Module, **changes: Any) -> Callable[[Tensor], Tensor]:
    config = LoCoConfig(inner="aot_eager", **changes)
    return torch.compile(model, backend=LoCoBackend(config))


def backward(run: Callable[[Tensor], Tensor], rows: int = 4) -> None:
    run(torch.randn(rows, 64)).square().sum().backward()


def step(*optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.zero_()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def norms(model: nn.Module) -> list[float]:
    return list(error_state(model).norms().values())


def buffers(model: nn.Module) -> list[int]:
    return [t.data_ptr() for p in error_state(model) for t in p.error]


# --- the view


def test_names_are_those_of_the_compressed_parameters() -> None:
    model = sharded()
    assert error_state(model).names() == []
    backward(compiled(model))
    state = error_state(model)
    assert sorted(state.names()) == sorted(COMPRESSED)
    assert len(state) == len(list(state)) == 4
    assert set(state.names()) <= {n for n, _ in model.named_parameters()}


def test_norms_are_in_gradient_units() -> None:
    model = sharded()
    run = compiled(model)
    run(torch.randn(4, 64))  # forward alone keeps nothing
    assert norms(model) == [0.0] * 4
    backward(run)
    state = error_state(model)
    for (name, norm), parameter in zip(state.norms().items(), state, strict=True):
        planes = decompress_error(parameter.memory(), parameter.recipe)
        expected = math.sqrt(sum(float(p.double().square().sum()) for p in planes))
        assert norm == pytest.approx(expected, rel=1e-9), name
        assert norm > 0


def test_saturation_counts_codes_at_the_ends() -> None:
    model = sharded()
    backward(compiled(model))
    state = error_state(model)
    assert set(state.saturation()) == set(COMPRESSED)
    (parameter, *_) = state
    state.reset()
    assert set(state.saturation().values()) == {0}
    with torch.no_grad():
        parameter.error[0].view(-1)[:3] = torch.tensor([127, -128, -127], dtype=torch.int8)
        parameter.error[1].view(-1)[0] = 127
    assert state.saturation()[state.names()[0]] == 3
    assert sum(state.saturation().values()) == 3


def test_without_fsdp() -> None:
    with pytest.raises(ValueError, match="Linear has no FSDP2 module: call fully_shard"):
        error_state(nn.Linear(4, 4))


# --- where it lives


def test_no_state_dict_and_no_buffer_holds_it() -> None:
    model = sharded()
    before = list(model.state_dict()), list(model.buffers()), list(model.named_parameters())
    backward(compiled(model))
    after = list(model.state_dict()), list(model.buffers()), list(model.named_parameters())
    assert [n for n, _ in before[2]] == [n for n, _ in after[2]]
    assert before[:2] == after[:2]
    model.load_state_dict(model.state_dict())
    assert all(norms(model))


def test_nothing_is_kept_for_what_is_not_compressed() -> None:
    model = sharded()
    backward(compiled(model, exempt=("first.*",), min_numel=8192))
    assert sorted(error_state(model).names()) == ["blocks.0.down.weight", "blocks.0.up.weight"]


# --- reset


def test_reset_between_forward_and_backward() -> None:
    """Autograd has saved the buffers: it must not mind."""
    model = sharded()
    run = compiled(model)
    backward(run)
    loss = run(torch.randn(4, 64)).square().sum()
    error_state(model).reset()
    assert norms(model) == [0.0] * 4
    loss.backward()
    assert all(norms(model))


def test_two_forwards_before_their_backwards_share_one_error() -> None:
    model = sharded()
    run = compiled(model)
    losses = [run(torch.randn(4, 64)).square().sum() for _ in range(2)]
    losses[0].backward()
    between = norms(model)
    losses[1].backward()
    assert norms(model) != between
    assert all(between)


def test_the_error_is_that_of_all_gradients_so_far() -> None:
    model, twin = sharded(), sharded()
    twin.load_state_dict(model.state_dict())
    x = [torch.randn(4, 64) for _ in range(2)]
    run = compiled(model)
    for part in x:
        run(part).square().sum().backward()
    twice = norms(model)
    run = compiled(twin)
    run(x[1]).square().sum().backward()
    assert norms(twin) != twice


# --- recompiles


def test_a_smaller_last_batch_finds_the_same_error() -> None:
    model = sharded()
    run = compiled(model)
    backward(run)
    first = buffers(model)
    with recorded() as graphs:
        backward(run, rows=3)
        backward(run, rows=1)
    assert graphs.after  # it did compile again
    assert buffers(model) == first


def test_dynamo_s_reset_and_another_compile_find_the_same_error() -> None:
    model = sharded()
    backward(compiled(model))
    first, before = buffers(model), norms(model)
    torch._dynamo.reset()
    assert norms(model) == before
    run = compiled(model)
    run(torch.randn(4, 64))
    assert (buffers(model), norms(model)) == (first, before)
    backward(run)
    assert buffers(model) == first


def test_another_config_of_the_same_format_keeps_the_error() -> None:
    model = sharded()
    backward(compiled(model))
    first, before = buffers(model), norms(model)
    compiled(model, reset_interval=7)(torch.randn(4, 64))
    assert (buffers(model), norms(model)) == (first, before)


def test_another_format_starts_at_zero_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = sharded()
    backward(compiled(model))
    with caplog.at_level(logging.WARNING, logger="loco_compile"):
        compiled(model, block_numel=64)(torch.randn(4, 64))
    assert norms(model) == [0.0] * 4
    assert caplog.text.count("its error starts at zero") == 4
    assert "first.weight" in caplog.text


def test_regional_blocks_have_errors_of_their_own() -> None:
    model = shard(Stack(num_blocks=2))
    for block in model.blocks:
        block.compile(backend=LoCoBackend(CONFIG))
    backward(model)
    assert sorted(error_state(model).names()) == [
        f"blocks.{i}.{n}.weight" for i in range(2) for n in ("down", "up")
    ]
    assert len(set(buffers(model))) == len(buffers(model)) == 4 * 3
    assert len(set(norms(model))) == 4


# --- optimizer steps


def test_reset_interval_counts_optimizer_steps() -> None:
    model = sharded()
    run, optimizer = compiled(model, reset_interval=3), SGD(model.parameters(), lr=0.1)
    is_zero = []
    for _ in range(7):
        backward(run)
        backward(run)  # gradients that accumulate are one step
        assert all(norms(model))
        step(optimizer)
        is_zero.append([n == 0 for n in norms(model)])
    assert is_zero == [[(i + 1) % 3 == 0] * 4 for i in range(7)]  # all at once


def test_a_reset_interval_of_0_never_resets() -> None:
    model = sharded()
    run, optimizer = compiled(model, reset_interval=0), SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(run)
        step(optimizer)
        assert all(norms(model))


def test_each_parameter_counts_the_steps_of_its_own_optimizer() -> None:
    model = sharded()
    run = compiled(model, reset_interval=2)
    optimizers = [
        SGD(model.blocks.parameters(), lr=0.1),
        SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1),
    ]
    backward(run)
    step(*optimizers)
    assert all(norms(model))  # one step of two optimizers is no second step
    backward(run)
    step(optimizers[0])
    zero = {name for name, norm in error_state(model).norms().items() if norm == 0}
    assert zero == {"blocks.0.up.weight", "blocks.0.down.weight"}
    step(optimizers[1])
    assert not any(norms(model))


def test_another_model_s_steps_do_not_count() -> None:
    model, other = sharded(), sharded()
    run = compiled(model, reset_interval=1)
    backward(run)
    backward(compiled(other))
    step(SGD(other.parameters(), lr=0.1))
    assert all(norms(model))
    step(SGD(model.parameters(), lr=0.1))
    assert not any(norms(model))
    assert all(norms(other))


def test_compression_starts_once_at_start_step() -> None:
    model = sharded()
    run, optimizer = compiled(model, start_step=2), SGD(model.parameters(), lr=0.1)
    is_compressed, num_graphs = [], []
    with recorded() as graphs:
        for _ in range(5):
            backward(run)
            step(optimizer)
            is_compressed.append("all_to_all_single" in graphs.after[-1])
            num_graphs.append(len(graphs.after))
    assert is_compressed == [False, False, True, True, True]
    # Forward and backward, once before and once after.
    assert num_graphs == [2, 2, 4, 4, 4]
    assert all(norms(model))


def test_steps_are_kept_across_recompiles() -> None:
    model = sharded()
    run, optimizer = compiled(model, reset_interval=2), SGD(model.parameters(), lr=0.1)
    backward(run)
    step(optimizer)
    torch._dynamo.reset()
    backward(compiled(model, reset_interval=2), rows=3)
    step(optimizer)
    assert not any(norms(model))


def test_a_step_without_held_gradients_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = sharded()
    run, optimizer = compiled(model), SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    backward(run)
    with caplog.at_level(logging.WARNING, "loco_compile"):
        optimizer.step()
    assert "blocks.0.up.weight: the optimizer stepped without gradients" in caplog.text
    caplog.clear()
    model.set_requires_gradient_sync(True)
    backward(run)
    with caplog.at_level(logging.WARNING, "loco_compile"):
        step(optimizer)
    assert "stepped without" not in caplog.text


def test_a_scaler_with_an_update_of_its_own_is_refused() -> None:
    model = sharded()
    scaler, optimizer = ShardedGradScaler(device="cpu"), SGD(model.parameters(), lr=0.1)
    scaler.scale(compiled(model)(torch.randn(4, 64)).sum()).backward()
    with pytest.raises(NotImplementedError, match="ShardedGradScaler has an update of its own"):
        scaler.step(optimizer)
