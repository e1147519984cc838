r"""Replace each planned reduction by compress -> all-to-all -> decompress-and-average.

    grad -> reduce_scatter -> wait -> shard
becomes, once for all compressed parameters of a bucket,
    grads, errors -> compress -> all_to_all -> wait -> decompress_mean -> shards
                              \-> new errors, copied into the error inputs at the end of the graph
and the parameters of the bucket that stay uncompressed share
    grads -> concatenated rank chunks -> reduce_scatter -> wait -> shards

An all-reduce is a reduce-scatter followed by an all-gather. The same compress, all-to-all and
decompress do its first half; the gather of the means follows uncompressed.

The launch half stands where the bucket's last reduction stood, the finish half where its wait
stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import stable_topological_sort

from .find import c10d, value
from .message import Part, compress_all, unpack_mean
from .plan import Choice, Exchange
from .splice import splice


def rewrite(gm: fx.GraphModule, *, exchanges: Sequence[Exchange]) -> fx.GraphModule:
    """Splice every exchange into the graph. Returns the untouched graph if there is none.

    Buckets of one site that stays uncompressed are left as they are.
    """
    latest: dict[fx.Node, fx.Node] = {}  # error input -> node that holds its newest value
    edited = False
    for exchange in exchanges:
        if exchange.compressed:
            _exchange_compressed(exchange, latest)
            edited = True
        if len(exchange.plain) > 1:
            _exchange_plain(exchange.plain)
            edited = True
    if not edited:
        return gm
    _store_errors(gm.graph, latest)
    stable_topological_sort(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def _last(choices: Sequence[Choice]) -> Choice:
    return max(choices, key=lambda c: c.site.collective)


def _exchange_compressed(exchange: Exchange, latest: dict[fx.Node, fx.Node]) -> None:
    choices = exchange.compressed
    first = choices[0].site
    parts = [Part(c.layout, _recipe(c), _result_dtype(c)) for c in choices]
    grads = [c.site.source for c in choices]
    sent_by = [c.site.errors[: p.num_buffers] for c, p in zip(choices, parts, strict=True)]
    known_by = [c.site.errors[p.num_buffers :] for c, p in zip(choices, parts, strict=True)]
    sender_inputs = [e for own in sent_by for e in own]
    receiver_inputs = [e for own in known_by for e in own]
    last = _last(choices).site

    def launch(*tensors: Tensor) -> tuple[Tensor, ...]:
        message, new = compress_all(tensors[: len(parts)], tensors[len(parts) :], parts)
        splits = [message.shape[1]] * first.num_ranks
        sent = c10d.all_to_all_single(message.reshape(-1), splits, splits, first.group_name)
        return sent, *new

    def finish(sent: Tensor, *known: Tensor) -> tuple[Tensor, ...]:
        received = c10d.wait_tensor(sent).reshape(first.num_ranks, -1)
        divisor = float(first.num_ranks) if first.op == "avg" else 1.0
        means, new = unpack_mean(received, known, parts, divisor=divisor)
        if first.kind == "all_reduce":
            means = _gather_means(means, choices)
        return *means, *new

    buffers = [latest.get(e, e) for e in sender_inputs]
    sent, *new = splice(launch, [*grads, *buffers], before=last.collective)
    latest.update(zip(sender_inputs, new, strict=True))
    known = [latest.get(e, e) for e in receiver_inputs]
    outputs = splice(finish, [sent, *known], before=last.wait)
    shards, new = outputs[: len(choices)], outputs[len(choices) :]
    latest.update(zip(receiver_inputs, new, strict=True))
    for choice, shard in zip(choices, shards, strict=True):
        choice.site.out.replace_all_uses_with(shard)
    for choice in choices:
        _erase(choice)


def _result_dtype(choice: Choice) -> torch.dtype:
    """Return the dtype of the mean: what it is cast to, unless that makes a gather longer."""
    before, after = value(choice.site.grad).dtype, value(choice.site.out).dtype
    if choice.site.kind == "all_reduce" and before.itemsize < after.itemsize:
        return before
    return after


def _gather_means(means: Sequence[Tensor], choices: Sequence[Choice]) -> list[Tensor]:
    """Return the whole of each all-reduced tensor from each rank's chunk (N,) of it."""
    first = choices[0].site
    flat = torch.cat(list(means))
    flat = c10d.wait_tensor(c10d.all_gather_into_tensor(flat, first.num_ranks, first.group_name))
    chunks = flat.reshape(first.num_ranks, -1).split([m.numel() for m in means], dim=1)
    sizes = [value(c.site.grad).numel() for c in choices]
    dtypes = [value(c.site.out).dtype for c in choices]
    return [
        chunk.reshape(-1)[:size].to(dtype)
        for chunk, size, dtype in zip(chunks, sizes, dtypes, strict=True)
    ]


def _exchange_plain(choices: Sequence[Choice]) -> None:
    first = choices[0].site
    sizes = [c.site.chunk_numel for c in choices]
    if first.kind == "all_reduce":
        sizes = [value(c.site.grad).numel() for c in choices]

    def launch(*grads: Tensor) -> tuple[Tensor, ...]:
        if first.kind == "all_reduce":
            flat = torch.cat(list(grads))
            return (c10d.all_reduce(flat, first.op, first.group_name),)
        chunks = [g.reshape(first.num_ranks, -1) for g in grads]
        flat = torch.cat(chunks, dim=1).reshape(-1)
        out = c10d.reduce_scatter_tensor(flat, first.op, first.num_ranks, first.group_name)
        return (out,)

    def finish(scattered: Tensor) -> tuple[Tensor, ...]:
        return tuple(c10d.wait_tensor(scattered).split(sizes))

    last = _last(choices).site
    (scattered,) = splice(launch, [c.site.grad for c in choices], before=last.collective)
    shards = splice(finish, [scattered], before=last.wait)
    for choice, shard in zip(choices, shards, strict=True):
        choice.site.shard.replace_all_uses_with(shard)
    for choice in choices:
        _erase(choice)


def _recipe(choice: Choice) -> Any:
    if choice.recipe is None:
        raise AssertionError(f"expected a recipe for {choice.site.name}")
    return choice.recipe


def _erase(choice: Choice) -> None:
    """Erase the old nodes, users first. Waits count as side effects: nothing else removes them."""
    site = choice.site
    node, source = site.grad, site.source
    for old in dict.fromkeys((site.cast, site.shard, site.wait, site.collective)):
        if old is not None and not old.users:
            old.graph.erase_node(old)
    # Casts and padding between the gradient and its source may have no use any more.
    while node is not source and not node.users:
        before = node.all_input_nodes[0]
        node.graph.erase_node(node)
        node = before


def _store_errors(graph: fx.Graph, latest: dict[fx.Node, fx.Node]) -> None:
    """Copy the newest errors into their inputs: Inductor then writes them in place (I10)."""
    copy: Callable[..., Any] = torch.ops.aten.copy_.default
    with graph.inserting_before(graph.output_node()):
        for error, new in latest.items():
            stored = graph.call_function(copy, (error, new))
            stored.meta["val"] = error.meta["val"]
