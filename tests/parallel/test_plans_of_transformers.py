"""The plans that transformers' models carry: each model that can be made small trains with tensor=2 as in one process.

Slow: about a hundred models. A model whose plan cannot be kept must be refused by an error, and none may be wrong.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import sparkdl.torch
from sparkdl.errors import ParamError
from sparkdl.parallel import Parallelism, divide
from tests.parallel.models import STEPS, batch, logits_of, optimizer_of, reference
from tests.run_ranks import RankEnvironment, run_ranks

TOLERANCE = 1e-5  # of float64; some layers compute in float32

SIZES = {
    **dict.fromkeys(["hidden_size", "vocab_size", "vocab_size_per_layer_input"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_hidden_size", "max_position_embeddings"], 64),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_attention_heads", "linear_num_value_heads", "mamba_dt_rank", "laurel_rank"], 4),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "num_key_value_heads", "linear_num_key_heads"], 2),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "index_n_heads"], 2),
    **dict.fromkeys(
        ["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 16
    ),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "index_head_dim"], 16),
    **dict.fromkeys(["head_dim", "global_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "sliding_window", "index_topk"], 8),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(
        ["n_group", "topk_group", "first_k_dense_replace", "decoder_sparse_step", "eos_token_id"], 1
    ),
    **dict.fromkeys(["zero_expert_num", "bos_token_id"], 0),
    "hidden_size_per_layer_input": 8,
}
OPTIONAL = ("head_dim", "num_key_value_heads")  # may be None in a default configuration
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "bailing_hybrid": {"num_hidden_layers": 4, "layer_group_size": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoehybrid": {"layer_types": ["attention"] * 2, "mamba_n_heads": 8},
    "jamba": {
        **dict.fromkeys(["attn_layer_period", "expert_layer_period"], 2),
        **dict.fromkeys(["attn_layer_offset", "expert_layer_offset"], 1),
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    **{name: {"num_hidden_layers": 4} for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
}
NOT_SMALL = {
    # Their configurations take other sizes for each layer, or need more than sizes.
    *(
        "cohere_compass_text",
        "dots1",
        "dots3_note_text",
        "gemma4_text",
        "gemma4_unified_text",
        "qwen4_exp_text",
    ),
    "inkling2_text",  # mixes float32 and float64
    "kimi_linear",  # a minute for each step
}
REFUSED = {
    "apertus": "act_fn.alpha_[np]' whole, and the ranks computed different gradients",  # between divided layers
    "doge": "'model.layers.0.self_attn' computes another result",  # the plan leaves out a parameter of heads
    "inkling_text": "in the style 'all_reduce', which sparkdl does not know",
    "llama4_text": "Did you mean 'model.layers",  # the plan of the class lacks the prefix
    "longcat_flash": "in the style 'experts', which takes a module with num_experts",
}
FAILING = {
    "nemotron_h": "out of bounds for dimension 0",  # eager experts do not skip those of other ranks
}


def names() -> list[str]:
    return [
        name
        for name in CONFIG_MAPPING
        if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
        and CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING
        and not CONFIG_MAPPING[name].sub_configs
        and name not in NOT_SMALL
    ]


def small(name: str) -> nn.Module:
    kind = CONFIG_MAPPING[name]
    default = kind()
    sizes = {
        key: size
        for key, size in SIZES.items()
        if hasattr(default, key) and (key in OPTIONAL or getattr(default, key) is not None)
    }
    if "qk_rope_head_dim" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": False,
        **OTHER_SIZES.get(name, {}),
    }
    torch.manual_seed(11)
    module = AutoModelForCausalLM.from_config(kind(**sizes)).double().eval()
    module.set_experts_implementation("eager")  # others do not take float64
    for parameter in module.parameters():
        if not parameter.any() or not parameter.isfinite().all():
            nn.init.normal_(parameter, std=0.05)
    return module


def outcome_of(name: str) -> str:
    expected = reference(lambda: small(name))
    try:
        layout = Parallelism(tensor=-1).lay_out()
        module = divide(small(name), layout.mesh["tensor"], whole_outputs=True)
        optimizer = optimizer_of(module)
        for step in range(STEPS):
            tokens, labels = batch(step)
            loss = F.cross_entropy(logits_of(module, tokens).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            loss_of_one, gradients = expected[step]
            if abs(loss.item() - loss_of_one) > TOLERANCE * loss_of_one:
                return f"wrong loss in step {step}"
            for key, parameter in module.named_parameters():
                one = gradients[key]
                if (parameter.grad is None) != (one is None):
                    return f"wrong: only one has a gradient of {key}"
                if one is not None:
                    found = parameter.grad.full_tensor()
                    if (found - one).norm() > TOLERANCE * one.norm().clamp_min(1e-6):
                        return f"wrong gradient of {key} in step {step}"
            optimizer.step()
    except ParamError as error:
        return f"refused: {error}"
    except (RuntimeError, IndexError) as error:
        return f"fails: {error}"
    return "equal"


def run_on_rank(environment: RankEnvironment) -> dict[str, str]:
    torch.set_num_threads(1)
    found = {}
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0)
        for name in names():
            found[name] = outcome_of(name)
            dist.barrier()
        sparkdl.torch.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_models_of_transformers_train_as_in_one_process_or_are_refused() -> None:
    known = {
        **{name: f"refused: .*{words}" for name, words in REFUSED.items()},
        **{name: f"fails: .*{words}" for name, words in FAILING.items()},
    }
    for outcomes in run_ranks(2, run_on_rank, timeout_s=1700.0):
        assert len(outcomes) > 80
        unlike = {
            name: outcome
            for name, outcome in outcomes.items()
            if not re.match(known.get(name, "equal$"), outcome, re.DOTALL)
        }
        assert not unlike
