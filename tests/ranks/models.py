"""Tiny models with everything that makes sharding awkward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

VOCABULARY = 29


class Gain(nn.Module):
    """One row: all ranks but the first have an empty shard, and the group holds nothing else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.row


class AwkwardBlock(nn.Module):
    """Rows that no world size divides, 1-D, frozen and unused parameters, a nested group."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, 5)
        self.gain = Gain(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        h = self.down(F.gelu(self.up(h)))
        return x + self.gain(h) + 0.1 * self.frozen(h)


class AwkwardModel(nn.Module):
    """Blocks between an embedding and a head, which belong to the root group."""

    def __init__(self, width: int = 11, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(AwkwardBlock(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        x = self.embed(tokens) + noise
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


def shard_awkward(
    mesh: DeviceMesh,
    *,
    num_blocks: int = 2,
    root: dict[str, Any] | None = None,
    **options: Any,
) -> AwkwardModel:
    """Build and shard the model; `root` holds options that only the root has."""
    torch.manual_seed(0)
    model = AwkwardModel(num_blocks=num_blocks)
    for block in model.blocks:
        fully_shard(block.gain, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **{**options, **(root or {})})
    return model


def batch(rank: int, step: int, size: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and noise of one rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(0, VOCABULARY, (size, 3), generator=generator)
    return tokens, 0.1 * torch.randn(size, 3, 11, generator=generator)


def loss_of(model: Callable[..., Tensor], tokens: Tensor, noise: Tensor) -> Tensor:
    """Cross entropy of the model's guess of its input."""
    return F.cross_entropy(model(tokens, noise).float().flatten(0, 1), tokens.flatten())
