"""Small models, and steps of AdamW on one process as the reference for all kinds of parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteSWAForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
)

from sparkdl.networks.decoder import Decoder, DecoderSizes

SIZES = DecoderSizes(vocabulary=32, width=32, layers=4, heads=4, key_heads=2)
BATCH, POSITIONS = 4, 16
STEPS = 2
"""The second step has the gradients at the weights that the first one has updated."""


def decoder(sizes: DecoderSizes = SIZES) -> Decoder:
    torch.manual_seed(11)
    return Decoder(sizes)


def llama(kind: type[PreTrainedModel] = LlamaForCausalLM, **changes: object) -> nn.Module:
    """A Llama, or another model of transformers with the same sizes."""
    torch.manual_seed(11)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return kind(kind.config_class(**{**sizes, **changes}))


def mixtral(*, implementation: str = "eager", num_experts: int = 4) -> nn.Module:
    """A mixture of experts, each token for two of them."""
    sizes = {"num_local_experts": num_experts, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    module: PreTrainedModel = llama(MixtralForCausalLM, **sizes)
    module.set_experts_implementation(implementation)
    return module


def latent(kind: type[PreTrainedModel] = DeepseekV2ForCausalLM, **changes: object) -> nn.Module:
    """A model with multi-head latent attention, and with shared experts in its later layers."""
    sizes = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "use_cache": False,  # blocks that are recomputed would fill it twice
    }
    return llama(kind, **{**sizes, **changes})


def with_sinks() -> nn.Module:
    """A model whose attention has parameters of its own, one number for each head."""
    module = llama(GraniteSWAForCausalLM, sliding_window=8, use_cache=False)
    for name, parameter in module.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return module


def gpt2() -> nn.Module:
    """A GPT-2, for which transformers has no plan of tensor or pipeline parallelism."""
    torch.manual_seed(11)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=POSITIONS,
            n_embd=32,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=1,
            **dropout,
        )
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and the next tokens as labels, each of shape ``(BATCH, POSITIONS)``."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(32, (BATCH, POSITIONS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    # The large epsilon keeps rounding errors in gradients near 0 from becoming first updates of +-1.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def logits_of(module: nn.Module, tokens: Tensor, **kwargs: object) -> Tensor:
    output = module(tokens, **kwargs)
    return output if isinstance(output, Tensor) else output.logits


@functools.cache
def reference(make: Callable[[], nn.Module]) -> list[tuple[float, dict[str, Tensor]]]:
    """The loss and the gradients of each step on one process."""
    module = make()
    optimizer = optimizer_of(module)
    found = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        loss = F.cross_entropy(logits_of(module, tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = {
            name: p.grad if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
        }
        found.append((loss.item(), gradients))
        optimizer.step()
    return found
