"""A byte-level GPT in plain PyTorch, and how it is sharded: what a user's own script would hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of the model."""

    dim: int = 320
    """Width of the residual stream."""
    layers: int = 2
    """Number of blocks."""
    heads: int = 5
    """Attention heads; must divide dim."""
    context: int = 128
    """Bytes in one window."""
    vocabulary: int = 256
    """Rows of the embedding and of the head; more than the 256 that bytes use only weigh."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be 1 or more, got {getattr(self, field.name)}")
        if self.vocabulary < 256:
            raise ValueError(f"vocabulary must hold the 256 bytes, got {self.vocabulary}")
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim={self.dim}, got {self.heads}")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Byte-level GPT with an untied head. The forward returns the mean loss of the batch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self._initialise(config.layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's: normal(0.02), and less where a block adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                adds_to_residual = name.endswith(("proj.weight", "down.weight"))
                std = 0.02 / (2 * layers) ** 0.5 if adds_to_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(place)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(
    config: ModelConfig,
    *,
    mesh: DeviceMesh,
    seed: int,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None = None,
) -> GPT:
    """Return a model with the seed's weights, sharded over the mesh: each block, then the rest.

    `reshard_after_forward=None` is FSDP2's default: blocks are gathered again for backward.
    """
    torch.manual_seed(seed)  # every rank makes the same full weights and keeps its shard of them
    model = GPT(config)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    options["reshard_after_forward"] = reshard_after_forward
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
