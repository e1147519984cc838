"""The command line: an option for each field of each config, made from the dataclasses."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from model import ModelConfig

from loco_compile import LoCoConfig

EAGER = "eager"
"""The method that is not ours: stock FSDP2, not compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The same for every method."""

    steps: int = 300
    """Optimizer steps."""
    batch: int = 3
    """Windows in one rank's batch."""
    lr: float = 1e-3
    """Highest learning rate: reached after a tenth of the steps, then a cosine down to a tenth."""
    weight_decay: float = 0.1
    """AdamW's, for parameters with two dimensions or more."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    seed: int = 0
    """Seeds the weights and the data order."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gathered parameters and activations (MixedPrecisionPolicy.param_dtype)."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of uncompressed gradient reductions (MixedPrecisionPolicy.reduce_dtype)."""
    eval_windows: int = 256
    """Held-out windows that the held-out loss is the mean of, over all ranks."""
    check_accumulated: bool = False
    """Also add up the true gradients, of an eager twin with the same weights and batches, and
    compare with the sum of what was sent. Doubles the work, so tokens/s is not reported."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "lr", "clip", "eval_windows"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Options:
    """A parsed command line."""

    methods: tuple[str, ...]
    ranks: int
    json: Path | None
    model: ModelConfig
    train: TrainConfig
    recipe: str
    overrides: dict[str, Any]
    """Fields of LoCoConfig that were given on the command line."""

    def config(self, method: str) -> LoCoConfig | None:
        """Return a method's config, None for eager."""
        if method == EAGER:
            return None
        return LoCoConfig.recipe(self.recipe, **{**self.overrides, "method": method})

    def as_dict(self) -> dict[str, Any]:
        """Return what the run depends on, for the JSON."""
        return {
            "methods": list(self.methods),
            "recipe": self.recipe,
            "model": dataclasses.asdict(self.model),
            "train": dataclasses.asdict(self.train),
        }


def parse(argv: list[str]) -> Options:
    """Parse and validate a command line. Exits with a message on a mistake, as argparse does."""
    parser = make_parser()
    given = vars(parser.parse_args(argv))
    try:
        options = Options(
            methods=given["method"],
            ranks=given["ranks"],
            json=given["json"],
            model=ModelConfig(**_take(given, ModelConfig)),
            train=TrainConfig(**_take(given, TrainConfig)),
            recipe=given["recipe"],
            overrides={k: v for k, v in _take(given, LoCoConfig).items() if k != "method"},
        )
        for method in options.methods:
            options.config(method)
    except ValueError as mistake:
        parser.error(str(mistake))
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with the script's own options and one for each field of the configs."""
    parser = argparse.ArgumentParser(
        prog="train.py", description="Train a byte-level GPT with FSDP2 and compare methods."
    )
    parser.add_argument(
        "--method",
        type=_methods,
        default=("none", "loco"),
        help=f"methods to run one after another, separated by commas: {', '.join(known_methods())}",
    )
    parser.add_argument("--ranks", type=_positive, default=2, help="processes to start (default 2)")
    parser.add_argument("--json", type=Path, help="file to write; the loss curve goes beside it")
    parser.add_argument("--recipe", default="default", help="LoCoConfig recipe to start from")
    for cls in (ModelConfig, TrainConfig, LoCoConfig):
        group = parser.add_argument_group(cls.__name__)
        add_fields(group, cls, skip=("method",) if cls is LoCoConfig else ())
    return parser


def add_fields(group: argparse._ArgumentGroup, cls: type, *, skip: tuple[str, ...] = ()) -> None:
    """Add an option for each field of a dataclass; an option that is not given leaves no value."""
    types, texts = get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        text = f"{texts.get(field.name, '')} (default {field.default})".replace("%", "%%")
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            help=text.strip(),
            default=argparse.SUPPRESS,
            **_kind(types[field.name]),
        )


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings under a class's fields, which Python itself drops."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    texts: dict[str, str] = {}
    name = None
    for node in definition.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts[name] = " ".join(str(node.value.value).split())
        else:
            name = None
    return texts


def known_methods() -> tuple[str, ...]:
    """Return the package's methods and eager."""
    return (*get_args(get_type_hints(LoCoConfig)["method"]), EAGER)


def _kind(annotation: Any) -> dict[str, Any]:
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation), "type": type(get_args(annotation)[0])}
    if annotation == tuple[str, ...]:
        return {"type": _names, "metavar": "NAME,NAME"}
    if annotation in (int, float, str):
        return {"type": annotation}
    raise AssertionError(f"expected a field type that has an option, got {annotation}")


def _take(given: dict[str, Any], cls: type) -> dict[str, Any]:
    return {f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _methods(text: str) -> tuple[str, ...]:
    methods = _names(text)
    unknown = [m for m in methods if m not in known_methods()]
    if unknown or not methods or len(set(methods)) < len(methods):
        allowed = ", ".join(known_methods())
        raise argparse.ArgumentTypeError(f"expected different ones of {allowed}, got {text!r}")
    return methods


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value
