"""What a user passes in, and what the backend leaves alone."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import loco_compile
from loco_compile import LoCoBackend, LoCoConfig, UncapturedError, explain, loco_backend
from loco_compile.passes.plan import Decline
from tests.graphs import Stack, fake_group, recorded, shard

QUICK = {"inner": "aot_eager"}
BACKEND = LoCoBackend(LoCoConfig(**QUICK))


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


def sharded(**options: Any) -> Stack:
    return shard(Stack(num_blocks=1), **options)


def step(model: nn.Module, **options: Any) -> None:
    compiled = torch.compile(model, **options)
    compiled(batch(model)).sum().backward()


def batch(model: nn.Module) -> Tensor:
    return torch.randn(4, 64, dtype=next(model.parameters()).dtype)


def methods(model: nn.Module) -> set[tuple[str, str]]:
    return {(row.method, row.reason) for row in explain(model).rows if "weight" in str(row)}


# --- ways to ask for it


def test_the_default_backend_compresses(two_ranks: None) -> None:
    model = sharded()
    with recorded() as graphs:
        step(model, backend=loco_backend)
    assert loco_backend.config == LoCoConfig()
    assert "all_to_all_single" in graphs.after[1]


def test_by_name_with_options(two_ranks: None) -> None:
    model = sharded()
    with recorded() as graphs:
        step(model, backend="loco", options={"bits": 8, "exempt": ["first.*"], **QUICK})
    (exempt,) = [r for r in explain(model).rows if r.reason == Decline.EXEMPT.value]
    assert exempt.parameters == ("first.weight",)
    recipes = {c.recipe.bits for e in graphs.exchanges[1] for c in e.compressed}
    assert recipes == {8}


def test_options_change_the_backend_s_own_config(two_ranks: None) -> None:
    model = sharded()
    backend = LoCoBackend(LoCoConfig(bits=8, **QUICK))
    with recorded() as graphs:
        step(model, backend=backend, options={"block_numel": 64})
    recipes = {
        (c.recipe.bits, c.recipe.block_numel) for e in graphs.exchanges[1] for c in e.compressed
    }
    assert recipes == {(8, 64)}
    assert backend.config == LoCoConfig(bits=8, **QUICK)


def test_model_compile_and_train_step(two_ranks: None) -> None:
    for how in ("model.compile", "train_step"):
        model = sharded()
        with recorded() as graphs:
            if how == "model.compile":
                model.compile(backend=BACKEND)
                model(batch(model)).sum().backward()
            else:
                torch.compile(lambda x, model=model: model(x).sum(), backend=BACKEND)(
                    batch(model)
                ).backward()
        assert graphs.after[1].count("all_to_all_single") == 2, how


def test_config_none_is_the_default() -> None:
    assert LoCoBackend().config == LoCoBackend(None).config == LoCoConfig()
    assert repr(LoCoBackend(LoCoConfig(bits=8))) == "LoCoBackend(LoCoConfig(bits=8))"


def test_copies_and_pickles_keep_the_config(two_ranks: None) -> None:
    for twin in (copy.deepcopy(BACKEND), pickle.loads(pickle.dumps(BACKEND))):
        assert twin.config == BACKEND.config
        model = sharded()
        step(model, backend=twin)
        assert ("loco", "") in methods(model)


# --- bad input: each error names the type or the field, the value, and the way out


@pytest.mark.parametrize("config", [{"bits": 4}, "default", 4, LoCoConfig])
def test_what_is_no_config(config: Any) -> None:
    with pytest.raises(TypeError, match="LoCoBackend takes a LoCoConfig, got") as raised:
        LoCoBackend(config)
    assert type(config).__name__ in str(raised.value)
    assert "LoCoBackend(LoCoConfig(...))" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bit": 8}, "LoCoConfig has no field 'bit' \\(value 8\\). Did you mean 'bits'"),
        ({"bits": 3}, "LoCoConfig.bits must be one of 2, 4, 8, got 3"),
        ({"error_scale": "fixed"}, "error_decay below 0.5"),
    ],
)
def test_wrong_options(two_ranks: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(sharded(), backend="loco", options=options)


def test_wrong_options_of_a_model_without_fsdp() -> None:
    with pytest.raises(ValueError, match="Did you mean 'bits'"):
        step(nn.Linear(64, 64), backend="loco", options={"bit": 8})


def test_modes_are_inductor_s(two_ranks: None) -> None:
    with pytest.raises(ValueError, match="has no mode 'max-autotune': leave mode out"):
        step(sharded(), backend=BACKEND, mode="max-autotune")
    step(sharded(), backend=BACKEND, mode="default")


def test_gradients_of_another_dtype_stay_uncompressed_and_say_so(two_ranks: None) -> None:
    model = sharded().double()
    step(model, backend=BACKEND)
    reasons = {row.reason for row in explain(model).rows if row.dtype == "float64"}
    assert reasons == {Decline.DTYPE.value, Decline.ONE_DIMENSION.value}


def test_no_process_group() -> None:
    with pytest.raises(UncapturedError, match="holds no FSDP2 group") as raised:
        step(nn.Linear(64, 64), backend=BACKEND)
    assert "call dist.init_process_group, then fully_shard" in str(raised.value)


def test_no_fsdp(two_ranks: None) -> None:
    with pytest.raises(UncapturedError, match="holds no FSDP2 group") as raised:
        step(nn.Linear(64, 64), backend=BACKEND)
    assert "call fully_shard on the model before torch.compile" in str(raised.value)
    assert "on_uncaptured='warn'" in str(raised.value)


def test_no_fsdp_may_be_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    backend = LoCoBackend(LoCoConfig(on_uncaptured="warn", **QUICK))
    model = nn.Linear(64, 64)
    with caplog.at_level(logging.WARNING, logger="loco_compile"):
        step(model, backend=backend)
    assert "holds no FSDP2 group" in caplog.text
    assert model.weight.grad is not None


@pytest.mark.parametrize("grad_off", [torch.no_grad, torch.inference_mode])
def test_a_model_that_does_not_train_needs_no_fsdp(grad_off: Any) -> None:
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    with grad_off():
        assert torch.equal(torch.compile(model, backend=BACKEND)(x), model(x))


def test_a_graph_without_parameters_needs_no_fsdp() -> None:
    x = torch.randn(4, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=BACKEND)(x).backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize("thing", [nn.Linear(4, 4), lambda x: x, None])
def test_what_is_no_graph(thing: Any) -> None:
    with pytest.raises(TypeError, match="takes graphs from torch.compile, got") as raised:
        BACKEND(thing, [torch.randn(4, 4)])
    assert type(thing).__name__ in str(raised.value)


@pytest.mark.parametrize("how", ["make_fx", "symbolic_trace"])
def test_a_graph_that_dynamo_did_not_make(how: str) -> None:
    x = torch.randn(4, 4)
    gm = make_fx(torch.sin)(x) if how == "make_fx" else fx.symbolic_trace(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="takes graphs from torch.compile, got"):
        BACKEND(gm, [x])


# --- everything else is left alone

GRAPHS_OF_ANOTHER_BACKEND = """
import sys, torch
if sys.argv[1] != "without":
    import loco_compile
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.inner(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.last = Block(), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.block(x.sin()).cos())

def make():
    model = Model()
    fully_shard(model.block)
    return fully_shard(model)

if sys.argv[1] == "used":
    config = loco_compile.LoCoConfig(inner="aot_eager")
    used = torch.compile(make(), backend=loco_compile.LoCoBackend(config))
    used(torch.randn(4, 64)).sum().backward()

def record(gm, inputs):
    for node in gm.graph.nodes:
        print(node.op, getattr(node.target, "__name__", node.target))
    print("graph")
    return gm.forward

x = torch.randn(4, 64)
torch.compile(make(), backend=record)(x).sum().backward()
model = make()
model.compile(backend=record)
model(x).sum().backward()
torch.compile(nn.Linear(64, 64), backend=record)(x).sum().backward()
print(torch._dynamo.config.wrap_top_frame)
"""


def test_graphs_of_other_backends_are_as_if_we_were_not_there() -> None:
    outputs = {}
    for how in ("without", "used"):
        done = subprocess.run(
            [sys.executable, "-c", GRAPHS_OF_ANOTHER_BACKEND, how],
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        outputs[how] = done.stdout
    assert outputs["without"].count("graph") >= 3
    assert outputs["used"] == outputs["without"]
    assert "loco" not in outputs["used"]
    assert "_c10d_functional" not in outputs["used"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_on_the_same_model(two_ranks: None, backend: str) -> None:
    model = sharded()
    step(model, backend=BACKEND)
    torch._dynamo.reset()
    with recorded() as graphs:
        step(model, backend=backend)
    assert graphs.before == []
    assert torch._dynamo.config.wrap_top_frame is False


def test_public_names() -> None:
    assert set(loco_compile.__all__) >= {
        "LoCoBackend",
        "LoCoConfig",
        "error_state",
        "explain",
        "loco_backend",
    }
    assert all(hasattr(loco_compile, name) for name in loco_compile.__all__)


TRAINS_ONCE = """
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from loco_compile import LoCoBackend, LoCoConfig
from tests.graphs import fake_group

with fake_group(2):
    model = fully_shard(torch.nn.Linear(64, 64))
    model.compile(backend=LoCoBackend(LoCoConfig(min_numel=0)))
    model(torch.randn(4, 64)).sum().backward()
    assert model.weight.grad is not None
print([counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")])
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Python's hashes differ between processes: none of them may be in the key of a graph."""
    seen = []
    for seed in ("1", "2"):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", TRAINS_ONCE],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **cache},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.append(done.stdout.splitlines()[-1])
    assert seen == ["[0, 2, 0]", "[2, 0, 0]"]
