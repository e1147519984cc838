"""The compress kernel equals the reference bit for bit: interpreted on CPU, and on a GPU."""

import itertools

import pytest
import torch
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.kernels import Memory, Recipe, compress_into, reference
from tests.kernels.cases import (
    OPTIONS,
    Offsets,
    assert_same_as_reference,
    clone,
    layout_of,
    random_error,
    zero_error,
)

SCALES = {
    "block": {},
    "fixed": {"fixed_scale": 4.0, "fixed_error_scale": 64.0},
    "fixed wire": {"fixed_scale": 4.0, "error_decay": 0.5},
    "fixed error": {"fixed_error_scale": 64.0, "error_decay": 0.0},
    "no error": {"keeps_error": False},
    "no error, fixed": {"keeps_error": False, "fixed_scale": 4.0},
}


def special_gradients():
    tiny = torch.finfo(torch.float32).smallest_normal
    halves = torch.arange(-256, 256).float() / 2
    special = {
        "zeros": torch.zeros(512),
        "negative zeros": -torch.zeros(512),
        "halves": halves,
        "denormals": halves * torch.finfo(torch.float32).tiny / 256,
        "smallest normal": torch.full((512,), tiny),
        "below the smallest block": torch.full((512,), 2.0**-101),
        "smallest block": torch.full((512,), 2.0**-100),
        "largest": torch.full((512,), torch.finfo(torch.float32).max),
        "mixed sizes": 10.0 ** torch.linspace(-38, 36, 512),
        "saturated both ways": torch.tensor([-1e6, 1e6]).repeat(256),
    }
    for name, value in (("nan", torch.nan), ("inf", torch.inf), ("minus inf", -torch.inf)):
        special[name] = torch.linspace(-1, 1, 512).index_fill(0, torch.tensor([5]), value)
    special["nan and inf"] = special["nan"].index_fill(0, torch.tensor([6]), torch.inf)
    # A NaN whose sign bit is set orders below every number as an integer.
    special["negative nan"] = special["nan"].clone().view(torch.int32).bitwise_or(-(2**31))
    special["negative nan"] = special["negative nan"].view(torch.float32)
    return special


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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_recipe_and_dtype(device, generator, dtype, name, bits):
    recipe = Recipe(bits=bits, block_numel=64, **SCALES[name])
    layout = layout_of(recipe, 2, 200)
    grad = torch.randn(400, generator=generator).to(dtype)
    error = random_error(layout, recipe, generator)
    assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option(device, generator, dtype, name):
    recipe = Recipe(**OPTIONS[name])
    layout = layout_of(recipe, 2, 300)
    # One block of positive zeros, one of negative ones: neither has a largest element.
    grad = torch.randn(600, generator=generator).to(dtype)
    grad[:128], grad[128:256] = 0.0, -0.0
    for error in (random_error(layout, recipe, generator), zero_error(layout, recipe, noise=7)):
        assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("gradient", special_gradients())
def test_special_values_with_every_option(device, generator, gradient, name):
    recipe = Recipe(**OPTIONS[name])
    grad = special_gradients()[gradient]
    layout = layout_of(recipe, 2, -(-grad.numel() // 2))
    error = random_error(layout, recipe, generator)
    assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)


# 0 and 1 element, one short of a block, one block, one more, odd, more than one program's 4096.
@pytest.mark.parametrize("chunk_numel", [0, 1, 63, 64, 65, 321, 4096 + 77])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sizes_and_worlds(device, generator, num_ranks, chunk_numel):
    recipe = Recipe(block_numel=64)
    layout = layout_of(recipe, num_ranks, chunk_numel)
    grad = torch.randn(num_ranks * chunk_numel, generator=generator)
    error = random_error(layout, recipe, generator)
    assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)


@pytest.mark.parametrize("grad_numel", [0, 1, 299, 300, 301, 599])
def test_elements_past_the_gradient_read_as_zero(device, generator, grad_numel):
    recipe = Recipe(block_numel=128)
    layout = layout_of(recipe, 3, 300)
    # Behind the gradient there is something that must not be read.
    grad = torch.full((900,), torch.nan)[:grad_numel]
    grad.copy_(torch.randn(grad_numel, generator=generator))
    error = zero_error(layout, recipe)
    assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_numel", [64, 128, 192, 256, 448, 1024])
def test_block_sizes(device, generator, block_numel, bits):
    recipe = Recipe(block_numel=block_numel, bits=bits)
    layout = layout_of(recipe, 2, 2 * block_numel + 33)
    grad = torch.randn(2 * layout.chunk_numel, generator=generator)
    error = random_error(layout, recipe, generator)
    assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)


@pytest.mark.parametrize("error_decay", [0.0, 0.5, 0.75, 0.875])
def test_steps_in_a_row(device, generator, error_decay):
    recipe = Recipe(block_numel=64, error_decay=error_decay)
    layout = layout_of(recipe, 2, 150)
    error = zero_error(layout, recipe)
    for _ in range(4):
        grad = torch.randn(300, generator=generator)
        sent = assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)
        error = sent.memory
    assert any(plane.any() for plane in error.planes)


@pytest.mark.parametrize("scales", ["block", "fixed", "no error", "fixed wire"])
@pytest.mark.parametrize("name", special_gradients())
def test_special_values(device, generator, name, scales):
    recipe = Recipe(block_numel=64, **SCALES[scales])
    if name == "largest" and scales == "fixed wire":
        pytest.skip("error / (1 - error_decay) overflows: see test_overflow_of_the_error")
    layout = layout_of(recipe, 2, 256)
    grad = special_gradients()[name]
    for error in (random_error(layout, recipe, generator), zero_error(layout, recipe)):
        assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)


def test_overflow_of_the_error_is_kept_as_its_largest_code(device):
    recipe = Recipe(block_numel=64, fixed_scale=4.0, error_decay=0.75)
    layout = layout_of(recipe, 1, 64)
    planes = tuple(torch.full(layout.plane_shape, -128, dtype=torch.int8) for _ in range(2))
    error = clone(Memory(planes, torch.full((1, 1), 2.0**119).bfloat16()), device)
    at = Offsets.of(layout)
    message = torch.zeros(1, at.row_bytes, dtype=torch.uint8, device=device)
    compress_into(
        message,
        torch.full((64,), -(2.0**125), device=device),
        error,
        layout=layout,
        recipe=recipe,
        code_offset=at.codes,
        scale_offset=at.scales,
    )
    assert error.scale.isfinite().all()
    assert (error.planes[0] == -128).all()


def test_deterministic(device, generator):
    recipe = Recipe()
    layout = layout_of(recipe, 2, 1000)
    grad = torch.randn(2000, generator=generator)
    error = random_error(layout, recipe, generator)
    first, second = (
        assert_same_as_reference(grad, error, layout=layout, recipe=recipe, device=device)
        for _ in range(2)
    )
    assert torch.equal(first.codes, second.codes)


@pytest.mark.parametrize("keeps_error", [False, True])
def test_error_must_fit_the_recipe(keeps_error):
    recipe = Recipe(keeps_error=keeps_error)
    layout = layout_of(recipe, 1, 256)
    error = Memory() if keeps_error else zero_error(layout, Recipe())
    with pytest.raises(ValueError, match="keeps_error is"):
        compress_into(
            torch.zeros(1, 256, dtype=torch.uint8),
            torch.zeros(256),
            error,
            layout=layout,
            recipe=recipe,
            code_offset=0,
            scale_offset=128,
        )


def traced_inputs(recipe, layout):
    """Return a function of tensors alone, and fake CUDA tensors for it."""
    error = zero_error(layout, recipe)
    tensors = [torch.zeros(layout.num_ranks * layout.chunk_numel, dtype=torch.bfloat16)]
    tensors += error.tensors()
    at = Offsets.of(layout)

    def step(grad, *state):
        message = grad.new_empty((layout.num_ranks, at.row_bytes), dtype=torch.uint8)
        places = {"code_offset": at.codes, "scale_offset": at.scales}
        memory = Memory.of(state, recipe)
        compress_into(message, grad, memory, layout=layout, recipe=recipe, **places)
        return message, *state

    return step, [torch.empty_like(t, device="cuda") for t in tensors]


TRACED = [dict(bits=b, **s) for b, s in itertools.product((4, 8), SCALES.values())]


@pytest.mark.parametrize("options", TRACED)
def test_traces_without_a_gpu_and_is_functional(sm90_target, options):
    recipe = Recipe(**options)
    with FakeTensorMode():
        step, inputs = traced_inputs(recipe, layout_of(recipe, 2, 1024))
        gm = make_fx(dispatch_functionalize(step))(*inputs)
    kernel = torch.ops.higher_order.triton_kernel_wrapper_functional
    (node,) = gm.graph.find_nodes(op="call_function", target=kernel)
    written = {"message_ptr"}
    if recipe.keeps_error:
        written |= {f"error_{i}_ptr" for i in range(recipe.codes_per_byte)}
        written |= set() if recipe.fixed_error_scale else {"error_scale_ptr"}
    assert set(node.kwargs["tensors_to_clone"]) == written


@pytest.mark.skipif(
    not torch.version.cuda and not torch.version.hip,
    reason="copy_ between fake CUDA tensors needs a torch built for CUDA or ROCm",
)
@pytest.mark.parametrize("options", TRACED)
def test_inductor_updates_the_error_in_place(sm90_target, options):
    recipe = Recipe(**options)
    with FakeTensorMode():
        step, inputs = traced_inputs(recipe, layout_of(recipe, 2, 1024))

        def backward(grad, *state):
            message, *after = dispatch_functionalize(step)(grad, *state)
            for old, new in zip(state, after, strict=True):
                old.copy_(new)
            return message

        graph = make_fx(backward)(*inputs).graph
    reinplace_inplaceable_ops_core(graph)
    kernel = torch.ops.higher_order.triton_kernel_wrapper_functional
    (node,) = graph.find_nodes(op="call_function", target=kernel)
    assert node.kwargs["tensors_to_clone"] == []
    for copying in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
        assert not graph.find_nodes(op="call_function", target=copying)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_opcheck():
    recipe = Recipe()
    layout = layout_of(recipe, 2, 300)
    at = Offsets.of(layout)
    error = clone(zero_error(layout, recipe), "cuda")
    message = torch.zeros(2, at.row_bytes, dtype=torch.uint8, device="cuda")
    torch.library.opcheck(
        torch.ops.loco_compile.compress.default,
        (
            torch.randn(600, device="cuda"),
            message,
            *(*error.planes, None, None, error.scale, None),
            *(layout.chunk_numel, layout.block_numel, recipe.bits),
            *(recipe.code_range, recipe.rotates, recipe.tracks_gradient),
            *(0.0, recipe.error_bits, 0.0, recipe.error_decay, at.codes, at.scales),
        ),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_more_elements_than_fit_in_int32():
    recipe = Recipe(keeps_error=False)
    layout = layout_of(recipe, 2, (1 << 30) + 256)
    grad = torch.zeros(2 * layout.chunk_numel, dtype=torch.bfloat16, device="cuda")
    grad[-256:] = torch.linspace(-1, 1, 256, device="cuda")
    message = torch.zeros(2, layout.message_bytes // 16 * 16 + 16, dtype=torch.uint8, device="cuda")
    compress_into(
        message,
        grad,
        Memory(),
        layout=layout,
        recipe=recipe,
        code_offset=0,
        scale_offset=layout.code_bytes,
    )
    last = layout_of(recipe, 1, 256)
    expected = reference.compress(grad[-256:].cpu(), Memory(), layout=last, recipe=recipe)
    codes = message[1, layout.code_bytes - 128 : layout.code_bytes].cpu()
    assert torch.equal(codes, expected.codes.flatten())
