"""Inputs for the kernel tests, and the kernels called the way the reference is."""

import dataclasses

import torch
from torch import Tensor

from loco_compile.kernels import Compressed, Error, Layout, Recipe, compress_into, reference

POISON = 0xA5
"""Fills a message before a kernel writes to it: bytes outside its two sections must keep it."""


def layout_of(recipe: Recipe, num_ranks: int, chunk_numel: int) -> Layout:
    return Layout(
        num_ranks=num_ranks,
        chunk_numel=chunk_numel,
        block_numel=recipe.block_numel,
        codes_per_byte=recipe.codes_per_byte,
    )


def random_error(layout: Layout, recipe: Recipe, generator: torch.Generator) -> Error | None:
    """Any int8 codes, and scales about as large as those of a standard normal gradient."""
    if not recipe.keeps_error:
        return None
    planes = tuple(
        torch.randint(-128, 128, layout.plane_shape, generator=generator, dtype=torch.int8)
        for _ in range(layout.codes_per_byte)
    )
    if recipe.fixed_error_scale is not None:
        return Error(planes, None)
    return Error(planes, (torch.rand(layout.scale_shape, generator=generator) / 64).bfloat16())


def zero_error(layout: Layout, recipe: Recipe) -> Error:
    planes = tuple(
        torch.zeros(layout.plane_shape, dtype=torch.int8) for _ in range(layout.codes_per_byte)
    )
    if recipe.fixed_error_scale is not None:
        return Error(planes, None)
    return Error(planes, torch.zeros(layout.scale_shape, dtype=torch.bfloat16))


def clone(error: Error | None, device: str = "cpu") -> Error | None:
    if error is None:
        return None
    scale = error.scale
    return Error(
        tuple(p.to(device, copy=True) for p in error.planes),
        None if scale is None else scale.to(device, copy=True),
    )


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
    grad: Tensor, error: Error | None, *, layout: Layout, recipe: Recipe, device: str = "cpu"
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
    if expected.error is not None:
        for plane, expected_plane in zip(kept.planes, expected.error.planes, strict=True):
            torch.testing.assert_close(plane.cpu(), expected_plane, rtol=0, atol=0)
        if expected.error.scale is not None:
            assert torch.equal(kept.scale.cpu(), expected.error.scale)
    return expected
