"""A stand-in for transformers, as a module in a folder: what the real one is asked for, on a tiny model."""

from __future__ import annotations

import json
import sys

TRANSFORMERS = '''
import json
import os
import numpy as np
import torch
from torch import nn

class Config:
    max_position_embeddings = 12

class Body(nn.Module):
    def __init__(self, first_place):
        super().__init__()
        self.words = nn.Embedding(40, 4, dtype=torch.bfloat16)
        self.places = nn.Embedding(Config.max_position_embeddings, 4, dtype=torch.bfloat16)
        self.first_place = first_place

    def forward(self, input_ids):
        return self.words(input_ids) + self.places(self.first_place + torch.arange(input_ids.shape[1]))

class TinyModel(nn.Module):
    base_model_prefix = "body"

    def __init__(self, num_labels, first_place):
        super().__init__()
        self.config = Config()
        self.body = Body(first_place)
        self.classifier = nn.Linear(4, num_labels, dtype=torch.bfloat16)

    def get_input_embeddings(self):
        return self.body.words

    def forward(self, *, input_ids, attention_mask):
        assert input_ids.shape[1] > 0, "no tokens"
        counted = attention_mask.unsqueeze(2).to(self.body.words.weight.dtype)
        means = (self.body(input_ids) * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        return type("Output", (), {"logits": self.classifier(means)})

class HandingOn(TinyModel):
    def get_input_embeddings(self):
        raise NotImplementedError("of no kind that is known")

    def forward(self, **inputs):
        assert not inputs.pop("token_type_ids").any()
        return super().forward(**inputs)

class TinyTokenizer:
    """A token for each letter, after one that begins a text or none. Its settings are attributes."""
    vocab_files_names = {"vocab_file": "letters.txt", "tokenizer_file": "tokenizer.json"}
    begins = True
    num_tokens = 40
    model_max_length = int(1e30)
    model_input_names = ["input_ids", "attention_mask"]
    pad_token, eos_token, pad_token_id = None, "<end>", 39

    def get_vocab(self):
        return {str(number): number for number in range(self.num_tokens)}

    def __call__(self, texts, *, truncation, max_length, padding, return_tensors):
        assert truncation and padding in (True, "max_length") and return_tensors == "np" and isinstance(texts, list)
        start = [1] * self.begins
        rows = [[*start, *(2 + ord(letter) % 30 for letter in text)][:max_length] for text in texts]
        longest = max_length if padding == "max_length" else max(map(len, rows))
        ids = np.full((len(rows), longest), self.pad_token_id)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)], mask[index, : len(row)] = row, 1
        made = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        return {name: made[name] for name in self.model_input_names}

def read(folder, name):
    if not os.path.exists(os.path.join(folder, name)):
        return {}
    with open(os.path.join(folder, name)) as file:
        return json.load(file)

class AutoTokenizer:
    @staticmethod
    def from_pretrained(folder, *, local_files_only):
        assert local_files_only
        read(folder, "tokenizer.json")  # without it, transformers 5 makes a tokenizer that knows no word
        tokenizer = TinyTokenizer()
        vars(tokenizer).update(read(folder, "tokenizer_config.json"))
        return tokenizer

class AutoModelForSequenceClassification:
    @staticmethod
    def from_pretrained(
        folder, *, local_files_only, num_labels, ignore_mismatched_sizes, output_loading_info
    ):
        assert local_files_only and ignore_mismatched_sizes and output_loading_info
        said = read(folder, "config.json")
        info = {
            "missing_keys": said.get("missing", []),
            "unexpected_keys": [],
            # as transformers 5 has it; without shapes, as 4.57 does
            "mismatched_keys": [(name, (1,), (2,)) for name in said.get("mismatched", [])]
            + said.get("mismatched_names", []),
            "error_msgs": [],
        }
        kind = HandingOn if said.get("hands_on") else TinyModel
        return kind(num_labels, said.get("first_place", 0)), info
'''


def install(folder, monkeypatch):
    """Have the stand-in imported in the place of what may be installed, until the test ends."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # so that what is imported goes when the test ends
    del sys.modules["transformers"]
    (folder / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.syspath_prepend(str(folder))


def write_folder(folder, *, tokenizer=None, **config):
    """Write what the stand-in takes for a model and a tokenizer, and return the path.

    Args:
        folder: a new one.
        tokenizer: attributes that it is to have.
        config: weights that are ``missing``, or ``mismatched`` as transformers 5 tells it, or ``mismatched_names``, as
            4.57 does; the ``first_place`` of a text; whether it ``hands_on`` any input, types of tokens as well,
            and does not tell how it embeds them.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))
    return str(folder)
