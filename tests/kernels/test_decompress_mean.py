"""The decompress-mean kernel equals the reference bit for bit: interpreted, and on a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.kernels import Memory, Recipe, decompress_mean_from, reference
from tests.kernels.cases import Offsets, layout_of, pack

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request):
    """A device to run kernels on: the CPU means the interpreter."""
    if request.param == "cpu":
        request.getfixturevalue("interpreted")
    return request.param


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def random_message(layout, recipe, generator):
    """Return what the ranks might have sent: any codes, scales over 12 orders of magnitude."""
    codes = torch.randint(0, 256, layout.plane_shape, generator=generator, dtype=torch.uint8)
    exponents = torch.rand(layout.scale_shape, generator=generator) * 40 - 30
    scales = (2.0**exponents).bfloat16()
    if recipe.fixed_scale is not None:
        scales = torch.ones_like(scales)
    return reference.Compressed(codes, scales, Memory())


def assert_same_as_reference(sent, *, layout, recipe, divisor, device, dtype=torch.float32):
    at = Offsets.of(layout)
    mean = decompress_mean_from(
        pack(sent, layout).to(device),
        layout=layout,
        recipe=recipe,
        code_offset=at.codes,
        scale_offset=at.scales,
        divisor=divisor,
        dtype=dtype,
    )
    expected = reference.decompress_mean(
        sent.codes, sent.scales, layout=layout, recipe=recipe, divisor=divisor
    )
    torch.testing.assert_close(mean.cpu(), expected.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("options", [{"bits": 2}, {"rotates": True}, {"bits": 2, "rotates": True}])
def test_every_option(device, generator, options, num_ranks):
    recipe = Recipe(**options)
    layout = layout_of(recipe, num_ranks, 300)
    sent = random_message(layout, recipe, generator)
    arguments = {"layout": layout, "recipe": recipe, "divisor": num_ranks, "device": device}
    assert_same_as_reference(sent, **arguments)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_change_is_added_to_what_is_known(device, generator, dtype, rotates):
    recipe = Recipe(tracks_gradient=True, error_bits=32, error_decay=0.0, rotates=rotates)
    layout = layout_of(recipe, 2, 300)
    sent = random_message(layout, recipe, generator)
    sent.scales[0, 1] = torch.nan  # lost on the way: the other rank's share of it is known
    known = torch.randn(300, generator=generator)
    expected, after = reference.decompress_change(
        sent.codes, sent.scales, known, layout=layout, recipe=recipe, divisor=2.0
    )
    assert expected[128:256].isnan().all() and not after.isnan().any()
    at, known = Offsets.of(layout), known.to(device)
    mean = decompress_mean_from(
        pack(sent, layout).to(device),
        known,
        layout=layout,
        recipe=recipe,
        code_offset=at.codes,
        scale_offset=at.scales,
        divisor=2.0,
        dtype=dtype,
    )
    torch.testing.assert_close(mean.cpu(), expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(known.cpu(), after, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fixed_scale", [None, 2.0**19])
@pytest.mark.parametrize("divisor", ["ranks", 1.0, 3.7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_recipes_worlds_and_divisors(device, generator, num_ranks, divisor, fixed_scale, bits):
    recipe = Recipe(bits=bits, block_numel=64, fixed_scale=fixed_scale)
    layout = layout_of(recipe, num_ranks, 321)
    sent = random_message(layout, recipe, generator)
    divisor = float(num_ranks) if divisor == "ranks" else divisor
    assert_same_as_reference(sent, layout=layout, recipe=recipe, divisor=divisor, device=device)


@pytest.mark.parametrize("chunk_numel", [0, 1, 63, 64, 65, 4096 + 77])
@pytest.mark.parametrize("block_numel", [64, 192, 1024])
def test_sizes(device, generator, block_numel, chunk_numel):
    recipe = Recipe(block_numel=block_numel)
    layout = layout_of(recipe, 2, chunk_numel)
    sent = random_message(layout, recipe, generator)
    assert_same_as_reference(sent, layout=layout, recipe=recipe, divisor=2.0, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_where_the_cast_is_exact(device, generator, dtype):
    # The interpreter's casts truncate. Codes times a power of two need no rounding: W = 2 sums
    # of 4-bit codes have 5 bits. That the compiled cast rounds to even: test_machine_code.py.
    recipe = Recipe(block_numel=64)
    layout = layout_of(recipe, 2, 200)
    sent = random_message(layout, recipe, generator)
    sent = sent._replace(scales=torch.full_like(sent.scales, 0.25))
    assert_same_as_reference(
        sent, layout=layout, recipe=recipe, divisor=2.0, device=device, dtype=dtype
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_to_even(generator, dtype):
    recipe = Recipe(block_numel=64)
    layout = layout_of(recipe, 3, 2000)
    sent = random_message(layout, recipe, generator)
    sent = sent._replace(scales=sent.scales.clamp(max=8.0))
    assert_same_as_reference(
        sent, layout=layout, recipe=recipe, divisor=3.0, device="cuda", dtype=dtype
    )


@pytest.mark.parametrize("fixed_scale", [None, 2.0**4])
def test_nan_of_one_rank_reaches_its_block_alone(device, generator, fixed_scale):
    recipe = Recipe(block_numel=64, fixed_scale=fixed_scale)
    layout = layout_of(recipe, 3, 300)
    sent = random_message(layout, recipe, generator)
    sent.scales[1, 2] = torch.nan
    mean = reference.decompress_mean(
        sent.codes, sent.scales, layout=layout, recipe=recipe, divisor=3.0
    )
    assert mean[128:192].isnan().all()
    assert mean.isnan().sum() == 64
    assert_same_as_reference(sent, layout=layout, recipe=recipe, divisor=3.0, device=device)


def test_fewer_elements_than_the_chunk(device, generator):
    recipe = Recipe(block_numel=64)
    layout = layout_of(recipe, 2, 300)
    sent = random_message(layout, recipe, generator)
    at = Offsets.of(layout)
    arguments = dict(
        layout=layout,
        recipe=recipe,
        code_offset=at.codes,
        scale_offset=at.scales,
        divisor=2.0,
        dtype=torch.float32,
    )
    message = pack(sent, layout).to(device)
    all_of_it = decompress_mean_from(message, **arguments)
    for out_numel in (0, 1, 64, 200):
        part = decompress_mean_from(message, out_numel=out_numel, **arguments)
        assert torch.equal(part, all_of_it[:out_numel])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_traces_without_a_gpu_and_reads_the_message_only(sm90_target, dtype):
    recipe = Recipe()
    layout = layout_of(recipe, 2, 1000)
    at = Offsets.of(layout)

    def finish(message):
        places = dict(code_offset=at.codes, scale_offset=at.scales, divisor=2.0, dtype=dtype)
        return decompress_mean_from(message, layout=layout, recipe=recipe, **places)

    with FakeTensorMode():
        message = torch.empty(2, at.row_bytes, dtype=torch.uint8, device="cuda")
        mean = finish(message)
        gm = make_fx(dispatch_functionalize(finish))(message)
    assert (mean.shape, mean.dtype, mean.device.type) == ((1000,), dtype, "cuda")
    kernel = torch.ops.higher_order.triton_kernel_wrapper_functional
    (node,) = gm.graph.find_nodes(op="call_function", target=kernel)
    assert node.kwargs["tensors_to_clone"] == ["out_ptr"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_opcheck():
    message = torch.zeros(2, 1040, dtype=torch.uint8, device="cuda")
    torch.library.opcheck(
        torch.ops.loco_compile.decompress_mean.default,
        (message, 300, 256, 4, 0.5, torch.float32, 0, 1024),
    )
