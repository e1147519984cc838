"""Numbers drawn from finished runs: results of each, and how the others compare with the first."""

from __future__ import annotations

import statistics
from typing import Any

from accumulated import relative_error
from trainer import Run

LARGEST_LOSS_GAP = 0.02
"""Held-out losses further apart than this are not the same training: then speeds say nothing."""

LARGEST_LOAD = 1.25
"""Load average for each core above which others, or too many ranks, have spoilt the timing. On two
cores shared with other work, the same command gave 0.71 and 1.13."""

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def summarise(run: Run) -> dict[str, Any]:
    """Return the results of one run. None stands for what was not measured."""
    percentiles = step_percentiles(run.timed_steps)
    rows = run.explain
    compressed = compressed_parameters(run)
    accumulated = run.accumulated or {}
    checked = [accumulated[name] for name in compressed if name in accumulated]
    return {
        "train_loss": run.train_loss,
        "held_out_loss": run.held_out_loss,
        "step_ms": percentiles,
        "tokens_per_s": run.tokens_per_step / percentiles["p50"] * 1e3 if percentiles else None,
        "first_step_s": run.step_seconds[0],
        "total_s": run.seconds,
        "load_average": run.load,
        "wire_bytes": None if rows is None else sum(r["bytes_on_wire"] for r in rows),
        "uncompressed_bytes": None if rows is None else sum(r["bytes_before"] for r in rows),
        "error_bytes": None if rows is None else sum(r["error_bytes"] for r in rows),
        "wire_ratio_to_bf16": wire_ratio_to_bf16(rows or []),
        "accumulated_error": relative_error(checked) if checked else None,
        "largest_accumulated_error": max((relative_error([c]) for c in checked), default=None),
    }


def step_percentiles(seconds: list[float]) -> dict[str, float] | None:
    """Return p20, p50 and p80 in ms, None for fewer than two steps."""
    if len(seconds) < 2:
        return None
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return {
        "p20": fifths[0] * 1e3,
        "p50": statistics.median(seconds) * 1e3,
        "p80": fifths[3] * 1e3,
    }


def compressed_parameters(run: Run) -> list[str]:
    """Return the names of the parameters whose gradients were compressed."""
    rows = [r for r in run.explain or [] if r["method"] != "none"]
    return [name for row in rows for name in row["parameters"]]


def wire_ratio_to_bf16(rows: list[dict[str, Any]]) -> float | None:
    """Return the compressed parts' bytes on the wire over those of a bf16 reduction of them.

    None if nothing is compressed.
    """
    parts = [r for r in rows if r["method"] != "none"]
    in_bf16 = sum(r["bytes_before"] * 2 / BYTES_PER_ELEMENT[r["dtype"]] for r in parts)
    return sum(r["bytes_on_wire"] for r in parts) / in_bf16 if in_bf16 else None


def compare(first: Run, other: Run) -> dict[str, Any]:
    """Return how a run differs from the first; the speed only if both trained the same."""
    gap = (other.held_out_loss - first.held_out_loss) / first.held_out_loss
    medians = [step_percentiles(run.timed_steps) for run in (first, other)]
    # Written so that a NaN loss is refused too.
    same_training = abs(gap) <= LARGEST_LOSS_GAP
    speed, withheld = None, None
    if not same_training:
        withheld = f"held-out losses differ by {gap:+.2%}, more than {LARGEST_LOSS_GAP:.0%}"
    elif medians[0] is None or medians[1] is None:
        withheld = "not timed: too few steps, or a twin ran beside"
    elif (load := max(first.load / first.cores, other.load / other.cores)) > LARGEST_LOAD:
        withheld = f"the machine was busy: load average {load:.2f} for each core"
    else:
        speed = medians[0]["p50"] / medians[1]["p50"]
    return {
        "first": first.method,
        "other": other.method,
        "held_out_gap_percent": 100 * gap,
        "train_gap_percent": 100 * (other.train_loss - first.train_loss) / first.train_loss,
        "speed": speed,
        "speed_withheld": withheld,
    }
