"""The throughput benchmark: what it exchanges, counts and claims. Times are never asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import exchanges
import hosts
import pytest
import throughput
import throughput_report
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.passes.find import c10d, find_sites, value
from tests.graphs import fake_group

SCRIPT = Path(throughput.__file__)
TINY = "--dim 64 --layers 1 --heads 2 --context 16 --vocabulary 512"


def traced_reduction(*, op: str = "avg", numel: int = 8):
    """Return the graph of one reduce-scatter over two ranks."""

    def run(grad: torch.Tensor) -> torch.Tensor:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(grad, op, 2, "0")).clone()

    return make_fx(run, tracing_mode="fake")(torch.randn(numel))


@pytest.mark.parametrize(
    ("rate", "bits"), [("100mbit", 1e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("64kbit", 64e3)]
)
def test_rates_are_read_as_tc_reads_them(rate, bits):
    assert hosts.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["100", "mbit", "-1mbit", "0mbit", "1 gbit", "1tbit", "1.2.3mbit"])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="a number of kbit, mbit or gbit"):
        hosts.bits_per_second(rate)


@pytest.mark.parametrize(
    "argv", [["--mode", "loco,zip"], ["--hosts", "1"], ["--rounds", "1"], ["--rate", "fast"]]
)
def test_mistakes_on_the_command_line_end_it(argv, capsys):
    with pytest.raises(SystemExit):
        throughput.parse(argv)
    assert argv[0].removeprefix("--") in capsys.readouterr().err.rpartition("error:")[2]


def test_the_default_model_is_the_one_of_the_goals():
    plan = throughput.plan_of(throughput.parse([]))
    assert (plan.model.dim, plan.model.layers, plan.model.vocabulary) == (384, 6, 4096)


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_gather", 3 * 4000), ("all_to_all", 3000), ("reduce_scatter", 3000)]
)
def test_least_bytes_of_a_collective(kind, sent):
    collective = exchanges.Collective(kind, numel=1000, dtype=torch.float32)
    assert collective.payload(4) == sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "divisor"), [("avg", 2), ("sum", 1)])
def test_the_fair_exchange_is_a_reduce_scatter(dtype, op, divisor):
    """With the all-to-all left out, a rank adds up the rows that it sent itself."""
    with fake_group(2):
        gm = traced_reduction(op=op)
        exchanges.exchange_uncompressed(gm, dtype)
        assert not find_sites(gm.graph)
        (output,) = gm.graph.find_nodes(op="output")
        assert value(output.args[0]).shape == (4,)
        for node in gm.graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default):
            node.replace_all_uses_with(node.args[0])
        gm.recompile()
        grad = torch.randn(8)
        mean = gm(grad)
    rows = grad.to(dtype).float().reshape(2, 4)
    torch.testing.assert_close(mean, (rows[0] + rows[1]) / divisor, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fair_exchange_goes_in_pieces_of_its_dtype(dtype):
    numel = 2 * (exchanges.PIECE_BYTES // dtype.itemsize + 1)
    with fake_group(2):
        gm = traced_reduction(numel=numel)
        exchanges.exchange_uncompressed(gm, dtype)
        sent = exchanges.collectives(gm.graph)
    assert [c.kind for c in sent] == ["all_to_all", "all_to_all"]
    assert [c.numel for c in sent] == [numel - 2, 2]
    assert {c.dtype for c in sent} == {dtype}


LOSSES = {"eager": [2.0, 1.0], "loco": [2.01, 1.0], "free": [9.0, 9.0]}


def test_modes_that_train_alike_agree_whatever_the_bound_that_trains_nothing_does():
    assert throughput_report.find_disagreement(LOSSES) is None


@pytest.mark.parametrize("losses", [[2.0, 1.04], [2.0, float("nan")]])
def test_modes_that_do_not_train_alike_are_named(losses):
    found = throughput_report.find_disagreement({**LOSSES, "loco": losses})
    assert found is not None and found.startswith("the mean loss of loco is ")


TIMED = {
    "fp32": {"seconds": [4.0, 4.0], "bytes": [8e6, 8e6]},
    "free": {"seconds": [1.5, 1.5], "bytes": [1e6, 1e6]},
    "loco": {"seconds": [2.0, 2.0], "bytes": [1e6, 1e6]},
    "gather": {"seconds": [0.5, 0.5], "bytes": [0, 0]},
    "exchange of loco": {"seconds": [0.25, 0.25], "bytes": [1e6, 1e6]},
}
PAYLOAD = {"loco": {"gather": 2e6, "exchange": 1e6}}


def test_the_parts_of_a_step_add_up_to_it():
    rows = throughput_report.summarise(TIMED, PAYLOAD, "12mbit", withheld=False)
    loco = rows["loco"]
    assert loco["split"] == {"gather": 0.5, "exchange": 0.25, "codec": 0.5, "rest": 0.75}
    assert loco["speed"] == {"fp32": 2.0}
    assert loco["ideal_wire_seconds"] == 2.0


def test_no_speed_is_told_when_losses_disagree():
    rows = throughput_report.summarise(TIMED, PAYLOAD, "12mbit", withheld=True)
    assert not any(row["speed"] for row in rows.values())


def test_a_simulated_link_adds_the_time_of_a_ranks_bytes():
    timed = {"seconds": [1.0], "bytes": [4e6]}  # of all four ranks
    found = throughput_report.simulate(timed, "8mbit", 4)
    assert found == {"seconds": [2.0], "bytes": [1e6]}


def run_script(folder: Path, arguments: str) -> tuple[dict, str]:
    """Run the script; return the JSON it wrote and what it printed."""
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *f"{TINY} {arguments}".split(), "--json", str(result)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads(result.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_gives_a_complete_result(tmp_path):
    simulate = "" if hosts.can_enter() else "--simulate"
    arguments = f"--hosts 2 --rate 1gbit,2gbit --rounds 2 --mode fp32,free,loco {simulate}"
    document, printed = run_script(tmp_path, arguments)
    assert document["command"] in printed
    assert (tmp_path / "result.png").stat().st_size > 1000
    assert list(document["results"]) == ["1gbit", "2gbit"]
    assert document["speedups_withheld"] is None
    payload = document["payload"]
    exchange = {mode: payload[mode]["exchange"] for mode in ("fp32", "free", "loco")}
    # 4 bits and a scale of 4 bytes for 256 of them, beside the small parts that stay float32.
    assert exchange["fp32"] / 8 < exchange["loco"] < exchange["fp32"] / 5
    assert exchange["free"] == exchange["loco"]
    for rows in document["results"].values():
        # More than the payload: TCP and IP headers, acknowledgements, gloo's own; less than twice.
        for mode in exchange:
            least = sum(payload[mode].values())
            assert least <= rows[mode]["bytes"] <= 2 * least + 1e5
        assert set(rows["loco"]["speed"]) == {"fp32"}
