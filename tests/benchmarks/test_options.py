"""The command line covers every field of every config, with the right types."""

import dataclasses

import pytest
from model import ModelConfig
from options import EAGER, TrainConfig, field_docs, known_methods, make_parser, parse

from loco_compile import LoCoConfig


@pytest.mark.parametrize("cls", [LoCoConfig, ModelConfig, TrainConfig])
def test_every_field_has_an_option_with_help(cls):
    options = {a.dest: a for a in make_parser()._actions}
    for field in dataclasses.fields(cls):
        assert field.name in options
        assert options[field.name].help, field.name


@pytest.mark.parametrize("cls", [LoCoConfig, ModelConfig, TrainConfig])
def test_every_field_has_a_docstring(cls):
    assert set(field_docs(cls)) == {f.name for f in dataclasses.fields(cls)}


def test_help_can_be_printed():
    assert "--error-decay" in make_parser().format_help()


# --method takes a list of methods: the other tests cover it.
SCALAR_FIELDS = [f for f in dataclasses.fields(LoCoConfig) if f.name != "method"]


@pytest.mark.parametrize("field", SCALAR_FIELDS, ids=lambda f: f.name)
def test_a_default_given_as_text_comes_back_as_itself(field):
    flag = "--" + field.name.replace("_", "-")
    if isinstance(field.default, bool):
        argv = [flag if field.default else "--no-" + field.name.replace("_", "-")]
    else:
        text = ",".join(field.default) if isinstance(field.default, tuple) else str(field.default)
        argv = [flag, text]
    options = parse(argv)
    assert options.overrides == {field.name: field.default}
    assert type(options.overrides[field.name]) is type(field.default)


def test_nothing_given_is_the_recipe():
    options = parse([])
    assert options.methods == ("none", "loco")
    assert options.config("loco") == LoCoConfig()
    assert options.config("none") == LoCoConfig(method="none")
    assert parse(["--recipe", "paper"]).config("loco") == LoCoConfig.recipe("paper")


def test_options_reach_their_configs():
    argv = "--method loco,eager --bits 8 --exempt *.head.weight,x --no-exempt-1d --dim 80 --lr 0.5"
    options = parse([*argv.split(), "--check-accumulated", "--recipe", "paper"])
    config = options.config("loco")
    assert (config.bits, config.exempt, config.exempt_1d) == (8, ("*.head.weight", "x"), False)
    assert config.scale == "fixed"
    assert options.config(EAGER) is None
    assert (options.model.dim, options.train.lr) == (80, 0.5)
    assert options.train.check_accumulated


def test_eager_is_offered_beside_the_packages_methods():
    assert set(known_methods()) >= {"loco", "none", EAGER}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--method sgd", "expected different ones of"),
        ("--method loco,loco", "expected different ones of"),
        ("--ranks 0", "expected 1 or more"),
        ("--bits 3", "LoCoConfig.bits must be one of 2, 4, 8, got 3"),
        ("--scale log", "invalid choice: 'log'"),
        ("--heads 3", "heads must divide dim=320, got 3"),
        ("--layers 0", "layers must be 1 or more, got 0"),
        ("--steps 0", "steps must be above 0, got 0"),
        ("--recipe none-such", "recipe"),
        ("--no-such-option", "unrecognized arguments"),
    ],
)
def test_a_mistake_ends_with_a_message(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(argv.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
