"""Notice FSDP groups whose hooks ran eagerly inside a region that we compile.

A graph break inside a group's forward sends its hooks back to eager: FSDP2 then reduces its
gradients uncompressed, and training goes on as if nothing had happened. That must never be silent.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from . import compat
from .state import GroupState, group_state

log = logging.getLogger(__name__)
_WATCHED = "_loco_watched"


class UncapturedError(RuntimeError):
    """Gradients that should be compressed would go out uncompressed."""


def watch(group: FSDPParamGroup) -> None:
    """Check every eager forward of a group; other groups and models are left alone.

    What is wrong is known before the outermost eager forward and raised after it: an error that
    the user's own forward raises comes first.
    """
    if getattr(group, _WATCHED, False):
        return
    pre_forward, post_forward = group.pre_forward, group.post_forward

    def checked_pre_forward(*args: Any, **kwargs: Any) -> Any:
        _note_eager_run(group)
        return pre_forward(*args, **kwargs)

    def checked_post_forward(*args: Any, **kwargs: Any) -> Any:
        _raise_pending(group)
        return post_forward(*args, **kwargs)

    setattr(group, "pre_forward", checked_pre_forward)  # noqa: B010  # on this group only
    setattr(group, "post_forward", checked_post_forward)  # noqa: B010
    setattr(group, _WATCHED, True)


def pending_parameters(groups: Iterable[FSDPParamGroup]) -> set[int]:
    """Return the ids of the gathered parameters in forwards that will raise UncapturedError."""
    return {
        id(p._unsharded_param)
        for group in groups
        if (state := group_state(group)) is not None and state.root.uncaptured is not None
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")  # set by the first gather
    }


def _raise_pending(group: FSDPParamGroup) -> None:
    state = group_state(group)
    if state is None or state.root.uncaptured is None:
        return
    name, message = state.root.uncaptured
    if name == state.name:
        state.root.uncaptured = None
        raise UncapturedError(message)


def _note_eager_run(group: FSDPParamGroup) -> None:
    state = group_state(group)
    if state is None:
        return
    if not state.name:
        state.root.uncaptured = None  # the root's forward starts anew
    if not torch.is_grad_enabled():
        return
    first_time, state.ran_eagerly = not state.ran_eagerly, True
    if not _inside_our_region():
        return  # on purpose: the root under regional compile, or a plain eager call
    message = (
        f"FSDP group {state.name or '(root)'!r} ran its hooks outside the compiled graph, so its "
        "gradients would be reduced uncompressed. Dynamo had traced as far as FSDP group "
        f"{state.root.last_traced or '(root)'!r}. Reason: {_last_graph_break(state)}. Fix: remove "
        "the graph break (torch.compile(..., fullgraph=True) shows where it is), or compile only "
        "the blocks without it (block.compile(backend=...)), or accept it with "
        "LoCoConfig(on_uncaptured='warn')."
    )
    if state.config.on_uncaptured == "error":
        # The outermost group's: those inside run eagerly because of it.
        state.root.uncaptured = state.root.uncaptured or (state.name, message)
    elif first_time:
        log.warning(message)


def report_uncaptured(message: str, *, warns: bool) -> None:
    """Raise UncapturedError, or warn where the config asks for it."""
    if not warns:
        raise UncapturedError(message)
    log.warning(message)


def _inside_our_region() -> bool:
    """Whether a callable compiled with our backend is on the stack.

    FSDP2's hooks switch Dynamo's callback off, so the thread's current callback tells nothing. Only
    runs when a captured group's eager hook does, which is rare.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            if compat.backend_of(frame.f_locals.get("callback")) is not None:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _last_graph_break(state: GroupState) -> str:
    """Return why the last trace of the root broke, in Dynamo's words."""
    counts = torch._dynamo.utils.counters["graph_break"]
    new = [reason for reason in counts if counts[reason] > state.root.graph_breaks[reason]]
    if not new:
        return (
            "none was noted, so Dynamo gave the frame up for good: after too many recompiles (see "
            "TORCH_LOGS=recompiles), or an exception that the forward raised while it was traced "
            "(torch._dynamo.reset() has it traced anew)"
        )
    return new[-1].strip().splitlines()[0]
