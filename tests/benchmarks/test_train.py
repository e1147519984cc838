"""The whole script, started as a user starts it, on a tiny model."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train.py"
TINY = "--dim 32 --layers 2 --heads 2 --context 32 --batch 2 --eval-windows 9 --min-numel 1000"
TOP_KEYS = {
    *("command", "started", "ranks", "backend", "machine", "versions", "options", "seed", "data"),
    *("num_parameters", "methods", "comparisons"),
}
RESULT_KEYS = {
    *("train_loss", "held_out_loss", "step_ms", "tokens_per_s", "first_step_s", "total_s"),
    *("wire_bytes", "uncompressed_bytes", "error_bytes", "wire_ratio_to_bf16"),
    *("load_average", "accumulated_error", "largest_accumulated_error"),
}


def run_script(folder: Path, arguments: str, *, prefix: tuple[str, ...] = ()) -> tuple[dict, str]:
    """Run the script; return the JSON it wrote and what it printed."""
    result = folder / "result.json"
    command = [sys.executable, *prefix, str(SCRIPT), *f"{TINY} {arguments}".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json", str(result)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads(result.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_eager_none_and_loco_give_a_complete_result(tmp_path):
    arguments = "--method eager,none,loco --steps 14 --inner aot_eager --check-accumulated"
    document, printed = run_script(tmp_path, arguments)

    assert set(document) == TOP_KEYS
    assert document["ranks"] == 2
    assert "--method eager,none,loco" in document["command"]
    assert document["command"] in printed
    assert (tmp_path / "result.png").stat().st_size > 1000
    eager, none, loco = (document["methods"][m] for m in ("eager", "none", "loco"))
    for method in (eager, none, loco):
        assert set(method["results"]) == RESULT_KEYS
        assert len(method["losses"]) == len(method["step_seconds"]) == 14
        assert all(math.isfinite(loss) for loss in method["losses"])

    # I1: method="none" under aot_eager is eager FSDP2 bit for bit.
    assert none["losses"] == eager["losses"]
    assert none["results"]["held_out_loss"] == eager["results"]["held_out_loss"]
    assert all(norms["difference"] == 0 for norms in none["accumulated"].values())
    assert loco["losses"][0] == none["losses"][0]
    assert loco["losses"][-1] != none["losses"][-1]
    assert loco["losses"][-1] < loco["losses"][0]

    # (E5) telescopes: the sent sum lacks the mean over ranks of the error left, over
    # 1 - error_decay, and the roundings of the stored error. One rounding is at most half a step
    # in each of a block's 256 elements: 16 * absmax / 254 <= 0.063 of the error's norm; 14 of
    # them are less than once the norm.
    for name, error_norm in loco["error_norms"].items():
        assert loco["accumulated"][name]["difference"] <= 2 * error_norm / (1 - 0.75)
    exempt = set(loco["accumulated"]) - set(loco["error_norms"])
    assert exempt
    for name in exempt:
        norms = loco["accumulated"][name]
        # Other weights than eager's give other roundings of float32 gradients, 14 of them.
        assert norms["difference"] <= 1e-5 * norms["true"]

    assert none["results"]["error_bytes"] == 0
    assert loco["results"]["error_bytes"] > 0
    assert loco["results"]["wire_bytes"] < none["results"]["wire_bytes"]
    assert loco["results"]["uncompressed_bytes"] == none["results"]["wire_bytes"]


@pytest.mark.slow
@pytest.mark.ranks
def test_under_torchrun_it_uses_the_ranks_it_is_given(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    document, printed = run_script(tmp_path, "--method eager --steps 2 --ranks 2", prefix=torchrun)
    assert document["ranks"] == 3
    assert printed.count("3 ranks of one machine over gloo") == 1
    # All steps fell into the warm-up: no speed is claimed.
    assert document["methods"]["eager"]["results"]["tokens_per_s"] is None
