"""The reference against a float64 simulation, its invariants, and the traps it must avoid."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loco_compile.kernels import SMALLEST_ABSMAX, Memory, Recipe, decompress_error, reference
from tests.kernels import simulation
from tests.kernels.cases import OPTIONS, layout_of, random_error, zero_error

EPS = 2.0**-24
"""Relative error of one float32 rounding."""
RECIPES = {
    "loco": {},
    "paper": {"fixed_scale": 4.0, "fixed_error_scale": 16.0, "error_decay": 0.75},
    "classic error feedback": {"error_decay": 0.0},
    "fixed wire": {"fixed_scale": 4.0, "error_decay": 0.5},
    "no error": {"keeps_error": False},
    "eight bits": {"bits": 8},
    "eight bits, no error": {"bits": 8, "keeps_error": False},
}


def in_order(planes, layout):
    """(W, B * K) in the order of the elements, from P planes (W, B, H)."""
    return torch.stack(list(planes), dim=2).reshape(layout.num_ranks, layout.padded_numel)


def codes_in_order(sent, layout, recipe):
    """Unpack offset-binary codes."""
    mask = (1 << recipe.bits) - 1
    planes = [
        ((sent.codes.int() >> (recipe.bits * p)) & mask) - (1 << (recipe.bits - 1))
        for p in range(layout.codes_per_byte)
    ]
    return in_order(planes, layout)


def decompressed(sent, layout, recipe):
    """What a receiver makes of one rank's message: (W, B * K) float64."""
    unit = 1.0 if recipe.fixed_scale is None else 1.0 / recipe.fixed_scale
    scales = sent.scales.double().repeat_interleave(layout.block_numel, 1)
    return codes_in_order(sent, layout, recipe) * scales * unit


def error_in_order(error, layout, recipe):
    return in_order(decompress_error(error, recipe), layout).double()


def padded(grad, layout):
    flat = torch.zeros(layout.num_ranks * layout.chunk_numel, dtype=torch.float64)
    flat[: grad.numel()] = grad.double()
    missing = layout.padded_numel - layout.chunk_numel
    return torch.nn.functional.pad(flat.reshape(layout.num_ranks, -1), (0, missing))


@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_simulation_over_several_steps(name):
    recipe = Recipe(block_numel=64, **RECIPES[name])
    layout = layout_of(recipe, 2, 150)
    generator = torch.Generator().manual_seed(1)
    error = zero_error(layout, recipe)
    codes, scales = np.zeros((2, layout.padded_numel)), np.zeros(layout.scale_shape)
    for _ in range(4):
        # Multiples of 2^-10 below 8: h, its products and its residual are exact in float32, or
        # round away from ties that this seed does not have. The codes must agree exactly.
        grad = (torch.randn(290, generator=generator) * 1024).round() / 1024
        sent = reference.compress(grad, error, layout=layout, recipe=recipe)
        q, wire, codes, scales = simulation.compress(
            grad.double().numpy(), codes, scales, layout=layout, recipe=recipe
        )
        assert np.array_equal(codes_in_order(sent, layout, recipe), q)
        assert np.array_equal(sent.scales.double(), wire)
        error = sent.memory
        if error.planes:
            assert np.array_equal(in_order(error.planes, layout), codes)
        if error.scale is not None:
            assert np.array_equal(error.scale.double(), scales)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_the_simulation(name):
    """Four steps, the error forgotten after two of them. Codes, scales and noise exactly."""
    recipe = Recipe(**OPTIONS[name])
    layout = layout_of(recipe, 2, 200)
    # Not seed 1: with "signed" one of its errors lies halfway between two codes (-44.5 steps),
    # where the product with an inverse and a division round apart.
    generator, noise = torch.Generator().manual_seed(2), 7
    memory = zero_error(layout, recipe, noise=noise)
    codes, scales = np.zeros((2, layout.padded_numel)), np.zeros(layout.scale_shape)
    for index in range(4):
        grad = (torch.randn(390, generator=generator) * 1024).round() / 1024
        sent = reference.compress(grad, memory, layout=layout, recipe=recipe)
        q, wire, codes, scales = simulation.compress(
            grad.double().numpy(), codes, scales, layout=layout, recipe=recipe, noise=noise
        )
        assert np.array_equal(codes_in_order(sent, layout, recipe), q)
        assert np.array_equal(sent.scales.double(), wire)
        assert_stored(sent.memory, codes, scales, layout, recipe)
        noise = simulation.hash32((noise + 0x9E3779B9) % 2**32)
        if recipe.stochastic:
            assert sent.memory.noise.item() == noise
        memory = sent.memory
        if index == 1:
            memory = zero_error(layout, recipe, noise=noise)
            codes, scales = np.zeros_like(codes), np.zeros_like(scales)


def assert_stored(memory, codes, scales, layout, recipe):
    if not memory.planes:
        return
    stored = in_order(memory.planes, layout).double().numpy()
    if recipe.error_bits == 32:
        # Float32 itself: at most four roundings in each of four steps, of values below 16.
        assert np.abs(stored - codes).max() <= 16 * 16 * EPS
        return
    # Float32 keeps a 16-bit code of 2^15 to 2^-9: in each of two steps it may round apart.
    assert np.abs(stored - codes).max() <= (2 if recipe.error_bits == 16 else 0)
    if memory.scale is not None:
        assert np.array_equal(memory.scale.double(), scales)


@pytest.mark.parametrize("name", ["two bits", "signed", "symmetric", "rotated", "all"])
def test_the_mean_of_every_option_equals_the_simulation(name):
    recipe = Recipe(**OPTIONS[name])
    layout = layout_of(recipe, 3, 200)
    grad = torch.randn(600, generator=torch.Generator().manual_seed(2))
    sent = reference.compress(
        grad, zero_error(layout, recipe, noise=7), layout=layout, recipe=recipe
    )
    mean = reference.decompress_mean(
        sent.codes, sent.scales, layout=layout, recipe=recipe, divisor=3.0
    )
    q = codes_in_order(sent, layout, recipe).double().numpy()
    wire = sent.scales.double().numpy()
    expected = simulation.decompress_mean(q, wire, layout=layout, recipe=recipe, divisor=3.0)
    # Two additions over the ranks, five stages of a rotation, one product: of sums below 3 * 8
    # for each element, 32 of them in a rotation, which then divides by 32.
    assert np.abs(mean.double().numpy() - expected).max() <= 8 * 24 * EPS


def test_what_senders_and_receiver_know_is_the_same():
    """(E5b), (E8b): known follows the mean of what the ranks have added up."""
    recipe = Recipe(**OPTIONS["EF21"])
    layout = layout_of(recipe, 2, 200)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(400, generator=generator) for _ in range(2)]
    memories = [zero_error(layout, recipe) for _ in grads]
    known, gaps = torch.zeros(200), []
    for _ in range(12):
        sent = [
            reference.compress(g, m, layout=layout, recipe=recipe)
            for g, m in zip(grads, memories, strict=True)
        ]
        memories = [s.memory for s in sent]
        mean, known = reference.decompress_change(
            torch.stack([s.codes[0] for s in sent]),
            torch.stack([s.scales[0] for s in sent]),
            known,
            layout=layout,
            recipe=recipe,
            divisor=2.0,
        )
        added_up = -sum(in_order(m.planes, layout)[0, :200].double() for m in memories) / 2
        # Each step rounds once for each rank and twice in the sum, at values below 8.
        assert (known.double() - added_up).abs().max() <= 12 * 4 * 8 * EPS
        gaps.append(float((mean - (grads[0] + grads[1])[:200] / 2).abs().max()))
    # A change shrinks to half a step of 1/8 of it, or to a whole one at the positive end of a
    # block: at least 8 times a step, down to where float32 rounds at values below 8.
    assert all(b <= a / 4 + 64 * EPS for a, b in zip(gaps, gaps[1:], strict=False))


@st.composite
def problems(draw):
    recipe = Recipe(
        block_numel=draw(st.sampled_from([64, 128, 192])),
        **RECIPES[draw(st.sampled_from(list(RECIPES)))],
    )
    layout = layout_of(recipe, draw(st.integers(1, 4)), draw(st.integers(1, 400)))
    numel = draw(st.integers(0, layout.num_ranks * layout.chunk_numel))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    grad = torch.randn(numel, generator=generator).to(dtype)
    return recipe, layout, grad, random_error(layout, recipe, generator)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_what_is_sent_is_near_what_should_be(problem):
    recipe, layout, grad, error = problem
    sent = reference.compress(grad, error, layout=layout, recipe=recipe)
    h = padded(grad, layout)
    if error.planes:
        h += error_in_order(error, layout, recipe)
    missed = (h - decompressed(sent, layout, recipe)).abs()
    if recipe.fixed_scale is not None:
        step = torch.full_like(h, 1.0 / recipe.fixed_scale)
        low, high = recipe.code_min * step, recipe.code_max * step
        missed = (h.clamp(low, high) - decompressed(sent, layout, recipe)).abs()
        bound = step / 2
    else:
        # absmax / step <= 2^(bits-1), one more than the largest code: the positive end of a block
        # misses up to a step, everything else half a step.
        step = sent.scales.double().repeat_interleave(layout.block_numel, 1)
        bound = torch.where(h > (recipe.code_max + 0.5) * step, step, step / 2)
    # h is rounded once to float32, and h / step twice (1 / step, the product), each relative to h.
    assert (missed <= bound + 3 * EPS * h.abs()).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_nothing_is_lost_but_the_errors_own_rounding(problem):
    recipe, layout, grad, error = problem
    if not error.planes:
        return
    recipe = Recipe(**{f: getattr(recipe, f) for f in recipe.__slots__} | {"error_decay": 0.0})
    sent = reference.compress(grad, error, layout=layout, recipe=recipe)
    before = padded(grad, layout) + error_in_order(error, layout, recipe)
    residual = before - decompressed(sent, layout, recipe)
    lost = (residual - error_in_order(sent.memory, layout, recipe)).abs()
    if recipe.fixed_error_scale is not None:
        step = torch.full_like(lost, 1.0 / recipe.fixed_error_scale)
        bound = torch.maximum(step / 2, residual.abs() - 127 * step)  # saturated: what is above
    else:
        # As on the wire: at most half a step, but a whole one at the positive end of the block.
        step = sent.memory.scale.double().repeat_interleave(layout.block_numel, 1)
        bound = torch.where(residual > 126.5 * step, step, step / 2)
    # Roundings to float32: h, h - q * step, the inverse of the error's step and the product.
    assert (lost <= bound + 4 * EPS * before.abs()).all()


def test_sum_of_what_is_sent_follows_the_sum_of_gradients():
    # Trap 3: at error_decay d the sum over steps of (gradient - sent) is e / (1 - d).
    recipe = Recipe(block_numel=64, error_decay=0.75)
    layout = layout_of(recipe, 1, 64)
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(64, generator=generator) * 0.1
    error, total = zero_error(layout, recipe), torch.zeros(1, 64, dtype=torch.float64)
    lost = torch.zeros_like(total)
    for _ in range(200):
        grad = mean + torch.randn(64, generator=generator)
        sent = reference.compress(grad, error, layout=layout, recipe=recipe)
        total += padded(grad, layout) - decompressed(sent, layout, recipe)
        error = sent.memory
        # Each step rounds e by half its step (a whole one at the top), worth 1 / (1 - d) of mass.
        lost += error.scale.double().item() * 4
    error_now = error_in_order(error, layout, recipe)
    assert ((total - error_now * 4).abs() <= lost).all()
    assert total.abs().max() < 8  # without feedback the mean alone would leave up to 60


def persistent_mean(recipe, steps):
    """Return how many wire steps of 1/8 are sent of a gradient that is always 0.3 of a step."""
    layout = layout_of(recipe, 1, 64)
    error, total = zero_error(layout, recipe), 0.0
    grad = torch.full((64,), 0.3 / 8)
    grad[0] = -1.0
    for _ in range(steps):
        sent = reference.compress(grad, error, layout=layout, recipe=recipe)
        total += decompressed(sent, layout, recipe)[0, 1].item() * 8
        error = sent.memory
    return total


def test_dead_zone_of_a_fixed_error_scale():
    # Trap 2: 0.125 * 0.3 step * 4 codes per step = 0.15 code, rounded to 0 for ever.
    dead = Recipe(block_numel=64, fixed_scale=8.0, fixed_error_scale=32.0, error_decay=0.875)
    assert persistent_mean(dead, 200) == 0.0
    # With a scale of its own the error arrives: 200 * 0.3 = 60 steps, less e / (1 - d), which is
    # below 1 step / (1 - d) = 8.
    alive = Recipe(block_numel=64, fixed_scale=8.0, error_decay=0.875)
    assert 52 <= persistent_mean(alive, 200) <= 68


@pytest.mark.parametrize("error_decay", [0.0, 0.5, 0.75])
def test_a_block_that_falls_silent_stays_finite(error_decay):
    # Trap 7. It decays by 14x a step at error_decay 0: denormal after some 26 steps.
    recipe = Recipe(block_numel=64, error_decay=error_decay)
    layout = layout_of(recipe, 1, 128)
    generator = torch.Generator().manual_seed(0)
    error = zero_error(layout, recipe)
    for step in range(60):
        grad = torch.randn(128, generator=generator)
        grad[:64] *= step == 0
        sent = reference.compress(grad, error, layout=layout, recipe=recipe)
        assert sent.scales.isfinite().all() and sent.memory.scale.isfinite().all()
        error = sent.memory
    if error_decay == 0.0:
        assert sent.scales[0, 0] == 0 and not any(p[0, 0].any() for p in error.planes)


@pytest.mark.parametrize("recipe_name", ["loco", "paper"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_stay_in_their_block_and_step(value, recipe_name):
    recipe = Recipe(block_numel=64, **RECIPES[recipe_name])
    layout = layout_of(recipe, 2, 150)
    generator = torch.Generator().manual_seed(0)
    grad, error = torch.randn(300, generator=generator), random_error(layout, recipe, generator)
    clean = reference.compress(grad, error, layout=layout, recipe=recipe)
    grad[70] = value  # rank 0, block 1
    dirty = reference.compress(grad, error, layout=layout, recipe=recipe)
    assert dirty.scales[0, 1].isnan()
    assert (dirty.codes[0, 1] == 0x88).all()  # zeros
    assert not any(plane[0, 1].any() for plane in dirty.memory.planes)
    is_other = torch.ones(layout.scale_shape, dtype=torch.bool)
    is_other[0, 1] = False
    assert torch.equal(clean.scales[is_other], dirty.scales[is_other])
    assert torch.equal(clean.codes[is_other], dirty.codes[is_other])
    for clean_plane, dirty_plane in zip(clean.memory.planes, dirty.memory.planes, strict=True):
        assert torch.equal(clean_plane[is_other], dirty_plane[is_other])
    mean = reference.decompress_mean(
        dirty.codes, dirty.scales, layout=layout, recipe=recipe, divisor=2.0
    )
    assert mean[64:128].isnan().all() and mean.isnan().sum() == 64
    after = reference.compress(torch.ones(300), dirty.memory, layout=layout, recipe=recipe)
    assert after.scales.isfinite().all()


def test_inductor_marks_nan_blocks_too():
    # AVX-512's maximum answers NaN with all bits set: negative, if taken for an integer.
    recipe = Recipe(block_numel=64)
    layout = layout_of(recipe, 1, 256)
    grad = torch.linspace(-1, 1, 256).index_fill(0, torch.tensor([5]), torch.nan)

    def scales(grad):
        return reference.compress(grad, Memory(), layout=layout, recipe=recipe).scales

    assert torch.equal(torch.compile(scales)(grad).isnan(), scales(grad).isnan())


@pytest.mark.parametrize("name", RECIPES)
def test_a_block_of_zeros_sends_zeros(name):
    recipe = Recipe(block_numel=64, **RECIPES[name])
    layout = layout_of(recipe, 2, 64)
    error = zero_error(layout, recipe)
    sent = reference.compress(torch.zeros(128), error, layout=layout, recipe=recipe)
    assert not codes_in_order(sent, layout, recipe).any()
    mean = reference.decompress_mean(
        sent.codes, sent.scales, layout=layout, recipe=recipe, divisor=2.0
    )
    assert torch.equal(mean, torch.zeros(64))


def test_padding_does_not_enter_a_scale():
    # 70 elements a rank: block 1 has 6, all of them small, and rank 1's chunk ends after 3 of them.
    recipe = Recipe(block_numel=64, keeps_error=False)
    layout = layout_of(recipe, 2, 70)
    grad = torch.ones(137)
    grad[64:70], grad[134:] = 2.0**-8, -(2.0**-9)
    sent = reference.compress(grad, Memory(), layout=layout, recipe=recipe)
    assert sent.scales.tolist() == [[2.0**-3, 2.0**-11], [2.0**-3, 2.0**-12]]
    expected = torch.zeros(2, 128, dtype=torch.float64)
    expected[:, :64], expected[0, 64:70], expected[1, 64:67] = 7 / 8, 7 / 8 * 2.0**-8, -(2.0**-9)
    assert torch.equal(decompressed(sent, layout, recipe), expected)


@pytest.mark.parametrize("value", [2.0**-149, 2.0**-127, 2.0**-101])
def test_blocks_below_the_smallest_are_zero(value):
    recipe = Recipe(block_numel=64)
    layout = layout_of(recipe, 1, 64)
    error = zero_error(layout, recipe)
    sent = reference.compress(torch.full((64,), value), error, layout=layout, recipe=recipe)
    assert sent.scales.item() == 0 and not decompressed(sent, layout, recipe).any()
    assert sent.memory.scale.item() == 0


def test_the_smallest_block_is_sent():
    recipe = Recipe(block_numel=64, keeps_error=False)
    layout = layout_of(recipe, 1, 64)
    grad = torch.full((64,), -SMALLEST_ABSMAX)
    sent = reference.compress(grad, Memory(), layout=layout, recipe=recipe)
    assert torch.equal(decompressed(sent, layout, recipe), padded(grad, layout))


@pytest.mark.parametrize("bits", [4, 8])
def test_saturation_clips_to_the_outermost_codes(bits):
    grad = torch.tensor([-1e30, 1e30]).repeat(32)
    for fixed_scale in (None, 4.0):
        recipe = Recipe(block_numel=64, bits=bits, fixed_scale=fixed_scale, keeps_error=False)
        layout = layout_of(recipe, 1, 64)
        sent = reference.compress(grad, Memory(), layout=layout, recipe=recipe)
        ends = [recipe.code_min, recipe.code_max]
        assert codes_in_order(sent, layout, recipe)[0, :2].tolist() == ends


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 8),
    st.integers(0, 300),
    st.sampled_from([4, 8]),
    st.sampled_from([None, 2.0**19]),
    st.sampled_from([None, 1.0, 3.7]),
    st.integers(0, 2**31),
)
def test_decompress_mean_against_float64(num_ranks, chunk_numel, bits, fixed_scale, divisor, seed):
    recipe = Recipe(block_numel=64, bits=bits, fixed_scale=fixed_scale)
    layout = layout_of(recipe, num_ranks, chunk_numel)
    divisor = float(num_ranks) if divisor is None else divisor
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, layout.plane_shape, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(layout.scale_shape, generator=generator) + 2.0**-20).bfloat16()
    mean = reference.decompress_mean(codes, scales, layout=layout, recipe=recipe, divisor=divisor)
    sent = codes_in_order(reference.Compressed(codes, scales, None), layout, recipe).double()
    arrays = sent.numpy(), scales.double().numpy()
    expected = simulation.decompress_mean(*arrays, layout=layout, recipe=recipe, divisor=divisor)
    size = simulation.decompress_mean(
        np.abs(arrays[0]), arrays[1], layout=layout, recipe=recipe, divisor=divisor
    )
    # code * scale is exact. W - 1 additions, 1 / divisor and one product are rounded, each by at
    # most EPS of the sum of magnitudes; terms in EPS^2 fit in one more.
    assert (np.abs(mean.double().numpy() - expected) <= (num_ranks + 2) * EPS * size).all()
