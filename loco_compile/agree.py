"""Check that all ranks made the same plan before their first exchange under it (I6)."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence

import torch.distributed as dist
from torch import fx

from . import compat
from .config import LoCoConfig
from .passes.plan import Exchange, fingerprint
from .passes.verify import collective_order
from .state import RootState

TIMEOUT = datetime.timedelta(minutes=10)
"""How long a rank waits for the others, which may still be compiling."""


class PlanMismatchError(RuntimeError):
    """The ranks of a process group would exchange different messages."""


def check_plan(
    gm: fx.GraphModule,
    exchanges: Sequence[Exchange],
    gathered: Sequence[tuple[str, str]],
    config: LoCoConfig,
    roots: Sequence[RootState],
) -> None:
    """Compare the plan of a graph with the other ranks' of each of its process groups.

    The plan, the parameters that are gathered, and the order of all collectives of the group: a
    gather more on one rank would pair every later collective with the wrong one.

    Uses the groups' stores and no collective: a rank may compile while its peers are inside one.
    What the FSDP roots in the graph were compared with before is not compared again, so a recompile
    waits for nobody. `gathered`: process group and name of each gathered parameter. `roots`: those
    roots; the plan is noted on each.

    Raises: PlanMismatchError on every rank of the group if any two differ, or when some rank has
            not shown up in time.
    """
    names = {e.bucket.group_name for e in exchanges} | {group for group, _ in gathered}
    for group_name in sorted(names):
        group = compat.resolve_group(group_name)
        if dist.get_backend(group) != "fake":
            own = [e for e in exchanges if e.bucket.group_name == group_name]
            order = [row[:-1] for row in collective_order(gm.graph) if row[-1] == group_name]
            parameters = sorted(name for group, name in gathered if group == group_name)
            digest = hashlib.sha256(repr((order, parameters)).encode()).hexdigest()[:16]
            plan = f"{config.fingerprint()}/{fingerprint(own)}/{digest}"
            if all((group_name, plan) in root.compared for root in roots):
                continue
            facts = {
                "config": str(config),
                "gathered": len(parameters),
                "reduced": _count(own),
                "collectives": len(order),
            }
            compare(group, plan, json.dumps({"plan": plan, **facts}))
            for root in roots:  # only now: after a mismatch the next plan is compared again
                root.compared.add((group_name, plan))


def compare(group: dist.ProcessGroup, plan: str, mine: str) -> None:
    """Compare one plan with those of all ranks of a process group. `mine`: JSON for the message.

    Raises: PlanMismatchError, as `check_plan`.
    """
    store, rank, num_ranks = compat.group_store(group), group.rank(), group.size()
    turn = store.add(f"loco/turn/{rank}", 1)
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
            f"{different} of {num_ranks} ranks planned another exchange. Rank {rank}: {mine}; "
            f"first rank to compile: {first}. Give every rank the same model and the same "
            "LoCoConfig, and let every rank use the same parameters in a step: an expert without "
            "tokens through a mask of zeros, not through an if."
        )


def _count(exchanges: Sequence[Exchange]) -> int:
    return sum(len(e.choices) for e in exchanges)
