"""Inputs for the kernel tests, and the kernels called the way the reference is."""

import dataclasses

import torch
from torch import Tensor

from loco_compile.kernels import Compressed, Layout, Memory, Recipe, compress_into, reference
from loco_compile.kernels.memory import Format, formats

POISON = 0xA5
"""Fills a message before a kernel writes to it: bytes outside its two sections must keep it."""
OPTIONS = {
    "two bits": {"bits": 2},
    "signed": {"code_range": "signed"},
    "signed, eight bits": {"bits": 8, "code_range": "signed"},
    "symmetric": {"code_range": "symmetric"},
    "stochastic": {"stochastic": True},
    "stochastic, fixed": {"stochastic": True, "fixed_scale": 4.0},
    "rotated": {"rotates": True},
    "16-bit error": {"error_bits": 16, "error_decay": 0.0},
    "16-bit error, fixed": {"error_bits": 16, "fixed_error_scale": 1024.0, "error_decay": 0.0},
    "float32 error": {"error_bits": 32},
    "EF21": {"tracks_gradient": True, "error_bits": 32, "error_decay": 0.0},
    "EF21, rotated": {
        "tracks_gradient": True,
        "error_bits": 32,
        "error_decay": 0.0,
        "rotates": True,
    },
    "no error, stochastic": {"keeps_error": False, "stochastic": True},
    "all": {
        "bits": 2,
        "code_range": "signed",
        "stochastic": True,
        "rotates": True,
        "error_bits": 16,
    },
}
"""Recipes for what the default leaves out; each needs blocks of 128 elements at least."""


def layout_of(recipe: Recipe, num_ranks: int, chunk_numel: int) -> Layout:
    return Layout(
        num_ranks=num_ranks,
        chunk_numel=chunk_numel,
        block_numel=recipe.block_numel,
        codes_per_byte=recipe.codes_per_byte,
    )


def random_error(layout: Layout, recipe: Recipe, generator: torch.Generator) -> Memory:
    """Any error codes, and scales about as large as those of a standard normal gradient."""
    tensors = [_random(f, recipe, generator) for f in formats(layout, recipe)]
    return Memory.of(tensors, recipe)


def _random(buffer: Format, recipe: Recipe, generator: torch.Generator) -> Tensor:
    shape, dtype = buffer
    if dtype == torch.int64:
        return torch.randint(0, 2**32, shape, generator=generator)
    if dtype == torch.float32:
        return torch.randn(shape, generator=generator)
    if dtype == torch.bfloat16:
        scale = torch.rand(shape, generator=generator) / 64
        return (scale * 2.0 ** (8 - recipe.error_bits)).bfloat16()
    ends = torch.iinfo(dtype)
    return torch.randint(ends.min, ends.max + 1, shape, generator=generator, dtype=dtype)


def zero_error(layout: Layout, recipe: Recipe, noise: int = 0) -> Memory:
    """What a rank keeps before the first step."""
    return Memory.of(allocate_error(layout, recipe, noise=noise), recipe)


def allocate_error(layout: Layout, recipe: Recipe, noise: int) -> list[Tensor]:
    starts = {torch.int64: noise}
    return [
        torch.full(shape, starts.get(dtype, 0), dtype=dtype)
        for shape, dtype in formats(layout, recipe)
    ]


def clone(memory: Memory, device: str = "cpu") -> Memory:
    """Copy every buffer."""
    copies = [None if t is None else t.to(device, copy=True) for t in memory[1:]]
    return Memory(tuple(p.to(device, copy=True) for p in memory.planes), *copies)


@dataclasses.dataclass(frozen=True)
class Offsets:
    """Where one tensor's sections lie in a message that holds other tensors before and after."""

    codes: int
    scales: int
    row_bytes: int

    @classmethod
    def of(cls, layout: Layout) -> "Offsets":
        codes = 32
        scales = codes + layout.code_bytes + 14
        return cls(codes, scales, -(-(scales + layout.scale_bytes + 6) // 16) * 16)


def sections(message: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Cut codes and scales out of a message."""
    at = Offsets.of(layout)
    codes = message[:, at.codes : at.codes + layout.code_bytes]
    scales = message[:, at.scales : at.scales + layout.scale_bytes]
    return (
        codes.reshape(layout.plane_shape),
        scales.contiguous().view(torch.bfloat16).reshape(layout.scale_shape),
    )


def pack(sent: Compressed, layout: Layout) -> Tensor:
    """Lay what the reference sends into a message."""
    at = Offsets.of(layout)
    message = torch.full((layout.num_ranks, at.row_bytes), POISON, dtype=torch.uint8)
    rows = layout.num_ranks
    message[:, at.codes : at.codes + layout.code_bytes] = sent.codes.reshape(rows, -1)
    scales = sent.scales.clone()
    # NaN is any NaN: x86 casts it to bfloat16 as 0x7FC0 or 0xFFFF, by the instructions it has.
    scales.view(torch.int16)[scales.isnan()] = 0x7FC0
    scales = scales.view(torch.uint8).reshape(rows, layout.scale_bytes)
    message[:, at.scales : at.scales + layout.scale_bytes] = scales
    return message


def assert_same_as_reference(
    grad: Tensor, error: Memory, *, layout: Layout, recipe: Recipe, device: str = "cpu"
) -> Compressed:
    """Run kernel and reference and compare every bit, the rest of the message included."""
    expected = reference.compress(grad, error, layout=layout, recipe=recipe)
    at = Offsets.of(layout)
    message = torch.full((layout.num_ranks, at.row_bytes), POISON, dtype=torch.uint8, device=device)
    kept = clone(error, device)
    compress_into(
        message,
        grad.to(device),
        kept,
        layout=layout,
        recipe=recipe,
        code_offset=at.codes,
        scale_offset=at.scales,
    )
    torch.testing.assert_close(message.cpu(), pack(expected, layout), rtol=0, atol=0)
    # The graph advances the noise, and the receiver what is known.
    for own, new in zip(
        (*kept.planes, kept.scale), (*expected.memory.planes, expected.memory.scale), strict=True
    ):
        if new is not None:
            torch.testing.assert_close(own.cpu(), new, rtol=0, atol=0)
    return expected
