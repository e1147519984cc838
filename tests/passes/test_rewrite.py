"""The rewrite on hand-written graphs: which sites it takes, what it leaves, where things stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from loco_compile import LoCoConfig
from loco_compile.passes.pipeline import run
from loco_compile.passes.plan import Decline
from loco_compile.passes.rewrite import rewrite
from loco_compile.passes.verify import collective_order
from tests.graphs import fake_group
from tests.passes.bare import (
    A2A,
    LOCO,
    PLAIN,
    RS,
    WAIT,
    Grad,
    Traced,
    facts,
    find,
    parameters,
    promised_and_real,
    text,
    trace,
)

COPY = torch.ops.aten.copy_.default
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


def rewritten(traced: Traced, config: LoCoConfig = LOCO) -> Traced:
    rewrite(traced.gm, exchanges=traced.exchanges(config))
    return traced


# --- n of n


@pytest.mark.parametrize("num", [1, 2, 5])
def test_all_parameters_of_a_group_share_one_all_to_all(num: int) -> None:
    traced = rewritten(trace(parameters(*[(64, 128)] * num)))
    assert (traced.count(A2A), traced.count(RS), traced.count(WAIT)) == (1, 0, 1)
    assert traced.count(COPY) == 3 * num  # two planes and the scales


def test_every_group_has_its_own_all_to_all() -> None:
    specs = [Grad(bucket=f"block{i}", name=f"w{i}") for i in range(3)]
    traced = rewritten(trace(specs))
    assert (traced.count(A2A), traced.count(RS)) == (3, 0)


@pytest.mark.parametrize("config", [LOCO, LoCoConfig.recipe("paper"), LoCoConfig(bits=8)])
def test_one_message_of_exactly_the_bytes_that_the_layout_says(config: LoCoConfig) -> None:
    specs = parameters((64, 128), (33, 96), (1, 4096))
    traced = rewritten(trace(specs, config), config)
    (node,) = find(traced.gm, A2A)
    # By hand: N = rows / 2 rounded up; B = N / K rounded up; B * K * bits / 8 codes, 2 B scales.
    num_bytes = 0
    for rows, columns in (s.shape for s in specs):
        num_blocks = -(-(-(-rows // 2) * columns) // config.block_numel)
        num_bytes += num_blocks * (config.block_numel * config.bits // 8 + 2)
    num_bytes += -num_bytes % 16
    assert node.meta["val"].dtype == torch.uint8
    assert node.meta["val"].numel() == 2 * num_bytes
    assert node.args[1] == node.args[2] == [num_bytes, num_bytes]


def test_one_copy_per_buffer_for_a_parameter_that_occurs_twice() -> None:
    # A module called twice: both exchanges, the second on the error that the first one left.
    traced = trace([Grad(), Grad()])
    left, errors = find(traced.gm, torch.ops.loco_compile.mark_shard.default), traced.errors
    first, second = left
    second.args = (second.args[0], first.args[1], second.args[2])
    rewritten(traced)
    assert traced.count(A2A) == 2
    copies = find(traced.gm, COPY)
    assert len(copies) == len(errors[0])
    sent = find(traced.gm, A2A)
    for copy in copies:
        assert sent[0] not in ancestors(copy)  # errors depend on no exchange
    inputs = set(traced.gm.graph.find_nodes(op="placeholder"))
    assert ancestors(sent[0]) & ancestors(sent[1]) - inputs


def ancestors(node: fx.Node) -> set[fx.Node]:
    found, todo = set(), [node]
    while todo:
        for parent in todo.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                todo.append(parent)
    return found


# --- declines


@pytest.mark.parametrize(
    ("spec", "config", "reason"),
    [
        (Grad(), PLAIN, Decline.METHOD_NONE),
        (Grad(op="max"), LOCO, Decline.REDUCTION),
        (Grad(op="min"), LOCO, Decline.REDUCTION),
        (Grad(dtype=torch.float64), LOCO, Decline.DTYPE),
        (Grad(dtype=torch.int32, op="sum"), LOCO, Decline.DTYPE),
        (Grad(dtype=FP32, reduce_dtype=torch.float64), LOCO, Decline.DTYPE),
        (Grad(is_marked=False), LOCO, Decline.NO_STATE),
        (Grad(keeps_error=False), LOCO, Decline.NO_STATE),
        *((Grad(plain=d.value), LOCO, d) for d in Decline),
    ],
)
def test_declined_for_the_right_reason_and_left_alone(
    spec: Grad, config: LoCoConfig, reason: Decline
) -> None:
    traced = trace([spec], config)
    before = text(traced.gm)
    (exchange,) = traced.exchanges(config)
    assert [c.decline for c in exchange.choices] == [reason]
    assert rewrite(traced.gm, exchanges=[exchange]) is traced.gm
    assert text(traced.gm) == before


def test_a_reduce_scatter_over_one_rank_is_declined() -> None:
    traced = trace([Grad()], num_ranks=1)
    (exchange,) = traced.exchanges(LOCO)
    assert exchange.choices[0].decline is Decline.ONE_RANK


def test_what_stays_uncompressed_shares_one_reduce_scatter() -> None:
    one_d = Decline.ONE_DIMENSION.value
    specs = [
        Grad(name="weight", index=0),
        Grad(name="norm", shape=(64,), index=1, plain=one_d),
        Grad(name="bias", shape=(101,), index=2, plain=one_d),  # padded to 102
    ]
    traced = rewritten(trace(specs))
    (node,) = find(traced.gm, RS)
    assert traced.count(A2A) == 1
    assert node.meta["val"].numel() == 32 + 51
    run_and_compare(traced, [(32 * 128, FP32), (32, FP32), (51, FP32)])


def run_and_compare(traced: Traced, expected: list[tuple[int, torch.dtype]]) -> None:
    results = traced.gm(*traced.inputs)
    assert [(r.numel(), r.dtype) for r in results] == expected


# --- nothing to do, twice


def test_nothing_to_do_leaves_the_graph_identical() -> None:
    traced = trace([Grad(bucket=f"b{i}") for i in range(3)], PLAIN)
    before, code = text(traced.gm), traced.gm.forward.__func__
    assert rewrite(traced.gm, exchanges=traced.exchanges(PLAIN)) is traced.gm
    assert text(traced.gm) == before
    assert traced.gm.forward.__func__ is code  # not recompiled
    assert rewrite(traced.gm, exchanges=[]) is traced.gm
    assert text(traced.gm) == before


@pytest.mark.parametrize("config", [LOCO, PLAIN])
def test_twice_is_once(config: LoCoConfig) -> None:
    traced = trace(parameters((64, 128), (64, 128)) + [Grad(bucket="other", is_marked=False)])
    run(traced.gm, config)
    once = text(traced.gm)
    run(traced.gm, config)
    assert text(traced.gm) == once


# --- metadata


@pytest.mark.parametrize("shape", [(64, 128), (33, 96)])
@pytest.mark.parametrize(
    "dtypes", [(FP32, None, None), (BF16, FP32, BF16), (BF16, None, FP32), (FP16, FP32, FP16)]
)
@pytest.mark.parametrize("config", [LOCO, LoCoConfig.recipe("paper"), PLAIN])
def test_metadata_is_what_the_nodes_give(
    shape: tuple[int, int], dtypes: tuple[Any, Any, Any], config: LoCoConfig
) -> None:
    dtype, reduce_dtype, shard_dtype = dtypes
    options = {"dtype": dtype, "reduce_dtype": reduce_dtype, "shard_dtype": shard_dtype}
    traced = trace(parameters(shape, (64, 64), **options), config)
    promised = facts([n.meta["val"] for n in traced.gm.graph.output_node().args[0]])
    run(traced.gm, config)
    for name, promise, real in promised_and_real(traced.gm):
        assert promise == real, name
    outputs = traced.gm.graph.output_node().args[0]
    assert facts([n.meta["val"] for n in outputs]) == promised
    results = traced.gm(*traced.inputs)
    assert [facts(r)[:3] for r in results] == [p[:3] for p in promised]


def test_shards_arrive_in_the_dtype_that_they_were_cast_to() -> None:
    traced = rewritten(trace([Grad(dtype=BF16, reduce_dtype=FP32, shard_dtype=BF16)]))
    run_and_compare(traced, [(32 * 128, BF16)])


def test_errors_are_copied_into_their_inputs_at_the_end() -> None:
    traced = rewritten(trace(parameters((64, 128), (64, 64))))
    inputs = list(traced.gm.graph.find_nodes(op="placeholder"))[2:]
    copies = [n for n in traced.gm.graph.nodes if n.target is COPY]
    assert [c.args[0] for c in copies] == inputs
    assert list(traced.gm.graph.nodes)[-len(copies) - 1 : -1] == copies
    traced.gm(*traced.inputs)
    assert all(b.count_nonzero() for own in traced.errors for b in own)


def test_provenance_is_copied() -> None:
    traced = trace([Grad()])
    (scatter,) = find(traced.gm, RS)
    scatter.meta["custom"] = {"mark": 7}
    scatter.meta["stack_trace"] = "here"
    rewritten(traced)
    (node,) = find(traced.gm, A2A)
    assert (node.meta["custom"], node.meta["stack_trace"]) == ({"mark": 7}, "here")


# --- order and overlap


def test_order_of_collectives_is_that_of_the_last_reduce_scatters() -> None:
    specs = [
        Grad(bucket="late", name="a", index=0),
        Grad(bucket="early", name="c", index=0),
        Grad(bucket="late", name="b", index=1, shape=(32, 64)),
    ]
    for overlaps in (False, True):
        traced = rewritten(trace(specs, overlaps=overlaps))
        early, late = find(traced.gm, A2A)
        assert early.meta["val"].numel() < late.meta["val"].numel()


def test_all_ranks_have_the_same_order_of_collectives() -> None:
    torch.distributed.destroy_process_group()
    specs = parameters((33, 96), (64, 128)) + [
        Grad(bucket="other", shape=(3,), plain=Decline.ONE_DIMENSION.value)
    ]
    orders = []
    for rank in (0, 1):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        store = torch.testing._internal.distributed.fake_pg.FakeStore()
        torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=2)
        traced = trace(specs)
        run(traced.gm, LOCO)
        orders.append([op for op, _ in collective_order(traced.gm.graph)])
    assert orders[0] == orders[1] == ["all_to_all_single", "reduce_scatter_tensor"]


def test_halves_stand_where_the_last_reduce_scatter_and_its_wait_stood() -> None:
    traced = trace(parameters((64, 128), (64, 64)), overlaps=True)
    between_before = between(traced.gm, find(traced.gm, RS)[-1], find(traced.gm, WAIT)[-1])
    aten = torch.ops.aten
    work = [n for t in (aten.exp, aten.relu, aten.sin) for n in find(traced.gm, t.default)]
    assert len(work) == 3
    assert set(work) <= set(between_before)
    rewritten(traced)
    (sent,) = find(traced.gm, A2A)
    (wait,) = find(traced.gm, WAIT)
    between_after = between(traced.gm, sent, wait)
    # As much work overlaps with the exchange as before.
    assert set(work) <= set(between_after)
    # The launch half lies behind the nodes that stood in front of the last reduce-scatter.
    nodes = list(traced.gm.graph.nodes)
    assert nodes.index(sent) < min(nodes.index(n) for n in work)


def between(gm: fx.GraphModule, first: fx.Node, last: fx.Node) -> list[fx.Node]:
    nodes = list(gm.graph.nodes)
    return nodes[nodes.index(first) + 1 : nodes.index(last)]


def test_gradients_are_read_where_autograd_left_them() -> None:
    # No cast, no padding and no copy of a gradient in full precision in front of the compression.
    specs = parameters((33, 96), (64, 128), dtype=BF16, reduce_dtype=FP32)
    traced = trace(specs)
    sources = [c.site.source for e in traced.exchanges(LOCO) for c in e.choices]
    assert [s.meta["val"].dtype for s in sources] == [BF16, BF16]
    rewritten(traced)
    for source in sources:
        users = list(source.users)
        assert len(users) == 1
        assert users[0].target is torch.ops.aten.view.default


def test_a_gradient_with_another_user_keeps_its_cast() -> None:
    traced = trace([Grad(dtype=BF16, reduce_dtype=FP32)])
    (scatter,) = find(traced.gm, RS)
    cast = scatter.args[0]
    output = traced.gm.graph.output_node()
    output.args = ((*output.args[0], cast),)
    rewritten(traced)
    assert cast in traced.gm.graph.nodes
    shard, kept = traced.gm(*traced.inputs)
    assert torch.equal(kept, (traced.grads[0] * 2).reshape(-1).float())
    assert shard.numel() == 32 * 128


def test_the_shard_may_have_several_users() -> None:
    traced = trace([Grad(dtype=BF16, reduce_dtype=FP32, shard_dtype=BF16)])
    marker = find(traced.gm, torch.ops.loco_compile.mark_shard.default)[0]
    output = traced.gm.graph.output_node()
    output.args = ((*output.args[0], marker),)
    rewritten(traced)
    run_and_compare(traced, [(32 * 128, BF16), (32 * 128, FP32)])
