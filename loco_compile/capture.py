"""Make stock FSDP2 traceable while Dynamo traces for our backend, and only then.

FSDP2's hooks are Dynamo-disabled, so `torch.compile(fully_shard(model))` has no collective in any
graph. Here Dynamo gets traceable stand-ins for `FSDPState._pre_forward` and `_post_forward`:

    pre-forward    every parameter of the group: shard -> unshard -> full parameter on its module
    post-forward   the shards back on their modules

Eager code and every other backend keep FSDP2's own hooks.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import OptimizeContext
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, _cast_fp_tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import compat, groups
from .state import ParameterState, RootState

EAGER_PRE_FORWARD = FSDPState._pre_forward
EAGER_POST_FORWARD = FSDPState._post_forward
_BUCKETS = "_loco_buckets"  # on Dynamo's OutputGraph: the FSDP states traced so far, named


@functools.cache
def install() -> None:
    """Register the stand-ins with Dynamo, and let `torch.compile(model)` trace the root's hooks."""
    torch.compiler.substitute_in_graph(EAGER_PRE_FORWARD)(_traced_pre_forward)
    torch.compiler.substitute_in_graph(EAGER_POST_FORWARD)(_traced_post_forward)
    _wrap_top_frame_for_our_backend()


def _wrap_top_frame_for_our_backend() -> None:
    """Trace a compiled module's hooks together with its forward, for our backend only.

    `torch.compile(module)` and `module.compile()` run the module's own hooks outside the traced
    frame unless Dynamo's `wrap_top_frame` is set when the wrapper is made. That setting is
    process-wide, so it is set just while a module is wrapped with our backend.
    """
    wrap = OptimizeContext.__call__

    @functools.wraps(wrap)
    def wrap_with_hooks(self: OptimizeContext, fn: Any) -> Any:
        is_module = isinstance(fn, nn.Module) or getattr(fn, "__name__", "") == "_call_impl"
        ours = is_module and compat.backend_of(self.callback) is not None
        with torch._dynamo.config.patch(wrap_top_frame=ours or torch._dynamo.config.wrap_top_frame):
            return wrap(self, fn)

    OptimizeContext.__call__ = wrap_with_hooks  # type: ignore[method-assign]  # see the docstring


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def _traces_for_us() -> bool:
    """Whether the running trace compiles for our backend. Evaluated while tracing."""
    trace = compat.current_trace()
    return trace is not None and compat.backend_of(trace.compiler) is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def _current_bucket() -> str:
    """Name of the group that `_prepare` saw last. Evaluated while tracing.

    A constant that no guard watches: one graph serves all equal blocks, under the first one's name.
    """
    trace = compat.current_trace()
    if trace is None:
        raise AssertionError("expected a running Dynamo trace")
    name: str = getattr(trace.output, _BUCKETS)[-1][1]
    return name


def traced_roots() -> list[RootState]:
    """Return what the FSDP roots share whose groups the running trace has entered."""
    trace = compat.current_trace()
    seen = getattr(trace.output, _BUCKETS, []) if trace is not None else []
    states = [state for ref, _ in seen if (state := ref()) is not None]
    return list(dict.fromkeys(groups.root_state(state) for state in states))


def _prepare(ctx: Any) -> None:
    """Do at trace time what FSDP2 does before its first forward, and allocate graph inputs."""
    state = ctx.get_local("self")._i_will_not_complain_if_bc_breaks_VariableTracker().value
    trace = compat.current_trace()
    if trace is None:
        raise AssertionError("expected a running Dynamo trace")
    backend = compat.backend_of(trace.compiler)
    with compat.errors_reach_the_user():
        name = groups.prepare(state, backend.config_of(trace.compiler))
    for shared in groups.shared_by_modules(state):
        _trace_hooks_of_group(shared)
    seen: list[tuple[weakref.ref[FSDPState], str]] = getattr(trace.output, _BUCKETS, [])
    entry = (weakref.ref(state), _unique_name(state, name, seen))
    setattr(trace.output, _BUCKETS, [*seen, entry])  # weak: the OutputGraph may outlive the model


def _unique_name(
    state: FSDPState, name: str, seen: list[tuple[weakref.ref[FSDPState], str]]
) -> str:
    """Return the group's name in this trace: several FSDP roots in it are all named ''."""
    for other, taken in seen:
        if other() is state:
            return taken
    others = sum(taken.partition("#")[0] == name for taken in dict(seen).values())
    return f"{name}#{others + 1}" if others else name


def _allow_side_effects(ctx: Any) -> None:
    """Let Dynamo swap parameters on modules inside a checkpointed region, as for FSDP2's own hooks.

    Safe there, since the swap is undone before the region ends.
    """
    compat.set_side_effects_in_region(allowed=True)


def _disallow_side_effects(ctx: Any) -> None:
    compat.set_side_effects_in_region(allowed=False)


def _traced_pre_forward(
    self: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not _traces_for_us():
        return torch._dynamo.disable(EAGER_PRE_FORWARD)(self, module, args, kwargs)  # type: ignore[no-any-return]
    comptime(_prepare)
    args, kwargs = _cast_inputs(self, args, kwargs)
    _unshard_all(self, _current_bucket())
    return _join_inputs(args, kwargs)


def _join_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the inputs that need gradients a common autograd node.

    Eager FSDP2's post-backward hook is such a node. Without it the gradients of a tensor that
    several modules read, as a decoder's layers read the encoder's output, add up in another order.
    """
    leaves, structure = tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if places and torch.is_grad_enabled():
        joined = torch.ops.loco_compile.join([leaves[i] for i in places])
        for place, tensor in zip(places, joined):  # noqa: B905  # traced
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


def _cast_inputs(
    self: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if self._is_root and self._device.type != "cpu":
        to_device = functools.partial(_to_device, self._device)
        args, kwargs = _apply_to_tensors(to_device, args), _apply_to_tensors(to_device, kwargs)
    if self._mp_policy.cast_forward_inputs and self._mp_policy.param_dtype:
        cast = functools.partial(_cast_fp_tensor, self._mp_policy.param_dtype)
        args, kwargs = _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)
    return args, kwargs


def _unshard_all(self: FSDPState, bucket: str) -> None:
    comptime(_allow_side_effects)
    for number, state in enumerate(groups.states_of(self)):
        group = state.fsdp_group
        # Read here so that Dynamo guards on them: the specs were made from these settings.
        if groups.settings(group) != state.settings:
            raise AssertionError("expected the settings that the group was prepared with")
        for parameter in state.parameters:
            shard = parameter.fsdp_param.sharded_param.to_local()
            full = torch.ops.loco_compile.unshard(
                shard,
                parameter.held,
                parameter.held_shard,
                parameter.error,
                _current_spec(parameter, group),
                f"{bucket}+{number}" if number else bucket,
            )
            if parameter.dtensor_spec is not None:
                full = _as_dtensor(full, parameter.dtensor_spec)
            _place(parameter.fsdp_param, full)
    comptime(_disallow_side_effects)


def _traced_post_forward(self: FSDPState, module: nn.Module, input: Any, output: Any) -> Any:
    if not _traces_for_us():
        return torch._dynamo.disable(EAGER_POST_FORWARD)(self, module, input, output)
    _reshard_all(self)
    for other in groups.shared_by_modules(self) if self._is_root else ():
        if other._modules_to_run_forward:  # the forward left out some of its modules
            _reshard_all(other)
            other._modules_to_run_forward.clear()
    return _cast_output(self, output)


def _reshard_all(self: FSDPState) -> None:
    comptime(_allow_side_effects)
    for state in groups.states_of(self):
        for parameter in state.parameters:
            _place(parameter.fsdp_param, parameter.fsdp_param.sharded_param)
    comptime(_disallow_side_effects)


def _cast_output(self: FSDPState, output: Any) -> Any:
    if self._mp_policy.output_dtype is None:
        return output
    return _apply_to_tensors(
        functools.partial(_cast_fp_tensor, self._mp_policy.output_dtype), output
    )


def _trace_hooks_of_group(state: FSDPState) -> None:
    """Let Dynamo trace the hooks of `fully_shard([a, b, ...])`, whose modules share one state.

    FSDP2 wraps them in closures of their own: unshard before the first module, reshard after the
    last. Nothing changes for eager code and for other backends.
    """
    for module in state._modules:
        for hooks, method, make in (
            (module._forward_pre_hooks, EAGER_PRE_FORWARD, _group_pre_hook),
            (module._forward_hooks, EAGER_POST_FORWARD, _group_post_hook),
        ):
            for key, hook in hooks.items():
                if inspect.unwrap(hook) is inspect.unwrap(method):
                    hooks[key] = make(state, hook)


def _group_pre_hook(state: FSDPState, eager: Any) -> Any:
    def pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _traces_for_us():
            return eager(module, args, kwargs)
        if state._modules_to_run_forward:
            return _cast_inputs(state, args, kwargs)
        state._modules_to_run_forward.update(state._modules)
        return _traced_pre_forward(state, module, args, kwargs)

    return pre_hook


def _group_post_hook(state: FSDPState, eager: Any) -> Any:
    def post_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not _traces_for_us():
            return eager(module, args, output)
        state._modules_to_run_forward.discard(module)
        if state._modules_to_run_forward:
            return _cast_output(state, output)
        return _traced_post_forward(state, module, args, output)

    return post_hook


def _current_spec(parameter: ParameterState, group: FSDPParamGroup) -> str:
    if not group.reduce_grads:
        return parameter.hold_spec
    if isinstance(group.mesh_info, HSDPMeshInfo) and not group.all_reduce_grads:
        return parameter.hold_shard_spec
    return parameter.spec


def _as_dtensor(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Give a parameter the placements back that it had before `fully_shard` (TP, EP)."""
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def _to_device(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)


def _place(fsdp_param: Any, value: Any) -> None:
    """Put a full or a sharded parameter on its module, and on those that share it."""
    info = fsdp_param._module_info
    info.module._parameters[info.param_name] = value
    for module, name in zip(info.shared_modules, info.shared_param_names):  # noqa: B905  # traced
        module._parameters[name] = value
