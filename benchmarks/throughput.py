"""Train on FSDP2 over shaped links between several hosts, and compare gradient exchanges.

    python benchmarks/throughput.py --hosts 4 --rate 100mbit,200mbit,1gbit --json build/t.json

The hosts are network namespaces of this machine (`hosts.py`), one rank each. All modes take one
step in turn, in one run (`exchanges.py` says what they are), so that a machine which is busy for a
while is busy for all of them; then the same at the next rate. Besides the steps, the collectives of
each mode are run alone, which splits a step's time:

    gather, exchange   those collectives alone, all started at once
    codec              the step of `loco` less that of `free`
    rest               what is left of the step

Where namespaces cannot be made, or with `--simulate`, the ranks exchange over an unshaped loopback
interface and the time that their bytes would take at the rate is added to every step. Such a result
is marked as simulated.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import hosts
import torch.distributed as dist
from data import load_corpus
from machine import machine_facts, version_facts
from model import ModelConfig
from options import EAGER, add_fields
from rich.console import Console
from steps import Plan, measure
from throughput_report import make_document, print_document, write_files
from torch.distributed.device_mesh import init_device_mesh

MODES = (EAGER, "none", "fp32", "bf16", "free", "loco")
PORT = 29500


def main(argv: list[str]) -> None:
    """Run as one rank if started as one, else make the hosts and start a rank on each."""
    options = parse(argv)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        run_rank(options, argv)
    elif hosts.is_inside():
        hosts.build(options.hosts)
        sys.exit(run_on_hosts(options, argv))
    elif not options.simulate and hosts.can_enter():
        hosts.enter([sys.executable, __file__, *argv])
    else:
        sys.exit(run_simulated(options, argv))


def run_on_hosts(options: argparse.Namespace, argv: list[str]) -> int:
    """Start torchrun on every host; stop all of them when one fails."""
    processes = []
    for index in range(options.hosts):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"),
            *(f"--nnodes={options.hosts}", f"--node-rank={index}"),
            *(f"--master-addr={hosts.address(0)}", f"--master-port={PORT}", __file__, *argv),
        ]
        environment = environment_of_ranks() | {"GLOO_SOCKET_IFNAME": hosts.INTERFACE}
        processes.append(subprocess.Popen(hosts.inside(index, torchrun), env=environment))
    while any(p.poll() is None for p in processes):
        if any(p.poll() for p in processes):
            for process in processes:
                process.terminate()
            break
        time.sleep(0.2)
    return max(abs(p.wait()) for p in processes)


def run_simulated(options: argparse.Namespace, argv: list[str]) -> int:
    """Start all ranks on this host; each learns from the options that its links are not shaped."""
    print("no network namespaces: unshaped loopback, the time on the wire is simulated")
    nproc = f"--nproc-per-node={options.hosts}"
    given = argv if options.simulate else [*argv, "--simulate"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", nproc]
    return subprocess.run([*torchrun, __file__, *given], env=environment_of_ranks()).returncode


def environment_of_ranks() -> dict[str, str]:
    """One thread each: there are more ranks than cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def run_rank(options: argparse.Namespace, argv: list[str]) -> None:
    """Measure, and report on rank 0."""
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        corpus = load_corpus()
        facts: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/throughput.py", *argv]),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "hosts": mesh.size(),
            "simulated": options.simulate,
            "machine": machine_facts(),
            "versions": version_facts(),
            "data": corpus.facts,
        }
        plan = plan_of(options)
        interface = "lo" if options.simulate else hosts.INTERFACE
        found = measure(
            plan, mesh, corpus, interface=interface, set_rate=rate_setter(options, mesh.get_rank())
        )
        if mesh.get_rank() == 0:
            document = make_document(facts, plan, found)
            print_document(document, Console(width=None if sys.stdout.isatty() else 110))
            if options.json:
                write_files(document, options.json)
    finally:
        dist.destroy_process_group()


def rate_setter(options: argparse.Namespace, rank: int) -> Callable[[str], None]:
    """Return what shapes this rank's links; all ranks have done so when it returns."""

    def set_rate(rate: str) -> None:
        if not options.simulate:
            hosts.shape(rank, rate)
        dist.barrier()

    return set_rate


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what to run."""
    given = vars(options)
    sizes = {k: given[k] for k in ("dim", "layers", "heads", "context", "vocabulary") if k in given}
    gpt = {"dim": 384, "layers": 6, "heads": 6, "vocabulary": 4096}  # 13.8 M parameters
    return Plan(
        modes=options.mode,
        rates=options.rate,
        rounds=options.rounds,
        model=ModelConfig(**{**gpt, **sizes}),
        batch=options.batch,
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits with a message on a mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, help="hosts, one rank each (default 4)")
    parser.add_argument("--rate", type=_names, default=("200mbit",), help="rates, as tc has them")
    parser.add_argument("--mode", type=_names, default=MODES, help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each mode at each rate")
    parser.add_argument("--batch", type=int, default=2, help="windows in a rank's batch")
    parser.add_argument("--simulate", action="store_true", help="do not shape; add the wire's time")
    parser.add_argument("--json", type=Path, help="file to write; a plot goes beside it")
    add_fields(parser.add_argument_group("model"), ModelConfig)
    options = parser.parse_args(argv)
    if unknown := [m for m in options.mode if m not in MODES]:
        parser.error(f"--mode takes {', '.join(MODES)}, got {', '.join(unknown)}")
    if options.hosts < 2 or options.rounds < 2:
        parser.error("--hosts and --rounds must be 2 or more")
    for rate in options.rate:
        try:
            hosts.bits_per_second(rate)
        except ValueError as mistake:
            parser.error(str(mistake))
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


if __name__ == "__main__":
    main(sys.argv[1:])
