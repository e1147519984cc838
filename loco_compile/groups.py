"""Prepare FSDP parameter groups for tracing: decide for each parameter, allocate."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import CompileContext
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from . import compat, guard, refuse
from .config import LoCoConfig
from .kernels.layout import Layout
from .kernels.memory import first_noise
from .kernels.recipe import Recipe
from .passes.markers import Tag
from .passes.plan import Decline, Parameter, decide, layout_of
from .state import (
    GROUP_ATTRIBUTE,
    GroupState,
    ParameterState,
    RootState,
    allocate_error,
    count_optimizer_steps,
    group_state,
)
from .unshard import Spec

log = logging.getLogger(__name__)
_STATES = "_loco_states"  # on an FSDPState
_ROOT = "_loco_root"  # on the root's FSDPState


def prepare(state: FSDPState, config: LoCoConfig) -> str:
    """Attach what a trace of `state` needs to it and to all groups of its root; return its name.

    Idempotent: existing error buffers are kept as long as the config keeps their layout. A group
    that FSDP2's own hooks are running right now lies outside every compiled region, e.g. the
    root's under regional compile: it gets no error buffers unless it is traced itself later. Any
    other group is taken for one that will be traced; one that stays eager has buffers for nothing.

    Raises: NotImplementedError that names the module, what it uses and the way out.
    """
    state._lazy_init()
    root = root_state(state)
    root.last_traced = _module_name(state)
    # Dynamo traces a frame again after a break: what counts is the state before the first try.
    if (compile_id := str(CompileContext.current_compile_id())) != root.compile_id:
        root.compile_id = compile_id
        root.graph_breaks = collections.Counter(torch._dynamo.utils.counters["graph_break"])
    is_new = False
    for member in state._state_ctx.all_states:
        for group in compat.param_groups(member):
            compiles = member is state or member._training_state == TrainingState.IDLE
            if _is_stale(group, config, compiles=compiles):
                if compiles:
                    refuse.refuse_traced(group)
                elif refuse.is_served_eagerly(group):
                    continue  # `prepare_eager` attaches its state
                _attach(group, root, config, compiles=compiles)
                guard.watch(group)
                _skip_post_backward_until_unsharded(group)
                is_new = True
        states = tuple(group_state(g) for g in compat.param_groups(member))
        setattr(member, _STATES, states)
    if is_new:
        _warn_of_idle_patterns(state, config)
    return root.last_traced


def prepare_eager(state: FSDPState, group: FSDPParamGroup, config: LoCoConfig) -> GroupState:
    """Attach to a group what `eager.compress` needs; return it. Idempotent, as `prepare`."""
    attached = group_state(group)
    if attached is None or not attached.eager or _is_stale(group, config, compiles=False):
        _attach(group, root_state(state), config, compiles=True, eager=True)
        states = tuple(group_state(g) for g in compat.param_groups(state))
        setattr(state, _STATES, states)
    attached = group_state(group)
    if attached is None:
        raise AssertionError(f"expected a state on {group._module_fqn}")
    return attached


def _skip_post_backward_until_unsharded(group: FSDPParamGroup) -> None:
    """Keep FSDP2's post-backward away from a group that has only run in compiled graphs.

    After the backward of a group that runs eagerly, such as the root's under regional compile,
    FSDP2 calls it for all groups of the root. With gradient sync off and a reduce_dtype it then
    reads the full parameter, which only an eager unshard makes.
    """
    if "post_backward" in vars(group):
        return
    post_backward = group.post_backward

    def post_backward_if_unsharded(*unused: Any) -> None:
        if any(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
            post_backward(*unused)

    setattr(group, "post_backward", post_backward_if_unsharded)  # noqa: B010  # this group only


def _warn_of_idle_patterns(state: FSDPState, config: LoCoConfig) -> None:
    groups = [g for s in state._state_ctx.all_states for g in compat.param_groups(s)]
    names = [p._param_fqn or "" for g in groups for p in g.fsdp_params]
    for pattern in config.exempt:
        if not fnmatch.filter(names, pattern):
            log.warning(
                "LoCoConfig.exempt pattern %r matches no parameter of this model; its names are "
                "like %r",
                pattern,
                names[0],
            )


def root_state(state: FSDPState) -> RootState:
    """Return what the groups of an FSDP root share; made, with its count of steps, at first use."""
    root = next(s for s in state._state_ctx.all_states if s._is_root)
    shared: RootState | None = getattr(root, _ROOT, None)
    if shared is None:
        shared = RootState()
        setattr(root, _ROOT, shared)
        count_optimizer_steps(root)
    return shared


def shared_by_modules(state: FSDPState) -> list[FSDPState]:
    """Return the states of a root that several modules share: `fully_shard([a, b, ...])`."""
    return [s for s in state._state_ctx.all_states if len(s._modules) > 1]


def states_of(state: FSDPState) -> tuple[GroupState, ...]:
    """Return what `prepare` attached to the groups of an FSDP state. Traced by Dynamo."""
    states: tuple[GroupState, ...] = getattr(state, _STATES)
    return states


def settings(group: FSDPParamGroup) -> tuple[Any, ...]:
    """Return the settings of a group that a user may change after the first step."""
    return (
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
        getattr(group.post_forward_mesh_info, "shard_mesh_size", 0),
        type(group._all_gather_comm).__name__,
        type(group._reduce_scatter_comm).__name__,
        group._all_reduce_hook is None,
    )


def _is_stale(group: FSDPParamGroup, config: LoCoConfig, *, compiles: bool) -> bool:
    state = group_state(group)
    if state is None or state.config != config or state.settings != settings(group):
        return True
    if compiles and not state.compiles:
        return True
    trained = [p for p in state.parameters if p.requires_grad]
    if any(_leaves_to_make(group, p.held, p.held_shard) for p in trained):
        return True
    return any(
        p.fsdp_param.sharded_param.requires_grad != p.requires_grad for p in state.parameters
    )


def _module_name(state: FSDPState) -> str:
    names = [g._module_fqn for g in compat.param_groups(state)]
    return names[0] or "" if names else ""


def _attach(
    group: FSDPParamGroup,
    root: RootState,
    config: LoCoConfig,
    *,
    compiles: bool,
    eager: bool = False,
) -> None:
    old = group_state(group)
    parameters = []
    for index, fsdp_param in enumerate(group.fsdp_params):
        before = old.parameters[index] if old is not None else None
        reason = None if compiles else Decline.NOT_COMPILED
        parameters.append(_parameter_state(group, fsdp_param, index, config, before, reason))
    state = GroupState(
        name=group._module_fqn or "",
        fsdp_group=group,
        root=root,
        config=config,
        parameters=parameters,
        settings=settings(group),
        compiles=compiles,
        eager=eager,
    )
    setattr(group, GROUP_ATTRIBUTE, state)


def _parameter_state(
    group: FSDPParamGroup,
    fsdp_param: FSDPParam,
    index: int,
    config: LoCoConfig,
    before: ParameterState | None,
    reason: Decline | None,
) -> ParameterState:
    spec = _spec(group, fsdp_param, index)
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    requires_grad = fsdp_param.sharded_param.requires_grad
    facts = Parameter(
        name=name,
        shape=spec.full_shape,
        grad_dtype=getattr(torch, (spec.reduce_dtype or spec.param_dtype).removeprefix("torch.")),
        num_ranks=spec.num_ranks if spec.num_replicas == 1 else spec.num_replicas,
        requires_grad=requires_grad,
    )
    held, held_shard = (before.held, before.held_shard) if before is not None else (None, None)
    shard_numel = fsdp_param.padded_sharded_param_size.numel()
    if requires_grad:
        missing = _leaves_to_make(group, held, held_shard)
        if "held" in missing:
            held = _make_leaf(facts.shape, facts.grad_dtype, group.device)
        if "held_shard" in missing:
            held_shard = _make_leaf((shard_numel,), facts.grad_dtype, group.device)
    decline = reason or decide(facts, config)
    layout, recipe, error = None, None, []
    if decline is None:
        recipe = config.arithmetic()
        # Within a replica, or between replicas where there are any.
        chunk_numel = shard_numel
        if spec.num_replicas > 1:
            chunk_numel = -(-shard_numel // spec.num_replicas)
        layout = layout_of(facts.num_ranks, chunk_numel, recipe)
        noise = first_noise(name, dist.get_rank())
        error = _error(layout, recipe, group.device, before, noise)
    later = _dump(spec, decline)
    num_steps = before.num_steps if before is not None else 0
    waits = decline is None and num_steps < config.start_step
    return ParameterState(
        name=name,
        fsdp_param=fsdp_param,
        config=config,
        spec=_dump(spec, Decline.START) if waits else later,
        later_spec=later,
        dtensor_spec=compat.dtensor_spec(fsdp_param),
        hold_spec=dataclasses.replace(spec, gradient="hold").dump(),
        hold_shard_spec=dataclasses.replace(spec, gradient="hold_shard").dump(),
        held=held,
        held_shard=held_shard,
        decline=decline,
        requires_grad=requires_grad,
        layout=layout,
        recipe=recipe,
        error=error,
        num_steps=num_steps,
    )


def _leaves_to_make(group: FSDPParamGroup, held: Any, held_shard: Any) -> list[str]:
    """Name the leaves that the group's switches ask for and a parameter does not have yet."""
    holds_shard = group.reduce_grads and not group.all_reduce_grads
    holds_shard = holds_shard and isinstance(group.mesh_info, HSDPMeshInfo)
    wanted = {"held": not group.reduce_grads and held is None}
    wanted["held_shard"] = holds_shard and held_shard is None
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _make_leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a leaf without memory: autograd adds up gradients in its `.grad`."""
    leaf = torch.empty(shape, dtype=dtype, device=device)
    leaf.untyped_storage().resize_(0)
    return leaf.requires_grad_()


def _error(
    layout: Layout,
    recipe: Recipe,
    device: torch.device,
    before: ParameterState | None,
    noise: int,
) -> list[torch.Tensor]:
    if before is not None and before.error:
        if (before.layout, before.recipe) == (layout, recipe):
            return before.error
        log.warning(
            "%s: the config changed the error's format, its error starts at zero", before.name
        )
    return allocate_error(layout, recipe, device, noise=noise)


def _dump(spec: Spec, decline: Decline | None) -> str:
    tag = dataclasses.replace(spec.tag, plain=decline.value if decline else "")
    return dataclasses.replace(spec, tag=tag).dump()


def _spec(group: FSDPParamGroup, fsdp_param: FSDPParam, index: int) -> Spec:
    mesh = group.mesh_info
    if not isinstance(mesh, FSDPMeshInfo):
        raise AssertionError(f"expected an FSDP mesh, got {mesh}")
    gather_group = mesh.shard_process_group
    reduce_group = getattr(mesh, "reduce_scatter_process_group", None) or gather_group
    dtype = fsdp_param.param_dtype or fsdp_param.orig_dtype
    replicas, replicate_group = 1, ""
    if isinstance(mesh, HSDPMeshInfo):
        replicas, replicate_group = (
            mesh.replicate_mesh_size,
            mesh.replicate_process_group.group_name,
        )
    return Spec(
        full_shape=tuple(fsdp_param._orig_size),
        shard_dim=fsdp_param.fsdp_placement.dim,
        padded_rows=fsdp_param.padded_sharded_param_size[0],
        num_ranks=mesh.shard_mesh_size,
        gather_group=gather_group.group_name,
        reduce_group=reduce_group.group_name,
        num_replicas=replicas,
        replicate_group=replicate_group,
        param_dtype=str(dtype),
        reduce_dtype=str(group._reduce_dtype) if group._reduce_dtype else "",
        divide_factor=group.gradient_divide_factor,
        force_sum=group.force_sum_reduction_for_comms,
        tag=Tag(
            bucket="",
            name=_relative_name(group, fsdp_param),
            index=index,
            num_replicas=replicas,
            regathers=group.post_forward_mesh_info is not None,
            **_smaller_mesh(group, mesh),
        ),
    )


def _smaller_mesh(group: FSDPParamGroup, mesh: FSDPMeshInfo) -> dict[str, Any]:
    """Return the tag's fields for `reshard_after_forward=k`."""
    smaller = group.post_forward_mesh_info
    if smaller is None or smaller.shard_mesh_size == mesh.shard_mesh_size:
        return {}
    return {
        "smaller_ranks": smaller.shard_mesh_size,
        "smaller_rank": smaller.shard_mesh_rank,
        "smaller_group": smaller.shard_process_group.group_name,
    }


def _relative_name(group: FSDPParamGroup, fsdp_param: FSDPParam) -> str:
    """Name within the group's module: equal for equal blocks, so that one graph serves them all."""
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    return name.removeprefix(f"{group._module_fqn}.")
