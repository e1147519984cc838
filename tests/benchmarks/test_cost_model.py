"""The cost model against cells computed by hand."""

import dataclasses

import cost_model
import pytest
from cost_model import METHODS, Cluster, paper_bytes, paper_seconds, traffic

from loco_compile import LoCoConfig

SMALL = Cluster(parameters=8000, ranks=4, bandwidth=1000.0)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("Adam", 24.0),  # (16 + 16) bits * 8000 * 3 / 4 / 8 / 1000
        ("SGD", 24.0),
        ("ZeRO++", 12.0),  # (8 + 8) * 8000 * 3 / 4 / 8000
        ("LoCo", 15.0),  # (4 + 16) * 8000 * 3 / 4 / 8000
        ("modified EF", 15.0),
        ("modified EF21", 15.0),
        ("EF", 80.0),  # (4 + 16) * 8000 * 4 / 8000: through one server
        ("EF21", 80.0),
        ("1-bit Adam", 3.75),  # 0.1 * 24 + 0.9 * (1 + 1) * 8000 * 3 / 4 / 8000
        ("1-bit LAMB", 3.75),
    ],
)
def test_seconds_of_the_paper(name, seconds):
    assert paper_seconds(METHODS[name], SMALL) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Adam", 44_000),  # 16000 + (2 + 4 + 8) * 8000 / 4
        ("SGD", 36_000),  # 16000 + (2 + 4 + 4) * 8000 / 4
        ("ZeRO++", 44_000),
        ("LoCo", 52_000),  # and 1 byte for each of 8000
        ("modified EF", 60_000),  # and 2
        ("modified EF21", 68_000),  # and 2, and 4 / 4
        ("1-bit Adam", 128_000),  # (2 + 14) * 8000: nothing is divided
        ("1-bit LAMB", 160_000),  # and 4
        ("EF", 144_000),  # and 2
    ],
)
def test_bytes_of_the_paper(name, size):
    assert paper_bytes(METHODS[name], SMALL) == size


def test_power_sgd():
    cluster = Cluster(parameters=10_000, ranks=4, bandwidth=1000.0)
    # 16 * 2 * 100 / 4 = 800 bits of factors, 16 * 10000 * 3 / 4 = 120000 of weights.
    assert cost_model.power_sgd_seconds(2, cluster) == pytest.approx(120_800 / 8000)
    document = cost_model.make_document(cluster, LoCoConfig(), rank=2, gathers=1)
    assert document["paper"]["PowerSGD"]["bytes"] == 160_000 + 2 * 2 * 100


NODES = Cluster(parameters=65_536, ranks=16, bandwidth=1e6, ranks_per_node=4)
"""Chunks of 4096 elements: 32 blocks of 128, so 2048 bytes of codes and 64 of scales."""


def test_a_ring_crosses_a_node_once():
    moved = traffic("bfloat16", NODES, LoCoConfig(), gathers=2)
    assert moved.exchange == 122_880  # 2 * 65536 * 15 / 16
    assert moved.gather == 2 * 122_880
    assert moved.seconds(NODES) == pytest.approx(0.36864)
    assert traffic("float32", NODES, LoCoConfig(), gathers=1).exchange == 2 * 122_880


def test_a_flat_exchange_crosses_it_once_for_each_rank():
    moved = traffic("flat", NODES, LoCoConfig(), gathers=2)
    # 4 ranks of the node, each to 12 ranks elsewhere, 2112 bytes.
    assert moved.exchange == 4 * 12 * 2112
    # int8 for 65536 elements, a bfloat16 for each of 16 * 32 blocks.
    assert moved.error == 65_536 + 2 * 512


def test_two_hops_send_a_shard_of_the_nodes_sum():
    moved = traffic("two hops", NODES, LoCoConfig(), gathers=2)
    # 4 ranks, each to its 3 counterparts, its chunk of the node's quarter: 2112 bytes.
    assert moved.exchange == 4 * 3 * 2112
    assert moved.error == (65_536 + 2 * 512) / 4


def test_eight_ranks_a_node_lose_with_a_flat_exchange():
    # 8 * 4.125 bits, 56 of 64 ranks elsewhere, against 16 bits * 63 / 64.
    large = dataclasses.replace(NODES, parameters=64 * 128 * 1000, ranks=64, ranks_per_node=8)
    sent = {way: traffic(way, large, LoCoConfig(), gathers=2).exchange for way in cost_model.WAYS}
    assert sent["flat"] / sent["bfloat16"] == pytest.approx(8 * 4.125 / 16 * 56 / 63, rel=1e-6)
    assert sent["two hops"] / sent["bfloat16"] == pytest.approx(4.125 / 16 * 56 / 63, rel=1e-6)


def test_command_line(tmp_path, monkeypatch, capsys):
    target = tmp_path / "out" / "cost.json"
    command = ["cost_model.py", "--ranks", "16", "--ranks-per-node", "4", "--json", str(target)]
    monkeypatch.setattr("sys.argv", command)
    cost_model.main()
    assert "two hops" in capsys.readouterr().out
    assert target.exists() and target.with_suffix(".png").exists()
    with pytest.raises(SystemExit):
        cost_model.parse(["--ranks", "10", "--ranks-per-node", "4"])
    assert "must be a multiple of --ranks-per-node 4" in capsys.readouterr().err
