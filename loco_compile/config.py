"""What a user can choose, validated up front."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from .kernels.layout import BLOCK_MULTIPLE
from .kernels.recipe import ROTATION, CodeRange, Recipe

Method = Literal["loco", "ef", "ef21", "zeropp", "none"]
Scale = Literal["block", "fixed"]
Rounding = Literal["nearest", "stochastic"]
Rotation = Literal["none", "hadamard"]
OnUncaptured = Literal["error", "warn"]
Inner = Literal["inductor", "aot_eager"]

_PHANTOM_DECAY = 0.5  # from here on int8 codes of 1 never decay: rint(0.5 * 1) = 0, rint(0.75) = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoCoConfig:
    """How gradients are exchanged. Every field has a default that is right for most models.

    Raises: ValueError that names the field, its value and the allowed set.
    """

    method: Method = "loco"
    """What is sent, and what is kept of it: "loco" (averaged 8-bit error feedback), "ef" (the last
    error, in 16 bits, never reset), "ef21" (the change of the gradient since the last step, added
    up by the receiver), "zeropp" (no feedback: ZeRO++'s) or "none" (the graph as it was, bit for
    bit). A method fixes some of the fields below: see docs/config.md."""
    bits: int = 4
    """Width of one gradient code on the wire, in bits: 2, 4 or 8."""
    scale: Scale = "block"
    """Scale of the codes: "block" (one bfloat16 for each block, from its largest magnitude) or
    "fixed" (`fixed_scale`, as in the paper)."""
    block_numel: int = 128
    """Elements that share one scale: a multiple of 64 from 64 to 1024."""
    fixed_scale: float = 2.0**19
    """s in (E1), codes per gradient unit; a power of two. Only used with scale="fixed"."""
    code_range: CodeRange = "full"
    """What the element of a block with the largest magnitude becomes. With 4 bits: -8 or +8, the
    latter clipped to 7 ("full"); -7 or +7 ("symmetric"); or always -8, with a scale of the other
    sign where that element is positive ("signed"). Only used with scale="block"."""
    rounding: Rounding = "nearest"
    """How codes are rounded: "nearest", or "stochastic" (up with the probability of the rest, from
    a hash of the parameter's name, the rank, the step and the element)."""
    rotation: Rotation = "none"
    """What is quantised: the gradient ("none") or the Hadamard transform of every 32 elements
    ("hadamard"), which spreads outliers. Needs scale="block"."""
    error_bits: int = 8
    """Width of the stored error, in bits: 8, 16, or 32 for float32 without a scale."""
    error_decay: float = 0.5
    """Weight of the OLD error in the moving average (E5), in [0, 1). 0 is classic error feedback.
    Values where 1 - error_decay is a power of two give the same bits on every backend."""
    error_scale: Scale = "block"
    """Scale of the stored error codes: "block" or "fixed" (`fixed_error_scale`)."""
    fixed_error_scale: float = 2.0**21
    """s_e in (E2), error codes per gradient unit, above 0. Only used with error_scale="fixed"."""
    reset_interval: int = 512
    """Optimizer steps between two resets of all error to zero (T_c of the paper); 0 means never."""
    start_step: int = 0
    """Optimizer steps at the start that are exchanged uncompressed."""
    exempt: tuple[str, ...] = ()
    """Glob patterns of parameter names (fnmatch, e.g. "*.embed.weight") to send uncompressed."""
    exempt_1d: bool = True
    """Whether parameters with one dimension (norms, biases) are sent uncompressed."""
    min_numel: int = 4096
    """Parameters with fewer elements than this are sent uncompressed."""
    on_uncaptured: OnUncaptured = "error"
    """What to do when an FSDP group's hooks ran outside the compiled graph, so that its gradients
    would go out uncompressed: "error" or "warn"."""
    inner: Inner = "inductor"
    """What compiles the rewritten graphs: "inductor", or "aot_eager" to run them op by op."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        self._apply_method()
        self._check_combinations()

    def _check_choices(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "method": get_args(Method),
            "bits": (2, 4, 8),
            "scale": get_args(Scale),
            "code_range": get_args(CodeRange),
            "rounding": get_args(Rounding),
            "rotation": get_args(Rotation),
            "error_bits": (8, 16, 32),
            "error_scale": get_args(Scale),
            "on_uncaptured": get_args(OnUncaptured),
            "inner": get_args(Inner),
            "exempt_1d": (True, False),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if type(value) not in {type(a) for a in allowed} or value not in allowed:
                one_of = ", ".join(repr(a) for a in allowed)
                raise ValueError(f"LoCoConfig.{name} must be one of {one_of}, got {value!r}")

    def _check_ranges(self) -> None:
        def need(name: str, what: str, holds: bool) -> None:
            if not holds:
                raise ValueError(f"LoCoConfig.{name} must be {what}, got {getattr(self, name)!r}")

        for name in ("block_numel", "reset_interval", "start_step", "min_numel"):
            value = getattr(self, name)
            need(name, "an integer", isinstance(value, int) and not isinstance(value, bool))
        for name in ("fixed_scale", "fixed_error_scale", "error_decay"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            need(name, "a finite number", number and math.isfinite(value))
        in_range = 64 <= self.block_numel <= 1024 and self.block_numel % BLOCK_MULTIPLE == 0
        need("block_numel", f"a multiple of {BLOCK_MULTIPLE} from 64 to 1024", in_range)
        need("error_decay", "in [0, 1)", 0 <= self.error_decay < 1)
        is_power = self.fixed_scale > 0 and math.frexp(self.fixed_scale)[0] == 0.5
        in_range = is_power and 2.0**-100 <= self.fixed_scale <= 2.0**100
        need("fixed_scale", "a power of two from 2**-100 to 2**100", in_range)
        in_range = 2.0**-100 <= self.fixed_error_scale <= 2.0**100
        need("fixed_error_scale", "from 2**-100 to 2**100", in_range)
        for name in ("reset_interval", "start_step", "min_numel"):
            need(name, "0 or more", getattr(self, name) >= 0)
        is_tuple = isinstance(self.exempt, tuple) and all(isinstance(p, str) for p in self.exempt)
        need("exempt", 'a tuple of glob patterns such as ("*.embed.weight",)', is_tuple)

    def _apply_method(self) -> None:
        """Set the fields that the method fixes, unless they were set to something else."""
        default = {f.name: f.default for f in dataclasses.fields(self)}
        for name, value in _METHODS[self.method].items():
            given = getattr(self, name)
            if given not in (default[name], value):
                raise ValueError(
                    f"LoCoConfig.{name} is {value!r} with method={self.method!r}, got {given!r}. "
                    f"Leave it out, or use method='loco', which has it free."
                )
            object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        if self.method == "none":
            return
        if self.method == "zeropp" and self.bits == 2:
            raise ValueError("LoCoConfig.bits must be 4 or 8 with method='zeropp', got 2")
        if self.error_scale == "fixed" and self.error_bits == 32:
            raise ValueError(
                "LoCoConfig: error_bits=32 keeps the error as float32, without a scale; got "
                "error_scale='fixed'. Use error_scale='block', or error_bits=8 or 16."
            )
        if self.rotation == "hadamard":
            self._check_rotation()
        has_error = self.method in ("loco", "ef")
        phantom = has_error and self.scale == "block" and self.error_scale == "fixed"
        if phantom and self.error_decay >= _PHANTOM_DECAY:
            raise ValueError(
                "LoCoConfig: scale='block' with error_scale='fixed' needs error_decay below "
                f"{_PHANTOM_DECAY}, got {self.error_decay}: small error codes would never decay "
                "and be sent again for ever. Use error_scale='block', or error_decay=0."
            )

    def _check_rotation(self) -> None:
        if self.scale == "fixed":
            raise ValueError(
                "LoCoConfig: rotation='hadamard' changes the size of what is quantised, so a fixed "
                "scale does not fit it. Use scale='block', or rotation='none'."
            )
        # A run of 32 elements lies in one plane of a block.
        multiple = ROTATION * 8 // self.bits
        if self.block_numel % multiple:
            raise ValueError(
                f"LoCoConfig.block_numel must be a multiple of {multiple} with rotation='hadamard' "
                f"and bits={self.bits}, got {self.block_numel}"
            )

    @classmethod
    def recipe(cls, name: str = "default", **overrides: Any) -> LoCoConfig:
        """Return a named config, with some fields changed.

        "default" is this project's; "paper" is the paper's fine-tuning setting: fixed s = 2^19,
        s_e = 4 s, the authors' decay 0.8, reset every 512 steps. A fixed scale fits one model and
        one loss: see docs/equations.md before using it.
        """
        if name not in _RECIPES:
            known = ", ".join(repr(k) for k in _RECIPES)
            raise ValueError(f"LoCoConfig.recipe must be one of {known}, got {name!r}")
        return cls.from_options({**_RECIPES[name], **overrides})

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> LoCoConfig:
        """Build a config from `torch.compile(..., options={...})`; unknown names are errors."""
        options = dict(options or {})
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"LoCoConfig has no field {name!r} (value {options[name]!r}).{hint} "
                    f"Fields: {', '.join(known)}"
                )
        if isinstance(options.get("exempt"), list):
            options["exempt"] = tuple(options["exempt"])
        return cls(**options)

    def arithmetic(self) -> Recipe:
        """Return the numbers the kernels need for a compressed parameter."""
        return Recipe(
            bits=self.bits,
            block_numel=self.block_numel,
            fixed_scale=self.fixed_scale if self.scale == "fixed" else None,
            code_range=self.code_range,
            stochastic=self.rounding == "stochastic",
            rotates=self.rotation == "hadamard",
            keeps_error=self.method != "zeropp",
            tracks_gradient=self.method == "ef21",
            error_bits=self.error_bits,
            error_decay=self.error_decay,
            fixed_error_scale=self.fixed_error_scale if self.error_scale == "fixed" else None,
        )

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal configs, in every process and version."""
        fields = dataclasses.asdict(self)
        for name in ("fixed_scale", "fixed_error_scale", "error_decay"):
            fields[name] = float(fields[name])  # 1 and 1.0 are equal, their texts are not
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        default = {f.name: f.default for f in dataclasses.fields(self)}
        changed = [f"{k}={v!r}" for k, v in dataclasses.asdict(self).items() if v != default[k]]
        return f"LoCoConfig({', '.join(changed)})"


_METHODS: dict[Method, dict[str, Any]] = {
    "loco": {},
    "ef": {"error_bits": 16, "error_decay": 0.0, "reset_interval": 0},
    # float32 on both sides: what a sender takes for known must be what the receiver knows.
    "ef21": {"error_bits": 32, "error_decay": 0.0, "error_scale": "block", "reset_interval": 0},
    "zeropp": {"error_bits": 8, "error_decay": 0.0, "error_scale": "block", "reset_interval": 0},
    "none": {},
}
"""What each method fixes. What else it is: `LoCoConfig.arithmetic`."""

_RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "scale": "fixed",
        "fixed_scale": 2.0**19,
        "error_scale": "fixed",
        "fixed_error_scale": 2.0**21,
        "error_decay": 0.8,
        "reset_interval": 512,
    },
}
