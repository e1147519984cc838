"""Results and comparisons: right numbers, and none where there is nothing to stand on."""

import math

import pytest
from compare import compare, step_percentiles, summarise, wire_ratio_to_bf16
from trainer import LAST_STEPS, WARM_UP_STEPS, Run


def row(*, method="loco", dtype="float32", before=4000, wire=500, error=1000, parameters=("w",)):
    return {
        "method": method,
        "dtype": dtype,
        "bytes_before": before,
        "bytes_on_wire": wire,
        "error_bytes": error,
        "parameters": list(parameters),
    }


def make_run(
    method="none", *, held_out=2.0, seconds=0.1, steps=100, rows=None, accumulated=None, load=2.0
):
    return Run(
        method=method,
        config=None,
        losses=[3.0] * (steps - LAST_STEPS) + [2.5] * LAST_STEPS,
        step_seconds=[50.0] + [9.0] * (WARM_UP_STEPS - 1) + [seconds] * (steps - WARM_UP_STEPS),
        held_out_loss=held_out,
        explain=rows,
        error_norms=None,
        accumulated=accumulated,
        num_ranks=2,
        tokens_per_step=1000,
        seconds=60.0,
        load=load,
        cores=2,
    )


def test_results_leave_out_the_warm_up_and_early_losses():
    results = summarise(make_run())
    assert results["train_loss"] == 2.5
    assert results["tokens_per_s"] == pytest.approx(10_000)
    assert results["step_ms"] == pytest.approx({"p20": 100, "p50": 100, "p80": 100})
    assert results["first_step_s"] == 50.0


def test_bytes_are_sums_over_the_rows():
    rows = [row(), row(method="none", before=80, wire=80, error=0, parameters=("b",))]
    results = summarise(make_run("loco", rows=rows))
    assert (results["wire_bytes"], results["uncompressed_bytes"]) == (580, 4080)
    assert results["error_bytes"] == 1000


def test_without_a_report_no_bytes_are_claimed():
    results = summarise(make_run("eager"))
    assert results["wire_bytes"] is results["error_bytes"] is results["wire_ratio_to_bf16"] is None


def test_ratio_to_bf16_counts_compressed_parts_only_and_scales_by_dtype():
    exempt = row(method="none", before=80, wire=80)
    assert wire_ratio_to_bf16([row(), exempt]) == 500 / 2000
    assert wire_ratio_to_bf16([row(dtype="bfloat16", before=2000), exempt]) == 500 / 2000
    assert wire_ratio_to_bf16([exempt]) is None


def test_accumulated_error_is_of_the_compressed_parameters():
    rows = [row(parameters=("w", "v")), row(method="none", parameters=("b",))]
    norms = {
        "w": {"difference": 3.0, "true": 300.0},
        "v": {"difference": 4.0, "true": 200.0},
        "b": {"difference": 5.0, "true": 10.0},
    }
    results = summarise(make_run("loco", rows=rows, accumulated=norms))
    assert results["largest_accumulated_error"] == pytest.approx(0.02)
    assert results["accumulated_error"] == pytest.approx(5 / math.hypot(300, 200))


def test_a_run_with_a_twin_beside_it_is_not_timed():
    assert summarise(make_run(accumulated={}))["tokens_per_s"] is None


def test_a_single_timed_step_is_no_measurement():
    assert step_percentiles([0.1]) is None


def test_speed_is_compared_if_the_losses_agree():
    result = compare(make_run(seconds=0.2), make_run("loco", held_out=2.039))
    assert result["speed"] == pytest.approx(2.0)
    assert result["held_out_gap_percent"] == pytest.approx(1.95)
    assert result["speed_withheld"] is None


@pytest.mark.parametrize("held_out", [2.05, 1.95, math.nan, math.inf])
def test_no_speed_if_the_losses_disagree(held_out):
    result = compare(make_run(), make_run("loco", held_out=held_out))
    assert result["speed"] is None
    assert "more than 2%" in result["speed_withheld"]


def test_no_speed_from_a_busy_machine():
    result = compare(make_run(), make_run("loco", load=3.0))
    assert result["speed"] is None
    assert result["speed_withheld"] == "the machine was busy: load average 1.50 for each core"


def test_no_speed_from_too_few_steps():
    few = make_run(steps=LAST_STEPS)
    short = make_run("loco", steps=LAST_STEPS)
    short.step_seconds[WARM_UP_STEPS + 1 :] = []
    assert compare(few, short)["speed"] is None
