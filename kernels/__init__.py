"""Arithmetic and wire layout of the compressed exchange: tensors in, tensors out.

`reference` runs everywhere. `compress_into` and `decompress_mean_from` do the same in Triton. They
load on first use: importing this package needs no triton, and no CPU program ever loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import reference
from .layout import SCALE_BYTES, Layout, section_bytes
from .memory import Memory
from .recipe import SMALLEST_ABSMAX, Recipe
from .reference import Compressed, decompress_error

if TYPE_CHECKING:
    from .compress import compress_into
    from .decompress_mean import decompress_mean_from

__all__ = [
    "SCALE_BYTES",
    "SMALLEST_ABSMAX",
    "Compressed",
    "Layout",
    "Memory",
    "Recipe",
    "compress_into",
    "decompress_error",
    "decompress_mean_from",
    "reference",
    "section_bytes",
]


def __getattr__(name: str) -> Any:
    """Import the Triton half when it is first asked for. Raises ImportError without triton."""
    if name == "compress_into":
        from .compress import compress_into

        return compress_into
    if name == "decompress_mean_from":
        from .decompress_mean import decompress_mean_from

        return decompress_mean_from
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
