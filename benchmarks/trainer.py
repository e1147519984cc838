"""One training run: a fresh model, one method, and everything measured on the way."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from accumulated import Accumulated
from data import Batches, Corpus, evaluation_starts, windows
from machine import num_cores
from model import GPT, ModelConfig, build_model
from options import TrainConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from loco_compile import LoCoBackend, LoCoConfig, error_state, explain

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP_STEPS = 10  # left out of the timing: compilation, then caches and the allocator settle
LAST_STEPS = 50  # the train loss is the mean of so many last steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one method gave. Losses are means over all ranks; times are this rank's."""

    method: str
    config: dict[str, Any] | None
    losses: list[float]
    step_seconds: list[float]
    held_out_loss: float
    explain: list[dict[str, Any]] | None
    error_norms: dict[str, float] | None
    """Norm of each parameter's error state at the end, mean over the ranks."""
    accumulated: dict[str, dict[str, float]] | None
    num_ranks: int
    tokens_per_step: int
    seconds: float
    load: float
    """The machine's load average of the last minute, when the run ended."""
    cores: int
    """Cores this process may use."""

    @property
    def train_loss(self) -> float:
        """Mean loss of the last steps."""
        return statistics.fmean(self.losses[-LAST_STEPS:])

    @property
    def timed_steps(self) -> list[float]:
        """Seconds of the steps that count for the speed; none if there were too few."""
        return [] if self.accumulated is not None else self.step_seconds[WARM_UP_STEPS:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of one launch share."""

    mesh: DeviceMesh
    corpus: Corpus
    model: ModelConfig
    train: TrainConfig

    @property
    def rank(self) -> int:
        return self.mesh.get_rank()

    def build(self) -> GPT:
        """Return a fresh sharded model with the seed's weights."""
        if self.train.dtype == "fp32" and self.train.reduce_dtype == "fp32":
            policy = MixedPrecisionPolicy()
        else:
            policy = MixedPrecisionPolicy(
                param_dtype=DTYPES[self.train.dtype], reduce_dtype=DTYPES[self.train.reduce_dtype]
            )
        return build_model(self.model, mesh=self.mesh, seed=self.train.seed, policy=policy)


def run_method(setting: Setting, method: str, config: LoCoConfig | None) -> Run:
    """Train a fresh model with a method; None as config means stock eager FSDP2."""
    started = time.perf_counter()
    torch._dynamo.reset()  # the methods before leave no compiled code behind
    train = setting.train
    model = setting.build()
    trained = model if config is None else torch.compile(model, backend=LoCoBackend(config))
    check = Accumulated(model, setting.build()) if train.check_accumulated else None
    local_losses, step_seconds = train_steps(setting, trained, check, label=method)
    losses = torch.tensor(local_losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return Run(
        method=method,
        config=None if config is None else dataclasses.asdict(config),
        losses=(losses / setting.mesh.size()).tolist(),
        step_seconds=step_seconds,
        held_out_loss=held_out_loss(setting, model),
        explain=None if config is None else explain_rows(model),
        error_norms=None if config is None else mean_error_norms(model),
        accumulated=None if check is None else check.norms(),
        num_ranks=setting.mesh.size(),
        tokens_per_step=setting.mesh.size() * train.batch * setting.model.context,
        seconds=time.perf_counter() - started,
        load=os.getloadavg()[0],
        cores=num_cores(),
    )


def train_steps(
    setting: Setting, model: nn.Module, check: Accumulated | None, *, label: str
) -> tuple[list[float], list[float]]:
    """Run the optimizer steps; return this rank's losses and the seconds of each step."""
    train = setting.train
    optimizer, schedule = make_optimizer(model, train)
    batches = Batches(
        setting.corpus.train,
        context=setting.model.context,
        batch=train.batch,
        seed=train.seed,
    )
    losses, seconds = [], []
    with tqdm(total=train.steps, desc=label, disable=setting.rank != 0, mininterval=0.5) as bar:
        for _ in range(train.steps):
            tokens, targets = batches.draw(setting.rank, setting.mesh.size())
            started = time.perf_counter()
            if check is not None:
                check.run_twin(tokens, targets)
            loss = model(tokens, targets)
            loss.backward()
            if check is not None:
                check.add()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - started)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
    return losses, seconds


def make_optimizer(model: nn.Module, train: TrainConfig) -> tuple[AdamW, LambdaLR]:
    """Return AdamW (matrices decay, vectors do not) and its warm-up and cosine schedule."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=train.lr, betas=(0.9, 0.95), fused=True)
    warm_up = max(1, train.steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, train.steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return optimizer, LambdaLR(optimizer, factor)


@torch.no_grad()
def held_out_loss(setting: Setting, model: nn.Module) -> float:
    """Return the mean loss over the held-out windows, the same for every method and rank count.

    Run eagerly whatever the method, so that only the weights differ.
    """
    text, context = setting.corpus.held_out, setting.model.context
    num_windows = setting.train.eval_windows
    starts = evaluation_starts(text, context=context, num_windows=num_windows)
    # Every rank must run as often as the others: FSDP2 gathers in each forward. So a rank that has
    # fewer windows left repeats one with weight 0.
    share = math.ceil(num_windows / setting.mesh.size())
    indices = range(setting.rank * share, (setting.rank + 1) * share)
    total = torch.zeros(1, dtype=torch.float64)
    model.eval()
    for first in range(0, share, setting.train.batch):
        chunk = indices[first : first + setting.train.batch]
        real = [i for i in chunk if i < num_windows]
        picked = starts[real] if real else starts[:1]
        total += float(model(*windows(text, picked, context))) * len(real)
    model.train()
    dist.all_reduce(total)
    return float(total) / num_windows


def explain_rows(model: nn.Module) -> list[dict[str, Any]]:
    """Return the package's own report about a model that has run a step."""
    rows: list[dict[str, Any]] = json.loads(explain(model).to_json())
    return rows


def mean_error_norms(model: nn.Module) -> dict[str, float]:
    """Return the norm of what each parameter's error state holds, in gradient units."""
    norms = error_state(model).norms()
    total = torch.tensor(list(norms.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(norms, (total / dist.get_world_size()).tolist(), strict=True))
