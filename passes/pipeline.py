"""The passes in the order they run. Works on any graph past AOTAutograd, with Dynamo or without."""

from __future__ import annotations

import logging

import torch
from torch import fx

from loco_compile.config import LoCoConfig

from .bucket import bucket_sites
from .find import find_held_markers, find_shard_markers, find_sites
from .gather import gather
from .plan import Exchange, plan
from .rewrite import rewrite
from .verify import verify

log = logging.getLogger(__name__)

ORDER = ("find", "bucket", "plan", "rewrite", "gather", "verify")
"""Passes over a forward or backward graph; `reshard` and `remat` run before, on the joint graph."""


def run(gm: fx.GraphModule, config: LoCoConfig) -> list[Exchange]:
    """Rewrite a graph in place and return what was decided for every reduce-scatter in it."""
    _trace("loco_before", gm)
    exchanges = plan(bucket_sites(find_sites(gm.graph)), config)
    rewrite(gm, exchanges=exchanges)
    _drop_markers(gm)
    gather(gm)
    verify(gm, exchanges=exchanges)
    if exchanges:
        num = sum(len(e.compressed) for e in exchanges)
        total = sum(len(e.choices) for e in exchanges)
        log.info("compressed %d of %d gradients in %d buckets", num, total, len(exchanges))
    _trace("loco_after", gm)
    return exchanges


def _drop_markers(gm: fx.GraphModule) -> None:
    """Remove the markers of sites that stay as they were, and those of held gradients."""
    markers = find_shard_markers(gm.graph) + find_held_markers(gm.graph)
    for marker in markers:
        marker.replace_all_uses_with(marker.args[0])  # type: ignore[arg-type]  # a node, by schema
        gm.graph.erase_node(marker)
    if markers:
        gm.recompile()


def _trace(name: str, gm: fx.GraphModule) -> None:
    """Leave the graph for TORCH_TRACE / tlparse."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False),
        expect_trace_id=False,
    )
