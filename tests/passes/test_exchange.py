"""The numbers of the spliced exchange: every rank of a group played in one process.

The bounds are derived, not tuned. A code is off by half a step at most, but for the largest
positive magnitude of a block, whose code would be one above the range: it is off by one step.
A step is absmax / 2^(bits-1), rounded up to bfloat16: times 1 + 2^-7 at most. float32 adds one
rounding per addition: 2^-24 of the largest magnitude for each rank.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from loco_compile import LoCoConfig
from loco_compile.kernels import Memory
from loco_compile.kernels.layout import Layout
from loco_compile.kernels.reference import decompress_error
from loco_compile.passes.pipeline import run
from tests.graphs import fake_group
from tests.passes.bare import LOCO, Grad, Traced, parameters, run_on_all_ranks, trace

FIXED = LoCoConfig(scale="fixed", fixed_scale=2.0**3, error_scale="fixed", fixed_error_scale=2.0**7)
CONFIGS = [LOCO, LoCoConfig(bits=8), LoCoConfig(block_numel=64, error_decay=0.0), FIXED]
SCALE = 2 * 3
"""The graph doubles each gradient in front of the exchange and triples the shard behind it."""


def rewritten(specs: list[Grad], config: LoCoConfig, num_ranks: int) -> Traced:
    traced = trace(specs, config, num_ranks=num_ranks)
    run(traced.gm, config)
    return traced


def random_grads(specs: list[Grad], num_ranks: int, seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(s.shape, generator=generator) * (1 + r)).to(s.dtype) for s in specs]
        for r in range(num_ranks)
    ]


def new_errors(specs: list[Grad], config: LoCoConfig, num_ranks: int) -> list[list[list[Tensor]]]:
    return [[s.buffers(num_ranks, config) for s in specs] for _ in range(num_ranks)]


def step(
    traced: Traced, grads: list[list[Tensor]], errors: list[list[list[Tensor]]]
) -> list[tuple[Tensor, ...]]:
    """One backward on all ranks: results[rank][parameter], errors updated in place."""
    inputs = [[*g, *itertools.chain.from_iterable(e)] for g, e in zip(grads, errors, strict=True)]
    return run_on_all_ranks(traced.gm, inputs)


def blocks(chunks: Tensor, layout: Layout) -> Tensor:
    """(W, N) -> (W, B, K), what is missing in the last block as zero."""
    missing = layout.padded_numel - layout.chunk_numel
    padded = torch.nn.functional.pad(chunks, [0, missing])
    return padded.reshape(layout.num_ranks, layout.num_blocks, layout.block_numel)


def chunks_of(grad: Tensor, layout: Layout) -> Tensor:
    """(W, N) float64: what each rank receives of a gradient, padded at its end."""
    flat = grad.double().reshape(-1)
    missing = layout.num_ranks * layout.chunk_numel - flat.numel()
    return torch.nn.functional.pad(flat, [0, missing]).reshape(layout.num_ranks, -1)


def stored(own: list[Tensor], layout: Layout, config: LoCoConfig) -> Tensor:
    """(W, N) float64: the stored error in gradient units."""
    memory = Memory.of(own, config.arithmetic())
    if memory.scale is not None:
        memory = memory._replace(scale=memory.scale.select(-1, 0))
    planes = decompress_error(memory, config.arithmetic())
    flat = torch.stack(planes, 2).reshape(layout.num_ranks, -1)
    return flat[:, : layout.chunk_numel].double()


def steps_of(chunks: Tensor, layout: Layout, config: LoCoConfig) -> Tensor:
    """(W, N) upper bound of the step of each element."""
    if config.scale == "fixed":
        return torch.full_like(chunks, 1 / config.fixed_scale)
    absmax = blocks(chunks.abs(), layout).amax(-1, keepdim=True)
    step_WBK = absmax / 2 ** (config.bits - 1) * (1 + 2**-7)
    step_WBK = step_WBK.expand(-1, -1, layout.block_numel)
    return step_WBK.reshape(layout.num_ranks, -1)[:, : layout.chunk_numel]


def shard_of(results: list[tuple[Tensor, ...]], index: int) -> Tensor:
    """(W, N) float64: what every rank got of a parameter, in units of its gradient."""
    return torch.stack([r[index].double() for r in results]) / 3


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("num_ranks", "op"), [(2, "avg"), (3, "sum"), (4, "avg")])
def test_the_mean_is_the_mean(config: LoCoConfig, num_ranks: int, op: str) -> None:
    """I2: within one step of the float64 mean, or sum, of what was to be sent."""
    specs = parameters((64, 96), (33, 50), (5, 7), (1, 300), op=op)
    divisor = num_ranks if op == "avg" else 1
    with fake_group(num_ranks):
        traced = rewritten(specs, config, num_ranks)
        errors = new_errors(specs, config, num_ranks)
        # The fixed scale fits magnitudes up to 7 / 8: half a unit, with the error added.
        unit = 0.02 if config is FIXED else 1.0
        for seed in range(2):
            grads = [[g * unit for g in own] for own in random_grads(specs, num_ranks, seed)]
            layouts = [s.layout(num_ranks, config) for s in specs]
            before = [
                [stored(e, x, config) for e, x in zip(own, layouts, strict=True)] for own in errors
            ]
            results = step(traced, grads, errors)
            for index, layout in enumerate(layouts):
                held = [
                    chunks_of(grads[r][index] * 2, layout) + before[r][index]
                    for r in range(num_ranks)
                ]
                expected = sum(held) / divisor
                largest = sum(h.abs().max() for h in held)
                bound = sum(steps_of(h, layout, config) for h in held) / divisor
                rounding = 2**-22 * largest
                off = (shard_of(results, index) - expected).abs()
                assert (off <= bound + rounding).all(), (seed, index)
                # On the whole it is much nearer: the codes round to nearest.
                assert off.mean() <= 0.5 * bound.mean()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_padding_never_raises_a_scale(config: LoCoConfig) -> None:
    """I7: rows that the ranks do not hold evenly, and elements that no block is filled with."""
    num_ranks, specs = 4, parameters((5, 3), (2, 70), (1, 1))
    with fake_group(num_ranks):
        traced = rewritten(specs, config, num_ranks)
        errors = new_errors(specs, config, num_ranks)
        grads = [[torch.full(s.shape, 0.25) for s in specs] for _ in range(num_ranks)]
        results = step(traced, grads, errors)
    for index, spec in enumerate(specs):
        layout = spec.layout(num_ranks, config)
        # -0.25 * 2 would be exact; +0.5 is the largest magnitude: off by one step at most.
        held = chunks_of(grads[0][index] * 2, layout)
        off = (shard_of(results, index) - held).abs()
        assert (off <= steps_of(held, layout, config)).all()
        assert (off[held == 0] == 0).all()


@pytest.mark.parametrize(("num_ranks", "bits"), [(2, 4), (3, 8)])
def test_nothing_is_lost(num_ranks: int, bits: int) -> None:
    """I3: with decay 0, what was sent and what is kept is what there was, up to the error's step.

    Summed over ranks, since only the sum is seen. The error's step: 1/128 of the largest residual,
    which is one step of the codes at most; it is off by half, or one at the end of its range.
    """
    config = LoCoConfig(error_decay=0.0, bits=bits)
    specs = parameters((40, 64), (7, 33), op="sum")
    with fake_group(num_ranks):
        traced = rewritten(specs, config, num_ranks)
        errors = new_errors(specs, config, num_ranks)
        total = [torch.zeros(()) for _ in specs]
        sent = [torch.zeros(()) for _ in specs]
        lost = [torch.zeros(()) for _ in specs]
        for seed in range(10):
            grads = random_grads(specs, num_ranks, seed)
            layouts = [s.layout(num_ranks, config) for s in specs]
            before = [
                [stored(e, x, config) for e, x in zip(o, layouts, strict=True)] for o in errors
            ]
            results = step(traced, grads, errors)
            for index, layout in enumerate(layouts):
                held = [
                    chunks_of(grads[r][index] * 2, layout) + before[r][index]
                    for r in range(num_ranks)
                ]
                lost[index] = lost[index] + sum(
                    steps_of(h, layout, config) / 128 * (1 + 2**-7) + 2**-21 * h.abs().max()
                    for h in held
                )
                total[index] = total[index] + sum(
                    chunks_of(grads[r][index] * 2, layout) for r in range(num_ranks)
                )
                sent[index] = sent[index] + shard_of(results, index)
                kept = sum(stored(errors[r][index], layout, config) for r in range(num_ranks))
                assert ((sent[index] + kept - total[index]).abs() <= lost[index]).all()


def test_a_small_constant_gradient_arrives_in_the_end() -> None:
    """Elements far below the step are sent once enough has gathered: the point of the error."""
    config = LoCoConfig(error_decay=0.0)
    (spec,) = specs = [Grad(shape=(2, 128), op="sum")]
    grad = torch.full(spec.shape, 1e-3)
    grad[:, 0] = -1.0  # sets the step of every block to 2/8
    with fake_group(2):
        traced = rewritten(specs, config, 2)
        errors = new_errors(specs, config, 2)
        total = sum(shard_of(step(traced, [[grad], [grad]], errors), 0) for _ in range(300))
    expected = 300 * 2 * 2 * 1e-3  # steps, ranks, doubled
    # What is still kept is half a step of 1/4 on each of two ranks at most; the error's own steps,
    # 1/4 * 1/2 / 128, lose up to half of each in a step, but do not add up in one direction.
    assert abs(float(total[:, 1:].mean()) - expected) <= 0.25
    assert abs(float(total[:, 0].mean()) + 300 * 4) <= 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("config", [LOCO, LoCoConfig(bits=8), FIXED], ids=str)
def test_nan_reaches_its_own_block_and_does_not_stay(bad: float, config: LoCoConfig) -> None:
    """I9."""
    num_ranks, specs = 2, parameters((8, 256), (8, 256))
    with fake_group(num_ranks):
        traced = rewritten(specs, config, num_ranks)
        errors = new_errors(specs, config, num_ranks)
        grads = random_grads(specs, num_ranks, 0)
        step(traced, grads, errors)
        grads[1][0][5, 17] = bad  # row 5 belongs to rank 1, where it is row 1
        results = step(traced, grads, errors)
        position = 256 + 17
        first = position - position % config.block_numel
        hit = torch.zeros(1024, dtype=torch.bool)
        hit[first : first + config.block_numel] = True
        assert torch.equal(~results[1][0].isfinite(), hit)
        assert results[0][0].isfinite().all()
        assert all(r[1].isfinite().all() for r in results)
        layout = specs[0].layout(num_ranks, config)
        kept = stored(errors[1][0], layout, config)[1]
        assert (kept[hit] == 0).all()
        assert kept[~hit].count_nonzero()
        assert stored(errors[0][0], layout, config).count_nonzero()
        grads[1][0][5, 17] = 0.0
        assert all(s.isfinite().all() for r in step(traced, grads, errors) for s in r)


def test_all_zero_gradients_send_and_keep_zero() -> None:
    specs = parameters((8, 256))
    with fake_group(2):
        traced = rewritten(specs, LOCO, 2)
        errors = new_errors(specs, LOCO, 2)
        results = step(traced, [[torch.zeros(8, 256)]] * 2, errors)
    assert all((r[0] == 0).all() for r in results)
    assert all((b == 0).all() for own in errors for e in own for b in e)


def test_half_gradients_are_summed_in_float32() -> None:
    """bf16 gradients, no reduce dtype: the sum is rounded once, at the end."""
    num_ranks, config = 4, LoCoConfig(bits=8)
    specs = parameters((8, 64), dtype=torch.bfloat16)
    with fake_group(num_ranks):
        traced = rewritten(specs, config, num_ranks)
        errors = new_errors(specs, config, num_ranks)
        grads = random_grads(specs, num_ranks, 0)
        results = step(traced, grads, errors)
    assert results[0][0].dtype == torch.bfloat16
    layout = specs[0].layout(num_ranks, config)
    held = [chunks_of(g[0] * 2, layout) for g in grads]
    off = (shard_of(results, 0) - sum(held) / num_ranks).abs()
    bound = sum(steps_of(h, layout, config) for h in held) / num_ranks
    # bfloat16 rounds the shard, and three times it: 2^-8 each.
    assert (off <= bound + 2 * 2**-8 * (sum(held).abs() / num_ranks + bound)).all()
