"""Packing and unpacking a message is exactly compressing and decompressing each tensor."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from loco_compile import LoCoConfig
from loco_compile.kernels import Memory
from loco_compile.kernels.layout import Layout, message_bytes, section_bytes
from loco_compile.kernels.reference import compress, decompress_mean
from loco_compile.passes.message import Part, compress_all, pack, unpack_mean
from loco_compile.passes.plan import layout_of
from tests.kernels.cases import random_error as any_memory

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

configs = st.builds(
    LoCoConfig,
    bits=st.sampled_from([4, 8]),
    scale=st.sampled_from(["block", "fixed"]),
    block_numel=st.sampled_from([64, 128, 320, 1024]),
    fixed_scale=st.sampled_from([1.0, 2.0**-3, 2.0**10]),
    error_decay=st.sampled_from([0.0, 0.25]),
    error_scale=st.sampled_from(["block", "fixed"]),
    fixed_error_scale=st.sampled_from([1.0, 24.0, 2.0**12]),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


class Case(NamedTuple):
    """A bucket on every rank."""

    num_ranks: int
    config: LoCoConfig
    chunk_numels: list[int]
    dtype: torch.dtype
    seed: int

    def parts(self) -> list[Part]:
        recipe = self.config.arithmetic()
        return [
            Part(layout_of(self.num_ranks, n, recipe), recipe, self.dtype)
            for n in self.chunk_numels
        ]


cases = st.builds(
    Case,
    num_ranks=st.integers(1, 8),
    config=configs,
    chunk_numels=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    dtype=dtypes,
    seed=st.integers(0, 2**16),
)


def random_error(layout: Layout, config: LoCoConfig, generator: torch.Generator) -> Memory:
    return any_memory(layout, config.arithmetic(), generator)


def slots(memory: Memory) -> list[Tensor]:
    """The buffers of loco_compile/state.py: on CPU every scale twice."""
    scale = memory.scale
    if scale is not None:
        memory = memory._replace(scale=torch.stack([scale, scale], -1))
    return memory._replace(known=None).tensors()


def bits_of(x: Tensor) -> Tensor:
    """Compare bits: a NaN is equal to itself, -0 is not 0."""
    return x.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()])


@QUICK
@given(cases)
def test_a_message_is_exactly_what_its_tensors_are_one_by_one(case: Case) -> None:
    generator, parts = torch.Generator().manual_seed(case.seed), case.parts()
    messages, alone = [], []
    for rank in range(case.num_ranks):
        grads, errors = [], []
        for part in parts:
            numel = case.num_ranks * part.layout.chunk_numel
            # The last row of the last rank may be missing: it reads as zero.
            numel -= rank % 2 if part.layout.chunk_numel > 1 else 0
            grads.append((torch.randn(numel, generator=generator) * 4).to(case.dtype))
            errors.append(random_error(part.layout, case.config, generator))
        if case.seed % 5 == 0:
            grads[0][0] = torch.nan
        buffers = [b for e in errors for b in slots(e)]
        message, new = compress_all(grads, buffers, parts)
        assert message.shape == (case.num_ranks, message_bytes([p.layout for p in parts]))
        assert message.dtype == torch.uint8
        own = [
            compress(g, e, layout=p.layout, recipe=p.recipe)
            for g, e, p in zip(grads, errors, parts, strict=True)
        ]
        expected = [b for c in own for b in slots(c.memory)]
        assert len(new) == len(expected) == len(buffers)
        for got, want, old in zip(new, expected, buffers, strict=True):
            assert (got.shape, got.dtype) == (old.shape, old.dtype)
            assert torch.equal(bits_of(got.contiguous()), bits_of(want))
        messages.append(message)
        alone.append(own)
    for divisor in (1.0, float(case.num_ranks)):
        for me in range(case.num_ranks):
            received = torch.stack([m[me] for m in messages])
            shards, _ = unpack_mean(received, [], parts, divisor=divisor)
            for index, part in enumerate(parts):
                want = decompress_mean(
                    torch.stack([own[index].codes[me] for own in alone]),
                    torch.stack([own[index].scales[me] for own in alone]),
                    layout=part.layout,
                    recipe=part.recipe,
                    divisor=divisor,
                ).to(case.dtype)
                assert shards[index].shape == (part.layout.chunk_numel,)
                assert shards[index].dtype == case.dtype
                assert torch.equal(bits_of(shards[index]), bits_of(want))


@QUICK
@given(cases)
def test_sections_lie_where_the_layout_says(case: Case) -> None:
    """docs of kernels/layout.py: codes, then scales, then zeros up to a multiple of 16."""
    generator, parts = torch.Generator().manual_seed(case.seed), case.parts()
    done = [
        compress(
            torch.randn(case.num_ranks * p.layout.chunk_numel, generator=generator),
            Memory(),
            layout=p.layout,
            recipe=p.recipe,
        )
        for p in parts
    ]
    message, start = pack(done), 0
    assert message.shape[1] % 16 == 0
    for compressed, part in zip(done, parts, strict=True):
        assert start % 16 == 0
        # B blocks of K codes of `bits` bits.
        num_blocks = -(-part.layout.chunk_numel // part.layout.block_numel)
        size = num_blocks * part.layout.block_numel * case.config.bits // 8
        section = message[:, start : start + size]
        assert torch.equal(section, compressed.codes.reshape(case.num_ranks, -1))
        start += size
    for compressed in done:
        raw = compressed.scales.contiguous().view(torch.uint8).reshape(case.num_ranks, -1)
        assert torch.equal(message[:, start : start + raw.shape[1]], raw)
        start += raw.shape[1]
    assert 0 <= message.shape[1] - start < 16
    assert (message[:, start:] == 0).all()
    assert sum(section_bytes([p.layout for p in parts])) == message.shape[1]


@pytest.mark.parametrize("recipe", [LoCoConfig(), LoCoConfig.recipe("paper"), LoCoConfig(bits=8)])
def test_number_of_buffers(recipe: LoCoConfig) -> None:
    arithmetic = recipe.arithmetic()
    layout = layout_of(2, 1000, arithmetic)
    part = Part(layout, arithmetic, torch.float32)
    error = random_error(layout, recipe, torch.Generator())
    assert part.num_buffers == len(slots(error))


def test_without_error_there_are_no_buffers() -> None:
    recipe = LoCoConfig(method="zeropp").arithmetic()
    part = Part(layout_of(2, 300, recipe), recipe, torch.float32)
    assert part.num_buffers == 0
    message, new = compress_all([torch.randn(600)], [], [part])
    assert new == []
    assert message.shape == (2, message_bytes([part.layout]))


def test_buffers_keep_the_number_of_slots_that_they_had() -> None:
    config = LoCoConfig()
    recipe = config.arithmetic()
    part = Part(layout_of(2, 300, recipe), recipe, torch.float32)
    error = random_error(part.layout, config, torch.Generator().manual_seed(0))
    for num_slots in (1, 2, 3):
        scale = error.scale.unsqueeze(-1).expand(-1, -1, num_slots).contiguous()
        _, new = compress_all([torch.randn(600)], [*error.planes, scale], [part])
        assert new[-1].shape == (*part.layout.scale_shape, num_slots)
        assert (new[-1] == new[-1][..., :1]).all()
