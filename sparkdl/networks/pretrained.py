"""Models and tokenizers of Hugging Face's transformers, as network and inputs.

They are tried on the *driver* and run on ranks. The folders must be written by ``save_pretrained`` of transformers;
the *driver* checks them and refuses models that are not supported. transformers is imported when a folder is read;
nothing is fetched from the network.
"""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError, list_names
from sparkdl.foreign_errors import errors_as, how_to_install, needing
from sparkdl.model.architecture import evaluating
from sparkdl.networks.folder_tokens import TextEncoder
from sparkdl.networks.text import ROWS_AT_ONCE, check_texts

_TAKEN = ("input_ids", "attention_mask", "token_type_ids")
_NO_LIMIT = 1 << 20
"""Tokenizers without a limit have a huge number as their limit."""

_FEW = 8
"""Number of tokens that any model takes."""

PADDINGS = ("right", "left", "full")
"""Padding at the end or at the start, to the longest text of a batch; or at the end, to the model's longest text."""


@dataclass(frozen=True, kw_only=True)
class PretrainedTextInputs:
    """Converts texts to the inputs of a model of transformers with its own tokenizer; saved with the model.

    Attributes:
        column: name of the column of texts.
        tokenizer: tokenizer of transformers.
        max_length: maximum number of tokens of a text, including those that the tokenizer adds; later tokens are cut
            off.
        padding: how texts of a batch get one length, one of :data:`PADDINGS`.
    """

    column: str
    tokenizer: Any
    max_length: int
    padding: str = "right"
    rows_at_once: ClassVar = ROWS_AT_ONCE

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """Return token numbers and the attention mask, each ``(rows, longest)``, and token types if the model has them.

        A text without any token gets one padding token that is attended to: models fail without a token.

        Raises:
            DataError: if a row does not hold a text.
        """
        texts = self._encoder.encode(check_texts(columns[self.column], self.column))
        template, tokenizer = self._encoder.template, self.tokenizer
        before, after = len(template.before), len(template.after)
        room = max(self.max_length - before - after, 0)
        rows = [
            [*template.before, *text[:room], *template.after] or [tokenizer.pad_token_id] for text in texts
        ]
        lengths = np.array([len(row) for row in rows], np.int64)
        width = self.max_length if self.padding == "full" else int(lengths.max(initial=1))
        begins = width - lengths if self.padding == "left" else np.zeros_like(lengths)
        shape = len(rows), width
        made = {
            "input_ids": np.full(shape, tokenizer.pad_token_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.full(shape, tokenizer.pad_token_type_id, np.int64),
        }
        for number, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            at = np.s_[number, begin : begin + len(row)]
            made["input_ids"][at] = row
            made["attention_mask"][at] = 1
            made["token_type_ids"][at] = [
                *template.types[:before],
                *[template.types[before]] * (len(row) - before - after),
                *template.types[before + 1 :],
            ]
        return {name: made[name] for name in taken_names(tokenizer)}

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)


def taken_names(tokenizer: Any) -> list[str]:
    """Return the names of a tokenizer's outputs that a model takes."""
    return [name for name in _TAKEN if name in tokenizer.model_input_names]


class PretrainedTextNetwork(nn.Module):
    """Calls a model of transformers with the inputs of :class:`PretrainedTextInputs`, and returns the class scores.

    Args:
        model: model whose output has ``logits``.
        names: names of the inputs, in the order in which they are given.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``(rows, classes)``."""
        scores: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return scores

    def new_layers(self) -> list[str]:
        """Return the names of the model's submodules that are new, or may be: those after its body, and its pooler."""
        model: Any = self.model
        body = model.base_model_prefix
        # peft takes names that end so: a layer without weights, such as a dropout, would be found in the body as well.
        after = [
            name
            for name, layer in model.named_children()
            if name != body and next(layer.parameters(), None) is not None
        ]
        return after + [name for name, _ in model.named_modules() if name.endswith(".pooler")]


class TextEmbedding(PretrainedTextNetwork):
    """Calls a model of transformers, and returns the mean of its last hidden states over a text's tokens."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``(rows, hidden size)``."""
        named = dict(zip(self.names, inputs, strict=True))
        states = self.model(**named).last_hidden_state
        if "attention_mask" not in named:
            mean: Tensor = states.mean(dim=1)
            return mean
        mask = named["attention_mask"].unsqueeze(-1).to(states.dtype)
        pooled: Tensor = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return pooled


class ImageEmbedding(nn.Module):
    """Calls a model of transformers for images, and returns one vector per image.

    That is what the model itself pools, such as the projected image features of CLIP; else the mean of its last hidden
    states over the patches and tokens of an image.

    Args:
        model: model without a head.
        has_pooler: whether the weights of its own pooling layer were trained, if it has such a layer.
    """

    def __init__(self, model: nn.Module, *, has_pooler: bool) -> None:
        super().__init__()
        self.model = model
        self.has_pooler = has_pooler

    def forward(self, pixels: Tensor) -> Tensor:
        """Return ``(rows, hidden size)`` for images of ``(rows, channels, height, width)``."""
        model: Any = self.model
        if hasattr(model, "get_image_features"):  # a model of images and texts
            outputs = model.get_image_features(pixel_values=pixels)
            features: Tensor = outputs if isinstance(outputs, Tensor) else outputs.pooler_output
            return features
        outputs = model(pixel_values=pixels)
        pooled: Tensor | None = getattr(outputs, "pooler_output", None)
        if pooled is not None and self.has_pooler:
            return pooled.flatten(1)
        states: Tensor = outputs.last_hidden_state
        return states.mean(dim=1) if states.dim() == 3 else states.mean(dim=(2, 3))


def fitting_inputs(
    folder: str, tokenizer: Any, network: PretrainedTextNetwork, *, column: str, wanted: int
) -> PretrainedTextInputs:
    """Return the inputs of a model for texts of at most ``wanted`` tokens, or of as many as the model takes.

    The number is tried, as some models reserve the first of the positions in their configuration for padding. So are
    the :data:`PADDINGS`, whatever the folder says: the first is taken that makes a text's output independent of the
    other texts of the batch.

    Raises:
        ParamError: if the model fails even with a short text, or depends on the other texts with any padding.
    """
    most = _longest_text(tokenizer, network, wanted)
    inputs = PretrainedTextInputs(column=column, tokenizer=tokenizer, max_length=most)
    for padding in PADDINGS:
        tried = replace(inputs, padding=padding)
        if _answers_each_alone(tried, network):
            return tried
    raise ParamError(
        f"Param pretrained is {folder!r}, with a {type(network.model).__name__} whose output for a text depends on the "
        "other texts of its batch, with padding before or after the texts. Choose another model."
    )


_NOISE = 1e-3
"""Difference between outputs that rounding can make, relative to the largest output."""


def _answers_each_alone(inputs: PretrainedTextInputs, network: PretrainedTextNetwork) -> bool:
    """Whether a model's output for a short text and an empty one is the same beside a long text."""
    long = " ".join("abcdefghijklmnopqrstuvwxyz" * (1 + inputs.max_length // 26))

    def outputs(*texts: str) -> Tensor:
        made = inputs({inputs.column: np.array(texts, dtype=object)})
        with torch.no_grad(), evaluating(network):
            scores: Tensor = network(*(torch.from_numpy(made[name]) for name in network.names))
        return scores

    short = ["a b", ""]
    try:
        alone = torch.cat([outputs(text) for text in short])
        difference = (outputs(*short, long[: 2 * inputs.max_length])[:2] - alone).abs().max()
    except Exception:  # models that shorten texts take no short text alone
        return False
    return bool(difference <= _NOISE * alone.abs().max())


def _longest_text(tokenizer: Any, network: PretrainedTextNetwork, wanted: int) -> int:
    config: Any = network.model.config
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    most = min([wanted, *(int(limit) for limit in limits if limit is not None and 0 < limit < _NO_LIMIT)])
    if _failure(tokenizer, network, most) is None:
        return most
    few = min(_FEW, most)
    failure = _failure(tokenizer, network, few)
    if failure is not None:
        raise ParamError(
            f"The model of Param pretrained failed on the driver with a text of {few} tokens: "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    more = range(few + 1, most)
    return few + bisect.bisect_left(
        more, True, key=lambda length: _failure(tokenizer, network, length) is not None
    )


def _failure(tokenizer: Any, network: PretrainedTextNetwork, num_tokens: int) -> Exception | None:
    """The exception that a model raises for a text of ``num_tokens`` tokens; None if it raises none."""
    text = np.array(["a " * num_tokens], dtype=object)
    inputs = PretrainedTextInputs(column="text", tokenizer=tokenizer, max_length=num_tokens)({"text": text})
    try:
        with torch.no_grad(), evaluating(network):
            network(*(torch.from_numpy(inputs[name]) for name in network.names))
    except Exception as error:
        return error
    return None


_VOCABULARIES = ("tokenizer.*", "*.model", "tekken.json")
"""Files for which transformers looks in addition to those that the class of a tokenizer names."""


def import_transformers(what: str) -> Any:
    """Return transformers, or raise a ParamError that says that ``what`` needs it and what to install."""
    with needing(what, "text", "transformers"):
        return importlib.import_module("transformers")


def check_folder(folder: str) -> None:
    """Check that transformers is installed and that a folder has the ``config.json`` of a model.

    Raises:
        ParamError: if either is missing.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ParamError(
            f"Param pretrained is {folder!r}, and there is no config.json in such a folder on the driver. It takes a "
            "local folder that model.save_pretrained(folder) and tokenizer.save_pretrained(folder) of transformers "
            "wrote."
        )
    if importlib.util.find_spec("transformers") is None:
        raise ParamError(
            f"Param pretrained is {folder!r}, which needs transformers on driver and executors, and that is not "
            f"installed here. {how_to_install('text', 'transformers')}"
        )


def load_folder(folder: str, *, num_outputs: int) -> tuple[Any, PretrainedTextNetwork]:
    """Return the tokenizer and the network of a folder, with ``num_outputs`` classes.

    The last layers are new if the model has none, or has them for a different number of classes.

    Raises:
        ParamError: if the folder holds no tokenizer or no model that can classify texts, or the weights are those of
            another model.
    """
    tokenizer, model, loading = load_parts(
        folder,
        "AutoModelForSequenceClassification",
        num_labels=num_outputs,
        ignore_mismatched_sizes=True,
    )
    _check_loaded(model, loading, folder)
    return tokenizer, PretrainedTextNetwork(model, taken_names(tokenizer))


def load_parts(folder: str, loader: str, **options: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    """Return the tokenizer and the model of a folder, and how the weights were loaded.

    Raises:
        ParamError: if the folder holds no tokenizer or no such model, or both do not fit together.
    """
    what = f"Param pretrained is {folder!r}, from which transformers loads no tokenizer and {loader[4:]}"
    advice = "It takes what model.save_pretrained(folder) and tokenizer.save_pretrained(folder) wrote."
    transformers = import_transformers("Param pretrained")
    with errors_as(ParamError, what, advice):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, loading = getattr(transformers, loader).from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **options
        )
    _check_tokenizer(tokenizer, folder)
    _check_tokens(tokenizer, model, folder)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ParamError(
                f"Param pretrained is {folder!r}, whose tokenizer has no padding token. Give it one: "
                "tokenizer.pad_token = ..., and save it again."
            )
        tokenizer.pad_token = tokenizer.eos_token  # as usual for models that generate texts
    for config in (
        model.config,
        model.config.get_text_config(),
    ):  # one, unless the model takes more than texts
        config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_input_names = _names_for(model, tokenizer.model_input_names)
    return tokenizer, model.float(), loading  # weights may be of a lower precision


def _names_for(model: Any, names: list[str]) -> list[str]:
    """The names of a tokenizer's outputs that a model takes: a generic tokenizer makes token types for any model."""
    takes = inspect.signature(model.forward).parameters
    # A forward that does not name tokens passes all arguments on. A forward that names them may accept others as
    # keywords and reject them further down.
    return [name for name in names if name in takes] if "input_ids" in takes else names


def _check_tokenizer(tokenizer: Any, folder: str) -> None:
    """Check that a folder holds a tokenizer: without one, transformers 5 makes a tokenizer without any words."""
    file_names = set(getattr(tokenizer, "vocab_files_names", {}).values())
    # A tokenizer of characters or bytes needs no vocabulary; for any other, its settings alone are not enough.
    wanted = [*file_names, *_VOCABULARIES] if file_names else ["tokenizer_config.json", *_VOCABULARIES]
    if not any(path.is_file() for pattern in wanted for path in Path(folder).glob(pattern)):
        raise ParamError(
            f"Param pretrained is {folder!r}, which holds no vocabulary of a tokenizer ({', '.join(sorted(wanted))}). "
            "Save the tokenizer beside the model: tokenizer.save_pretrained(folder)."
        )


def _check_tokens(tokenizer: Any, model: Any, folder: str) -> None:
    """Check that a model knows all tokens of its tokenizer; otherwise it would fail in the middle of a fit."""
    try:
        embedding, numbers = model.get_input_embeddings(), tokenizer.get_vocab().values()
    except NotImplementedError:  # such as models that hash characters
        return
    highest = max(numbers, default=0)
    if isinstance(embedding, nn.Embedding) and highest >= embedding.num_embeddings:
        raise ParamError(
            f"Param pretrained is {folder!r}. Its tokenizer gives token numbers up to {highest}, and its model has "
            f"embeddings for 0 to {embedding.num_embeddings - 1}. Take the tokenizer that belongs to the model, or "
            "call model.resize_token_embeddings(len(tokenizer)) and save it again."
        )


def _check_loaded(model: Any, loading: Mapping[str, Any], folder: str) -> None:
    """Check that only layers after the body of a model are newly initialized: the body's weights must be loaded."""
    body = f"{model.base_model_prefix}."
    # Models that were trained to predict words have no pooler, the body's last layer, which precedes the classifier.
    lacking = [name for name in names_lacking(loading) if name.startswith(body) and ".pooler." not in name]
    if lacking:
        raise ParamError(
            f"Param pretrained is {folder!r}, whose weights are not those of the model in its config.json: missing or "
            f"of another shape are {list_names(lacking, 3)}. Save it again with model.save_pretrained(folder)."
        )


def names_lacking(loading: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights that were missing, or of another shape, when transformers loaded a model."""
    # transformers 5 lists both shapes with each name of another shape, 4.57 the name alone.
    mismatched = (key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"])
    return sorted({*loading["missing_keys"], *mismatched})
