"""Two checks that hold for every way to use FSDP2: parity without, conservation with compression.

`assert_parity`: `method="none"` trains bit for bit like eager FSDP2 (I1).
`assert_conserved`: with LoCo and error_decay 0, what was not sent is in the error (I3). A gradient
that is lost, counted twice, scaled, or reduced over the wrong ranks is off by far more than the
rounding that the bound allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from loco_compile import LoCoBackend, LoCoConfig, compat, error_state
from loco_compile.kernels.reference import decompress_error
from loco_compile.state import ParameterState
from loco_compile.unshard import Spec
from tests.ranks.launch import RanksTest

VOCABULARY = 29
WIDTH = 16
PARITY = LoCoBackend(LoCoConfig(method="none", inner="aot_eager"))
LOCO = LoCoBackend(LoCoConfig(inner="aot_eager", min_numel=0, error_decay=0.0, reset_interval=0))


class Block(nn.Module):
    """A residual block; `bias=False` where rows must divide evenly."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm and head: 29 rows, which no world size divides."""

    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Call `fully_shard` on each block and on the model."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def net(block: Callable[[], nn.Module] = Block, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker of sharded nets with equal weights."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return shard(Net(block), **options)

    return build


def whole(model: nn.Module, backend: LoCoBackend) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)


def regional(model: nn.Module, backend: LoCoBackend) -> Callable[..., Any]:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def sync_on(last: int, *, reshard: bool = True) -> Callable[[nn.Module, int], None]:
    """Return what trainers do: reduce in the last micro-batch only."""

    def switch(model: nn.Module, index: int) -> None:
        model.set_requires_gradient_sync(index == last)
        model.set_is_last_backward(index == last)
        model.set_reshard_after_backward(reshard or index == last)

    return switch


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which may be an ordinary one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclasses.dataclass
class Feature:
    """One way to use FSDP2: how the model is made, called and stepped."""

    build: Callable[[], nn.Module]
    """Makes a sharded model; the same weights at every call."""
    wrap: Callable[[nn.Module, LoCoBackend], Callable[..., Any]] = whole
    data: Callable[[int, int], tuple[Tensor, ...]] | None = None
    """(rank, step) -> arguments of the model; tokens by default."""
    loss: Callable[[Any], Tensor] = lambda output: output.float().pow(2).mean()
    micro_batches: Callable[[nn.Module, int], None] = lambda model, index: None
    """Called before each micro-batch with its index."""
    num_micro_batches: int = 1
    around_step: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None
    """Replaces clipping, the optimizer step and zeroing."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: (
        torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    )

    def backward(self, model: nn.Module, call: Callable[..., Any], rank: int, step: int) -> float:
        """Run all micro-batches of one optimizer step; return the sum of their losses."""
        total = 0.0
        for index in range(self.num_micro_batches):
            self.micro_batches(model, index)
            loss = self.loss(call(*(self.data or tokens)(rank, 100 * index + step)))
            loss.backward()
            total += float(loss)
        return total


def tokens(rank: int, step: int, size: int = 2, length: int = 5) -> tuple[Tensor, ...]:
    """A batch of one rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return (torch.randint(0, VOCABULARY, (size, length), generator=generator),)


@dataclasses.dataclass
class Trained:
    """What a run left on this rank."""

    losses: list[float]
    with_gradient: list[str]
    parameters: dict[str, Tensor]


class FeatureTest(RanksTest):
    """Runs features on real ranks."""

    def check(self, name: str, feature: Feature, *, steps: int = 3, same_none: bool = True) -> None:
        """Run both checks; a case each."""
        with self.case(feature=name, method="none"):
            self.assert_parity(feature, steps=steps, same_none=same_none)
        with self.case(feature=name, method="loco"):
            self.assert_conserved(feature, steps=steps)

    def assert_parity(self, feature: Feature, *, steps: int = 3, same_none: bool = True) -> None:
        """`same_none`: whether the same parameters must be without a gradient."""
        eager = feature.build()
        expected = self._train(feature, eager, eager, steps)
        torch._dynamo.reset()
        model = feature.build()
        found = self._train(feature, model, feature.wrap(model, PARITY), steps)
        self.assertEqual(found.losses, expected.losses, rtol=0, atol=0)
        if same_none:
            self.assertEqual(found.with_gradient, expected.with_gradient)
        self.assertTrue(expected.parameters)
        different = {
            name: (value - found.parameters[name]).abs().max().item()
            for name, value in expected.parameters.items()
            if not torch.equal(value, found.parameters[name])
        }
        self.assertFalse(different, "largest difference of each parameter")

    def _train(
        self, feature: Feature, model: nn.Module, call: Callable[..., Any], steps: int
    ) -> Trained:
        named = dict(model.named_parameters())
        trained = [p for p in named.values() if p.requires_grad]
        optimizer = feature.optimizer(trained)
        losses: list[float] = []
        with_gradient: list[str] = []
        for step in range(steps):
            losses.append(feature.backward(model, call, self.rank, step))
            with_gradient = [n for n, p in named.items() if p.grad is not None]
            if feature.around_step is None:
                torch.nn.utils.clip_grad_norm_(trained, 0.5)
                optimizer.step()
                optimizer.zero_grad()
            else:
                feature.around_step(model, optimizer)
        parameters = {n: local(p).detach().clone() for n, p in named.items()}
        return Trained(losses, with_gradient, parameters)

    def assert_conserved(self, feature: Feature, *, steps: int = 3) -> None:
        """Add up true and sent gradients at fixed weights; the difference must be the error."""
        eager, model = feature.build(), feature.build()
        torch._dynamo.reset()
        call = feature.wrap(model, LOCO)
        unsent: dict[str, Tensor] = {}
        lost: dict[str, float] = {}
        for step in range(steps):
            for part, run in ((eager, eager), (model, call)):
                part.zero_grad()
                feature.backward(part, run, self.rank, step)
            true = dict(eager.named_parameters())
            compressed = compressed_parameters(model)
            self.assertTrue(compressed, "expected compressed parameters")
            for name, state in compressed.items():
                sent = state.fsdp_param.sharded_param.grad
                difference = local(true[name].grad).double() - local(sent).double()
                unsent[name] = unsent.get(name, 0.0) + difference
                lost[name] = lost.get(name, 0.0) + largest_error_step(state)
        for name, state in compressed_parameters(model).items():
            expected = mean_error(state).double()
            shape = unsent[name].shape
            expected = expected[: shape.numel()].reshape(shape)
            # Each step stores the error to one error step; float32 rounds gradients, all below 8.
            bound = lost[name] + steps * 2.0**-20
            worst = (unsent[name] - expected).abs().max().item() if shape.numel() else 0.0
            self.assertLessEqual(worst, bound, name)


def compressed_parameters(model: nn.Module) -> dict[str, ParameterState]:
    """Return what is kept for each compressed parameter, by name in the model."""
    state = error_state(model)
    return dict(zip(state.names(), state, strict=True))


def exchange_group(state: ParameterState) -> dist.ProcessGroup:
    """The ranks that exchange the parameter's codes."""
    spec = Spec.load(state.spec)
    return compat.resolve_group(
        spec.replicate_group if spec.num_replicas > 1 else spec.reduce_group
    )


def largest_error_step(state: ParameterState) -> float:
    """The largest step that a block's error is stored with, on any rank of the exchange."""
    scale = state.memory().scale
    assert scale is not None
    largest = scale.float().max() if scale.numel() else torch.zeros(())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=exchange_group(state))
    return float(largest)


def mean_error(state: ParameterState) -> Tensor:
    """The error averaged over the ranks of the exchange, flat, where this rank's shard gets it."""
    assert state.recipe is not None and state.layout is not None
    planes = decompress_error(state.memory(), state.recipe)
    num_ranks, chunk = state.layout.num_ranks, state.layout.chunk_numel
    own = torch.cat(list(planes), -1).reshape(num_ranks, -1)[:, :chunk].contiguous().float()
    group = exchange_group(state)
    all_ranks = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(all_ranks, own, group=group)
    mean = torch.stack(all_ranks).double().mean(0)
    if Spec.load(state.spec).num_replicas > 1:
        return mean.reshape(-1)
    return mean[dist.get_rank(group)]
