"""The `torch.compile` backend: capture on, passes over every graph, then Inductor or plain AOT."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.weak import WeakIdKeyDictionary

from . import agree, capture, compat, loss_scale
from .config import LoCoConfig
from .guard import pending_parameters, report_uncaptured
from .passes.find import find_gathers, find_held_markers
from .passes.pipeline import run as run_passes
from .passes.plan import Decline, Exchange
from .passes.remat import remat
from .passes.reshard import reshard
from .state import RootState, group_state

log = logging.getLogger(__name__)
_UNSHARD = torch.ops.loco_compile.unshard


@dataclasses.dataclass(eq=False)
class CompileRecord:
    """What became of one Dynamo graph: filled in as its forward and backward are compiled."""

    config: LoCoConfig
    roots: Sequence[RootState]
    """Of the FSDP groups in the graph."""
    decisions: dict[str, dict[int, Decline | None]] = dataclasses.field(default_factory=dict)
    """FSDP group -> place of the parameter in it -> why it is not compressed, None if it is."""
    error_addresses: set[int] = dataclasses.field(default_factory=set)
    """Where the error buffers are that the graph has run with."""
    switches: WeakKeyDictionary[FSDPParamGroup, tuple[Any, ...]] = dataclasses.field(
        default_factory=WeakKeyDictionary
    )
    """FSDP groups that the graph has run, with what a user may switch for each backward."""

    def check_switches(self) -> None:
        """Raise RuntimeError if a group was switched between its last forward, here, and now."""
        for group, before in self.switches.items():
            state = group_state(group)
            if state is None or state.last_run is not self:
                continue
            if (now := compat.backward_switches(group)) != before:
                raise RuntimeError(
                    f"FSDP group {group._module_fqn or '(root)'!r} ran forward with "
                    f"(reduce_grads, all_reduce_grads, gradient_divide_factor) = {before}, and "
                    f"backward with {now}. The compiled backward is that of the forward: call "
                    "set_requires_gradient_sync, set_requires_all_reduce and "
                    "set_gradient_divide_factor before the forward."
                )

    def note(self, exchanges: Sequence[Exchange]) -> None:
        """Keep what was decided, without the nodes that it was decided on."""
        for exchange in exchanges:
            for choice in exchange.choices:
                # Of an HSDP group's two reductions, the one between replicas is decided on.
                if choice.site.tag is not None and choice.decline != Decline.INSIDE_REPLICA:
                    group = self.decisions.setdefault(exchange.bucket.name, {})
                    group[choice.site.tag.index] = choice.decline


class _JointPasses(CustomGraphPass):
    """The passes over the joint graph in the form that Inductor's config takes."""

    def __call__(self, graph: fx.Graph) -> None:
        remat(reshard(graph))

    def uuid(self) -> Any:
        return hashlib.sha256(b"loco_compile.joint.1").hexdigest()


class LoCoBackend:
    """A backend for `torch.compile(model, backend=LoCoBackend(config))`.

    `torch.compile(model, backend="loco", options={...})` takes the config's fields as options.
    """

    is_loco_backend = True

    def __init__(self, config: LoCoConfig | None = None) -> None:
        if config is not None and not isinstance(config, LoCoConfig):
            raise TypeError(
                f"LoCoBackend takes a LoCoConfig, got {type(config).__name__} {config!r}. Write "
                "LoCoBackend(LoCoConfig(...)), or torch.compile(..., backend='loco', options={...})"
            )
        self.config = config or LoCoConfig()
        capture.install()
        loss_scale.install()

    def __repr__(self) -> str:
        return f"LoCoBackend({self.config})"

    def config_of(self, compiler: Any) -> LoCoConfig:
        """Return the config of a Dynamo compiler function: ours, or with `options` on top."""
        options = None
        while compiler is not None and compiler is not self:
            options = getattr(compiler, "kwargs", {}).get("options") or options
            links = ("compiler_fn", "_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
            compiler = next((getattr(compiler, k) for k in links if hasattr(compiler, k)), None)
        return self._with_options(options)

    def _with_options(self, options: Mapping[str, Any] | None) -> LoCoConfig:
        if not options:
            return self.config
        return LoCoConfig.from_options({**dataclasses.asdict(self.config), **options})

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one Dynamo graph. Called by torch.compile.

        Raises: UncapturedError if the graph trains parameters but holds no FSDP group.
        """
        with compat.errors_reach_the_user():
            _check_graph(gm)
            if mode not in (None, "default"):
                raise ValueError(
                    f"the loco backend has no mode {mode!r}: leave mode out of torch.compile"
                )
            config = self._with_options(options)
            owners = _find_owners(gm)
            if not owners and _trains_parameters(gm):
                if pending_parameters(compat.all_groups()):
                    return _run_if_pending(gm, config)
                _report_nothing_to_compress(config)
        record = CompileRecord(config, capture.traced_roots())
        compiled = _INNER[config.inner](gm, example_inputs, record)
        return _run_and_record(compiled, record, owners)


def _check_graph(gm: Any) -> None:
    if not isinstance(gm, fx.GraphModule) or not isinstance(gm.graph.output_node().args[0], tuple):
        raise TypeError(
            f"the loco backend takes graphs from torch.compile, got {type(gm).__name__}: write "
            "torch.compile(model, backend=loco_backend). For other graphs use "
            "loco_compile.passes.pipeline.run(gm, config)"
        )


def _find_owners(gm: fx.GraphModule) -> dict[str, int]:
    """Return for each FSDP group in a Dynamo graph the input that holds its first parameter."""
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    owners: dict[str, int] = {}
    for name, parameter in _find_unshards(gm, {n: n for n in inputs}):
        owners.setdefault(name, inputs.index(parameter))
    return owners


def _find_unshards(
    gm: fx.GraphModule, origins: Mapping[fx.Node, fx.Node]
) -> Iterator[tuple[str, fx.Node]]:
    """Yield the group's name and the parameter of each unshard, in checkpointed regions too.

    `origins`: input of `gm` -> input of the outermost graph.
    """
    for node in gm.graph.find_nodes(op="call_function", target=_UNSHARD.default) + list(
        gm.graph.find_nodes(op="call_function", target=_UNSHARD)
    ):
        yield str(node.args[5]), origins[_input_of(node.args[0])]
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    for node in gm.graph.find_nodes(op="call_function", target=checkpoint):
        body = getattr(gm, str(node.args[0].target))
        pairs = zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=True)
        inner = {n: origins[_input_of(outer)] for n, outer in pairs if _input_of(outer) in origins}
        yield from _find_unshards(body, inner)


def _input_of(node: Any) -> Any:
    """Follow the first inputs of a node up to an input of the graph, or to a constant."""
    while isinstance(node, fx.Node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _trains_parameters(gm: fx.GraphModule) -> bool:
    if not torch.is_grad_enabled():
        return False
    inputs = (n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder"))
    values = itertools.chain(inputs, gm.parameters())
    return any(isinstance(v, torch.nn.Parameter) and v.requires_grad for v in values)


def _report_nothing_to_compress(config: LoCoConfig) -> None:
    if not dist.is_initialized():
        fix = "torch.distributed is not initialised: call dist.init_process_group, then fully_shard"
    else:
        fix = (
            "call fully_shard on the model before torch.compile; if it is sharded, its hooks ran "
            "outside this graph: see TORCH_LOGS=graph_breaks"
        )
    report_uncaptured(
        "the loco backend compiled a graph that trains parameters but holds no FSDP2 group, so "
        f"there is nothing to compress. Fix: {fix}. LoCoConfig(on_uncaptured='warn') compiles it "
        "as it is.",
        warns=config.on_uncaptured == "warn",
    )


def _run_if_pending(gm: fx.GraphModule, config: LoCoConfig) -> Callable[..., Any]:
    """Run a graph as it is in a forward that raises at its end; report it in any other.

    The graph is told by its parameters, which are at hand only when it runs.
    """

    def run(*inputs: Any) -> Any:
        if pending_parameters(compat.all_groups()).isdisjoint(map(id, inputs)):
            _report_nothing_to_compress(config)
        return gm.forward(*inputs)

    return run


def _run_and_record(
    compiled: Callable[..., Any], record: CompileRecord, owners: dict[str, int]
) -> Callable[..., Any]:
    """Note on each group which graph ran it: one graph may serve many blocks."""
    groups = WeakIdKeyDictionary()

    def run(*args: Any) -> Any:
        for name, index in owners.items():
            parameter = args[index]
            if parameter not in groups:
                groups[parameter] = compat.group_of(parameter)
            state = group_state(groups[parameter])
            if state is None:
                continue
            record.switches[state.fsdp_group] = compat.backward_switches(state.fsdp_group)
            if not state.fsdp_group.is_sharded:  # an eager forward left its full parameters
                state.fsdp_group.reshard()
            if state.last_run is not record:
                record.error_addresses |= state.error_addresses()
            state.note_run(record, name)
        return compiled(*args)

    return run


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Places of a graph's inputs that autograd does not know to change."""

    errors: tuple[int, ...]
    held: tuple[int, ...]


def _apply_passes(gm: fx.GraphModule, record: CompileRecord) -> _Inputs:
    """Run the passes over a forward or backward graph."""
    held = {marker.args[0] for marker in find_held_markers(gm.graph)}
    gathered = [(g.group_name, g.tag.name) for g in find_gathers(gm.graph)]
    exchanges = run_passes(gm, record.config)
    with compat.errors_reach_the_user():
        agree.check_plan(gm, exchanges, gathered, record.config, record.roots)
    record.note(exchanges)
    errors = {e for x in exchanges for c in x.compressed for e in c.site.errors}
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    return _Inputs(
        errors=tuple(i for i, n in enumerate(inputs) if n in errors),
        held=tuple(i for i, n in enumerate(inputs) if n in held),
    )


def _run_backward(compiled: Any, inputs: _Inputs, record: CompileRecord) -> Any:
    """Let a backward update the error buffers and use up held gradients, behind autograd's back.

    Autograd saved the buffers for backward. Two forwards before one backward save them twice: the
    first backward's update is meant to be seen by the second, so versions are kept. A saved-tensor
    hook that gives back a copy would take the update with it, so that is refused.

    Raises: RuntimeError in the backward if a buffer is not the one that was saved, or if the
            settings of a group are not those of its forward.
    """

    def run(args: list[Any]) -> Any:
        record.check_switches()
        buffers = tuple(args[i] for i in inputs.errors)
        if any(b.data_ptr() not in record.error_addresses for b in buffers):
            raise RuntimeError(
                "backward got copies of the error feedback buffers, whose update would be lost: "
                "saved_tensors_hooks (activation offloading, save_on_cpu) are active around the "
                "forward. Keep the compiled module outside of them."
            )
        for i in inputs.held:
            leaf = args[i]
            args[i] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = None
        with torch.autograd._unsafe_preserve_version_counter(buffers):
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's calling convention
    return run


def _compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], record: CompileRecord
) -> Callable[..., Any]:
    def inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        own = _apply_passes(gm, record)
        compat.forget_hashes_of_meshes(inputs)
        return _run_backward(compile_fx_inner(gm, inputs, **kwargs), own, record)

    # A hit in AOTAutogradCache would skip inner_compile. config_patches, unlike a `with` here, also
    # covers the backward, which is compiled later.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compile_fx(  # type: ignore[return-value]
            gm,
            example_inputs,
            inner_compile=inner_compile,
            config_patches={"joint_custom_post_pass": _JointPasses()},
        )


def _compile_with_aot_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], record: CompileRecord
) -> Callable[..., Any]:
    def compile_graph(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        own = _apply_passes(gm, record)
        return _run_backward(make_boxed_func(gm), own, record)

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        _JointPasses()(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    with torch._functorch.config.patch(enable_autograd_cache=False):
        return aot_autograd(
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


_INNER = {"inductor": _compile_with_inductor, "aot_eager": _compile_with_aot_eager}

loco_backend = LoCoBackend()
"""The backend with the default config."""
