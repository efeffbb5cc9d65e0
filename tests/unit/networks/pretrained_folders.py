"""Folders with tiny models and tokenizers of transformers as ``save_pretrained`` writes them; without downloads."""

from __future__ import annotations

import json

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_TOKENS = 40


def write_folder(
    folder,
    *,
    kind="gpt2",
    tokens="[CLS]",
    places=12,
    num_tokens=NUM_TOKENS,
    names=None,
    padding_side="right",
    **config,
):
    """Write a model for seven classes with bfloat16 weights, and a tokenizer of letters; return the path.

    Args:
        folder: folder to create.
        kind: kind of the model: ``gpt2`` (whose tokenizer gets no padding token), ``bert``, ``roberta`` (whose first
            two positions are reserved) or ``distilbert`` (which takes no token types).
        tokens: special tokens that the tokenizer puts before each text.
        places: number of positions of the model.
        num_tokens: number of tokens of the tokenizer.
        names: names of the tokenizer's outputs; input ids and attention mask when None.
        padding_side: side on which the tokenizer pads, as the folder says.
        config: further settings of the model.
    """
    import torch
    import transformers

    sizes = {
        "gpt2": {"n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": places},
        "distilbert": {"dim": 4, "n_layers": 1, "n_heads": 2, "hidden_dim": 4},
    }
    usual = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4}
    positions = {} if kind in ("gpt2", "xlnet") else {"max_position_embeddings": places}
    settings = {"vocab_size": NUM_TOKENS, "num_labels": 7, **sizes.get(kind, usual), **positions, **config}
    model = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model(kind, **settings)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    special = {"pad_token": None, "eos_token": "<end>"} if kind == "gpt2" else {"pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters(tokens, num_tokens),
        unk_token="[UNK]",
        cls_token="[CLS]",
        model_input_names=names or ["input_ids", "attention_mask"],
        padding_side=padding_side,
        **special,
    ).save_pretrained(folder)
    return str(folder)


def letters(tokens, num_tokens):
    """A tokenizer of ``tokenizers`` with one token per letter, trained on letters; it ignores whitespace."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    special = ["[PAD]", "[UNK]", "[CLS]", "<end>"]
    special += [f"[SPARE{number}]" for number in range(num_tokens - len(special) - len(LETTERS))]
    tokenizer.train_from_iterator(
        LETTERS, trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    )
    assert tokenizer.get_vocab_size() == num_tokens
    if tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens} $A", special_tokens=[(tokens, tokenizer.token_to_id(tokens))]
        )
    return tokenizer


def change_config(folder, **changes):
    """Change settings in the config of a folder, so that they no longer match the weights."""
    path = f"{folder}/config.json"
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({**config, **changes}, file)


def leave_out(folder, *names):
    """Remove weights from a folder."""
    from safetensors.torch import load_file, save_file

    path = f"{folder}/model.safetensors"
    weights = load_file(path)
    for name in names:
        del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
