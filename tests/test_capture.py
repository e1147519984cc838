"""What is refused, what is noticed when it escapes the graph, and that eager FSDP2 stays eager."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import distribute_module

from loco_compile import LoCoBackend, LoCoConfig, UncapturedError, capture, error_state, explain
from tests.graphs import Stack, fake_group, recorded, shard

BACKEND = LoCoBackend(LoCoConfig(inner="aot_eager"))
WARNS = LoCoBackend(LoCoConfig(inner="aot_eager", on_uncaptured="warn"))


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


def step(model: nn.Module, backend: LoCoBackend = BACKEND) -> None:
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(4, 64)).sum().backward()


# --- features of FSDP2 that the captured graph would not reproduce


class Extension(Tensor):
    """A parameter that gathers itself, as float8 weights do."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Tensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, device=data.device, requires_grad=data.requires_grad
        )

    def __init__(self, data: Tensor) -> None:
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.data_inside if isinstance(x, Extension) else x

        def wrap(x: Any) -> Any:
            return Extension(x) if isinstance(x, Tensor) else x

        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return torch.utils._pytree.tree_map(wrap, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.data_inside,), None

    def fsdp_post_all_gather(self, gathered: Any, *_: Any, **__: Any) -> Any:
        return gathered[0], gathered


def offloaded() -> nn.Module:
    return shard(Stack(num_blocks=1), offload_policy=CPUOffloadPolicy(pin_memory=False))


def with_extension() -> nn.Module:
    model = Stack(num_blocks=1)
    model.blocks[0].up.weight = nn.Parameter(Extension(torch.randn(128, 64)))
    return shard(model)


def with_all_reduce_hook() -> nn.Module:
    model = shard(Stack(num_blocks=1))
    model.set_all_reduce_hook(lambda _: None)
    return model


class Custom:
    """Somebody's own communication."""

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("expected this never to run")


def with_custom_reduce_scatter() -> nn.Module:
    model = shard(Stack(num_blocks=1))
    model.set_custom_reduce_scatter(Custom())
    return model


def with_custom_all_gather() -> nn.Module:
    model = shard(Stack(num_blocks=1))
    model.blocks[0].set_custom_all_gather(Custom())
    return model


def replicated() -> nn.Module:
    return replicate(Stack(num_blocks=1))


def on_dimensions_of_a_mesh() -> nn.Module:
    from torch.distributed.fsdp import DataParallelMeshDims  # not in all supported versions

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Stack(num_blocks=1)
    distribute_module(model, mesh)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))


@pytest.mark.parametrize(
    ("build", "module", "feature"),
    [
        (replicated, "the root module", "a replicate-only mesh"),
        pytest.param(
            on_dimensions_of_a_mesh,
            "the root module",
            "dp_mesh_dims (SPMD DTensors)",
            marks=pytest.mark.skipif(
                "dp_mesh_dims" not in inspect.signature(fully_shard).parameters,
                reason="this torch has no dp_mesh_dims",
            ),
        ),
        (offloaded, "the root module", "CPUOffloadPolicy"),
        (with_extension, "blocks.0", "fsdp_pre_all_gather tensor extensions"),
        (with_all_reduce_hook, "the root module", "an all-reduce hook"),
        (with_custom_reduce_scatter, "the root module", "a custom reduce-scatter"),
        (with_custom_all_gather, "blocks.0", "a custom all-gather"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused_by_name(build: Callable[[], nn.Module], module: str, feature: str) -> None:
    with fake_group(4), pytest.raises(NotImplementedError) as raised:
        step(build())
    message = str(raised.value)
    assert message.startswith(f"loco_compile cannot trace {module}: it uses {feature}")
    assert "Remove it, or compile this model with another backend." in message


def test_a_feature_switched_on_later_is_refused_then(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=1))
    compiled, x = torch.compile(model, backend=BACKEND), torch.randn(4, 64)
    compiled(x).sum().backward()
    model.set_custom_reduce_scatter(Custom())
    with pytest.raises(NotImplementedError, match="a custom reduce-scatter"):
        compiled(x).sum().backward()


# --- hooks that escape the graph


class Breaking(nn.Module):
    """A block that Dynamo cannot trace in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break("on purpose")
        return torch.relu(x)


class Whole(nn.Module):
    """A model with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))


class Picky(nn.Module):
    """A block that refuses batches of three."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        return torch.relu(self.up(x))


def breaking_stack() -> nn.Module:
    model = Stack(num_blocks=2)
    model.blocks[1] = Breaking()
    return shard(model)


def test_a_graph_break_in_a_group_is_an_error(two_ranks: None) -> None:
    with pytest.raises(UncapturedError) as raised:
        step(breaking_stack())
    message = str(raised.value)
    assert "ran its hooks outside the compiled graph" in message
    assert "as far as FSDP group 'blocks.1'" in message
    assert "Reason: " in message
    assert "graph_break" in message or "graph break" in message
    assert "on_uncaptured='warn'" in message


def test_a_graph_break_may_be_a_warning(two_ranks: None, caplog: pytest.LogCaptureFixture) -> None:
    model = breaking_stack()
    with caplog.at_level(logging.WARNING, logger="loco_compile"):
        compiled, x = torch.compile(model, backend=WARNS), torch.randn(4, 64)
        for _ in range(3):
            compiled(x).sum().backward()
    warnings = [r.getMessage() for r in caplog.records if "outside the compiled" in r.getMessage()]
    assert len(warnings) == len(set(warnings))  # once for each group, not in each step
    assert any("FSDP group '(root)'" in w for w in warnings)
    assert all(p.grad is not None for p in model.parameters())


def test_an_exception_in_a_traced_forward(two_ranks: None) -> None:
    """It reaches the user, Dynamo gives the frame up, and the fix of our error brings it back."""
    model = Stack(num_blocks=2)
    model.blocks[1] = Picky()
    model = shard(model)
    compiled = torch.compile(model, backend=BACKEND)
    compiled(torch.randn(4, 64)).sum().backward()
    kept = error_state(model).norms()
    assert all(kept.values())
    with pytest.raises(ValueError, match="three"):
        compiled(torch.randn(3, 64))
    with pytest.raises(UncapturedError, match=r"the forward raised .* \(torch._dynamo.reset\(\)"):
        compiled(torch.randn(4, 64))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(torch.randn(4, 64))
    assert error_state(model).norms() == kept
    with recorded() as graphs:
        compiled(torch.randn(4, 64)).sum().backward()
    assert sum(g.count("all_to_all_single") for g in graphs.after) == 3


def test_a_graph_break_outside_of_groups_is_none_of_ours(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=1))

    @torch.compile(backend=BACKEND)
    def train_step(x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return model(x).sum()

    with recorded() as graphs:
        train_step(torch.randn(4, 64)).backward()
    assert sum(g.count("all_to_all_single") for g in graphs.after) == 2


def test_an_untraceable_block_can_be_left_out(two_ranks: None) -> None:
    """The fix that the error names: compile only the blocks without the break."""
    model = breaking_stack()
    model.blocks[0].compile(backend=BACKEND)
    model(torch.randn(4, 64)).sum().backward()
    methods = {row.name: row.method for row in explain(model).rows if row.numel >= 4096}
    assert methods["blocks.0"] == "loco"
    assert methods.get("blocks.1", "none") == "none"


# --- several models, eager forwards, hooks


def test_two_models_in_one_graph_do_not_mix(two_ranks: None) -> None:
    """Both roots have no name: their gradients must not share a message, nor their errors."""
    first, second = shard(Stack(num_blocks=1)), fully_shard(Whole())

    @torch.compile(backend=BACKEND)
    def train_step(x: Tensor) -> Tensor:
        return second(first(x)).sum()

    with recorded() as graphs:
        train_step(torch.randn(4, 64)).backward()
    assert graphs.after[1].count("all_to_all_single") == 3
    assert sorted(error_state(first).names()) == [
        "blocks.0.down.weight",
        "blocks.0.up.weight",
        "first.weight",
        "last.weight",
    ]
    assert error_state(second).names() == ["up.weight"]
    for model in (first, second):
        assert all(error_state(model).norms().values())
        assert {row.method for row in explain(model).rows if row.numel >= 4096} == {"loco"}


def test_a_compiled_step_after_an_eager_forward(two_ranks: None) -> None:
    """Eager FSDP2 leaves the root's full parameters on their modules until backward."""
    model = shard(Stack(num_blocks=1))
    compiled, x = torch.compile(model, backend=BACKEND), torch.randn(4, 64)
    compiled(x).sum().backward()
    with torch.no_grad():
        model(x)
    compiled(x).sum().backward()
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())


def test_saved_tensor_hooks_would_lose_the_error(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=1))
    compiled, x = torch.compile(model, backend=BACKEND), torch.randn(4, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = compiled(x).sum()
    with pytest.raises(RuntimeError, match="copies of the error feedback buffers") as raised:
        loss.backward()
    assert "saved_tensors_hooks" in str(raised.value)
    compiled(x).sum().backward()


# --- evaluation


def test_evaluation_gathers_and_sends_nothing(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=1)).eval()
    compiled = torch.compile(model, backend=BACKEND)
    with recorded() as graphs, torch.no_grad():
        out = compiled(torch.randn(4, 64))
    assert not out.requires_grad
    assert len(graphs.after) == 1
    assert graphs.after[0].count("all_gather_into_tensor") == 2
    assert "all_to_all" not in graphs.after[0]


# --- eager FSDP2


def test_hooks_of_fsdp_are_not_replaced() -> None:
    assert FSDPState._pre_forward is capture.EAGER_PRE_FORWARD
    assert FSDPState._post_forward is capture.EAGER_POST_FORWARD
    assert FSDPState._pre_forward.__module__.startswith("torch.distributed")


def test_installing_twice_is_once() -> None:
    wrapped = torch._dynamo.eval_frame.OptimizeContext.__call__
    capture.install()
    LoCoBackend()
    assert torch._dynamo.eval_frame.OptimizeContext.__call__ is wrapped


def test_setting_of_dynamo_is_as_it_was(two_ranks: None) -> None:
    before = torch._dynamo.config.wrap_top_frame
    step(shard(Stack(num_blocks=1)))
    assert torch._dynamo.config.wrap_top_frame is before
    with torch._dynamo.config.patch(wrap_top_frame=True):
        step(shard(Stack(num_blocks=1)))
        assert torch._dynamo.config.wrap_top_frame is True


def test_a_captured_model_can_still_run_eagerly(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=1))
    x = torch.randn(4, 64)
    torch.compile(model, backend=BACKEND)(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()  # a plain eager step is no graph break
    assert all(p.grad is not None for p in model.parameters())
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())


def test_parameters_are_the_shards_after_a_compiled_step(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=1))
    before = dict(model.named_parameters())
    step(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(p.grad.placements == p.placements for p in after.values())
