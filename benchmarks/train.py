"""Train a byte-level GPT on FSDP2 with several gradient exchanges, and compare them.

    python benchmarks/train.py --method none,loco --ranks 2 --steps 300 --json build/demo.json

The model is trained anew for each method, with the same seed and data order, on the sources of the
Python standard library. Started plainly, the script starts itself again under torchrun with
`--ranks` processes; under torchrun it uses the ranks it is given. `--method eager` is stock FSDP2.
"""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime, timezone
from typing import Any

import torch.distributed as dist
from data import load_corpus
from machine import machine_facts, num_cores, version_facts
from options import Options, parse
from report import PLAIN, make_document, print_header, print_results, write_files
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from trainer import Setting, run_method

BACKEND = "gloo"


def main(argv: list[str]) -> None:
    """Run as one rank if started as one, else start the ranks."""
    options = parse(argv)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        run_rank(options, command=shlex.join(["python", "benchmarks/train.py", *argv]))
    else:
        start_ranks(options, argv)


def start_ranks(options: Options, argv: list[str]) -> None:
    """Start this script under torchrun, the cores shared out among the ranks."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // options.ranks)))
    # --standalone: a rendezvous on a free port of this machine.
    torchrun(["--standalone", f"--nproc-per-node={options.ranks}", __file__, *argv])


def run_rank(options: Options, *, command: str) -> None:
    """Run every method, and on rank 0 report."""
    dist.init_process_group(BACKEND)
    try:
        corpus = load_corpus()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        setting = Setting(mesh=mesh, corpus=corpus, model=options.model, train=options.train)
        facts: dict[str, Any] = {
            "command": command,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "ranks": mesh.size(),
            "backend": BACKEND,
            "machine": machine_facts(),
            "versions": version_facts(),
            "options": options.as_dict(),
            "seed": options.train.seed,
            "data": corpus.facts,
            "num_parameters": sum(p.numel() for p in setting.build().parameters()),
        }
        console = Console(quiet=mesh.get_rank() != 0, width=None if sys.stdout.isatty() else 100)
        print_header(facts, console)
        runs = [run_method(setting, m, options.config(m)) for m in options.methods]
        document = make_document(facts, runs)
        print_results(document, console)
        if options.json is not None and mesh.get_rank() == 0:
            picture = write_files(document, options.json)
            console.print(f"written: {options.json}, {picture}", **PLAIN)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
