"""W gloo ranks for a test class, and many cases in one launch of them."""

from __future__ import annotations

import contextlib
import datetime
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class RanksTest(MultiProcContinuousTest):
    """Starts `world_size` gloo ranks once for all tests of the class.

    A process takes several seconds to start, a case takes about one: a test runs many cases, each
    under `case`.
    """

    world_size = 2
    # An exchange that one rank left waits this long: well below the test's own limit.
    timeout = datetime.timedelta(seconds=90)

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        torch.set_num_threads(1)  # the ranks share few cores
        # The models end in a view, which nobody changes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        super()._init_pg(rank, world_size, rdvz_file)

    @classmethod
    def mesh(cls, num_ranks: int | None = None) -> DeviceMesh:
        """The first ranks, all by default; one: each rank for itself. On the CPU, GPU or not.

        Called by every rank. Those outside the mesh are told by `mesh.get_coordinate()`: None.
        """
        if num_ranks == 1:
            mesh = init_device_mesh("cpu", (cls.world_size, 1), mesh_dim_names=("all", "own"))
            return mesh["own"]
        return DeviceMesh("cpu", range(num_ranks or cls.world_size))

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        # The base class takes what is set already: fork, which autograd refuses, if another test of
        # this process used the default.
        torch.multiprocessing.set_start_method("spawn", force=True)
        super()._spawn_processes(world_size)

    def setUp(self) -> None:
        # The base class skips the tests after a failed one. Here all ranks leave a failed test in
        # step, so the next one can run.
        type(self).poison_pill = False
        super().setUp()

    @contextlib.contextmanager
    def case(self, **what: Any) -> Iterator[None]:
        """Run one case with a fresh Dynamo; fail on every rank, naming case and ranks, if one does.

        Like `subTest`, which the workers of torch's base class do not have. A failure is raised by
        `finish_cases`, so that one run shows all of them.
        """
        torch._dynamo.reset()
        failure = ""
        try:
            yield
        except Exception:
            failure = traceback.format_exc()
        failures: list[Any] = [None] * self.world_size
        dist.all_gather_object(failures, failure)
        name = ", ".join(f"{k}={v}" for k, v in what.items())
        failed = [r for r, f in enumerate(failures) if f]
        if failed:
            text = f"[{name}] on ranks {failed}:\n{failures[failed[0]]}"
            self.failed_cases = [*getattr(self, "failed_cases", []), text]

    def finish_cases(self) -> None:
        """Raise if a case failed."""
        failed = getattr(self, "failed_cases", [])
        if failed:
            raise AssertionError(f"{len(failed)} cases failed\n" + "\n".join(failed))
