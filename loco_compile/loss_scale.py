"""Keep the error in the units of the gradients when `torch.amp.GradScaler` changes the loss scale.

Under a loss scale `k` all gradients, and so the errors, are `k` times as large. When the scale
changes, each error is multiplied by the ratio of the scales: exactly, for powers of two. After an
overflow the scaler skips the step, and what was kept of its gradients is dropped.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from . import compat
from .state import ParameterState, group_state

_OPTIMIZERS = "_loco_optimizers"  # on a GradScaler: those it stepped since its last update


@functools.cache
def install() -> None:
    """Let errors follow every GradScaler that steps parameters of ours; no other is touched."""
    _note_optimizers()
    _rescale_after_updates()


def _note_optimizers() -> None:
    step = GradScaler.step

    @functools.wraps(step)
    def noted_step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            noted = self.__dict__.setdefault(_OPTIMIZERS, weakref.WeakSet())
            noted.add(optimizer)
            for state in _states_of(noted):
                _refuse(self, state)
        return step(self, optimizer, *args, **kwargs)

    GradScaler.step = noted_step  # type: ignore[method-assign]  # see `install`


def _rescale_after_updates() -> None:
    update = GradScaler.update

    @functools.wraps(update)
    def rescaled_update(self: GradScaler, new_scale: Any = None) -> None:
        states = _states_of(self.__dict__.pop(_OPTIMIZERS, ()))
        if not states or self._scale is None:
            update(self, new_scale)
            return
        before = self._scale.clone()
        update(self, new_scale)
        factor = self._scale / before
        if new_scale is None:
            # Smaller means an overflow. On the device: the host must not wait for it.
            factor = torch.where(factor < 1, torch.zeros_like(factor), factor)
        for state in states:
            state.rescale_error(factor)

    GradScaler.update = rescaled_update  # type: ignore[method-assign]  # see `install`


def _states_of(optimizers: Any) -> list[ParameterState]:
    """Return what is kept for the compressed parameters that these optimizers hold."""
    groups = [g for o in optimizers for g in o.param_groups]
    held = {id(p) for group in groups for p in group["params"]}
    states = [s for g in compat.all_groups() if (s := group_state(g)) is not None]
    kept = [parameter for state in states for parameter in state.parameters]
    return [s for s in kept if s.error and id(s.fsdp_param.sharded_param) in held]


def _refuse(scaler: GradScaler, state: ParameterState) -> None:
    if type(scaler).update is not GradScaler.update:
        raise NotImplementedError(
            f"{state.name}: {type(scaler).__name__} has an update of its own, which its error "
            "cannot follow. Use torch.amp.GradScaler, which is the one for FSDP2."
        )
    fixed = [f for f in ("scale", "error_scale") if getattr(state.config, f) == "fixed"]
    if fixed:
        raise NotImplementedError(
            f"{state.name}: LoCoConfig({fixed[0]}='fixed') is made for gradients of one size, and "
            "GradScaler changes it. Use LoCoConfig(scale='block', error_scale='block') with loss "
            "scaling, or train in bfloat16 without it."
        )
