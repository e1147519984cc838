"""What the script leaves behind: a JSON file, a loss-curve picture and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compare import compare, summarise
from rich.console import Console
from rich.table import Table
from trainer import LAST_STEPS, WARM_UP_STEPS, Run

# Facts as they are: no markup, no colours, and no line breaks inside a command to copy.
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


def make_document(facts: dict[str, Any], runs: list[Run]) -> dict[str, Any]:
    """Return everything about a launch, ready for JSON."""
    methods = {
        run.method: {
            "config": run.config,
            "results": summarise(run),
            "losses": run.losses,
            "step_seconds": run.step_seconds,
            "explain": run.explain,
            "error_norms": run.error_norms,
            "accumulated": run.accumulated,
        }
        for run in runs
    }
    comparisons = [compare(runs[0], other) for other in runs[1:]]
    return {**facts, "methods": methods, "comparisons": comparisons}


def write_files(document: dict[str, Any], path: Path) -> Path:
    """Write the JSON and, beside it, the loss curve; return the picture's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    picture = path.with_suffix(".png")
    draw_losses(document, picture)
    return picture


def draw_losses(document: dict[str, Any], path: Path) -> None:
    """Draw each method's train loss, smoothed, and its held-out loss as a point at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, method in document["methods"].items():
        losses = method["losses"]
        (line,) = axes.plot(smooth(losses), label=f"{name}, train", linewidth=1.2)
        held_out = method["results"]["held_out_loss"]
        axes.plot(len(losses) - 1, held_out, "o", color=line.get_color(), label=f"{name}, held out")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def smooth(values: list[float], *, window: int = 10) -> list[float]:
    """Return means over the last `window` values, over fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def print_header(document: dict[str, Any], console: Console) -> None:
    """Say first what was simulated, then command, machine and versions."""
    versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items())
    machine = document["machine"]
    console.print(
        f"{document['ranks']} ranks of one machine over {document['backend']}: losses and bytes "
        "are real, speeds say nothing about a network.\n"
        f"command: {document['command']}\n"
        f"machine: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['threads_per_rank']} thread(s) per rank, {machine['system']}\n"
        f"versions: {versions}",
        **PLAIN,
    )


def print_results(document: dict[str, Any], console: Console) -> None:
    """Print one row for each method, then the comparisons with the first."""
    table = Table(
        title=f"train loss: mean of the last {LAST_STEPS} steps; bytes: one rank, one step"
    )
    table.add_column("method")
    headings = ("train loss", "held-out loss", "tokens/s", "gradient bytes sent", "error bytes")
    for heading in headings:
        table.add_column(heading, justify="right")
    withheld = {c["other"] for c in document["comparisons"] if c["speed_withheld"]}
    for name, method in document["methods"].items():
        results = method["results"]
        speed = None if name in withheld else results["tokens_per_s"]
        table.add_row(
            name,
            f"{results['train_loss']:.4f}",
            f"{results['held_out_loss']:.4f}",
            _count(speed),
            _count(results["wire_bytes"]),
            _count(results["error_bytes"]),
        )
    console.print(table)
    for comparison in document["comparisons"]:
        console.print(_sentence(comparison), **PLAIN)
    for name, method in document["methods"].items():
        for line in _more(name, method["results"]):
            console.print(line, **PLAIN)


def _sentence(comparison: dict[str, Any]) -> str:
    names = f"{comparison['other']} against {comparison['first']}"
    gap = f"held-out loss {comparison['held_out_gap_percent']:+.2f} %"
    if comparison["speed"] is None:
        return f"{names}: {gap}; no speed: {comparison['speed_withheld']}"
    speed = f"{comparison['speed']:.3f} times the steps per second"
    return f"{names}: {gap}; {speed} (median after {WARM_UP_STEPS} steps)"


def _more(name: str, results: dict[str, Any]) -> list[str]:
    times = f"first step {results['first_step_s']:.1f} s, in all {results['total_s']:.1f} s"
    load = f"load average at the end {results['load_average']:.1f}"
    lines = [f"{name}: {times}, {load}"]
    if results["wire_ratio_to_bf16"] is not None:
        ratio = results["wire_ratio_to_bf16"]
        lines.append(f"{name}: compressed parts send {ratio:.4f} of the bytes of a bf16 reduction")
    if results["largest_accumulated_error"] is not None:
        worst, pooled = results["largest_accumulated_error"], results["accumulated_error"]
        lines.append(
            f"{name}: sum of sent gradients differs from the true sum by {pooled:.3%} over all "
            f"compressed parameters, by {worst:.3%} in the worst one"
        )
    return lines


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
