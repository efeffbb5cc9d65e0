"""Reads and writes Hugging Face folders with a causal language model and its tokenizer.

transformers is imported where it is needed.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as
from sparkdl.networks.adapters import with_adapters
from sparkdl.networks.decoder import Decoder
from sparkdl.networks.language import END, FolderTokenizer, LearnedTokenizer, num_tokens_of
from sparkdl.networks.logits import ATTENTION_TYPES, takes_positions
from sparkdl.networks.pretrained import import_transformers
from sparkdl.random_state import seeded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from sparkdl.networks.language import LanguageTokenizer, TokenNumbers


_NOT_READ = "Param pretrained is {!r}, which holds no causal language model with a tokenizer"


def load_language_folder(
    folder: str,
    *,
    lora_rank: int | None,
    seed: int,
    without_weights: Callable[[], AbstractContextManager[None]] | None = None,
) -> tuple[FolderTokenizer, nn.Module]:
    """Return the tokenizer and the model of a folder, with adapters if ``lora_rank`` is given.

    The trained weights are float32: those of the model, or those of adapters for a model that keeps the dtype of its
    folder.

    Args:
        folder: path of a local folder.
        lora_rank: rank of the adapters (LoRA) that are trained in place of the weights; None for no adapters.
        seed: seed of the initial weights of the adapters.
        without_weights: context manager in which modules are made without weights, such as
            :func:`sparkdl.parallel.on_meta`; the model is then made from its configuration, and its weights are not
            read. None to read them.

    Raises:
        ParamError: if a library is missing, the folder has no such model or no tokenizer, or these do not match.
    """
    transformers = import_transformers("Param pretrained")
    context = without_weights or nullcontext
    with errors_as(ParamError, _NOT_READ.format(folder)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if without_weights is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        else:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            with context():
                model = transformers.AutoModelForCausalLM.from_config(config)
            if os.path.exists(f"{folder}/generation_config.json"):
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ParamError(f"The tokenizer in {folder!r} has no end of sequence. Set its eos_token.")
    wrapped = FolderTokenizer(tokenizer)
    if wrapped.num_tokens > num_tokens_of(model, wrapped):
        raise ParamError(
            f"The tokenizer in {folder!r} has {wrapped.num_tokens} tokens, and the model has "
            f"{num_tokens_of(model, wrapped)}. Call model.resize_token_embeddings(len(tokenizer)), and save it again."
        )
    # Masks keep the texts of packed rows apart, and these implementations take masks.
    model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
    if not takes_positions(model):
        raise ParamError(
            f"The model in {folder!r} is a {type(model).__name__}, which takes no position_ids. The texts of a "
            "packed row cannot begin at position 0. Choose another model."
        )
    if any(getattr(layer, "is_decoder", None) is False for layer in model.modules()):
        raise ParamError(
            f"The model in {folder!r} is a {type(model).__name__} that sees later tokens as well: its config.json has "
            "is_decoder false. Choose a model that was trained to continue texts."
        )
    if any(hasattr(layer, "create_position_ids_from_input_ids") for layer in model.modules()):
        raise ParamError(
            f"The model in {folder!r} is a {type(model).__name__}, whose positions begin after its padding token. The "
            "texts of a packed row cannot begin at position 0. Choose another model."
        )
    others = set(getattr(model.config, "layer_types", None) or ()) - set(ATTENTION_TYPES)
    if others:
        raise ParamError(
            f"The model in {folder!r} has layers of the type {min(others)!r}, in which the texts of a packed row would "
            f"not be kept apart. Choose one whose layers are all {' or '.join(ATTENTION_TYPES)}."
        )
    if lora_rank is None:
        if getattr(model.config, "quantization_config", None) is not None:
            raise ParamError(
                f"The weights in {folder!r} are quantized, and only adapters over them can be trained. Set loraRank."
            )
        # Most folders hold bfloat16, in which the small steps of an optimizer are lost.
        return wrapped, model.float()
    with seeded(seed), context():
        return wrapped, with_adapters(model, lora_rank)


def why_converted(folder: str) -> str | None:
    """Return why transformers converts the tensors in a folder's files when it loads them; None if it does not.

    Raises:
        ParamError: if transformers is missing, or the folder holds no configuration of a model.
    """
    transformers = import_transformers("Param pretrained")
    if os.path.exists(f"{folder}/adapter_config.json"):
        return "it holds adapters"
    with errors_as(ParamError, _NOT_READ.format(folder)):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if getattr(config, "transformers_weights", None) is not None:
        return "its configuration names the file of its weights"
    if getattr(config, "dtype", None) is None:
        return "its configuration does not name the dtype of the weights"
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # transformers 4, which converts no tensors
        return None
    kinds = [config.model_type, *(config.architectures or [])]
    conversions = [
        conversion for kind in kinds for conversion in get_checkpoint_conversion_mapping(kind) or []
    ]
    if any(isinstance(conversion, WeightConverter) for conversion in conversions):
        return f"transformers joins or divides weights of a {config.model_type}"
    return None


def save_language_folder(
    decoder: nn.Module, tokenizer: LanguageTokenizer | TokenNumbers, folder: str, *, max_length: int
) -> None:
    """Write a model and its tokenizer in the format of ``AutoModelForCausalLM`` and ``AutoTokenizer``.

    A :class:`~sparkdl.networks.decoder.Decoder` has the architecture of Llama, and is written as such.
    :class:`TokenNumbers` have no tokenizer to write.

    Args:
        decoder: a decoder of sparkdl or a model of transformers.
        tokenizer: tokenizer of the model's tokens.
        folder: path of a local folder.
        max_length: number of positions that a decoder of sparkdl was trained on.
    """
    transformers = import_transformers("save_pretrained")
    model: Any = decoder
    if isinstance(decoder, Decoder):
        model = _as_llama(decoder, transformers, end=tokenizer.end, max_length=max_length)
    model.save_pretrained(folder)
    if isinstance(tokenizer, LearnedTokenizer):
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.library_tokenizer, eos_token=END, model_max_length=max_length
        ).save_pretrained(folder)
    elif isinstance(tokenizer, FolderTokenizer):
        tokenizer.tokenizer.save_pretrained(folder)


def _as_llama(decoder: Decoder, transformers: Any, *, end: int | None, max_length: int) -> nn.Module:
    sizes = decoder.sizes
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden_features,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads or sizes.heads,
        max_position_embeddings=max_length,
        rms_norm_eps=sizes.norm_epsilon,
        rope_theta=sizes.rope_base,
        tie_word_embeddings=sizes.is_tied,
        bos_token_id=None,
        eos_token_id=end,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    model.load_state_dict(_llama_names(decoder), assign=True)
    if sizes.is_tied:
        model.tie_weights()  # type: ignore[operator]  # of transformers
    return model


_LLAMA_NAMES = {
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attention_norm.": "input_layernorm.",
    "attention.query.": "self_attn.q_proj.",
    "attention.key.": "self_attn.k_proj.",
    "attention.value.": "self_attn.v_proj.",
    "attention.output.": "self_attn.o_proj.",
    "feed_forward_norm.": "post_attention_layernorm.",
    "feed_forward.gate.": "mlp.gate_proj.",
    "feed_forward.up.": "mlp.up_proj.",
    "feed_forward.output.": "mlp.down_proj.",
    "head.": "lm_head.",
}


def _llama_names(decoder: Decoder) -> dict[str, Tensor]:
    """The weights of a decoder, by their names in Llama."""
    weights = {}
    for key, weight in decoder.state_dict().items():
        name = key
        for part, other in _LLAMA_NAMES.items():
            name = name.replace(part, other)
        weights["model.norm.weight" if key == "norm.weight" else name] = weight
    return weights
