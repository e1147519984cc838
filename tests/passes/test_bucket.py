"""Which sites travel together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loco_compile.passes.bucket import Bucket, bucket_sites
from loco_compile.passes.find import find_sites
from tests.graphs import fake_group
from tests.passes.bare import PLAIN, Grad, text, trace


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


def buckets_of(specs: list[Grad]) -> list[Bucket]:
    traced = trace(specs, PLAIN)
    before = text(traced.gm)
    buckets = bucket_sites(find_sites(traced.gm.graph))
    assert text(traced.gm) == before  # pure
    return buckets


def names(buckets: list[Bucket]) -> list[tuple[str, list[str]]]:
    return [(b.name, [s.tag.name if s.tag else "" for s in b.sites]) for b in buckets]


def test_one_bucket_for_each_group() -> None:
    specs = [Grad(bucket=b, name=n, index=i) for b in "xy" for i, n in enumerate("ab")]
    assert names(buckets_of(specs)) == [("x", ["a", "b"]), ("y", ["a", "b"])]


def test_members_lie_in_the_order_of_the_group_not_of_the_graph() -> None:
    # Backward meets a group's parameters from its last to its first.
    specs = [Grad(name=n, index=i) for i, n in [(2, "c"), (0, "a"), (1, "b")]]
    (bucket,) = buckets_of(specs)
    assert [s.tag.name for s in bucket.sites] == ["a", "b", "c"]
    assert bucket.last.tag.name == "b"
    assert (bucket.num_ranks, bucket.op) == (2, "avg")
    assert bucket.group_name == torch.distributed.group.WORLD.group_name


def test_dtypes_and_reductions_do_not_mix() -> None:
    specs = [
        Grad(name="a", index=0),
        Grad(name="b", index=1, dtype=torch.bfloat16),
        Grad(name="c", index=2, op="sum"),
        Grad(name="d", index=3, dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ]
    assert names(buckets_of(specs)) == [("block", ["a", "d"]), ("block", ["b"]), ("block", ["c"])]


def test_a_parameter_that_occurs_twice_opens_a_second_bucket() -> None:
    specs = [Grad(name=n, index=i) for i, n in [(0, "a"), (1, "b"), (0, "a"), (1, "b"), (0, "a")]]
    assert [len(b.sites) for b in buckets_of(specs)] == [2, 2, 1]


def test_sites_without_a_marker_travel_alone() -> None:
    buckets = buckets_of([Grad(is_marked=False), Grad(is_marked=False), Grad()])
    assert [len(b.sites) for b in buckets] == [1, 1, 1]
    assert len({b.name for b in buckets}) == 3


def test_nothing_to_bucket() -> None:
    assert bucket_sites([]) == []
