"""`explain`: one row for each part of a group, whose numbers are computed again here by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from loco_compile import LoCoBackend, LoCoConfig, Report, explain
from loco_compile.passes.plan import Decline
from tests.graphs import Stack, fake_group, shard

CONFIG = LoCoConfig(inner="aot_eager")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


def step(model: nn.Module, config: LoCoConfig = CONFIG) -> Report:
    torch.compile(model, backend=LoCoBackend(config))(torch.randn(4, 64)).sum().backward()
    return explain(model)


def chunk_numel(shape: torch.Size, num_ranks: int) -> int:
    """Elements that each rank holds, padding included."""
    return -(-shape[0] // num_ranks) * shape[1:].numel()


def wire_bytes(shapes: list[torch.Size], num_ranks: int, config: LoCoConfig) -> int:
    """Codes and bfloat16 scales of each block, filled up to 16, to each other rank."""
    total = 0
    for shape in shapes:
        num_blocks = -(-chunk_numel(shape, num_ranks) // config.block_numel)
        total += num_blocks * (config.block_numel * config.bits // 8 + 2)
    return (num_ranks - 1) * (total + -total % 16)


def error_bytes(shapes: list[torch.Size], num_ranks: int, config: LoCoConfig) -> int:
    """One byte for each element of each block, and on CPU two copies of a bfloat16 scale."""
    num_blocks = sum(-(-chunk_numel(s, num_ranks) // config.block_numel) for s in shapes)
    return num_ranks * num_blocks * (config.block_numel + 2 * 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("config", [CONFIG, LoCoConfig(bits=8, block_numel=320, inner="aot_eager")])
def test_rows_add_up(num_ranks: int, config: LoCoConfig) -> None:
    with fake_group(num_ranks):
        model = Stack(num_blocks=2)
        shapes = {n: p.shape for n, p in model.named_parameters()}
        report = step(shard(model), config)
    assert sum(r.numel for r in report.rows) == sum(s.numel() for s in shapes.values())
    assert sorted(n for r in report.rows for n in r.parameters) == sorted(shapes)
    for row in report.rows:
        own = [shapes[n] for n in row.parameters]
        assert row.numel == sum(s.numel() for s in own)
        plain = (num_ranks - 1) * 4 * sum(chunk_numel(s, num_ranks) for s in own)
        assert row.bytes_before == plain
        if row.method == "loco":
            assert row.bytes_on_wire == wire_bytes(own, num_ranks, config)
            assert row.error_bytes == error_bytes(own, num_ranks, config)
            assert row.reason == ""
        else:
            assert row.bytes_on_wire == plain
            assert row.error_bytes == 0
            assert row.reason == Decline.ONE_DIMENSION.value
    names = [(r.name, r.method) for r in report.rows]
    assert sorted(names) == [
        ("(root)", "loco"),
        ("blocks.0", "loco"),
        ("blocks.0", "none"),
        ("blocks.1", "loco"),
        ("blocks.1", "none"),
    ]


def test_bytes_before_are_in_the_dtype_of_the_reduction(two_ranks: None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (root, *_) = step(shard(Stack(num_blocks=1), mp_policy=policy)).rows
    assert (root.dtype, root.bytes_before) == ("float32", 2 * 32 * 64 * 4)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    (root, *_) = step(shard(Stack(num_blocks=1), mp_policy=policy)).rows
    assert (root.dtype, root.bytes_before) == ("bfloat16", 2 * 32 * 64 * 2)


class Odd(nn.Module):
    """A matrix for every reason not to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(64, 64, bias=False)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.unused = nn.Linear(64, 64, bias=False)
        self.small = nn.Linear(64, 3, bias=False)
        self.exempt = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.plain(self.exempt(self.frozen(x))))


def test_every_reason_is_a_row(two_ranks: None) -> None:
    config = LoCoConfig(exempt=("exempt.*",), inner="aot_eager")
    rows = {r.parameters[0].split(".")[0]: r for r in step(fully_shard(Odd()), config).rows}
    reasons = {name: row.reason for name, row in rows.items()}
    assert reasons == {
        "plain": "",
        "frozen": Decline.FROZEN.value,
        "unused": Decline.UNUSED.value,
        "small": Decline.SMALL.value,
        "exempt": Decline.EXEMPT.value,
    }
    # What has no gradient sends nothing, before and after.
    for name in ("frozen", "unused"):
        assert (rows[name].bytes_before, rows[name].bytes_on_wire) == (0, 0)
    assert rows["exempt"].bytes_before == rows["exempt"].bytes_on_wire == 32 * 64 * 4


def test_one_rank_sends_nothing() -> None:
    with fake_group(1):
        report = step(shard(Stack(num_blocks=1)))
    assert {r.reason for r in report.rows} == {Decline.ONE_RANK.value}
    assert all(r.bytes_before == r.bytes_on_wire == r.error_bytes == 0 for r in report.rows)


def test_without_compression(two_ranks: None) -> None:
    report = step(shard(Stack(num_blocks=1)), LoCoConfig(method="none", inner="aot_eager"))
    assert {(r.method, r.reason) for r in report.rows} == {("none", Decline.METHOD_NONE.value)}
    assert all(r.bytes_before == r.bytes_on_wire > 0 for r in report.rows)


def test_a_group_outside_every_compiled_region_is_listed(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=2))
    for block in model.blocks:
        block.compile(backend=LoCoBackend(CONFIG))
    model(torch.randn(4, 64)).sum().backward()
    report = explain(model)
    (root,) = [r for r in report.rows if r.name == "(root)"]
    assert (root.method, root.reason) == ("none", Decline.NOT_COMPILED.value)
    assert (root.numel, root.error_bytes) == (2 * 64 * 64, 0)
    assert root.bytes_before == root.bytes_on_wire == 2 * 32 * 64 * 4
    # One graph served both blocks: each has its own rows all the same.
    assert [r.name for r in report.rows if r.method == "loco"] == ["blocks.0", "blocks.1"]


def test_json(two_ranks: None) -> None:
    report = step(shard(Stack(num_blocks=1)))
    rows = json.loads(report.to_json())
    assert len(rows) == len(report.rows)
    for data, row in zip(rows, report.rows, strict=True):
        assert data["parameters"] == list(row.parameters)
        assert {k: v for k, v in data.items() if k != "parameters"} == {
            k: getattr(row, k) for k in data if k != "parameters"
        }


def test_str_is_a_table(two_ranks: None) -> None:
    report = step(shard(Stack(num_blocks=1)))
    header, rule, *lines, total = str(report).splitlines()
    assert header.split("  ")[0] == "name"
    assert set(rule) == {"-"}
    assert len(lines) == len(report.rows)
    assert {len(line) for line in lines} == {len(header)} == {len(rule)}
    for name in ("numel", "method", "reason"):  # columns stand under their names
        at = header.index(name)
        for line, row in zip(lines, report.rows, strict=True):
            value = getattr(row, name)
            text = f"{value:,}" if isinstance(value, int) else value
            assert line[at:].startswith(text)
    before = sum(r.bytes_before for r in report.rows)
    after = sum(r.bytes_on_wire for r in report.rows)
    assert f"{before:,} bytes before, {after:,} on the wire ({after / before:.3f} of it)" in total


def test_before_the_first_step(two_ranks: None) -> None:
    model = shard(Stack(num_blocks=1))
    torch.compile(model, backend=LoCoBackend(CONFIG))
    with pytest.raises(ValueError, match="after the first backward") as raised:
        explain(model)
    assert "torch.compile(model, backend=loco_backend)" in str(raised.value)


def test_without_fsdp() -> None:
    with pytest.raises(ValueError, match="Linear has no FSDP2 module: call fully_shard"):
        explain(nn.Linear(4, 4))


def test_a_step_without_compression_at_the_start_is_reported_as_such(two_ranks: None) -> None:
    report = step(shard(Stack(num_blocks=1)), LoCoConfig(start_step=1, inner="aot_eager"))
    reasons = {r.reason for r in report.rows if r.name == "(root)"}
    assert reasons == {Decline.START.value}
