"""The exchange on CUDA, traced on fake CUDA tensors: what Inductor is left with, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile import LoCoConfig
from loco_compile.passes.markers import Tag
from loco_compile.passes.pipeline import run
from loco_compile.passes.plan import layout_of
from tests.graphs import fake_group

triton = pytest.importorskip("triton", reason="the CUDA graph holds Triton kernels")
c10d = torch.ops._c10d_functional
NUM_RANKS = 2
SHAPES = [(64, 512), (101, 512)]  # the second is padded by one row


@pytest.fixture
def h200_driver() -> Iterator[None]:
    """Let Triton analyse kernels for sm_90: Inductor asks the driver for its target."""
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)

    class Driver:
        def get_current_target(self) -> object:
            return target

    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(Driver())
    yield
    driver._active = before


def traced(config: LoCoConfig) -> fx.GraphModule:
    """A backward of two bfloat16 gradients that are reduced in float32, on fake CUDA tensors."""
    recipe = config.arithmetic()

    def backward(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shards, errors = [], list(args[len(SHAPES) :])
        for index in range(len(SHAPES)):
            flat = args[index].reshape(-1).float()
            padding = -args[index].shape[0] % NUM_RANKS * args[index].shape[1]
            flat = torch.nn.functional.pad(flat, [0, padding]) if padding else flat
            shard = c10d.reduce_scatter_tensor(flat, "avg", NUM_RANKS, "0")
            own, errors = errors[:3], errors[3:]
            tag = Tag(bucket="block", name=f"weight{index}", index=index).dump()
            shards.append(torch.ops.loco_compile.mark_shard(c10d.wait_tensor(shard), own, tag))
        return tuple(shards)

    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in SHAPES]
        for rows, columns in SHAPES:
            layout = layout_of(NUM_RANKS, -(-rows // NUM_RANKS) * columns, recipe)
            plane = torch.empty(layout.plane_shape, dtype=torch.int8, device="cuda")
            scale = torch.empty(*layout.scale_shape, 1, dtype=torch.bfloat16, device="cuda")
            inputs += [plane, plane.clone(), scale]
        return make_fx(backward)(*inputs)


def names(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_inductor_is_left_with_kernels_and_one_all_to_all(h200_driver: None) -> None:
    with fake_group(NUM_RANKS):
        gm = traced(LoCoConfig())
        run(gm, LoCoConfig())
        reinplace_inplaceable_ops(FakeTensorUpdater(gm), gm.graph)
        decompose_triton_kernel_wrapper_functional(gm.graph)
    left = names(gm.graph)
    # No clone of an error, no copy back into it, no cast or padding of a gradient, no concatenation
    # of codes: gradients are read where autograd left them (I10), errors are updated in place.
    work = [n for n in left if "view" not in n and "empty" not in n]
    assert work == [
        "triton_kernel_wrapper_mutation",
        "triton_kernel_wrapper_mutation",
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.wait_tensor.default",
        "triton_kernel_wrapper_mutation",
        "triton_kernel_wrapper_mutation",
    ]
    # The message and the two shards.
    assert sum("empty" in n for n in left) == 3


def test_shards_keep_their_shape_dtype_and_device(h200_driver: None) -> None:
    with fake_group(NUM_RANKS):
        gm = traced(LoCoConfig())
        run(gm, LoCoConfig())
    shards = [n.meta["val"] for n in gm.graph.output_node().args[0]]
    assert [tuple(s.shape) for s in shards] == [(32 * 512,), (51 * 512,)]
    assert {(s.dtype, s.device.type) for s in shards} == {(torch.float32, "cuda")}
