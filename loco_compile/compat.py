"""Differences between the supported torch versions, each with the version it serves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch._dynamo.exc import ShortenTraceback
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """Return the parameter groups of an FSDP state. torch 2.11 has one; 2.12 and later a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def dtensor_spec(fsdp_param: FSDPParam) -> Any:
    """Return the DTensorSpec that a parameter had before `fully_shard`, None for a plain tensor.

    torch 2.12 and later name it `_unsharded_dtensor_spec`, 2.11 `_tp_spec`.
    """
    if not fsdp_param.is_dtensor:
        return None
    spec = getattr(fsdp_param, "_unsharded_dtensor_spec", None)
    return spec or getattr(fsdp_param, "_tp_spec", None)


def backward_switches(group: FSDPParamGroup) -> tuple[Any, ...]:
    """Return what eager FSDP2 reads of a group in backward and a user may set at any time."""
    return group.reduce_grads, group.all_reduce_grads, group.gradient_divide_factor


def forget_hashes_of_meshes(inputs: Sequence[Any]) -> None:
    """Let Inductor's cache find a graph that another process compiled.

    Its key takes the meshes among the inputs by their fields. One is Python's hash of the mesh,
    another number in every process, kept since its first use. It is computed again when needed.
    torch 2.14; older versions have no meshes among the inputs.
    """
    for x in inputs:
        mesh = getattr(x, "real_obj", None)
        if isinstance(mesh, DeviceMesh) and hasattr(mesh, "_hash"):
            mesh._hash = None


def resolve_group(name: Any) -> dist.ProcessGroup:
    """Return the process group that functional collectives know by this name."""
    return dist.distributed_c10d._resolve_process_group(name)


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the store that a process group was made with. Private in every version so far."""
    return dist.distributed_c10d._world.pg_map[group][1]


def backend_of(callback: Any) -> Any:
    """Yield nothing but the innermost `backend` a Dynamo callback compiles with, or None.

    Dynamo wraps the user's backend in several callables, and names the link differently in each.
    """
    links = (
        "_torchdynamo_orig_backend",
        "_torchdynamo_orig_callable",
        "compiler_fn",
        "__wrapped__",
    )
    seen: set[int] = set()
    while callback is not None and id(callback) not in seen:
        seen.add(id(callback))
        if getattr(callback, "is_loco_backend", False):
            return callback
        callback = next((getattr(callback, k) for k in links if getattr(callback, k, None)), None)
    return None


@dataclasses.dataclass(frozen=True)
class Tracing:
    """The Dynamo trace that is running now."""

    output: Any
    """Dynamo's OutputGraph: lives as long as the trace."""
    compiler: Any
    """The callable that will compile the graph."""


def current_trace() -> Tracing | None:
    """Return the running Dynamo trace, None outside of one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except (AttributeError, IndexError):
        return None
    return Tracing(output, output.compiler_fn)


def set_side_effects_in_region(*, allowed: bool) -> None:
    """Set whether the running trace may change outer state inside a higher-order operator.

    Dynamo does so around FSDP2's own hooks in a checkpointed region; turned off, the value from
    before is back. Private in every version so far.
    """
    trace = current_trace()
    if trace is None:
        raise AssertionError("expected a running Dynamo trace")
    tracer = trace.output.current_tracer
    if allowed:
        tracer.loco_side_effects = tracer.allow_side_effects_in_hop
    tracer.allow_side_effects_in_hop = allowed or tracer.loco_side_effects


@contextlib.contextmanager
def errors_reach_the_user() -> Iterator[None]:
    """Raise errors that a user can act on so that Dynamo hands them on under their own type.

    It wraps what is raised while it traces in InternalTorchDynamoError, and what a backend raises
    in BackendCompilerFailed, except for subclasses of ShortenTraceback.
    """
    try:
        yield
    except ShortenTraceback:
        raise
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        kind = type(error)
        bases = (ShortenTraceback, kind)
        visible = type(kind.__name__, bases, {"__module__": kind.__module__})
        raise visible(*error.args, first_useful_frame=None).with_traceback(
            error.__traceback__
        ) from error.__cause__


def all_groups() -> list[FSDPParamGroup]:
    """Return the FSDP parameter groups of all modules that are alive."""
    states = [ref() for ref in _module_state_mapping.values()]
    return [g for s in states if isinstance(s, FSDPState) for g in param_groups(s)]


def group_of(parameter: Any) -> FSDPParamGroup | None:
    """Return the FSDP group that holds a sharded parameter, among all modules that are alive."""
    for group in all_groups():
        if any(p.sharded_param is parameter for p in group.fsdp_params):
            return group
    return None


def fsdp_state(module: Any) -> FSDPState | None:
    """Return the FSDP state of a module, None if `fully_shard` was not called on it."""
    state = _get_module_state(module)
    return state if isinstance(state, FSDPState) else None
