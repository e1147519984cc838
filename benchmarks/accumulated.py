"""Does what was sent add up to the true gradient? Measured, with an eager twin.

Error feedback promises that the sum over steps of what was sent stays within a bounded distance of
the sum of the true mean gradients. The identity behind it (the distance is the error left, over
1 - error_decay) is not used here: a twin model, sharded alike but neither compiled nor compressed,
gets the trained model's weights before each step, runs the same batch, and its gradients are added
up beside the sent ones. Eager FSDP2 as the judge shares no code with what it judges.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Accumulated:
    """Sums of true and of sent gradients, in float64, of this rank's shards."""

    def __init__(self, model: nn.Module, twin: nn.Module) -> None:
        self.model, self.twin = model, twin
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter in model.named_parameters():
            local = local_shard(parameter)
            self.sums[name] = tuple(torch.zeros_like(local, dtype=torch.float64) for _ in range(2))

    def run_twin(self, tokens: Tensor, targets: Tensor) -> None:
        """Give the twin the model's weights and compute its gradients, before a step."""
        with torch.no_grad():
            pairs = zip(self.twin.parameters(), self.model.parameters(), strict=True)
            for copy, parameter in pairs:
                local_shard(copy).copy_(local_shard(parameter))
        self.twin.zero_grad()
        self.twin(tokens, targets).backward()

    def add(self) -> None:
        """Add both models' gradients to the sums. Before clipping, which scales them."""
        true = dict(self.twin.named_parameters())
        for name, parameter in self.model.named_parameters():
            for total, source in zip(self.sums[name], (true[name], parameter), strict=True):
                if source.grad is None:
                    raise AssertionError(f"expected a gradient for {name}, got None")
                total += local_shard(source.grad)

    def norms(self) -> dict[str, dict[str, float]]:
        """Return ||sum sent - sum true|| and ||sum true|| over all ranks, by parameter name."""
        squares = torch.tensor(
            [
                [float((sent - true).square().sum()), float(true.square().sum())]
                for true, sent in self.sums.values()
            ],
            dtype=torch.float64,
        )
        dist.all_reduce(squares)
        pairs = squares.sqrt().tolist()
        return {
            name: {"difference": difference, "true": true}
            for name, (difference, true) in zip(self.sums, pairs, strict=True)
        }


def relative_error(norms: list[dict[str, float]]) -> float:
    """Return the relative error of several parameters taken as one vector."""
    return math.hypot(*(n["difference"] for n in norms)) / math.hypot(*(n["true"] for n in norms))


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
