"""Communication time and memory of each method for a model and a cluster, by formula.

    python benchmarks/cost_model.py --parameters 7e9 --ranks 64 --bandwidth 12.5e9 --json FILE

Two tables: the model of LoCo's paper (its Table I; every GPU on a link of its own, codes without
scales), then what FSDP2 moves over a node's one link: block scales, one or two gathers, a flat
exchange against two hops. And a picture of the second over the number of ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loco_compile import LoCoConfig
from loco_compile.kernels.layout import Layout, message_bytes
from loco_compile.kernels.memory import formats

WARM_UP = 0.1
"""Share of the steps that 1-bit Adam and 1-bit LAMB take at full precision."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is trained, and on what."""

    parameters: int
    """Psi."""
    ranks: int
    """N."""
    bandwidth: float
    """B, bytes a second of one link, in each direction."""
    ranks_per_node: int = 1
    """L, ranks that share a node and its link. Used by the second table."""

    @property
    def nodes(self) -> int:
        """Nodes of the cluster."""
        return self.ranks // self.ranks_per_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the paper's table."""

    gradient_bits: float
    weight_bits: float
    is_sharded: bool = True
    """Whether gradients and optimizer states are divided over the ranks."""
    has_master: bool = False
    """Whether one server collects and sends, instead of a ring or tree."""
    has_warm_up: bool = False
    moment_bytes: int = 8
    """Bytes of optimizer moments for one parameter."""
    extra_bytes: float = 0.0
    """Bytes of its own state for one parameter on every rank."""
    extra_shard_bytes: float = 0.0
    """The same, divided over the ranks."""


METHODS = {
    "Adam": Method(gradient_bits=16, weight_bits=16),
    "SGD": Method(gradient_bits=16, weight_bits=16, moment_bytes=4),
    "1-bit Adam": Method(gradient_bits=1, weight_bits=1, is_sharded=False, has_warm_up=True),
    "1-bit LAMB": Method(
        gradient_bits=1, weight_bits=1, is_sharded=False, has_warm_up=True, extra_bytes=4
    ),
    "EF": Method(gradient_bits=4, weight_bits=16, is_sharded=False, has_master=True, extra_bytes=2),
    "EF21": Method(
        gradient_bits=4, weight_bits=16, is_sharded=False, has_master=True, extra_bytes=2
    ),
    "ZeRO++": Method(gradient_bits=8, weight_bits=8),
    "modified EF": Method(gradient_bits=4, weight_bits=16, extra_bytes=2),
    "modified EF21": Method(gradient_bits=4, weight_bits=16, extra_bytes=2, extra_shard_bytes=4),
    "LoCo": Method(gradient_bits=4, weight_bits=16, extra_bytes=1),
}


def paper_seconds(method: Method, cluster: Cluster) -> float:
    """Return the seconds that a step communicates. Source: Table I of arXiv 2407.04480."""

    def seconds(bits: float) -> float:
        n = cluster.ranks
        passes = n if method.has_master else (n - 1) / n
        return bits * cluster.parameters * passes / (8 * cluster.bandwidth)

    compressed = seconds(method.gradient_bits + method.weight_bits)
    if method.has_warm_up:
        return WARM_UP * seconds(32) + (1 - WARM_UP) * compressed
    return compressed


def power_sgd_seconds(rank: int, cluster: Cluster) -> float:
    """Return PowerSGD's: 16-bit factors of rank `rank` for gradients, weights as in Adam."""
    gradients = 16 * rank * math.sqrt(cluster.parameters) / cluster.ranks
    weights = 16 * cluster.parameters * (cluster.ranks - 1) / cluster.ranks
    return (gradients + weights) / (8 * cluster.bandwidth)


def paper_bytes(method: Method, cluster: Cluster) -> float:
    """Return the bytes of training state on one rank. Source: Table I of arXiv 2407.04480.

    16-bit weights and gradients, a float32 copy of the weights, the moments, the method's own.
    """
    divided = 2 + 4 + method.moment_bytes
    if method.is_sharded:
        divided /= cluster.ranks
    own = method.extra_bytes + method.extra_shard_bytes / cluster.ranks
    return (2 + divided + own) * cluster.parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one step moves through the link of one node, and what a rank keeps for it."""

    gather: float
    """Bytes of bfloat16 weights that leave the node."""
    exchange: float
    """Bytes of gradients that leave the node."""
    error: float
    """Bytes of error state on one rank."""

    def seconds(self, cluster: Cluster) -> float:
        """Return the time on the link, without latency and overlap."""
        return (self.gather + self.exchange) / cluster.bandwidth


def ring_bytes(bits: float, cluster: Cluster) -> float:
    """Return what a ring over all ranks sends out of a node: its buffer, once around."""
    return bits / 8 * cluster.parameters * (cluster.ranks - 1) / cluster.ranks


def traffic(way: str, cluster: Cluster, config: LoCoConfig, *, gathers: int) -> Traffic:
    """Return what one step of FSDP2 moves with a way of reducing gradients.

    `way`: "float32", "bfloat16" (rings), "flat" (codes by one all-to-all over all ranks) or
    "two hops" (a reduce-scatter within the node, then codes between nodes).
    """
    gather = gathers * ring_bytes(16, cluster)
    if way in ("float32", "bfloat16"):
        bits = {"float32": 32, "bfloat16": 16}[way]
        return Traffic(gather=gather, exchange=ring_bytes(bits, cluster), error=0)
    inside = 1 if way == "flat" else cluster.ranks_per_node
    peers = cluster.ranks // inside
    recipe = config.arithmetic()
    layout = Layout(
        num_ranks=peers,
        chunk_numel=-(-cluster.parameters // cluster.ranks),
        block_numel=recipe.block_numel,
        codes_per_byte=recipe.codes_per_byte,
    )
    remote = peers - (cluster.ranks_per_node if way == "flat" else 1)
    exchange = cluster.ranks_per_node * remote * message_bytes([layout])
    error = sum(math.prod(shape) * dtype.itemsize for shape, dtype in formats(layout, recipe))
    return Traffic(gather=gather, exchange=exchange, error=error)


WAYS = ("float32", "bfloat16", "flat", "two hops")


def make_document(cluster: Cluster, config: LoCoConfig, *, rank: int, gathers: int) -> Any:
    """Return both tables, and the second one's times over the number of ranks."""
    paper = {
        name: {"seconds": paper_seconds(m, cluster), "bytes": paper_bytes(m, cluster)}
        for name, m in METHODS.items()
    }
    factors = 2 * rank * math.sqrt(cluster.parameters)
    dense = dataclasses.replace(METHODS["Adam"], is_sharded=False)
    paper["PowerSGD"] = {
        "seconds": power_sgd_seconds(rank, cluster),
        "bytes": paper_bytes(dense, cluster) + factors,
    }
    fsdp2 = {}
    for way in WAYS:
        moved = traffic(way, cluster, config, gathers=gathers)
        fsdp2[way] = {**dataclasses.asdict(moved), "seconds": moved.seconds(cluster)}
    nodes = [2**k for k in range(1, 9)]
    curve: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in nodes:
        larger = dataclasses.replace(cluster, ranks=number * cluster.ranks_per_node)
        for way in WAYS:
            moved = traffic(way, larger, config, gathers=gathers)
            curve[way].append(moved.seconds(larger))
    return {
        "cluster": dataclasses.asdict(cluster),
        "config": str(config),
        "power_sgd_rank": rank,
        "gathers": gathers,
        "paper": paper,
        "fsdp2": fsdp2,
        "over_nodes": {"nodes": nodes, **curve},
    }


def print_tables(document: dict[str, Any], console: Console) -> None:
    """Print both tables."""
    cluster = document["cluster"]
    table = Table(title=f"The paper's model: Psi {cluster['parameters']:,}, N {cluster['ranks']}")
    for heading in ("method", "seconds a step", "GB a rank"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, row in document["paper"].items():
        table.add_row(name, f"{row['seconds']:.3f}", f"{row['bytes'] / 1e9:.2f}")
    console.print(table)
    table = Table(
        title=f"FSDP2, {cluster['ranks_per_node']} ranks a node, {document['gathers']} gather(s)"
    )
    table.add_column("gradients")
    for heading in ("gather GB", "exchange GB", "seconds", "to bfloat16", "error GB a rank"):
        table.add_column(heading, justify="right")
    base = document["fsdp2"]["bfloat16"]
    for way, row in document["fsdp2"].items():
        table.add_row(
            way,
            f"{row['gather'] / 1e9:.2f}",
            f"{row['exchange'] / 1e9:.2f}",
            f"{row['seconds']:.3f}",
            f"{row['exchange'] / base['exchange']:.2f}x bytes",
            f"{row['error'] / 1e9:.3f}",
        )
    console.print(table)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the seconds of a step over the number of nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    curves = document["over_nodes"]
    for way in WAYS:
        axes.plot(curves["nodes"], curves[way], marker="o", label=way)
    per_node = document["cluster"]["ranks_per_node"]
    axes.set(xlabel=f"nodes of {per_node} ranks", ylabel="seconds on a node's link, one step")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line. Exits with a message if the cluster cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_HELP)
    parser.add_argument("--parameters", type=float, default=7e9, help="Psi")
    parser.add_argument("--ranks", type=int, default=64, help="N")
    parser.add_argument("--bandwidth", type=float, default=12.5e9, help="bytes a second of a link")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="L: they share one link")
    parser.add_argument("--gathers", type=int, default=2, choices=(1, 2), help="2 if resharded")
    parser.add_argument("--power-sgd-rank", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write this file, and a picture beside it")
    options = parser.parse_args(arguments)
    if min(options.parameters, options.ranks, options.bandwidth, options.ranks_per_node) < 1:
        parser.error("--parameters, --ranks, --bandwidth and --ranks-per-node must be 1 or more")
    if options.ranks % options.ranks_per_node:
        parser.error(
            f"--ranks {options.ranks} must be a multiple of --ranks-per-node "
            f"{options.ranks_per_node}"
        )
    return options


_HELP = argparse.RawDescriptionHelpFormatter


def main() -> None:
    """Print the tables; write the files if asked."""
    options = parse()
    cluster = Cluster(
        parameters=round(options.parameters),
        ranks=options.ranks,
        bandwidth=options.bandwidth,
        ranks_per_node=options.ranks_per_node,
    )
    document = make_document(
        cluster, LoCoConfig(), rank=options.power_sgd_rank, gathers=options.gathers
    )
    print_tables(document, Console())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        draw(document, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
