"""All passes over the graphs of whole FSDP2 models, and of none."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from expecttest import TestCase
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx.experimental.proxy_tensor import make_fx

from loco_compile import LoCoBackend, LoCoConfig
from loco_compile.passes import bucket, find, gather, pipeline, plan, verify
from loco_compile.passes import rewrite as rewrite_module
from loco_compile.passes.plan import Decline
from tests.graphs import Graphs, Stack, fake_group, outline, recorded, shard
from tests.passes.bare import (
    A2A,
    GATHER,
    LOCO,
    PLAIN,
    RS,
    Grad,
    parameters,
    promised_and_real,
    text,
    trace,
)


def traced(
    num_blocks: int,
    config: LoCoConfig = LOCO,
    *,
    num_ranks: int = 2,
    is_regional: bool = False,
    **options: Any,
) -> Graphs:
    """Graphs of one step of a stack of blocks: forward, then backward."""
    with fake_group(num_ranks), recorded() as graphs:
        model, backend = shard(Stack(num_blocks=num_blocks), **options), LoCoBackend(config)
        if is_regional:
            for block in model.blocks:
                block.compile(backend=backend)
        else:
            model.compile(backend=backend)
        model(torch.randn(4, 64)).sum().backward()
    return graphs


def counts(graphs: Graphs, which: int) -> dict[str, int]:
    graph = graphs.modules[which].graph
    return {
        name: len(graph.find_nodes(op="call_function", target=target))
        for name, target in [("all_gather", GATHER), ("reduce_scatter", RS), ("all_to_all", A2A)]
    }


def without_copies(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("copy_"))


class TestSnapshots(TestCase):
    def test_whole_model_forward(self) -> None:
        graphs = traced(1)
        # first and last of the root; norm.weight, norm.bias, up.weight, up.bias, down.weight.
        self.assertExpectedInline(
            "\n".join(r for r in graphs.before[0].splitlines() if r.startswith("all_gather")),
            """\
all_gather_into_tensor float32[4096]
all_gather_into_tensor float32[4096]
all_gather_into_tensor float32[64]
all_gather_into_tensor float32[64]
all_gather_into_tensor float32[8192]
all_gather_into_tensor float32[128]
all_gather_into_tensor float32[8192]""",
        )
        self.assertExpectedInline(
            graphs.after[0],
            """\
all_gather_into_tensor float32[8192]
wait_tensor float32[8192]
all_gather_into_tensor float32[16640]
wait_tensor float32[16640]""",
        )

    def test_whole_model_backward(self) -> None:
        graphs = traced(1)
        rows = [r for r in graphs.before[1].splitlines() if not r.startswith(("wait", "mark"))]
        self.assertExpectedInline(
            "\n".join(rows),
            """\
all_gather_into_tensor float32[8192]
all_gather_into_tensor float32[8192]
all_gather_into_tensor float32[64]
all_gather_into_tensor float32[64]
reduce_scatter_tensor float32[4096]
reduce_scatter_tensor float32[64]
reduce_scatter_tensor float32[4096]
reduce_scatter_tensor float32[32]
reduce_scatter_tensor float32[32]
reduce_scatter_tensor float32[2048]
reduce_scatter_tensor float32[2048]""",
        )
        self.assertExpectedInline(
            without_copies(graphs.after[1]),
            """\
all_gather_into_tensor float32[16512]
wait_tensor float32[16512]
all_to_all_single uint8[8448]
wait_tensor uint8[8448]
reduce_scatter_tensor float32[128]
wait_tensor float32[128]
all_to_all_single uint8[4224]
wait_tensor uint8[4224]""",
        )

    def test_error_buffers_are_written_at_the_end_of_backward(self) -> None:
        rows = traced(1).after[1].splitlines()
        first = next(i for i, row in enumerate(rows) if row.startswith("copy_"))
        self.assertExpectedInline(
            "\n".join(rows[first:]),
            """\
copy_ int8[2, 32, 64]
copy_ int8[2, 32, 64]
copy_ bfloat16[2, 32, 2]
copy_ int8[2, 32, 64]
copy_ int8[2, 32, 64]
copy_ bfloat16[2, 32, 2]
copy_ int8[2, 16, 64]
copy_ int8[2, 16, 64]
copy_ bfloat16[2, 16, 2]
copy_ int8[2, 16, 64]
copy_ int8[2, 16, 64]
copy_ bfloat16[2, 16, 2]""",
        )

    def test_regional(self) -> None:
        graphs = traced(3, is_regional=True)
        self.assertEqual(len(graphs.after), 2)  # one forward and one backward for all blocks
        self.assertExpectedInline(
            graphs.after[0],
            """\
all_gather_into_tensor float32[16640]
wait_tensor float32[16640]""",
        )
        self.assertExpectedInline(
            without_copies(graphs.after[1]),
            """\
all_gather_into_tensor float32[16512]
wait_tensor float32[16512]
all_to_all_single uint8[8448]
wait_tensor uint8[8448]
reduce_scatter_tensor float32[128]
wait_tensor float32[128]""",
        )

    def test_without_compression_one_reduce_scatter_for_each_group(self) -> None:
        self.assertExpectedInline(
            traced(1, PLAIN).after[1],
            """\
all_gather_into_tensor float32[16512]
wait_tensor float32[16512]
reduce_scatter_tensor float32[8320]
wait_tensor float32[8320]
reduce_scatter_tensor float32[4096]
wait_tensor float32[4096]""",
        )

    def test_mixed_precision(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        graphs = traced(1, mp_policy=policy)
        self.assertExpectedInline(
            without_copies(graphs.after[1]),
            """\
all_gather_into_tensor bfloat16[16512]
wait_tensor bfloat16[16512]
all_to_all_single uint8[8448]
wait_tensor uint8[8448]
reduce_scatter_tensor float32[128]
wait_tensor float32[128]
all_to_all_single uint8[4224]
wait_tensor uint8[4224]""",
        )


class TestThreeBlocks(TestCase):
    def test_one_all_to_all_for_each_group_and_no_full_size_reduce_scatter(self) -> None:
        graphs = traced(3)
        groups = 3 + 1
        self.assertEqual(counts(graphs, 0), counts_of(gathers=groups))
        # Backward gathers the blocks again, not the root, whose parameters FSDP2 keeps. The norm
        # and the bias of each block, exempt, share one small reduce-scatter.
        expected = counts_of(gathers=groups - 1, scatters=3, exchanges=groups)
        self.assertEqual(counts(graphs, 1), expected)
        left = graphs.modules[1].graph.find_nodes(op="call_function", target=RS)
        numels = {n.meta["val"].numel() for n in left}
        self.assertEqual(numels, {(64 + 64 + 128) // 2})

    def test_without_compression_the_counts_are_those_of_fsdp2(self) -> None:
        graphs = traced(3, PLAIN)
        self.assertEqual(counts(graphs, 0), counts_of(gathers=4))
        self.assertEqual(counts(graphs, 1), counts_of(gathers=3, scatters=4))

    def test_metadata_is_what_the_nodes_give(self) -> None:
        graphs = traced(3)
        with fake_group(2):
            for gm in graphs.modules:
                for name, promise, real in promised_and_real(gm):
                    self.assertEqual(promise, real, name)

    def test_all_ranks_plan_the_same(self) -> None:
        prints, outlines = [], []
        for rank in (0, 2):
            with fake_group(3, rank), recorded() as graphs:  # 64 rows on 3 ranks: uneven
                model = shard(Stack(num_blocks=1))
                model.compile(backend=LoCoBackend(LOCO))
                model(torch.randn(4, 64)).sum().backward()
            prints.append(plan.fingerprint(graphs.exchanges[1]))
            outlines.append(graphs.after[1])
        self.assertEqual(prints[0], prints[1])
        self.assertEqual(outlines[0], outlines[1])

    def test_every_reduce_scatter_has_a_choice(self) -> None:
        graphs = traced(3)
        choices = [c for e in graphs.exchanges[1] for c in e.choices]
        self.assertEqual(len(choices), graphs.before[1].count("reduce_scatter_tensor"))
        declines = [c.decline for c in choices]
        self.assertEqual(declines.count(None), 3 * 2 + 2)
        self.assertEqual(declines.count(Decline.ONE_DIMENSION), 3 * 3)


def counts_of(*, gathers: int, scatters: int = 0, exchanges: int = 0) -> dict[str, int]:
    return {"all_gather": gathers, "reduce_scatter": scatters, "all_to_all": exchanges}


class TestBareGraph(TestCase):
    def test_a_graph_with_markers(self) -> None:
        with fake_group(2):
            step = trace(parameters((64, 128), (33, 96)) + [Grad(bucket="b", is_marked=False)])
            exchanges = pipeline.run(step.gm, LOCO)
            results = step.gm(*step.inputs)
        self.assertEqual([len(e.compressed) for e in exchanges], [2, 0])
        self.assertEqual(
            [(r.numel(), r.dtype) for r in results][:2],
            [(4096, torch.float32), (1632, torch.float32)],
        )
        self.assertExpectedInline(
            without_copies(outline(step.gm.graph)),
            """\
all_to_all_single uint8[5952]
wait_tensor uint8[5952]
reduce_scatter_tensor float32[4096]
wait_tensor float32[4096]""",
        )

    def test_a_graph_without_markers_stays_as_it_is(self) -> None:
        with fake_group(2):
            step = trace([Grad(is_marked=False), Grad(is_marked=False)])
            before = text(step.gm)
            (first, second) = pipeline.run(step.gm, LOCO)
        self.assertEqual(text(step.gm), before)
        reasons = {c.decline for e in (first, second) for c in e.choices}
        self.assertEqual(reasons, {Decline.NO_STATE})

    def test_markers_of_one_declined_parameter_are_removed(self) -> None:
        with fake_group(2):
            step = trace([Grad(plain=Decline.SMALL.value)])
            pipeline.run(step.gm, LOCO)
            outlined = outline(step.gm.graph)
            (result,) = step.gm(*step.inputs)
        self.assertExpectedInline(
            outlined,
            """\
reduce_scatter_tensor float32[4096]
wait_tensor float32[4096]""",
        )
        self.assertEqual(result.numel(), 4096)

    def test_a_graph_without_collectives_stays_as_it_is(self) -> None:
        gm = make_fx(lambda x: x.sin() * 2, tracing_mode="fake")(torch.randn(3))
        before = text(gm)
        self.assertEqual(pipeline.run(gm, LOCO), [])
        self.assertEqual(text(gm), before)


class TestOrder(TestCase):
    def test_every_declared_pass_exists_and_is_run_in_that_order(self) -> None:
        functions = {
            "find": find.find_sites,
            "bucket": bucket.bucket_sites,
            "plan": plan.plan,
            "rewrite": rewrite_module.rewrite,
            "gather": gather.gather,
            "verify": verify.verify,
        }
        self.assertEqual(tuple(functions), pipeline.ORDER)
        source = inspect.getsource(pipeline.run)
        for name, function in functions.items():
            self.assertIn(f"{function.__name__}(", source, name)
