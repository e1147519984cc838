"""Time training steps of several exchanges in turn, in one process group, at several link rates."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import exchanges
import hosts
import torch
import torch.distributed as dist
from data import Batches, Corpus
from model import ModelConfig, build_model
from options import EAGER
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW
from tqdm import tqdm

from loco_compile import LoCoBackend

GATHER = "gather"
"""The step's all-gathers alone, all started at once."""
EXCHANGE = "exchange of "
"""In front of a mode: the collectives of its gradients alone, all started at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run."""

    modes: tuple[str, ...]
    rates: tuple[str, ...]
    rounds: int
    model: ModelConfig
    batch: int = 2
    lr: float = 1e-3
    seed: int = 0


class Trained:
    """One mode's model, trained on the same batches as that of every other mode."""

    def __init__(self, mode: str, plan: Plan, mesh: DeviceMesh, corpus: Corpus) -> None:
        self.mode, self.mesh = mode, mesh
        self.model = build_model(
            plan.model,
            mesh=mesh,
            seed=plan.seed,
            policy=MixedPrecisionPolicy(),
            reshard_after_forward=False,
        )
        self.optimizer = AdamW(self.model.parameters(), lr=plan.lr, fused=True)
        self.batches = Batches(
            corpus.train, context=plan.model.context, batch=plan.batch, seed=plan.seed
        )
        self.losses: list[float] = []
        self.collectives: list[exchanges.Collective] = []
        self.call: nn.Module = self.model

    def compile(self) -> None:
        """Run the first steps: what they compile exchanges by the mode."""
        if self.mode == EAGER:
            self.step()
            self.step()
            return
        backend = LoCoBackend(exchanges.config_of(self.mode))
        self.call = torch.compile(self.model, backend=backend, dynamic=False)  # type: ignore[assignment]
        with exchanges.compiled_as(self.mode) as found:
            self.step()
            self.collectives = list(found)
            self.step()
        if len(found) != len(self.collectives):
            raise AssertionError(f"expected mode {self.mode} to compile in its first step only")

    def step(self) -> None:
        """Train one step on the next batch."""
        tokens, targets = self.batches.draw(self.mesh.get_rank(), self.mesh.size())
        loss = self.call(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


@dataclasses.dataclass
class Timed:
    """What one thing took, round by round; this rank's, then the mean over the ranks."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    sent: list[float] = dataclasses.field(default_factory=list)
    """Bytes at the interface."""


def measure(
    plan: Plan,
    mesh: DeviceMesh,
    corpus: Corpus,
    *,
    interface: str,
    set_rate: Callable[[str], None],
) -> dict[str, Any]:
    """Train every mode at every rate, one step of each in turn; return what was measured.

    All ranks return the same: seconds of the slowest rank, bytes and losses as means over ranks.
    """
    # All modes stay compiled beside each other, under one frame.
    torch._dynamo.config.recompile_limit = 4 * len(plan.modes)
    trained = [Trained(mode, plan, mesh, corpus) for mode in plan.modes]
    quiet = mesh.get_rank() != 0
    for one in tqdm(trained, desc="compiling", disable=quiet):
        one.compile()
    # What compiled again would exchange as the backend does, whatever the mode.
    torch._dynamo.config.error_on_recompile = True
    jobs = make_jobs(trained, mesh)
    rates = {}
    with tqdm(total=len(plan.rates) * plan.rounds * len(jobs), disable=quiet) as bar:
        for rate in plan.rates:
            set_rate(rate)
            bar.set_description(rate)
            timed = {name: Timed() for name in jobs}
            for _ in range(plan.rounds):
                for name, job in jobs.items():
                    run_timed(job, timed[name], interface)
                    bar.update()
            rates[rate] = {name: gathered(t) for name, t in timed.items()}
    return {
        "rates": rates,
        "losses": {one.mode: mean_over_ranks(one.losses) for one in trained},
        "payload": {one.mode: payload(one, mesh.size()) for one in trained if one.collectives},
    }


def make_jobs(trained: Sequence[Trained], mesh: DeviceMesh) -> dict[str, Callable[[], None]]:
    """Return the step of each mode, and its collectives alone."""
    jobs: dict[str, Callable[[], None]] = {one.mode: one.step for one in trained}
    run = functools.partial(
        exchanges.run_again, num_ranks=mesh.size(), group=mesh.get_group().group_name
    )
    for one in trained:
        gathers, reductions = exchanges.split_by_kind(one.collectives)
        if not one.collectives or one.mode == "free":
            continue
        jobs.setdefault(GATHER, functools.partial(run, gathers))
        jobs[EXCHANGE + one.mode] = functools.partial(run, reductions)
    return jobs


def run_timed(job: Callable[[], None], timed: Timed, interface: str) -> None:
    """Run a job between two barriers, so that all ranks start together and bytes are its own."""
    dist.barrier()
    before, started = hosts.sent_bytes(interface), time.perf_counter()
    job()
    timed.seconds.append(time.perf_counter() - started)
    dist.barrier()
    timed.sent.append(float(hosts.sent_bytes(interface) - before))


def gathered(timed: Timed) -> dict[str, list[float]]:
    """Return seconds of the slowest rank, and mean bytes."""
    seconds = torch.tensor(timed.seconds, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {"seconds": seconds.tolist(), "bytes": mean_over_ranks(timed.sent)}


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the mean over the ranks of each value."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def payload(one: Trained, num_ranks: int) -> dict[str, float]:
    """Return the least bytes that a rank has to send in a step for its collectives."""
    gathers, reductions = exchanges.split_by_kind(one.collectives)
    return {
        "gather": sum(c.payload(num_ranks) for c in gathers),
        "exchange": sum(c.payload(num_ranks) for c in reductions),
    }
