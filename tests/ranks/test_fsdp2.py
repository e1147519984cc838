"""The rows of docs/fsdp2.md, each on real ranks: parity without, conservation with compression."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from loco_compile import error_state, explain
from tests.ranks.features import (
    LOCO,
    WIDTH,
    Block,
    Feature,
    FeatureTest,
    Net,
    local,
    net,
    regional,
    shard,
    sync_on,
    tokens,
    whole,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.features]

BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASTING = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


# --- activation checkpointing


class CheckpointedInside(Block):
    """A block that checkpoints its own forward: FSDP2's hooks are outside of the region."""

    context_fn: Any = None

    def forward(self, x: Tensor) -> Tensor:
        extra = {} if self.context_fn is None else {"context_fn": self.context_fn}
        return checkpoint(super().forward, x, use_reentrant=False, **extra)


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save matrix products, recompute the rest."""
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(CheckpointedInside):
    """Keeps matrix products."""

    context_fn = functools.partial(create_selective_checkpoint_contexts, save_products)


class CheckpointedOutside(Net):
    """Checkpoints calls of sharded blocks: FSDP2's hooks are inside of the region."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def wrapped(*, first: bool) -> nn.Module:
    """`checkpoint_wrapper` inside (`first`) or outside the sharded block."""
    torch.manual_seed(0)
    model = Net()
    for index, block in enumerate(model.blocks):
        if first:
            model.blocks[index] = fully_shard(checkpoint_wrapper(block))
        else:
            model.blocks[index] = checkpoint_wrapper(fully_shard(block))
    return fully_shard(model)


def checkpointed_outside(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard(CheckpointedOutside(), **options)


# --- parameters


def tied() -> nn.Module:
    """The head's weight is the embedding's, as in GPT-2; of a copy."""
    torch.manual_seed(0)
    model = Net()
    model.head.weight = model.embed.weight
    return shard(copy.deepcopy(model))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapters() -> nn.Module:
    """Only adapters are trained, and a parameter without elements."""
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)
        block.nothing = nn.Parameter(torch.zeros(0, 3))
    return shard(model)


def with_ignored_parameters() -> nn.Module:
    """The blocks' norms are no business of FSDP2: each rank trains its own, on equal data."""
    torch.manual_seed(0)
    model = Net()
    ignored = {p for block in model.blocks for p in block.norm.parameters()}
    for block in model.blocks:
        fully_shard(block, ignored_params=ignored)
    return fully_shard(model, ignored_params=ignored)


def from_meta() -> nn.Module:
    with torch.device("meta"):
        model = Net(Experts)
    shard(model).to_empty(device="cpu")
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(local(tensor), std=0.1)
    return model


class Experts(Block):
    """Two experts, of which one may get no token; buffers, of which one counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("gain", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = super().forward(x) * self.gain
        # A mask as routers make it: an expert without tokens gets zeros, not no gradient.
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        return self.experts[0](x) * mask + self.experts[1](x) * (1 - mask)


class Skipping(Net):
    """Leaves out the second block when told to; the same on all ranks."""

    skips = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        if not self.skips:
            x = self.blocks[1](x)
        return self.head(self.norm(x))


def skipping() -> nn.Module:
    torch.manual_seed(0)
    return shard(Skipping(num_blocks=2))


def skip_first_micro_batch(model: nn.Module, index: int) -> None:
    model.skips = index == 0


class SeveralOutputs(Net):
    """Returns every block's output."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return {"logits": self.head(self.norm(x)), "hidden": outputs}


class Reader(Block):
    """Reads, twice, what is not the output of the block before."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x) + self.up(memory).tanh() @ self.down.weight.T + memory.sin()


class Readers(Net):
    """All blocks read the embedding, as a decoder's layers read the encoder's output."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = memory = self.embed(tokens)
        for block in self.blocks:
            x = block(x, memory=memory)
        return self.head(self.norm(x))


def readers() -> nn.Module:
    torch.manual_seed(0)
    return shard(Readers(Reader, num_blocks=3))


def several_outputs() -> nn.Module:
    torch.manual_seed(0)
    return shard(SeveralOutputs(num_blocks=2))


# --- groups and settings


def grouped(*names: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker of nets in which these modules share one FSDP group."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            fully_shard(block)
        fully_shard([model.get_submodule(n) for n in names], **options)
        return fully_shard(model)

    return build


def configured(setter: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    """Return a maker of nets on all FSDP modules of which `setter` was called."""

    def build() -> nn.Module:
        model = net()()
        for module in model.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                setter(module)
        return model

    return build


def divide_sums_by_3(module: Any) -> None:
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(3.0)


def prefetching() -> nn.Module:
    model = net(reshard_after_forward=False)()
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.set_modules_to_backward_prefetch([model.blocks[0]])
    model.set_post_optim_event(torch.Event("cpu"))
    return model


# --- gradient accumulation


# --- around the step


class Int8Momentum(torch.optim.Optimizer):
    """Momentum kept in int8, with one scale for each parameter's shard."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[parameter], local(parameter.grad)
                if not state:
                    state.update(codes=torch.zeros_like(grad, dtype=torch.int8), scale=0.0)
                momentum = 0.9 * state["codes"] * state["scale"] + grad
                state["scale"] = float(momentum.abs().max()) / 127 if momentum.numel() else 0.0
                if state["scale"]:
                    state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
                local(parameter).sub_(group["lr"] * momentum)


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def step_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing is left to do: see `with_optimizer_in_backward`."""


def with_optimizer_in_backward() -> nn.Module:
    model = net()()

    def step(parameter: Tensor) -> None:
        parameter.optimizer.step()
        parameter.optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.optimizer = torch.optim.SGD([parameter], lr=1e-2)
        parameter.register_post_accumulate_grad_hook(step)
    return model


class TestOnTwoRanks(FeatureTest):
    world_size = 2

    def test_activation_checkpointing(self) -> None:
        for name, build in {
            "checkpoint_wrapper inside": functools.partial(wrapped, first=True),
            "checkpoint_wrapper outside": functools.partial(wrapped, first=False),
            "selective checkpoint in a block": net(Selective),
            "checkpoint around blocks, kept unsharded": functools.partial(
                checkpointed_outside, reshard_after_forward=False
            ),
        }.items():
            self.check(name, Feature(build))
        self.check("checkpoint around, regional", Feature(checkpointed_outside, wrap=regional))
        self.finish_cases()

    def test_parameters(self) -> None:
        for name, build in {
            "tied; deepcopy before fully_shard": tied,
            "frozen base with adapters; 0 elements": adapters,
            "meta init; buffers; experts": from_meta,
        }.items():
            self.check(name, Feature(build))
        ignoring = Feature(
            with_ignored_parameters,
            data=lambda rank, step: tokens(0, step),
            around_step=zero_in_place,
        )
        self.check("ignored_params", ignoring)
        self.finish_cases()

    def test_forwards(self) -> None:
        skip = Feature(skipping, micro_batches=skip_first_micro_batch, num_micro_batches=2)
        self.check("block left out in every other forward", skip)
        reads_some = Feature(several_outputs, loss=lambda out: out["logits"].pow(2).mean())
        self.check("several outputs, one read", reads_some)
        self.check("a tensor that all blocks read", Feature(readers))
        self.finish_cases()

    def test_a_parameter_behind_an_output_that_the_loss_ignores_gets_zeros(self) -> None:
        with self.case(feature="loss of the first block's output"):
            model = several_outputs()
            call = whole(model, LOCO)
            call(*tokens(self.rank, 0))["hidden"][0].sum().backward()
            gradient = local(model.blocks[1].up.weight.grad)
            self.assertFalse(gradient.any())
        self.finish_cases()

    def test_groups_and_settings(self) -> None:
        for name, build in {
            "fully_shard([embed, norm, head])": grouped("embed", "norm", "head"),
            "[norm, head], kept unsharded": grouped("norm", "head", reshard_after_forward=False),
            "[norm, head], cast on the way in and out": grouped("norm", "head", mp_policy=CASTING),
            "sums, divided by 3": configured(divide_sums_by_3),
            "kept unsharded, prefetch, event after the optimizer": prefetching,
        }.items():
            with self.case(feature=name, method="none"):
                self.assert_parity(Feature(build))
            if "cast" not in name and "divided" not in name:  # the bound is for plain float32
                with self.case(feature=name, method="loco"):
                    self.assert_conserved(Feature(build))
        self.check("[norm, head], regional", Feature(grouped("norm", "head"), wrap=regional))
        self.finish_cases()

    def test_names_in_shared_groups(self) -> None:
        with self.case(feature="fully_shard([norm, head])"):
            model = grouped("norm", "head")()
            whole(model, LOCO)(*tokens(self.rank, 0)).sum().backward()
            names = {n for n, p in model.named_parameters() if p.dim() > 1}
            self.assertEqual(set(error_state(model).names()), names)
            rows = [n for row in explain(model).rows for n in row.parameters]
            self.assertEqual(sorted(rows), sorted(n for n, _ in model.named_parameters()))
        self.finish_cases()

    def test_gradient_accumulation(self) -> None:
        for name, feature in {
            "no_sync, bf16": Feature(
                net(mp_policy=BF16_FP32), micro_batches=sync_on(2), num_micro_batches=3
            ),
            "no_sync, regional": Feature(
                net(), wrap=regional, micro_batches=sync_on(2), num_micro_batches=3
            ),
            "no_sync, regional, bf16": Feature(
                net(mp_policy=BF16_FP32), regional, micro_batches=sync_on(2), num_micro_batches=3
            ),
            "no_sync, unsharded between": Feature(
                net(), micro_batches=sync_on(2, reshard=False), num_micro_batches=3
            ),
            "no_sync, checkpointed": Feature(
                checkpointed_outside, micro_batches=sync_on(1), num_micro_batches=2
            ),
        }.items():
            if "bf16" not in name:
                self.check(name, feature)
            else:
                with self.case(feature=name):  # the bound is for plain float32
                    self.assert_parity(feature)
        with self.case(feature="every backward reduces"):
            self.assert_parity(Feature(net(), num_micro_batches=3))
        self.finish_cases()

    def test_a_held_gradient_is_compressed_once(self) -> None:
        with self.case(feature="no_sync"):
            model = net()()
            call = whole(model, LOCO)
            switch = sync_on(1)
            for index in range(2):
                switch(model, index)
                before = {n: [t.clone() for t in p.error] for n, p in self.kept(model)}
                call(*tokens(self.rank, index)).sum().backward()
                after = dict(self.kept(model))
                changed = [
                    not torch.equal(old, new)
                    for name, olds in before.items()
                    for old, new in zip(olds, after[name].error, strict=True)
                ]
                self.assertEqual(any(changed), index == 1)
                # torch 2.11 fills in zeros where later versions leave no gradient.
                has_gradient = [
                    p.grad is not None and bool(local(p.grad).any()) for p in model.parameters()
                ]
                self.assertEqual(any(has_gradient), index == 1)
        self.finish_cases()

    def kept(self, model: nn.Module) -> list[tuple[str, Any]]:
        try:
            state = error_state(model)
        except ValueError:
            return []
        return list(zip(state.names(), state, strict=True))

    def test_switches_between_forward_and_backward_are_refused(self) -> None:
        for name, switch in {
            "sync": lambda model: model.set_requires_gradient_sync(False),
            "factor": lambda model: model.set_gradient_divide_factor(2.0),
        }.items():
            with self.case(switch=name):
                model = net()()
                loss = whole(model, LOCO)(*tokens(self.rank, 0)).sum()
                switch(model)
                with self.assertRaisesRegex(RuntimeError, "before the forward"):
                    loss.backward()
        self.finish_cases()

    def test_around_the_step(self) -> None:
        for name, feature in {
            "SGD, foreach, zero_grad(set_to_none=False)": Feature(
                net(),
                optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
                around_step=zero_in_place,
            ),
            "momentum in int8": Feature(net(), optimizer=lambda p: Int8Momentum(p, lr=1e-2)),
            "AdamW, fused": Feature(
                net(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)
            ),
        }.items():
            with self.case(feature=name):
                self.assert_parity(feature)
        with self.case(feature="optimizer in backward"):
            feature = Feature(with_optimizer_in_backward, around_step=step_in_backward)
            self.assert_parity(feature)
        self.finish_cases()
