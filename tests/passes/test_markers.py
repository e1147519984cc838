"""Markers are identities that survive tracing, and tags survive the trip as text."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile.passes.find import find_full_markers, find_shard_markers
from loco_compile.passes.markers import Tag, mark_full, mark_shard

TAG = Tag(
    bucket="layers.0",
    name="weight",
    index=3,
    regathers=True,
    smaller_ranks=2,
    smaller_rank=1,
    smaller_group="7",
    num_replicas=2,
    plain="has one dimension (exempt_1d)",
)


def test_a_tag_comes_back_as_it_was() -> None:
    assert Tag.load(TAG.dump()) == TAG
    default = Tag(bucket="", name="w", index=0)
    assert Tag.load(default.dump()) == default
    assert all(f.default != getattr(TAG, f.name) for f in dataclasses.fields(Tag))


def test_an_unknown_key_is_no_tag() -> None:
    with pytest.raises(TypeError):
        Tag.load('{"bucket": "", "name": "w", "index": 0, "color": "red"}')


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_markers_are_identities_that_alias_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(6, 4).to(dtype)
    error = [torch.zeros(2, 1, 64, dtype=torch.int8)]
    for marked in (mark_full(x, TAG.dump()), mark_shard(x, error, TAG.dump())):
        assert torch.equal(marked, x)
        assert marked.data_ptr() != x.data_ptr()


def test_opcheck() -> None:
    x, error = torch.randn(6, 4), [torch.zeros(2, 1, 64, dtype=torch.int8)]
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.loco_compile.mark_full, (x, "{}"), test_utils=utils)
    torch.library.opcheck(torch.ops.loco_compile.mark_shard, (x, error, "{}"), test_utils=utils)
    torch.library.opcheck(torch.ops.loco_compile.mark_shard, (x, [], "{}"), test_utils=utils)


def test_markers_are_nodes_with_their_arguments() -> None:
    def fn(x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        full = torch.ops.loco_compile.mark_full(x, TAG.dump())
        return torch.ops.loco_compile.mark_shard(full, [e], TAG.dump())

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4), torch.zeros(4, dtype=torch.int8))
    (full,), (shard,) = find_full_markers(gm.graph), find_shard_markers(gm.graph)
    x, e = gm.graph.find_nodes(op="placeholder")
    assert full.args == (x, TAG.dump())
    assert tuple(shard.args[1]) == (e,)
    assert Tag.load(shard.args[2]) == TAG
