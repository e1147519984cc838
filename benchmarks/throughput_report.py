"""What a throughput run leaves behind: a JSON file, a table for each rate and a plot."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import hosts
from report import PLAIN
from rich.console import Console
from rich.table import Table
from steps import EXCHANGE, GATHER, Plan

LARGEST_LOSS_GAP = 0.01
"""Mean losses of the timed steps further apart than this are not the same training. Two seeds
differ by about as much; a broken exchange stops the loss from falling, which is far more."""

BASELINES = ("fp32", "bf16")
"""The fair exchanges, which speeds are told against."""

MEANING = {
    "eager": "stock FSDP2",
    "none": "captured, gloo's reduce-scatter",
    "fp32": "fair exchange, float32",
    "bf16": "fair exchange, bfloat16",
    "free": "LoCo's bytes, no codec",
    "loco": "LoCo",
}


def make_document(facts: dict[str, Any], plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """Return everything about a run, ready for JSON."""
    disagreement = find_disagreement(found["losses"])
    rates = {}
    for rate, timed in found["rates"].items():
        if facts["simulated"]:
            timed = {name: simulate(t, rate, facts["hosts"]) for name, t in timed.items()}
        rates[rate] = summarise(timed, found["payload"], rate, withheld=disagreement is not None)
    return {
        **facts,
        "options": dataclasses.asdict(plan),
        "speedups_withheld": disagreement,
        "results": rates,
        "timed": found["rates"],
        "losses": found["losses"],
        "payload": found["payload"],
    }


def find_disagreement(losses: dict[str, list[float]]) -> str | None:
    """Return why the modes did not train alike, None if they did. `free` trains nothing."""
    means = {m: statistics.fmean(v) for m, v in losses.items() if m != "free"}
    for mode, mean in means.items():
        first = next(iter(means))
        gap = abs(mean / means[first] - 1)
        if not gap <= LARGEST_LOSS_GAP:
            return f"the mean loss of {mode} is {gap:.2%} from that of {first}"
    return None


def simulate(timed: dict[str, list[float]], rate: str, num_hosts: int) -> dict[str, list[float]]:
    """Add to each time what its bytes take at the rate; the loopback counts all ranks' bytes."""
    sent = [b / num_hosts for b in timed["bytes"]]
    wire = [8 * b / hosts.bits_per_second(rate) for b in sent]
    return {"seconds": [s + w for s, w in zip(timed["seconds"], wire, strict=True)], "bytes": sent}


def summarise(
    timed: dict[str, Any], payload: dict[str, Any], rate: str, *, withheld: bool
) -> dict[str, Any]:
    """Return percentiles, speeds and the split of every mode at one rate."""
    medians = {name: statistics.median(t["seconds"]) for name, t in timed.items()}
    rows = {}
    for name, one in timed.items():
        fifths = statistics.quantiles(one["seconds"], n=5, method="inclusive")
        row: dict[str, Any] = {
            "seconds": {"p20": fifths[0], "p50": medians[name], "p80": fifths[3]},
            "bytes": statistics.median(one["bytes"]),
        }
        if name in payload:
            row["split"] = split(name, medians)
            bits = 8 * (payload[name]["gather"] + payload[name]["exchange"])
            row["ideal_wire_seconds"] = bits / hosts.bits_per_second(rate)
        row["speed"] = {}
        if name in MEANING and not withheld:
            row["speed"] = {b: medians[b] / medians[name] for b in BASELINES if b in medians}
        rows[name] = row
    return rows


def split(mode: str, medians: dict[str, float]) -> dict[str, float]:
    """Return the parts of a mode's median step, which add up to it; `free` has no parts of its own.

    Medians of different steps are subtracted, so a part that is small may come out below zero.
    """
    parts = {"gather": medians.get(GATHER, 0.0)}
    messages = "loco" if mode == "free" else mode
    parts["exchange"] = medians.get(EXCHANGE + messages, 0.0)
    parts["codec"] = 0.0
    if mode == "loco" and "free" in medians:
        parts["codec"] = medians["loco"] - medians["free"]
    parts["rest"] = medians[mode] - sum(parts.values())
    return parts


def print_document(document: dict[str, Any], console: Console) -> None:
    """Print conditions, then a table for each rate."""
    machine, versions = document["machine"], document["versions"]
    kind = "SIMULATED links" if document["simulated"] else "network namespaces, shaped links"
    console.print(
        f"{document['hosts']} hosts, {kind}, gloo; {machine['processor']}, "
        f"{machine['cores']} cores for all of them\n"
        f"command: {document['command']}\n"
        f"versions: {', '.join(f'{k} {v}' for k, v in versions.items())}",
        **PLAIN,
    )
    for rate, rows in document["results"].items():
        console.print(make_table(rate, rows))
    if document["speedups_withheld"]:
        console.print(f"no speeds: {document['speedups_withheld']}", **PLAIN)


def make_table(rate: str, rows: dict[str, Any]) -> Table:
    """Return the table of one rate: seconds as median (20th to 80th percentile)."""
    table = Table(title=f"{rate}: one step")
    table.add_column("mode")
    headings = ("seconds", "MB sent", "to fp32", "to bf16")
    for heading in (*headings, "gather", "exchange", "codec", "rest", "ideal wire"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        if name not in MEANING:
            continue
        seconds, parts = row["seconds"], row.get("split", {})
        table.add_row(
            name,
            f"{seconds['p50']:.2f} ({seconds['p20']:.2f}-{seconds['p80']:.2f})",
            f"{row['bytes'] / 1e6:.1f}",
            *(f"{row['speed'][b]:.2f}x" if b in row["speed"] else "-" for b in BASELINES),
            *(f"{parts[p]:.2f}" if parts else "-" for p in ("gather", "exchange", "codec", "rest")),
            f"{row['ideal_wire_seconds']:.2f}" if "ideal_wire_seconds" in row else "-",
        )
    return table


def write_files(document: dict[str, Any], path: Path) -> None:
    """Write the JSON and, beside it, the plot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    draw(document, path.with_suffix(".png"))


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the seconds of a step over the rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    rates = {r: hosts.bits_per_second(r) / 1e6 for r in document["results"]}
    order = sorted(rates, key=lambda r: rates[r])
    for mode, meaning in MEANING.items():
        if mode in document["options"]["modes"]:
            seconds = [document["results"][r][mode]["seconds"]["p50"] for r in order]
            axes.plot([rates[r] for r in order], seconds, marker="o", label=f"{mode}: {meaning}")
    label = "simulated" if document["simulated"] else "shaped"
    axes.set(xlabel=f"Mbit/s of each host's link ({label})", ylabel="seconds a step, median")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
