"""Models and tokenizers of Hugging Face's transformers, of a local folder. Loaded on the *driver*; run on *ranks*.

transformers is imported when a folder is read; nothing is fetched from the network.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.training.ready_made.text_inputs import checked_texts
from sparkdl.training.validation import evaluating

_TAKEN = ("input_ids", "attention_mask", "token_type_ids")
_NO_LIMIT = 1 << 20
"""Tokenizers without a limit say so by a huge number."""

_FEW = 8
"""How many tokens any model takes."""


@dataclass(frozen=True, kw_only=True)
class PretrainedTextInputs:
    """Makes the inputs of a model of transformers with its own tokenizer; saved with the model.

    Attributes:
        column: name of the column of texts.
        tokenizer: of transformers.
        max_length: tokens of a text that count, those that the tokenizer adds among them.
    """

    column: str
    tokenizer: Any
    max_length: int

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """Return numbers of tokens and which of them count, each ``(rows, longest)``, and types where there are any.

        Raises:
            DataError: if a row holds no text.
        """
        made = self.tokenizer(
            checked_texts(columns[self.column], self.column),
            truncation=True,
            max_length=self.max_length,
            padding=True,
            return_tensors="np",
        )
        return {name: np.asarray(made[name], np.int64) for name in taken_names(self.tokenizer)}


def taken_names(tokenizer: Any) -> list[str]:
    """Return what a tokenizer makes that a model takes."""
    return [name for name in _TAKEN if name in tokenizer.model_input_names]


class PretrainedTextNetwork(nn.Module):
    """Calls a model of transformers with what :class:`PretrainedTextInputs` makes, and returns the scores of classes.

    Args:
        model: which returns ``logits``.
        names: of the inputs, in the order in which they come.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``(rows, classes)``."""
        scores: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return scores


def check_folder(folder: str) -> None:
    """Check that transformers is installed and a folder may hold a model.

    Raises:
        ParamError: if not.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ParamError(
            f"Param pretrained is {folder!r}, and there is no config.json in such a folder on the driver. It takes a "
            "local folder that model.save_pretrained(folder) and tokenizer.save_pretrained(folder) of transformers "
            "wrote."
        )
    if importlib.util.find_spec("transformers") is None:
        raise ParamError(
            f"Param pretrained is {folder!r}, which transformers reads, and that is not installed here. Install it on "
            "driver and executors: pip install transformers"
        )


def load_folder(folder: str, *, num_outputs: int) -> tuple[Any, PretrainedTextNetwork]:
    """Return tokenizer and network of a folder, with last layers for so many classes, new where it had others or none.

    Raises:
        ParamError: if there is no tokenizer, or no model for texts as a whole, or its weights are those of another.
    """
    try:
        transformers = importlib.import_module("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder,
            local_files_only=True,
            num_labels=num_outputs,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise ParamError(
            f"Param pretrained is {folder!r}, of which transformers makes no tokenizer and model that tells classes: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check_loaded(model, loading, folder)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ParamError(
                f"Param pretrained is {folder!r}, whose tokenizer has no token that fills up. Give it one: "
                "tokenizer.pad_token = ..., and save it again."
            )
        tokenizer.pad_token = tokenizer.eos_token  # as is usual for models that generate texts
    model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, PretrainedTextNetwork(
        model.float(), taken_names(tokenizer)
    )  # weights may come in a lower precision


def longest_text(tokenizer: Any, network: PretrainedTextNetwork, wanted: int) -> int:
    """Return how many tokens of a text a model takes, ``wanted`` at most.

    Tries it, too: of the places that their configuration tells of, some models keep the first for what fills up.

    Raises:
        ParamError: if it takes no text at all.
    """
    config: Any = network.model.config
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    most = min([wanted, *(int(limit) for limit in limits if limit is not None and 0 < limit < _NO_LIMIT)])
    if _failure(tokenizer, network, most) is None:
        return most
    taken, refused = min(_FEW, most), most
    failure = _failure(tokenizer, network, taken)
    if failure is not None:
        raise ParamError(
            f"Param pretrained names a model that fails with a text of {taken} tokens, tried on the driver: "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if _failure(tokenizer, network, middle) is None:
            taken = middle
        else:
            refused = middle
    return taken


def _failure(tokenizer: Any, network: PretrainedTextNetwork, num_tokens: int) -> Exception | None:
    """What a model raises with a text of so many tokens."""
    text = np.array(["a " * num_tokens], dtype=object)
    inputs = PretrainedTextInputs(column="text", tokenizer=tokenizer, max_length=num_tokens)({"text": text})
    try:
        with torch.no_grad(), evaluating(network):
            network(*(torch.from_numpy(inputs[name]) for name in network.names))
    except Exception as error:
        return error
    return None


def _check_loaded(model: Any, loading: Mapping[str, Any], folder: str) -> None:
    """Check that only layers after the body of a model begin anew: the body's own weights are what it is taken for."""
    # With names of another shape are both shapes.
    names = {*loading["missing_keys"], *(each[0] for each in loading["mismatched_keys"])}
    lacking = sorted(name for name in names if _is_of_body(name, model.base_model_prefix))
    if lacking:
        raise ParamError(
            f"Param pretrained is {folder!r}, whose weights are not those of the model that its config.json tells of: "
            f"missing or of another shape are {', '.join(lacking[:3])}{' and more' if len(lacking) > 3 else ''}. Save "
            "it again with model.save_pretrained(folder)."
        )


def _is_of_body(name: str, body: str) -> bool:
    # Models that were trained to guess words lack the pooler, the body's own layer before that for classes.
    return name.startswith(f"{body}.") and ".pooler." not in name
