"""Models and tokenizers of Hugging Face's transformers, as network and inputs. Tried on the *driver*; run on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        texts = checked_texts(columns[self.column], self.column)
        made = self._tokens(texts, max_length=self.max_length, padding=True)
        if made["input_ids"].shape[1] == 0:  # no token in any text: models fail without a place
            made = self._tokens(texts, max_length=1, padding="max_length")
        return {name: np.asarray(made[name], np.int64) for name in taken_names(self.tokenizer)}

    def _tokens(self, texts: list[str], *, max_length: int, padding: bool | str) -> Any:
        return self.tokenizer(
            texts, truncation=True, max_length=max_length, padding=padding, return_tensors="np"
        )


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
