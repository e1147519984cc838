"""Start the same short training again and again under a checking allocator, and count what dies.

    python benchmarks/launches.py --count 100 --ranks 1,2 --json build/launches.json

Every launch is `benchmarks/train.py` on a tiny model through Inductor, with glibc's checking malloc
(`malloc.check=3`: abort with a message at the first block that is corrupted or misused). The caches
of Inductor are kept from launch to launch, so what repeats is the running, not the compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine_facts, version_facts
from tqdm import tqdm

TRAIN = Path(__file__).with_name("train.py")
TINY = "--steps 4 --dim 64 --layers 2 --heads 2 --context 32 --batch 2 --eval-windows 1".split()
CHECKS = {
    "LD_PRELOAD": "libc_malloc_debug.so.0",
    "GLIBC_TUNABLES": "glibc.malloc.check=3",
    "OMP_NUM_THREADS": "1",
}


def launch(num_ranks: int, method: str, cache: str) -> subprocess.CompletedProcess[str]:
    """Train once in `num_ranks` new processes."""
    command = [sys.executable, str(TRAIN), "--method", method, "--ranks", str(num_ranks), *TINY]
    environment = {**os.environ, **CHECKS, "TORCHINDUCTOR_CACHE_DIR": cache}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run(count: int, ranks: list[int], method: str) -> dict[str, Any]:
    """Launch `count` times for each number of ranks; return what failed, with its last words."""
    failures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache, tqdm(total=count * len(ranks)) as progress:
        for num_ranks in ranks:
            for index in range(count):
                done = launch(num_ranks, method, cache)
                if done.returncode:
                    failures.append(
                        {
                            "ranks": num_ranks,
                            "launch": index,
                            "exit": done.returncode,
                            "stderr": done.stderr[-2000:],
                        }
                    )
                progress.set_postfix(failed=len(failures), ranks=num_ranks)
                progress.update()
    return {
        "machine": machine_facts(),
        "versions": version_facts(),
        "method": method,
        "launches": {str(r): count for r in ranks},
        "failures": failures,
    }


def main() -> None:
    """Parse the command line, run, and say what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="launches for each number of ranks")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, separated by commas")
    parser.add_argument("--method", default="loco", help="method of benchmarks/train.py")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    result = run(options.count, [int(r) for r in options.ranks.split(",")], options.method)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2))
    failures = result["failures"]
    print(f"{len(failures)} of {sum(result['launches'].values())} launches failed")
    for failure in failures:
        print(f"--- ranks {failure['ranks']}, launch {failure['launch']}, exit {failure['exit']}")
        print(failure["stderr"])
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
