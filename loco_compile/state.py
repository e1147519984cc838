"""Life cycle of the error feedback state: allocation, optimizer steps, resets, a view of it.

The error of a parameter is a few tensors that belong to its FSDP parameter group, so that Dynamo
lifts them to graph inputs: one compiled graph serves many blocks, each with its own error, and a
recompile finds the same buffers. They are in no state_dict.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from . import compat
from .config import LoCoConfig
from .kernels.layout import Layout
from .kernels.memory import Memory, formats
from .kernels.recipe import Recipe
from .kernels.reference import decompress_error
from .passes.plan import Decline
from .unshard import Spec

log = logging.getLogger(__name__)

GROUP_ATTRIBUTE = "_loco_state"


@dataclasses.dataclass(eq=False)
class ParameterState:
    """Everything kept for one FSDP parameter."""

    name: str
    """Fully qualified name."""
    fsdp_param: Any
    """FSDP2's own record; its `sharded_param` is read while tracing."""
    config: LoCoConfig
    spec: str
    """JSON of the Spec that the trace uses now."""
    later_spec: str
    """JSON of the Spec from `start_step` on; equal to `spec` when there is nothing to wait for."""
    dtensor_spec: Any
    """Mesh and placements of a parameter that was a DTensor before `fully_shard` (TP, EP)."""
    hold_spec: str
    """JSON of the Spec while `set_requires_gradient_sync(False)` holds."""
    hold_shard_spec: str
    """JSON of the Spec while `set_requires_all_reduce(False)` does."""
    decline: Decline | None
    """Why the parameter is sent uncompressed, None if it is compressed (from `start_step` on)."""
    requires_grad: bool
    """Whether the parameter was trainable when this was made."""
    layout: Layout | None
    """Wire layout; None for a parameter that is not compressed."""
    recipe: Recipe | None
    """Arithmetic; None for a parameter that is not compressed."""
    error: list[Tensor]
    """The buffers of kernels/memory.py, with the block scales as (W, B, slots): each once for
    every slot."""
    held: Tensor | None = None
    """A leaf of the full shape and no memory, in the dtype of the reduction: its `.grad` is the sum
    of the gradients that were not reduced. None as long as every gradient was."""
    held_shard: Tensor | None = None
    """The same for gradients that were reduced within a replica only: one shard (N,)."""
    num_steps: int = 0
    """Optimizer steps taken with this parameter."""

    def memory(self) -> Memory:
        """Return the buffers as the kernels name them."""
        _, recipe = self.format()
        memory = Memory.of(self.error, recipe)
        if memory.scale is None:
            return memory
        return memory._replace(scale=memory.scale.select(-1, 0))

    def is_compressed_now(self) -> bool:
        """Return whether the next gradient goes out compressed."""
        return self.decline is None and self.num_steps >= self.config.start_step

    def format(self) -> tuple[Layout, Recipe]:
        """Return the wire layout and the arithmetic of a compressed parameter."""
        if self.layout is None or self.recipe is None:
            raise AssertionError(f"expected a compressed parameter, {self.name} is not")
        return self.layout, self.recipe

    def zero_error(self) -> None:
        """Forget what was not sent, and what the receivers know."""
        own = [t for t in self.error if t.dtype != torch.int64]  # but not the noise
        # Backward graphs have saved these buffers: a version bump would make autograd refuse them.
        with torch.autograd._unsafe_preserve_version_counter(tuple(own)):
            for tensor in own:
                tensor.zero_()

    def rescale_error(self, factor: Tensor) -> None:
        """Follow a loss scale that has changed by a factor. Error scales must not be fixed."""
        own = [t for t in self.error if t.dtype.is_floating_point]  # block scales, or float errors
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(own)):
            torch._foreach_mul_(own, factor)

    def numel(self) -> int:
        """Elements of the full parameter."""
        return int(self.fsdp_param._orig_size.numel())

    def grad_dtype(self) -> str:
        """Name of the dtype in which the gradient is reduced."""
        spec = Spec.load(self.spec)
        return spec.reduce_dtype or spec.param_dtype

    def plain_bytes(self) -> int:
        """Bytes sent by an uncompressed exchange at ideal bytes.

        One chunk to each other rank for a reduce-scatter. Between replicas (HSDP) an all-reduce
        sends twice the chunks that a reduce-scatter over them would.
        """
        spec = Spec.load(self.spec)
        if spec.num_replicas == 1:
            return self.bytes_inside_replica()
        chunk_bytes = self._chunk_between_replicas() * self._itemsize()
        return int(2 * (spec.num_replicas - 1) * chunk_bytes)

    def bytes_inside_replica(self) -> int:
        """Bytes sent by the uncompressed reduce-scatter within the shard group."""
        num_ranks: int = Spec.load(self.spec).num_ranks
        return (num_ranks - 1) * self._shard_numel() * self._itemsize()

    def gathered_bytes(self) -> int:
        """Bytes of the uncompressed gather that follows a compressed exchange between replicas."""
        spec = Spec.load(self.spec)
        if spec.num_replicas == 1:
            return 0
        itemsize = min(self._itemsize(), self.fsdp_param.sharded_param.dtype.itemsize)
        return int((spec.num_replicas - 1) * self._chunk_between_replicas() * itemsize)

    def num_replicas(self) -> int:
        """R, ranks that hold the same shard; 1 without replicas."""
        return Spec.load(self.spec).num_replicas

    def _shard_numel(self) -> int:
        return int(self.fsdp_param.padded_sharded_param_size.numel())

    def _chunk_between_replicas(self) -> int:
        return -(-self._shard_numel() // self.num_replicas())

    def _itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.grad_dtype().removeprefix("torch."))
        return dtype.itemsize

    def error_bytes(self) -> int:
        """Bytes of error state on this rank."""
        return sum(t.numel() * t.element_size() for t in self.error)


@dataclasses.dataclass(eq=False)
class RootState:
    """What all groups of one FSDP root share."""

    last_traced: str = ""
    """Name of the group whose forward Dynamo entered last."""
    graph_breaks: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Dynamo's counts of graph breaks before it traced that frame."""
    compile_id: str = ""
    """Dynamo's name of that frame."""
    uncaptured: tuple[str, str] | None = None
    """The outermost group that runs eagerly now but should have been traced, and what to raise."""
    compared: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Process groups with plans that all their ranks share (`agree`)."""


@dataclasses.dataclass(eq=False)
class GroupState:
    """Everything kept for one FSDP parameter group, in the order of its parameters."""

    name: str
    """Fully qualified name of the group's module; empty for the root."""
    fsdp_group: FSDPParamGroup
    root: RootState
    config: LoCoConfig
    parameters: list[ParameterState]
    settings: tuple[Any, ...]
    """FSDP2's mutable settings that the specs were made from."""
    compiles: bool
    """False for a group that FSDP2's own hooks ran while another group was traced."""
    eager: bool = False
    """Whether FSDP2's own hooks send the group's gradients compressed (`eager.compress`)."""
    record: Any = None
    """CompileRecord of the compiled graph that says what becomes of the gradients: of those that
    ran this group, the last one that reduces them. None if no graph ran it."""
    holds: bool = False
    """Whether that graph holds all gradients back instead: so far, none has reduced them."""
    last_run: Any = None
    """CompileRecord of the compiled graph that last ran this group with gradients."""
    name_in_graph: str = ""
    """Name of the group in that graph: the first block's, if the graph serves many."""
    ran_eagerly: bool = False
    """Whether FSDP2's own hooks have run the group, outside any compiled graph, with gradients."""

    def note_run(self, record: Any, name_in_graph: str) -> None:
        """Note that a compiled graph runs this group now. An evaluation says nothing of gradients.

        It counts until there is a training step, as a graph that holds gradients back does until
        one reduces them.
        """
        if torch.is_grad_enabled():
            self.last_run = record
        says_more = torch.is_grad_enabled() and self.fsdp_group.reduce_grads
        if says_more or self.record is None:
            self.record, self.name_in_graph = record, name_in_graph
            self.holds = not self.fsdp_group.reduce_grads

    def name_in(self, module_name: str, parameter: ParameterState) -> str:
        """Return a parameter's name in a model where the group's first module has this name."""
        prefix = module_name.removesuffix(self.name.split(", ")[0])
        if prefix and not self.name:
            prefix += "."
        return prefix + parameter.name

    def error_addresses(self) -> set[int]:
        """Return where the error buffers of the group are."""
        return {e.data_ptr() for p in self.parameters for e in p.error}


def allocate_error(
    layout: Layout, recipe: Recipe, device: torch.device, *, noise: int = 0
) -> list[Tensor]:
    """Return zeroed buffers, static: no recompile may make their shapes symbolic.

    `noise`: where the random numbers of stochastic rounding start.
    """
    buffers = []
    for shape, dtype in formats(layout, recipe):
        if dtype == torch.bfloat16:
            # The CPU keeps every scale twice. Inductor fuses the loops over a tensor's blocks only
            # if none of them runs over the blocks alone: it would be vectorised along them. Tested
            # on the generated code in tests/passes/test_generated_code.py.
            shape = (*shape, 2 if device.type == "cpu" else 1)
        start = noise if dtype == torch.int64 else 0
        buffers.append(torch.full(shape, start, dtype=dtype, device=device))
        torch._dynamo.mark_static(buffers[-1])
    return buffers


def group_state(group: FSDPParamGroup) -> GroupState | None:
    """Return what was attached to a group, None if it was never captured."""
    return getattr(group, GROUP_ATTRIBUTE, None)


def count_optimizer_steps(owner: FSDPState) -> None:
    """Let every optimizer step advance the parameters it holds of one FSDP root.

    Steps are counted for each parameter by the optimizer that owns it, so several optimizers, or
    one for each parameter (optimizer-in-backward), still make one step of each. The global hook
    lives as long as `owner`, the root's state, and serves no other root's parameters.
    """
    owner_ref = weakref.ref(owner)  # the hook must not keep a model alive

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for state in _parameter_states(owner_ref()):
            # Looked up anew each time: load_state_dict(assign=True) replaces parameters.
            if id(state.fsdp_param.sharded_param) in held:
                advance(state)
                _warn_of_held_gradient(state)

    # Dynamo must not trace the hook: it is Python bookkeeping.
    handle = register_optimizer_step_post_hook(torch._dynamo.disable(after_step))
    weakref.finalize(owner, handle.remove)


def _warn_of_held_gradient(state: ParameterState) -> None:
    """Say so when a step was taken without gradients that are still held."""
    leaves = (state.held, state.held_shard)
    if any(leaf is not None and leaf.grad is not None for leaf in leaves):
        log.warning(
            "%s: the optimizer stepped without gradients that set_requires_gradient_sync(False) "
            "holds back: no later backward with sync used the parameter",
            state.name,
        )


def _parameter_states(owner: FSDPState | None) -> Iterator[ParameterState]:
    for member in owner._state_ctx.all_states if owner is not None else []:
        for group in compat.param_groups(member):
            state = group_state(group)
            yield from state.parameters if state is not None else []


def advance(state: ParameterState) -> None:
    """Count one optimizer step of a parameter: reset its error or start compressing when due."""
    state.num_steps += 1
    if state.num_steps >= state.config.start_step:
        state.spec = state.later_spec  # a guard on the old spec fails: Dynamo compiles again
    if state.config.reset_interval and state.num_steps % state.config.reset_interval == 0:
        state.zero_error()


class ErrorState:
    """What LoCo keeps for a model on this rank, by parameter name."""

    def __init__(self, parameters: dict[str, ParameterState]) -> None:
        self._parameters = parameters

    def __iter__(self) -> Iterator[ParameterState]:
        return iter(self._parameters.values())

    def __len__(self) -> int:
        return len(self._parameters)

    def names(self) -> list[str]:
        """Return the names of the compressed parameters."""
        return list(self._parameters)

    def reset(self) -> None:
        """Set every error to zero. What was not sent yet is lost."""
        for parameter in self:
            parameter.zero_error()

    def norms(self) -> dict[str, float]:
        """Return the l2 norm of each parameter's error on this rank, in gradient units."""
        return self._each(
            lambda planes, _: float(sum(p.double().square().sum() for p in planes)) ** 0.5
        )

    def saturation(self) -> dict[str, int]:
        """Return how many stored error codes of each parameter sit at an end of their range."""
        return self._each(lambda _, codes: sum(_num_at_ends(c) for c in codes))

    def _each(self, measure: Callable[[list[Tensor], tuple[Tensor, ...]], Any]) -> dict[str, Any]:
        values = {}
        for name, parameter in self._parameters.items():
            _, recipe = parameter.format()
            memory = parameter.memory()
            values[name] = measure(decompress_error(memory, recipe), memory.planes)
        return values


def _num_at_ends(codes: Tensor) -> int:
    if codes.dtype.is_floating_point:
        return 0
    ends = torch.iinfo(codes.dtype)
    return int(((codes == ends.min) | (codes == ends.max)).sum())


def find_groups(model: nn.Module) -> dict[FSDPParamGroup, str]:
    """Return the FSDP groups in a model, in module order, with the names of their modules.

    The names are those in `model`, whichever FSDP root a group belongs to.
    """
    found: dict[FSDPParamGroup, str] = {}
    for name, module in model.named_modules():
        state = compat.fsdp_state(module)
        if state is not None:
            plain = ".".join(part for part in name.split(".") if part != "_orig_mod")
            for group in compat.param_groups(state):
                found.setdefault(group, plain)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no FSDP2 module: call fully_shard(model) before "
            "torch.compile"
        )
    return found


def error_state(model: nn.Module) -> ErrorState:
    """Return the error feedback state of a model that has run at least one compiled step.

    Raises: ValueError if the model has no FSDP2 module.
    """
    parameters = {}
    for group, name in find_groups(model).items():
        state = group_state(group)
        if state is None:
            continue
        for parameter in state.parameters:
            if parameter.error:
                parameters[state.name_in(name, parameter)] = parameter
    return ErrorState(parameters)
