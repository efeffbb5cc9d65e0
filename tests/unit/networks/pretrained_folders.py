"""Folders with tiny models and tokenizers of transformers, as ``save_pretrained`` writes them; nothing is fetched."""

from __future__ import annotations

import json

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_TOKENS = 40


def write_folder(
    folder, *, kind="gpt2", tokens="[CLS]", places=12, num_tokens=NUM_TOKENS, names=None, **config
):
    """Write a model for seven classes whose weights are of bfloat16, and a tokenizer of letters; return the path.

    Args:
        folder: a new one.
        kind: of the model: ``gpt2`` (whose tokenizer gets no token that fills up), ``bert``, ``roberta`` (whose first
            two places are no texts) or ``distilbert`` (which takes no types of tokens).
        tokens: which the tokenizer puts before each text.
        places: of the model.
        num_tokens: of the tokenizer.
        names: what the tokenizer makes, unless as usual.
        config: of the model, further settings.
    """
    import torch
    import transformers

    sizes = {
        "gpt2": {"n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": places},
        "distilbert": {
            "dim": 4,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 4,
            "max_position_embeddings": places,
        },
    }
    usual = {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 4,
        "max_position_embeddings": places,
    }
    settings = {"vocab_size": NUM_TOKENS, "num_labels": 7, **sizes.get(kind, usual), **config}
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
        **special,
    ).save_pretrained(folder)
    return str(folder)


def letters(tokens, num_tokens):
    """A tokenizer of ``tokenizers`` with a token for each letter, trained on letters; blanks count for nothing."""
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
    """Have the config of a folder say something else than its weights are."""
    path = f"{folder}/config.json"
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({**config, **changes}, file)


def leave_out(folder, *names):
    """Take weights out of a folder."""
    from safetensors.torch import load_file, save_file

    path = f"{folder}/model.safetensors"
    weights = load_file(path)
    for name in names:
        del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
