"""Run a script on several ranks, as a user does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, *, num_ranks: int = 2, **environment: str) -> str:
    """Return what a script prints under torchrun on a free port, in the script's own folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    ran = subprocess.run(
        [*launcher, "--master-addr=127.0.0.1", f"--master-port={port}", str(script)],
        capture_output=True,
        text=True,
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    return "".join(f"{line.rstrip()}\n" for line in ran.stdout.splitlines())
