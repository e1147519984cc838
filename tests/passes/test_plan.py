"""Policy: every gradient gets a recipe or exactly one reason."""

from __future__ import annotations

import dataclasses
import fnmatch
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from loco_compile import LoCoConfig
from loco_compile.passes.plan import (
    COMPRESSIBLE,
    Decline,
    Parameter,
    decide,
    fingerprint,
    layout_of,
)
from tests.graphs import fake_group
from tests.passes.bare import LOCO, PLAIN, Grad, parameters, trace

MATRIX = Parameter(
    name="layers.0.up.weight", shape=(64, 128), grad_dtype=torch.float32, num_ranks=2
)


def changed(**facts: object) -> Parameter:
    return dataclasses.replace(MATRIX, **facts)


def test_a_matrix_is_compressed() -> None:
    assert decide(MATRIX, LoCoConfig()) is None


@pytest.mark.parametrize(
    ("parameter", "config", "reason"),
    [
        (changed(requires_grad=False), LoCoConfig(), Decline.FROZEN),
        (changed(num_ranks=1), LoCoConfig(), Decline.ONE_RANK),
        (MATRIX, LoCoConfig(method="none"), Decline.METHOD_NONE),
        (MATRIX, LoCoConfig(exempt=("*.up.weight",)), Decline.EXEMPT),
        (MATRIX, LoCoConfig(exempt=("x", "layers.?.up*")), Decline.EXEMPT),
        (changed(shape=(8192,)), LoCoConfig(), Decline.ONE_DIMENSION),
        (changed(shape=()), LoCoConfig(), Decline.ONE_DIMENSION),
        (changed(shape=(64, 63)), LoCoConfig(), Decline.SMALL),
        (changed(shape=(63,)), LoCoConfig(exempt_1d=False), Decline.SMALL),
        (changed(shape=(0, 128)), LoCoConfig(min_numel=0), Decline.SMALL),
        (changed(grad_dtype=torch.float64), LoCoConfig(), Decline.DTYPE),
        (changed(grad_dtype=torch.float8_e4m3fn), LoCoConfig(), Decline.DTYPE),
    ],
)
def test_reasons(parameter: Parameter, config: LoCoConfig, reason: Decline) -> None:
    assert decide(parameter, config) is reason


@pytest.mark.parametrize(
    ("parameter", "config"),
    [
        (changed(shape=(64, 64)), LoCoConfig()),  # exactly min_numel
        (changed(shape=(8192,)), LoCoConfig(exempt_1d=False)),
        (changed(shape=(1, 1)), LoCoConfig(min_numel=0)),
        (MATRIX, LoCoConfig(exempt=("up.weight", "LAYERS*", "layers.0"))),
        (changed(grad_dtype=torch.bfloat16), LoCoConfig()),
        (changed(grad_dtype=torch.float16), LoCoConfig()),
    ],
)
def test_no_reason(parameter: Parameter, config: LoCoConfig) -> None:
    assert decide(parameter, config) is None


names = st.from_regex(r"[a-c]{1,3}(\.[a-c]{1,3}){0,2}", fullmatch=True)
facts = st.builds(
    Parameter,
    name=names,
    shape=st.lists(st.integers(0, 100), max_size=3).map(tuple),
    grad_dtype=st.sampled_from([*COMPRESSIBLE, torch.float64]),
    num_ranks=st.integers(1, 8),
    requires_grad=st.booleans(),
)
configs = st.builds(
    LoCoConfig,
    method=st.sampled_from(["loco", "none"]),
    exempt=st.lists(st.sampled_from(["a*", "*.b", "c", "?"]), max_size=2).map(tuple),
    exempt_1d=st.booleans(),
    min_numel=st.integers(0, 10_000),
)


@settings(max_examples=300, deadline=None)
@given(facts, configs)
def test_compressed_if_and_only_if_nothing_speaks_against_it(
    parameter: Parameter, config: LoCoConfig
) -> None:
    numel = math.prod(parameter.shape)
    speaks_for = (
        parameter.requires_grad
        and parameter.num_ranks > 1
        and config.method == "loco"
        and not any(fnmatch.fnmatchcase(parameter.name, p) for p in config.exempt)
        and (len(parameter.shape) >= 2 or not config.exempt_1d)
        and numel >= max(config.min_numel, 1)
        and parameter.grad_dtype in COMPRESSIBLE
    )
    assert (decide(parameter, config) is None) == speaks_for


@settings(max_examples=300, deadline=None)
@given(
    num_ranks=st.integers(1, 1024),
    chunk_numel=st.integers(0, 2**40),
    bits=st.sampled_from([4, 8]),
    block_numel=st.integers(1, 16).map(lambda n: 64 * n),
)
def test_layout(num_ranks: int, chunk_numel: int, bits: int, block_numel: int) -> None:
    recipe = LoCoConfig(bits=bits, block_numel=block_numel).arithmetic()
    layout = layout_of(num_ranks, chunk_numel, recipe)
    assert layout.padded_numel - block_numel < chunk_numel <= layout.padded_numel
    assert layout.padded_numel == layout.num_blocks * block_numel
    assert layout.code_bytes * 8 == layout.padded_numel * bits
    assert layout.code_bytes % 16 == 0
    assert math.prod(layout.plane_shape) * layout.codes_per_byte == num_ranks * layout.padded_numel
    assert layout.scale_shape == (num_ranks, layout.num_blocks)


def test_every_reason_is_another_text() -> None:
    assert len({d.value for d in Decline}) == len(Decline)
    assert all(Decline(d.value) is d for d in Decline)


def plan_fingerprint(specs: list[Grad], config: LoCoConfig = LOCO, num_ranks: int = 2) -> str:
    with fake_group(num_ranks):
        return fingerprint(trace(specs, config, num_ranks=num_ranks).exchanges(config))


def test_fingerprint_is_that_of_the_plan() -> None:
    specs = parameters((64, 128), (64, 64))
    same = plan_fingerprint(specs)
    assert plan_fingerprint(parameters((64, 128), (64, 64))) == same
    # Shapes with equal chunks are one plan; everything else is another.
    assert plan_fingerprint(parameters((128, 64), (64, 64))) == same
    others = [
        plan_fingerprint(parameters((64, 128), (64, 65))),
        plan_fingerprint(parameters((64, 128))),
        plan_fingerprint(parameters((64, 64), (64, 128))),
        plan_fingerprint(parameters((64, 128), (64, 64), dtype=torch.bfloat16)),
        plan_fingerprint(parameters((64, 128), (64, 64), op="sum")),
        plan_fingerprint(parameters((64, 128), (64, 64), bucket="other")),
        plan_fingerprint(specs, PLAIN),
        plan_fingerprint(specs, LoCoConfig(bits=8)),
        plan_fingerprint(specs, LoCoConfig(block_numel=64)),
        plan_fingerprint(specs, LoCoConfig(error_decay=0.0)),
        plan_fingerprint(specs, num_ranks=4),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_a_recipe_is_asked_only_of_what_is_compressed() -> None:
    with fake_group(2):
        (exchange,) = trace([Grad()], PLAIN).exchanges(PLAIN)
    (choice,) = exchange.plain
    assert exchange.compressed == ()
    with pytest.raises(AssertionError, match=r"expected a recipe for block\.weight"):
        choice.layout  # noqa: B018
