"""Check that all ranks made the same plan before their first exchange under it (I6)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence

import torch.distributed as dist

from . import compat
from .config import LoCoConfig
from .passes.plan import Exchange, fingerprint

TIMEOUT = datetime.timedelta(minutes=10)
"""How long a rank waits for the others, which may still be compiling."""


class PlanMismatchError(RuntimeError):
    """The ranks of a process group would exchange different messages."""


def check_plan(exchanges: Sequence[Exchange], config: LoCoConfig) -> None:
    """Compare the plan of a graph with the other ranks' of each of its process groups.

    Uses the groups' stores and no collective: a rank may compile while its peers are inside one. A
    plan that this rank compared before is not compared again, so a recompile waits for nobody.

    Raises: PlanMismatchError on every rank of the group if any two differ, or when some rank has
            not shown up in time.
    """
    for group_name in sorted({e.bucket.group_name for e in exchanges}):
        group = compat.resolve_group(group_name)
        if dist.get_backend(group) != "fake":
            own = [e for e in exchanges if e.bucket.group_name == group_name]
            _compare(group, own, config)


def _compare(group: dist.ProcessGroup, exchanges: Sequence[Exchange], config: LoCoConfig) -> None:
    store, rank, num_ranks = compat.group_store(group), group.rank(), group.size()
    plan = f"{config.fingerprint()}/{fingerprint(exchanges)}"
    if store.check([compared := f"loco/compared/{rank}/{plan}"]):
        return
    turn = store.add(f"loco/turn/{rank}", 1)
    mine = json.dumps({"plan": plan, "config": str(config), "parameters": _count(exchanges)})
    first = store.compare_set(f"loco/{turn}/first", "", mine).decode()
    store.add(f"loco/{turn}/different", int(json.loads(first)["plan"] != plan))
    if store.add(f"loco/{turn}/arrived", 1) == num_ranks:
        store.set(f"loco/{turn}/done", "1")
    try:
        store.wait([f"loco/{turn}/done"], TIMEOUT)
    except RuntimeError as error:  # torch.distributed.DistStoreError
        arrived = store.add(f"loco/{turn}/arrived", 0)
        raise PlanMismatchError(
            f"rank {rank} waited {TIMEOUT} to compare its plan, but only {arrived} of {num_ranks} "
            "ranks compiled one: run the same model and the same inputs' structure on all ranks"
        ) from error
    if different := store.add(f"loco/{turn}/different", 0):
        raise PlanMismatchError(
            f"{different} of {num_ranks} ranks planned another gradient exchange. Rank {rank}: "
            f"{mine}; first rank to compile: {first}. Give every rank the same model and the same "
            "LoCoConfig."
        )
    store.set(compared, "1")  # only now: after a mismatch the next plan is compared again


def _count(exchanges: Sequence[Exchange]) -> int:
    return sum(len(e.choices) for e in exchanges)
