"""One all-gather for each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.passes.find import find_full_markers
from loco_compile.passes.gather import gather
from loco_compile.passes.markers import Tag
from tests.graphs import fake_group, outline
from tests.passes.bare import GATHER, WAIT, c10d, facts, find, promised_and_real, text

GROUP, NUM_RANKS = "0", 2


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_group(NUM_RANKS):
        yield


def full_of(shard: Tensor, tag: Tag) -> Tensor:
    """What loco_compile/unshard.py does in forward."""
    flat = c10d.all_gather_into_tensor(shard.reshape(-1), NUM_RANKS, GROUP)
    full = c10d.wait_tensor(flat).reshape(NUM_RANKS * shard.shape[0], *shard.shape[1:])
    return torch.ops.loco_compile.mark_full(full, tag.dump())


def traced(tags: Sequence[Tag | None], shards: Sequence[Tensor]) -> fx.GraphModule:
    """A forward that uses every full parameter but those without a tag, which go unused."""

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        outs = []
        for shard, tag in zip(inputs, tags, strict=True):
            full = full_of(shard, tag or Tag(bucket="block", name="unused", index=9))
            if tag is not None:
                outs.append(full.sin())
        return tuple(outs)

    return make_fx(forward, tracing_mode="fake")(*shards)


def tag(index: int, bucket: str = "block", name: str | None = None) -> Tag:
    return Tag(bucket=bucket, name=name or f"w{index}", index=index)


def test_all_gathers_of_a_group_become_one() -> None:
    shards = [torch.randn(4, 3), torch.randn(5), torch.randn(1, 2, 2)]
    gm = traced([tag(0), tag(1), tag(2)], shards)
    promised = facts([n.meta["val"] for n in gm.graph.output_node().args[0]])
    gather(gm)
    assert outline(gm.graph) == "all_gather_into_tensor float32[42]\nwait_tensor float32[42]"
    assert find_full_markers(gm.graph) == []
    for name, promise, real in promised_and_real(gm):
        assert promise == real, name
    assert facts([n.meta["val"] for n in gm.graph.output_node().args[0]]) == promised
    assert [facts(r)[:3] for r in gm(*shards)] == [p[:3] for p in promised]


class _Gathering(fx.Interpreter):
    """Runs as rank 0 of two that hold the same shards."""

    def call_function(self, target, args, kwargs):
        if target is GATHER:
            return torch.cat([args[0], args[0] + 100])
        return args[0] if target is WAIT else super().call_function(target, args, kwargs)


def test_every_rank_s_part_of_every_parameter_arrives_in_its_place() -> None:
    shards = [torch.randn(4, 3), torch.randn(5), torch.randn(1, 2, 2)]
    gm = gather(traced([tag(2), tag(0), tag(1)], shards))  # an order that is not the graph's
    for shard, result in zip(shards, _Gathering(gm).run(*shards), strict=True):
        assert torch.equal(result, torch.cat([shard, shard + 100]).sin())


def test_groups_and_dtypes_do_not_mix() -> None:
    shards = [torch.randn(2), torch.randn(4), torch.randn(8).bfloat16(), torch.randn(16)]
    gm = gather(traced([tag(0), tag(0, "other"), tag(1), tag(2)], shards))
    sizes = [(n.meta["val"].numel(), n.meta["val"].dtype) for n in find(gm, GATHER)]
    expected = [(36, torch.float32), (8, torch.float32), (16, torch.bfloat16)]
    assert sorted(sizes, key=str) == sorted(expected, key=str)


def test_a_parameter_gathered_twice_is_gathered_twice() -> None:
    # A module called twice frees its parameter in between.
    shards = [torch.randn(2), torch.randn(2)]
    gm = gather(traced([tag(0, name="w"), tag(0, name="w")], shards))
    assert len(find(gm, GATHER)) == 2


def test_gathers_without_users_are_erased() -> None:
    gm = traced([tag(0), None], [torch.randn(2), torch.randn(4)])
    for marker in find_full_markers(gm.graph):
        if not marker.users:
            gm.graph.erase_node(marker)
    gm.graph.eliminate_dead_code()  # as the partitioner does, which keeps waits
    assert len(find(gm, GATHER)) == 2
    gather(gm)
    assert outline(gm.graph) == "all_gather_into_tensor float32[4]\nwait_tensor float32[4]"


def test_gathers_that_are_not_ours_stay() -> None:
    def forward(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, NUM_RANKS, GROUP)) * 2

    gm = make_fx(forward, tracing_mode="fake")(torch.randn(4))
    before = text(gm)
    assert gather(gm) is gm
    assert text(gm) == before


def test_twice_is_once() -> None:
    gm = gather(traced([tag(0), tag(1)], [torch.randn(2), torch.randn(4)]))
    once = text(gm)
    assert text(gather(gm)) == once
