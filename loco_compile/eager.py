"""Compress the gradients of FSDP groups that stay eager: the root's under regional compile.

FSDP2 lets a module bring its own reduce-scatter. The one here takes the flat buffer that FSDP2
made, sends the compressed parameters' columns as one message and the others uncompressed, with the
codec (`passes/message.py`), the error state and the checks of the compiled way.

    for block in model.blocks:
        block.compile(backend=loco_backend)
    loco_compile.eager.compress(model)
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from . import agree, compat, groups, loss_scale, refuse
from .config import LoCoConfig
from .passes.message import Part, compress_all, unpack_mean
from .state import GroupState, ParameterState


def compress(module: nn.Module, config: LoCoConfig | None = None) -> None:
    """Let FSDP2's own hooks send the gradients of a module's FSDP group compressed.

    For groups that no compiled region holds. Nested FSDP modules have groups of their own, which
    are left as they are. Call it once, after `fully_shard`.

    Raises: TypeError if `config` is no LoCoConfig; ValueError if the module has no FSDP group;
            NotImplementedError for a group with replicas (HSDP) or communication of the user's own.
    """
    config = config or LoCoConfig()
    if not isinstance(config, LoCoConfig):
        raise TypeError(f"compress takes a LoCoConfig, got {type(config).__name__} {config!r}")
    state = compat.fsdp_state(module)
    if state is None or not compat.param_groups(state):
        raise ValueError(
            f"{type(module).__name__} has no FSDP group of its own: call fully_shard on it first, "
            "or pass the module that fully_shard was called on"
        )
    loss_scale.install()
    for group in compat.param_groups(state):
        refuse.refuse_eager(group)
        group._reduce_scatter_comm = _ReduceScatter(state, group, config)


class _ReduceScatter(DefaultReduceScatter):
    """Stands in for FSDP2's reduce-scatter of one group."""

    is_loco = True

    def __init__(self, state: FSDPState, group: FSDPParamGroup, config: LoCoConfig) -> None:
        self._state, self._group, self._config = state, group, config
        self._reduced: list[int] = []
        post_backward = group.post_backward

        def noted_post_backward(*args: Any) -> Any:
            # Afterwards the gradients are one flat buffer, which does not say whose they are.
            self._reduced = [i for i, p in enumerate(group.fsdp_params) if _has_gradient(p)]
            return post_backward(*args)

        setattr(group, "post_backward", noted_post_backward)  # noqa: B010  # on this group only

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce (W * N,) to this rank's (N,), FSDP2's layout: each parameter's chunk in turn."""
        state = groups.prepare_eager(self._state, self._group, self._config)
        own = [state.parameters[i] for i in self._reduced]
        sent = [op == dist.ReduceOp.AVG or op == dist.ReduceOp.SUM] * len(own)
        sent = [is_mean and p.is_compressed_now() for is_mean, p in zip(sent, own, strict=True)]
        if not any(sent):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._compare_plans(state, own, group)
        sizes = [p.fsdp_param.padded_sharded_param_size.numel() for p in own]
        grads = input_tensor.view(group.size(), -1).split(sizes, dim=1)
        shards = output_tensor.split(sizes)
        plain = [i for i, is_sent in enumerate(sent) if not is_sent]
        if plain:
            flat = torch.cat([grads[i] for i in plain], dim=1).reshape(-1)
            reduced = flat.new_empty(flat.numel() // group.size())
            super().__call__(reduced, flat, group, op)
            for i, part in zip(plain, reduced.split([sizes[i] for i in plain]), strict=True):
                shards[i].copy_(part)
        chosen = [i for i, is_sent in enumerate(sent) if is_sent]
        divisor = float(group.size()) if op == dist.ReduceOp.AVG else 1.0
        means = _exchange([grads[i] for i in chosen], [own[i] for i in chosen], group, divisor)
        for i, mean in zip(chosen, means, strict=True):
            shards[i].copy_(mean)
        return None

    def _compare_plans(
        self, state: GroupState, own: list[ParameterState], group: dist.ProcessGroup
    ) -> None:
        plan = f"eager/{self._config.fingerprint()}/{[(p.name, p.spec) for p in own]}"
        if (key := (group.group_name, plan)) not in state.root.compared:
            agree.compare(group, plan, json.dumps({"plan": plan, "config": str(self._config)}))
            state.root.compared.add(key)


def _has_gradient(fsdp_param: Any) -> bool:
    if fsdp_param.unsharded_accumulated_grad is not None:
        return True
    full = getattr(fsdp_param, "_unsharded_param", None)
    return full is not None and full.grad is not None


@torch.no_grad()
def _exchange(
    grads: list[Tensor], own: list[ParameterState], group: dist.ProcessGroup, divisor: float
) -> list[Tensor]:
    """Send (W, N) gradients, all in one message; return the averaged (N,) shards."""
    parts = [Part(*p.format(), dtype=g.dtype) for p, g in zip(own, grads, strict=True)]
    sender = [e for o, p in zip(own, parts, strict=True) for e in o.error[: p.num_buffers]]
    receiver = [e for o, p in zip(own, parts, strict=True) for e in o.error[p.num_buffers :]]
    message, new = compress_all([g.contiguous() for g in grads], sender, parts)
    received = torch.empty_like(message)
    dist.all_to_all_single(received.view(-1), message.view(-1), group=group)
    means, known = unpack_mean(received, receiver, parts, divisor=divisor)
    for buffer, value in zip([*sender, *receiver], [*new, *known], strict=True):
        if buffer is not value:
            buffer.copy_(value)
    return means
