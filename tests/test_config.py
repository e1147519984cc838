"""Every field is validated, documented and part of the fingerprint."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from loco_compile import LoCoConfig

FIELDS = [f.name for f in dataclasses.fields(LoCoConfig)]

# Per field: values that are allowed but not the default, and values that are not.
GOOD: dict[str, list[Any]] = {
    "method": ["ef", "ef21", "zeropp", "none"],
    "bits": [2, 8],
    "scale": ["fixed"],
    "block_numel": [64, 1024],
    "fixed_scale": [1.0, 2.0**-100, 2.0**100],
    "code_range": ["symmetric", "signed"],
    "rounding": ["stochastic"],
    "rotation": ["hadamard"],
    "error_bits": [16, 32],
    "error_decay": [0.0, 0.75, 0.999],
    "error_scale": ["fixed"],
    "fixed_error_scale": [3.0, 2.0**-100, 2.0**100],
    "reset_interval": [0, 1],
    "start_step": [1, 10_000],
    "exempt": [("*.embed.weight",), ("a", "b")],
    "exempt_1d": [False],
    "min_numel": [0, 1],
    "on_uncaptured": ["warn"],
    "inner": ["aot_eager"],
}
OUT_OF_RANGE: dict[str, list[Any]] = {
    "method": ["onebit", "LOCO", ""],
    "bits": [0, 1, 3, 16, -4],
    "scale": ["tensor", ""],
    "block_numel": [0, 32, 63, 96, 1025, 1088, -128],
    "fixed_scale": [0.0, -1.0, 3.0, 2.0**101, 2.0**-101, float("inf"), float("nan")],
    "code_range": ["half", ""],
    "rounding": ["up", ""],
    "rotation": ["random", ""],
    "error_bits": [0, 4, 64],
    "error_decay": [-0.1, 1.0, 1.5, float("nan"), float("-inf")],
    "error_scale": ["tensor", ""],
    "fixed_error_scale": [0.0, -2.0, 2.0**101, 2.0**-101, float("inf"), float("nan")],
    "reset_interval": [-1],
    "start_step": [-1],
    "exempt": [],  # every tuple of strings is in range
    "exempt_1d": [],
    "min_numel": [-1],
    "on_uncaptured": ["ignore", ""],
    "inner": ["eager", ""],
}
WRONG_TYPE: dict[str, list[Any]] = {
    "method": [None, 1, b"loco"],
    "bits": [4.0, "4", None, True],
    "scale": [None, 1],
    "block_numel": [128.0, "128", None, True],
    "fixed_scale": ["1", None, True, 1j],
    "code_range": [None, 1],
    "rounding": [None, True],
    "rotation": [None, True],
    "error_bits": [8.0, "8", None, True],
    "error_decay": ["0.5", None, False],
    "error_scale": [None, 1],
    "fixed_error_scale": ["1", None, True],
    "reset_interval": [1.0, "512", None, True],
    "start_step": [1.0, "0", None, False],
    "exempt": ["*.weight", ["*.weight"], None, (1,), {"a"}],
    "exempt_1d": [1, 0, "yes", None],
    "min_numel": [1.0, "0", None, True],
    "on_uncaptured": [None, 1],
    "inner": [None, 1],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name in FIELDS for value in table[name]]


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_cases(name: str) -> None:
    assert GOOD[name], name
    assert OUT_OF_RANGE[name] or name in ("exempt", "exempt_1d"), name
    assert WRONG_TYPE[name], name


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_allowed_values_are_accepted(name: str, value: Any) -> None:
    # error_scale="fixed" with block scales needs a small decay: the combination is tested below.
    others = {"error_decay": 0.0} if name == "error_scale" else {}
    assert getattr(LoCoConfig(**{name: value}, **others), name) == value


@pytest.mark.parametrize(
    ("method", "fixed"),
    [
        ("ef", {"error_bits": 16, "error_decay": 0.0, "reset_interval": 0}),
        ("ef21", {"error_bits": 32, "error_decay": 0.0, "reset_interval": 0}),
        ("zeropp", {"error_decay": 0.0, "reset_interval": 0}),
    ],
)
def test_a_method_fixes_its_fields(method: str, fixed: dict[str, Any]) -> None:
    config = LoCoConfig(method=method)
    assert {name: getattr(config, name) for name in fixed} == fixed
    assert config == LoCoConfig(method=method, **fixed)
    others = {"error_decay": 0.25, "reset_interval": 7, "error_bits": 48 - config.error_bits}
    for name in fixed:
        with pytest.raises(ValueError, match=f"LoCoConfig.{name} is {fixed[name]!r} with method"):
            LoCoConfig(method=method, **{name: others[name]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "zeropp", "bits": 2}, "must be 4 or 8"),
        ({"error_bits": 32, "error_scale": "fixed", "error_decay": 0.0}, "without a scale"),
        ({"rotation": "hadamard", "scale": "fixed"}, "a fixed scale does not fit"),
        ({"rotation": "hadamard", "bits": 2, "block_numel": 192}, "a multiple of 128"),
    ],
)
def test_combinations_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoCoConfig(**fields)


@pytest.mark.parametrize(
    ("method", "keeps", "tracks"),
    [("loco", True, False), ("ef", True, False), ("ef21", True, True), ("zeropp", False, False)],
)
def test_a_method_is_a_recipe(method: str, keeps: bool, tracks: bool) -> None:
    recipe = LoCoConfig(method=method).arithmetic()
    assert (recipe.keeps_error, recipe.tracks_gradient) == (keeps, tracks)


@pytest.mark.parametrize(("name", "value"), cases(OUT_OF_RANGE) + cases(WRONG_TYPE))
def test_other_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"LoCoConfig\.{name} must be") as raised:
        LoCoConfig(**{name: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("name", [n for n in FIELDS if OUT_OF_RANGE[n]])
def test_the_error_says_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        LoCoConfig(**{name: OUT_OF_RANGE[name][-1]})
    allowed = str(raised.value).split("must be")[1].split(", got")[0].strip()
    assert len(allowed) > 3


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        LoCoConfig("loco")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("bit", "bits"), ("error_decya", "error_decay"), ("block_size", None), ("min_numels", None)],
)
def test_unknown_option_names_a_close_one(wrong: str, right: str | None) -> None:
    with pytest.raises(ValueError, match=f"no field '{wrong}'") as raised:
        LoCoConfig.from_options({wrong: 8})
    assert "value 8" in str(raised.value)
    assert right is None or f"Did you mean '{right}'?" in str(raised.value)
    assert all(name in str(raised.value) for name in FIELDS)


def test_unknown_option_without_a_close_one_has_no_guess() -> None:
    with pytest.raises(ValueError, match="no field 'zzzz'") as raised:
        LoCoConfig.from_options({"zzzz": 1})
    assert "Did you mean" not in str(raised.value)


def test_options_are_fields() -> None:
    assert LoCoConfig.from_options({"bits": 8, "exempt": ["a"]}) == LoCoConfig(
        bits=8, exempt=("a",)
    )
    assert LoCoConfig.from_options(None) == LoCoConfig.from_options({}) == LoCoConfig()


@pytest.mark.parametrize("decay", [0.5, 0.75, 0.8])
def test_small_codes_that_never_decay_are_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="error_decay below 0.5, got") as raised:
        LoCoConfig(scale="block", error_scale="fixed", error_decay=decay)
    assert "error_scale='block'" in str(raised.value)


def test_combinations_that_decay_are_accepted() -> None:
    LoCoConfig(scale="block", error_scale="fixed", error_decay=0.25)
    LoCoConfig(scale="fixed", error_scale="fixed", error_decay=0.8)
    LoCoConfig(scale="fixed", error_scale="block", error_decay=0.8)
    LoCoConfig(method="none", scale="block", error_scale="fixed", error_decay=0.8)


def test_recipes() -> None:
    assert LoCoConfig.recipe() == LoCoConfig.recipe("default") == LoCoConfig()
    paper = LoCoConfig.recipe("paper")
    assert (paper.scale, paper.error_scale) == ("fixed", "fixed")
    assert paper.fixed_error_scale == 4 * paper.fixed_scale
    assert LoCoConfig.recipe("paper", bits=8) == dataclasses.replace(paper, bits=8)


def test_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'default', 'paper', got 'papre'"):
        LoCoConfig.recipe("papre")
    with pytest.raises(ValueError, match="Did you mean 'bits'"):
        LoCoConfig.recipe("paper", bit=8)


def test_str_shows_what_differs_from_the_default() -> None:
    assert str(LoCoConfig()) == "LoCoConfig()"
    assert str(LoCoConfig(bits=8, exempt=("a",))) == "LoCoConfig(bits=8, exempt=('a',))"


@pytest.mark.parametrize("config", [LoCoConfig(), LoCoConfig.recipe("paper", exempt=("*",))])
def test_str_is_python_that_gives_the_config_back(config: LoCoConfig) -> None:
    assert eval(str(config), {"LoCoConfig": LoCoConfig}) == config


@pytest.mark.parametrize("name", FIELDS)
def test_frozen(name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(LoCoConfig(), name, GOOD[name][0])


def test_no_new_attribute() -> None:
    # slots: a misspelt assignment is an error whatever it is (TypeError on Python 3.10 and 3.11).
    with pytest.raises((AttributeError, TypeError)):
        LoCoConfig().bit = 8


def test_copies_and_pickles_are_equal_and_hash_alike() -> None:
    config = LoCoConfig(bits=8, exempt=("a",))
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
        assert twin.fingerprint() == config.fingerprint()


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_fingerprint_depends_on_every_field(name: str, value: Any) -> None:
    base = LoCoConfig(error_decay=0.25) if name == "error_scale" else LoCoConfig()
    other = dataclasses.replace(base, **{name: value})
    assert other.fingerprint() != base.fingerprint()
    assert dataclasses.replace(base).fingerprint() == base.fingerprint()


def test_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "from loco_compile import LoCoConfig as C;"
        "print(C(exempt=('a', 'b')).fingerprint(), C.recipe('paper').fingerprint())"
    )
    expected = [
        LoCoConfig(exempt=("a", "b")).fingerprint(),
        LoCoConfig.recipe("paper").fingerprint(),
    ]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert done.stdout.split() == expected
    assert all(len(f) == 16 and int(f, 16) >= 0 for f in expected)


def test_equal_numbers_of_another_type_have_one_fingerprint() -> None:
    # 1 == 1.0: the configs are equal, so their fingerprints must be.
    assert LoCoConfig(fixed_scale=1) == LoCoConfig(fixed_scale=1.0)
    assert LoCoConfig(fixed_scale=1).fingerprint() == LoCoConfig(fixed_scale=1.0).fingerprint()
    assert LoCoConfig(error_decay=0).fingerprint() == LoCoConfig(error_decay=0.0).fingerprint()


def test_arithmetic_holds_what_the_kernels_need() -> None:
    recipe = LoCoConfig.recipe("paper", bits=8, block_numel=64).arithmetic()
    assert (recipe.bits, recipe.block_numel, recipe.error_decay) == (8, 64, 0.8)
    assert (recipe.fixed_scale, recipe.fixed_error_scale) == (2.0**19, 2.0**21)
    recipe = LoCoConfig().arithmetic()
    assert recipe.fixed_scale is None
    assert recipe.fixed_error_scale is None
