"""Notice FSDP groups whose hooks ran eagerly inside a region that we compile.

A graph break inside a group's forward sends its hooks back to eager: FSDP2 then reduces its
gradients uncompressed, and training goes on as if nothing had happened. That must never be silent.
"""

from __future__ import annotations

import logging
import sys
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
    """Check every eager pre-forward of a group; other groups and models are left alone."""
    if getattr(group, _WATCHED, False):
        return
    eager_pre_forward = group.pre_forward

    def pre_forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _note_eager_run(group)
        return eager_pre_forward(*args, **kwargs)

    setattr(group, "pre_forward", pre_forward)  # noqa: B010  # on this group only
    setattr(group, _WATCHED, True)


def _note_eager_run(group: FSDPParamGroup) -> None:
    state = group_state(group)
    if state is None:
        return
    first_time, state.ran_eagerly = not state.ran_eagerly, True
    if not _inside_our_region():
        return  # on purpose: the root under regional compile, or a plain eager call
    report_uncaptured(
        f"FSDP group {state.name or '(root)'!r} ran its hooks outside the compiled graph, so its "
        "gradients would be reduced uncompressed. Dynamo had traced as far as FSDP group "
        f"{_last_traced(state) or '(root)'!r}. Reason: {_last_graph_break()}. Fix: remove the "
        "graph break (torch.compile(..., fullgraph=True) shows where it is), or compile only the "
        "blocks without it (block.compile(backend=...)), or accept it with "
        "LoCoConfig(on_uncaptured='warn').",
        warns=state.config.on_uncaptured == "warn",
        is_new=first_time,
    )


def report_uncaptured(message: str, *, warns: bool, is_new: bool = True) -> None:
    """Raise UncapturedError, or warn where the config asks for it."""
    if not warns:
        raise UncapturedError(message)
    if is_new:
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


def _last_traced(state: GroupState) -> str:
    """Return the group whose forward the last trace entered: a graph break is in there."""
    return state.root.last_traced


def _last_graph_break() -> str:
    breaks = list(torch._dynamo.utils.counters["graph_break"])
    return (
        breaks[-1].strip().splitlines()[0]
        if breaks
        else "unknown (run with TORCH_LOGS=graph_breaks)"
    )
