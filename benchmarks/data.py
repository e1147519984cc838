"""The text that is trained on: the Python standard library's own sources, found on every machine.

Split by FILE, so that no held-out text stands in a training file, and by a hash of the file's path,
so that every run on the same Python version gets the same split. Left out: installed packages,
tests (many of them large tables of cases), `encodings` and `pydoc_data` (generated tables, near
copies of one another: they would leak through any split) and `_sysconfigdata*` (written for one
machine).
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)
LEFT_OUT_PREFIX = "_sysconfigdata"
HELD_OUT_SHARE = 0.05
SEPARATOR = b"\0"  # ends every file; occurs in no source


@dataclasses.dataclass(frozen=True)
class Split:
    """Source files, as paths below the standard library's folder."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The bytes of both parts, each a one-dimensional uint8 tensor, and facts to publish."""

    train: Tensor
    held_out: Tensor
    facts: dict[str, object]


def is_held_out(path: str) -> bool:
    """Return whether a file belongs to the held-out part: a fixed share of all hashes does."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def find_sources(root: Path) -> list[str]:
    """Return the non-empty sources below `root` that are not left out, sorted."""
    sources = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        is_left_out = LEFT_OUT_FOLDERS.intersection(relative.parts[:-1])
        if not is_left_out and not path.name.startswith(LEFT_OUT_PREFIX) and path.stat().st_size:
            sources.append(relative.as_posix())
    return sorted(sources)


def split_sources(sources: list[str]) -> Split:
    """Divide files into train and held-out by the hash of their path.

    Raises: ValueError if a part is empty.
    """
    held_out = tuple(s for s in sources if is_held_out(s))
    train = tuple(s for s in sources if not is_held_out(s))
    if not train or not held_out:
        raise ValueError(
            f"{len(sources)} source files give {len(train)} for training and {len(held_out)} held "
            "out: too few. Use a Python that ships its standard library's .py files."
        )
    return Split(train, held_out)


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus below `root`, by default the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    split = split_sources(find_sources(root))
    train, held_out = _read(root, split.train), _read(root, split.held_out)
    facts = {
        "source": "Python standard library",
        "num_train_files": len(split.train),
        "num_held_out_files": len(split.held_out),
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
        # Two runs with equal hashes read the same text.
        "sha256": hashlib.sha256(train + held_out).hexdigest(),
    }
    return Corpus(_as_tensor(train), _as_tensor(held_out), facts)


def _read(root: Path, files: tuple[str, ...]) -> bytes:
    return b"".join((root / name).read_bytes() + SEPARATOR for name in files)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Random windows of a text: every rank draws the whole step's windows and takes its own.

    So the same seed gives the same data order to every method, and W ranks of B windows read what
    one rank of W * B reads.
    """

    def __init__(self, text: Tensor, *, context: int, batch: int, seed: int) -> None:
        if len(text) <= context:
            raise ValueError(f"context must be below the text's {len(text)} bytes, got {context}")
        self.text, self.context, self.batch = text, context, batch
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Return a rank's tokens and targets of the next step, each (batch, context) int64."""
        last = len(self.text) - self.context
        starts = torch.randint(last, (num_ranks, self.batch), generator=self.generator)[rank]
        return windows(self.text, starts, self.context)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the windows at `starts` as tokens and, one byte on, targets: (n, context) int64."""
    index = starts[:, None] + torch.arange(context + 1)
    picked = text[index].long()
    return picked[:, :-1], picked[:, 1:]


def evaluation_starts(text: Tensor, *, context: int, num_windows: int) -> Tensor:
    """Return starts of windows that lie evenly over the text and do not overlap.

    Raises: ValueError if the text holds fewer windows.
    """
    room = (len(text) - 1) // context
    if num_windows > room:
        raise ValueError(f"num_windows must be at most {room} for this text, got {num_windows}")
    return torch.arange(num_windows) * (room * context // num_windows)
