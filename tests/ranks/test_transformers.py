"""Hugging Face Transformers models, unmodified and tiny, on real ranks: parity and conservation.

Weights are random, and dropout is 0: eager and compiled code draw their random numbers in different
orders. `use_cache=False` is what training needs anyway; with it on, Dynamo also traces the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from loco_compile import LoCoBackend
from loco_compile.guard import UncapturedError
from tests.ranks.features import PARITY, Feature, FeatureTest, whole

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.features]

VOCABULARY = 61  # which 3 ranks do not divide
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "use_cache": False,
}


def llama(**fields: Any) -> nn.Module:
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1, **fields})
    return transformers.LlamaForCausalLM(config)


def checkpointed_llama(**fields: Any) -> nn.Module:
    """Recomputes each layer's forward; Transformers keeps FSDP2's hooks outside of that region."""
    model = llama(**fields)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def gpt2(*, names_loss: bool = True) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    if names_loss:
        # It has none by default and logs so in every forward; Dynamo breaks the graph at a logger.
        model.loss_type = "ForCausalLM"
    return model


def mixtral(**fields: Any) -> nn.Module:
    """4 experts, 2 for each token; `grouped_mm` by default, which has no data-dependent loop."""
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=1, num_local_experts=4, **fields
    )
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """All decoder layers read the encoder's output, and four modules share the embedding."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


LAYERS = {"LlamaDecoderLayer", "MixtralDecoderLayer", "GPT2Block", "BertLayer", "T5Block"}


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers; `fully_shard` puts FSDP in front of the name of their class."""
    return [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in LAYERS]


def sharded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker of models with an FSDP group for each layer and one for the rest."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = make().train()
        for layer in layers(model):
            fully_shard(layer)
        return fully_shard(model)

    return build


def regional(model: nn.Module, backend: LoCoBackend) -> Callable[..., Any]:
    for layer in layers(model):
        layer.compile(backend=backend)
    return model


@dataclasses.dataclass
class Language(Feature):
    """A model that is called with tokens and labels, as Transformers' trainer does."""

    def backward(self, model: nn.Module, call: Callable[..., Any], rank: int, step: int) -> float:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        tokens = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.item()


class TestTransformers(FeatureTest):
    world_size = 3

    def check_both(
        self, name: str, make: Callable[[], nn.Module], *, conserved: Callable[..., Any]
    ) -> None:
        """Check parity of both ways to compile, and conservation of one of them.

        The codec is what takes long to trace. Regional compile has it once for all layers.
        """
        for wrap in (whole, regional):
            with self.case(model=name, wrap=wrap.__name__):
                self.assert_parity(Language(sharded(make), wrap=wrap), steps=5)
        with self.case(model=name, wrap=conserved.__name__, method="loco"):
            self.assert_conserved(Language(sharded(make), wrap=conserved), steps=2)

    def assert_refused(
        self,
        name: str,
        make: Callable[[], nn.Module],
        reason: str,
        wrap: Callable[..., Any] = whole,
    ) -> None:
        """Expect an error with Dynamo's reason."""
        with self.case(refused=name, wrap=wrap.__name__):
            feature = Language(sharded(make), wrap=wrap)
            model = feature.build()
            with self.assertRaisesRegex(UncapturedError, f"Reason: {reason}"):
                feature.backward(model, feature.wrap(model, PARITY), self.rank, 0)

    def test_llama(self) -> None:
        self.check_both("Llama", llama, conserved=whole)
        self.finish_cases()

    def test_gradient_checkpointing(self) -> None:
        # Transformers 5.25 sets a context variable around each attention (to look up hub kernels),
        # and Dynamo traces no such thing in a checkpointed region unless told to leave it out.
        self.assert_refused("Llama, as it is", checkpointed_llama, "HOP: Unsafe side effect")
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            self.check_both("Llama", checkpointed_llama, conserved=regional)
            # Told to cache, it logs that it will not.
            caching = functools.partial(checkpointed_llama, use_cache=True)
            self.assert_refused("Llama, use_cache=True", caching, "logging.Logger method")
        self.finish_cases()

    def test_gpt2(self) -> None:
        self.check_both("GPT-2", gpt2, conserved=whole)
        nameless = functools.partial(gpt2, names_loss=False)
        self.assert_refused("GPT-2 without a loss_type", nameless, "logging.Logger method")
        self.finish_cases()

    def test_mixtral(self) -> None:
        self.check_both("Mixtral", mixtral, conserved=regional)
        looping = functools.partial(mixtral, experts_implementation="eager")
        self.assert_refused("Mixtral, eager experts", looping, "Dynamic shape operator")
        self.assert_refused("Mixtral, eager experts", looping, "Dynamic shape operator", regional)
        self.finish_cases()

    def test_bert(self) -> None:
        self.check_both("BERT", bert, conserved=regional)
        self.finish_cases()

    def test_t5(self) -> None:
        self.check_both("T5", t5, conserved=regional)
        self.finish_cases()
