"""`reshard_after_forward=k` keeps 1/k of a parameter and gathers it again over k ranks."""

from __future__ import annotations

import torch
from expecttest import TestCase

from loco_compile import LoCoBackend, LoCoConfig
from tests.graphs import Graphs, Stack, fake_group, recorded, shard

CONFIG = LoCoConfig(method="none", inner="aot_eager")


def traced(reshard_after_forward: bool | int) -> Graphs:
    """Graphs of one step on the first of four ranks; W = 4, so a full matrix has 4096 elements."""
    with fake_group(4), recorded() as graphs:
        model = shard(Stack(width=64, num_blocks=1), reshard_after_forward=reshard_after_forward)
        compiled = torch.compile(model, backend=LoCoBackend(CONFIG))
        compiled(torch.randn(4, 64)).sum().backward()
    return graphs


def gathers(graphs: Graphs, which: int) -> list[tuple[int, int]]:
    """(elements of the result, ranks) of each all-gather of a graph."""
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    nodes = graphs.modules[which].graph.find_nodes(op="call_function", target=target)
    return [(n.meta["val"].numel(), n.args[1]) for n in nodes]


def saved_numels(graphs: Graphs) -> list[int]:
    outputs = graphs.modules[0].graph.output_node().args[0]
    return [o.meta["val"].numel() for o in outputs if "clone" in o.name]


class TestReshard(TestCase):
    def test_backward_gathers_over_the_smaller_mesh(self) -> None:
        graphs = traced(2)
        # Two matrices of the root; two matrices and three vectors of the block.
        self.assertEqual(gathers(graphs, 0), [(2 * 4096, 4), (2 * 8192 + 64 + 64 + 128, 4)])
        # Backward needs `last`, both matrices of the block and its norm, not the vector `up.bias`.
        self.assertEqual(gathers(graphs, 1), [(4096, 2), (2 * 8192 + 64 + 64, 2)])

    def test_forward_saves_half_of_each_parameter(self) -> None:
        # What backward needs of them: `last`, norm.weight, norm.bias, up.weight, down.weight.
        expected = sorted(n // 2 for n in (4096, 64, 64, 8192, 8192))
        self.assertEqual(sorted(n for n in saved_numels(traced(2)) if n in expected), expected)

    def test_the_whole_mesh_needs_no_copy(self) -> None:
        graphs = traced(True)
        self.assertEqual(saved_numels(graphs), [])
        self.assertEqual({ranks for _, ranks in gathers(graphs, 1)}, {4})
