"""Wire format and error layout. Shape arithmetic only: exists once, used by every backend.

A gradient of W * N elements goes out as W chunks of N, one for each rank. Every chunk is cut into B
blocks of K elements (the last one may be short), a block into P planes of H = K / P elements, and
its codes share one scale. With 4-bit codes P = 2 and the planes are the block's halves:

    chunk of rank w   | block 0               | block 1               | ... | block B-1  .. |
    block             | plane 0: H elements   | plane 1: H elements   |
    code byte [b, h]  = code of element [b, 0, h]  +  16 * code of element [b, 1, h]

    message to rank w | codes of tensor 0 | codes of tensor 1 | ... | scales of 0 | ... | filling |

The codes are offset binary (code + 2^(bits-1)), the scales bfloat16, little endian. One message for
all tensors of a bucket, filled up to a multiple of 16 bytes, one all-to-all. H is a multiple of 16,
so every block of codes starts on 16 bytes. The error is int8 in P planes of its own, each (W, B, H)
and contiguous: one loop over (W, B, H) reads the gradient's planes and both error planes and writes
one code byte, so nothing is interleaved and no lane crosses another. Elements past N in the last
block read as zero: they never raise a block's scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

ALIGNMENT = 16
"""Bytes that a message, and so every section of codes in it, is a multiple of."""
SCALE_BYTES = 2
"""Bytes of one block scale on the wire (bfloat16)."""
BLOCK_MULTIPLE = 64
"""`block_numel` is a multiple of this: H stays a multiple of 16 for 2-, 4- and 8-bit codes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Shapes of one compressed tensor: W chunks of N elements."""

    num_ranks: int
    """W, ranks of the exchange."""
    chunk_numel: int
    """N, elements that one rank receives (its padded shard)."""
    block_numel: int
    """K, elements of one block."""
    codes_per_byte: int
    """P, planes of a block."""

    @property
    def num_blocks(self) -> int:
        """B, blocks of one chunk."""
        return -(-self.chunk_numel // self.block_numel)

    @property
    def plane_numel(self) -> int:
        """H, elements of one plane of one block."""
        return self.block_numel // self.codes_per_byte

    @property
    def padded_numel(self) -> int:
        """B * K, elements of one chunk with its last block filled up."""
        return self.num_blocks * self.block_numel

    @property
    def plane_shape(self) -> tuple[int, int, int]:
        """(W, B, H): shape of the codes and of each error plane."""
        return self.num_ranks, self.num_blocks, self.plane_numel

    @property
    def scale_shape(self) -> tuple[int, int]:
        """(W, B): shape of the wire scales and of the error scales."""
        return self.num_ranks, self.num_blocks

    @property
    def code_bytes(self) -> int:
        """Bytes of codes for one peer."""
        return self.num_blocks * self.plane_numel

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales for one peer."""
        return self.num_blocks * SCALE_BYTES


def section_bytes(layouts: Sequence[Layout]) -> list[int]:
    """Return the bytes of each section of one peer's message: codes, then scales, then filling."""
    sections = [x.code_bytes for x in layouts] + [x.scale_bytes for x in layouts]
    return [*sections, -sum(sections) % ALIGNMENT]


def message_bytes(layouts: Sequence[Layout]) -> int:
    """Return M, the bytes of one peer's message."""
    return sum(section_bytes(layouts))
