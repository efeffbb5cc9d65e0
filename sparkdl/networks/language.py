"""Language models: tokenizers, packed rows for training, and the outputs of a trained model for texts.

A tokenizer has ``num_tokens``, ``before`` and ``after`` (the tokens that it puts around every text), ``end`` (the token
that ends a text), ``encode`` and ``decode``; :class:`TokenNumbers` stand for a tokenizer if texts were tokenized
elsewhere. Texts are packed on the *executors*, and :class:`LanguageNetwork` is trained on the *ranks*;
:class:`TextModel` computes predictions anywhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.data.blend.packing import PackedBatch, SequencePacker
from sparkdl.errors import DataError
from sparkdl.foreign_errors import needing
from sparkdl.networks.decoder import Decoder
from sparkdl.networks.folder_tokens import TextEncoder
from sparkdl.networks.generation import Generation, continue_texts, last_tokens
from sparkdl.networks.logits import logits_of
from sparkdl.networks.text import check_texts

END = "<|end|>"
"""The token after a text, in a learned tokenizer."""

NUM_OPEN_ROWS = 16
"""Maximum number of rows that a packer fills at the same time; a text goes into the first one with room for it."""

Row: TypeAlias = dict[str, npt.NDArray[np.int64]]
"""A packed row; see :class:`TextPacker`."""


@dataclass(frozen=True)
class TokenNumbers:
    """The token numbers of a model without a tokenizer.

    Attributes:
        num_tokens: size of the vocabulary.
        end: the token that ends a text; None if there is none.
    """

    num_tokens: int
    end: int | None = None
    before: ClassVar[tuple[int, ...]] = ()


@dataclass(frozen=True)
class LearnedTokenizer:
    """A byte-pair encoding learned from texts. It can encode any text, because every byte is a token.

    Attributes:
        json: the tokenizer in the JSON format of the library ``tokenizers``.
    """

    json: str
    before: ClassVar[tuple[int, ...]] = ()
    after: ClassVar[tuple[int, ...]] = ()

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary."""
        count: int = self.library_tokenizer.get_vocab_size()
        return count

    @property
    def end(self) -> int:
        """The token that ends a text."""
        number: int = self.library_tokenizer.token_to_id(END)
        return number

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text alone."""
        tokens: list[int] = self.library_tokenizer.encode(text).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without ends."""
        text: str = self.library_tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    @cached_property
    def library_tokenizer(self) -> Any:
        """The tokenizer of the library ``tokenizers``."""
        tokenizer = _tokenizers().Tokenizer.from_str(self.json)
        tokenizer.encode_special_tokens = True  # the string of the end in a text is not the end
        return tokenizer

    def __reduce__(self) -> Any:
        """Pickle only the JSON, not the tokenizer that the library made from it."""
        return LearnedTokenizer, (self.json,)


def learn_tokenizer(texts: Iterable[str], num_tokens: int) -> LearnedTokenizer:
    """Learn a byte-pair encoding (Sennrich et al., 2016) from texts.

    Args:
        texts: texts from which the encoding is learned.
        num_tokens: maximum size of the vocabulary: 256 bytes, the end token, and the most frequent pairs.
    """
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return LearnedTokenizer(tokenizer.to_str())


def _tokenizers() -> Any:
    with needing("A LanguageModel, on driver and executors,", "text", "tokenizers"):
        import tokenizers
    return tokenizers


@dataclass(frozen=True)
class FolderTokenizer:
    """The tokenizer of a Hugging Face folder.

    Attributes:
        tokenizer: tokenizer of transformers, with an end-of-sequence token.
    """

    tokenizer: Any

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary."""
        return len(self.tokenizer)

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts before every text."""
        return self._encoder.template.before

    @property
    def after(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts after every text."""
        return self._encoder.template.after

    @property
    def end(self) -> int:
        """The last token that the tokenizer puts after a text, or its end-of-sequence token if it puts none."""
        return self.after[-1] if self.after else int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text alone."""
        (tokens,) = self._encoder.encode([text])
        return tokens

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without ends."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


LanguageTokenizer: TypeAlias = LearnedTokenizer | FolderTokenizer
"""Converts texts to tokens, and tokens to texts. No text, whatever it contains, yields an end or a control token."""

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


def frame_tokens(tokens: Tokens, before: tuple[int, ...], end: int | None) -> Tokens:
    """Add the tokens before every text and the end token to the tokens of a text, unless they are there already."""
    if before and tuple(tokens[: len(before)]) != before:
        tokens = np.concatenate([before, np.asarray(tokens, np.int64)])
    if end is not None and not (len(tokens) and tokens[-1] == end):
        tokens = np.append(np.asarray(tokens, np.int64), end)
    return tokens


class TextPacker:
    """Packs the tokens of whole texts into rows; texts longer than a row are split.

    A row has ``tokens``; ``documents``, the number of each token's text in the row and -1 for padding; and ``labels``,
    the next token of the same text, or -100 if there is none: each ``(length,)``.

    Args:
        length: number of tokens in a row.
        end: token that is appended to a text unless the text already ends with it; None to append nothing.
        before: tokens that are put before a text unless the text already begins with them.
    """

    def __init__(self, length: int, end: int | None, before: tuple[int, ...] = ()) -> None:
        self._packer = SequencePacker(length, batch_size=1, num_open_rows=NUM_OPEN_ROWS)
        self._before, self._end = before, end

    def add(self, text: Tokens) -> Iterator[Row]:
        """Add the tokens of a text, and yield the rows that are complete."""
        self._packer.add([frame_tokens(text, self._before, self._end)])
        while (batch := self._packer.pop()) is not None:
            yield _row(batch)

    def finish(self) -> Iterator[Row]:
        """Yield the remaining rows."""
        while (batch := self._packer.finish()) is not None:
            yield _row(batch)


def _row(batch: PackedBatch) -> Row:
    return {
        "tokens": batch.tokens[0],
        "documents": batch.document_ids[0].astype(np.int64),
        "labels": batch.labels()[0],
    }


# Logits are a view, as they are too large to be copied; losses do not change them in place.
warnings.filterwarnings(
    "ignore", message=r"FSDP2-wrapped module \(FSDPLanguageNetwork\) returned a view", category=UserWarning
)


class LanguageNetwork(nn.Module):
    """Computes the logits of the next tokens of packed rows, with classes in the second dimension as in torch's losses.

    Args:
        decoder: a :class:`~sparkdl.networks.decoder.Decoder`, or a causal language model of transformers.
    """

    positions_dim = 2
    """The dimension of positions in the output."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.classes_first = _ClassesFirst()

    pipeline_parts = ((), "decoder", ("classes_first",))
    """The decoder defines how it is cut into pipeline stages."""

    @property
    def tensor_plan(self) -> dict[str, str]:
        """The plan of the decoder, for tensor parallelism."""
        plan = getattr(self.decoder, "tensor_plan", None) or getattr(self.decoder, "tp_plan", None) or {}
        return {f"decoder.{name}": style for name, style in plan.items()}

    def stored_name(self, name: str) -> str | None:
        """Return the name of a weight in the folder of a transformers model; None for adapters, which are drawn."""
        if ".lora_" in name:
            return None
        inner = name.removeprefix("decoder.").removeprefix("base_model.model.")
        return inner.replace(".base_layer.", ".")

    def draw_weight(self, name: str, weight: Tensor) -> None:
        """Draw one weight of sparkdl's decoder or of peft's adapters, in place.

        The second matrix of an adapter is 0, so that adapters do not change the model at first.
        """
        if isinstance(self.decoder, Decoder):
            self.decoder.draw_weight(name.removeprefix("decoder."), weight)
        elif ".lora_A." in name:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            assert ".lora_B." in name, "all weights except those of adapters are read from the folder"
            nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute the logits of the token after each position.

        Args:
            tokens: token numbers, ``(rows, positions)`` integers.
            documents: document number of each position, ``(rows, positions)`` integers; a position attends only to
                positions with the same number.
            positions: position numbers, ``(positions,)``, if ranks share sequences; None to count from 0: in each row
                for a decoder of sparkdl, in each text for a model of transformers.

        Returns:
            Logits, ``(rows, vocabulary, positions)``.
        """
        return self.classes_first(logits_of(self.decoder, tokens, documents, positions))  # type: ignore[no-any-return]  # modules return Any


class _ClassesFirst(nn.Module):
    """Transposes ``(rows, positions, classes)`` to ``(rows, classes, positions)``."""

    def forward(self, logits: Tensor) -> Tensor:
        """Exchange the last two dimensions."""
        return logits.transpose(1, 2)


def num_tokens_of(decoder: Any, tokenizer: LanguageTokenizer | TokenNumbers) -> int:
    """Return the number of tokens of a decoder: as many as its tokenizer has, or more for a model of transformers."""
    if isinstance(decoder, Decoder):
        return tokenizer.num_tokens
    return int(decoder.get_input_embeddings().num_embeddings)


ANSWERS = ("continuation", "logLikelihood", "embedding")


@dataclass(frozen=True, kw_only=True)
class PromptInputs:
    """Converts texts, or arrays of their tokens, to tokens for :class:`TextModel`; saved with the model.

    Attributes:
        column: name of the column.
        tokenizer: tokenizer of the model, or its token numbers if it has none.
        num_tokens: number of tokens of the model.
        takes_tokens: whether the column holds arrays of tokens.
        max_length: maximum number of tokens that are kept of a text; None for all.
        from_end: whether the last tokens of a longer text are kept instead of the first ones.
    """

    column: str
    tokenizer: LanguageTokenizer | TokenNumbers
    num_tokens: int
    takes_tokens: bool
    max_length: int | None
    from_end: bool
    rows_at_once: ClassVar = 32
    """Number of texts that are continued together: each has keys and values of its own for every layer."""

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """Return ``tokens``, ``(rows, longest)``, and ``lengths``, ``(rows,)``.

        A text becomes its tokens, with those that the tokenizer puts around every text; a text that is continued gets
        none behind it. An array gets the tokens before every text, unless it begins with them. A text without any token
        gets the end token.

        Raises:
            DataError: if a row holds no text, or a number that is not a token, or is empty and there is no end token.
        """
        rows, before = columns[self.column], self.tokenizer.before
        texts = list(map(self._of_array, rows)) if self.takes_tokens else self._of_texts(rows)
        if self.max_length is not None and self.from_end:
            texts = [last_tokens(list(text), self.max_length, before) for text in texts]
        elif self.max_length is not None:
            texts = [text[: self.max_length] for text in texts]
        lengths = np.array([len(text) for text in texts], np.int64)
        padded = np.zeros((len(texts), int(lengths.max(initial=1))), np.int64)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        return {"tokens": padded, "lengths": lengths}

    def _of_texts(self, rows: npt.NDArray[Any]) -> list[Tokens]:
        assert not isinstance(self.tokenizer, TokenNumbers), "without a tokenizer, the column holds tokens"
        before, after = self.tokenizer.before, () if self.from_end else self.tokenizer.after
        return [
            [*before, *self.tokenizer.encode(text), *after] or [self.tokenizer.end]
            for text in check_texts(rows, self.column)
        ]

    def _of_array(self, row: Any) -> Tokens:
        tokens = np.asarray(row, np.int64) if len(row) else np.empty(0, np.int64)
        check_tokens(tokens, self.num_tokens, self.column)
        text = frame_tokens(tokens, self.tokenizer.before, None)
        if len(text):
            return text
        if self.tokenizer.end is None:
            raise DataError(
                f"Column {self.column!r} holds an array without tokens, and the model has no end-of-text token to "
                "begin with. Leave those rows out."
            )
        return [self.tokenizer.end]


def check_tokens(tokens: npt.NDArray[np.integer[Any]], num_tokens: int, column: str) -> None:
    """Check that token numbers are in the vocabulary.

    Raises:
        DataError: if one is not; the message names it.
    """
    wrong = tokens[(tokens < 0) | (tokens >= num_tokens)]
    if len(wrong):
        raise DataError(
            f"Column {column!r} holds the token {wrong[0]}, and there are {num_tokens} tokens, from 0 to "
            f"{num_tokens - 1}."
        )


class TextModel(nn.Module):
    """A trained language model with its tokenizer, and the output that it computes for texts.

    Args:
        decoder: a decoder of sparkdl or a model of transformers.
        tokenizer: tokenizer of the decoder, or its token numbers if it has none.
        answer: output to compute, one of :data:`ANSWERS`.
        generation: options of the continuation of texts.
        max_length: number of positions that the decoder was trained on.
        in_tokens: whether a continuation is returned as tokens instead of a text.
    """

    def __init__(
        self,
        decoder: nn.Module,
        tokenizer: LanguageTokenizer | TokenNumbers,
        *,
        answer: str,
        generation: Generation,
        max_length: int,
        in_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.decoder, self.tokenizer = decoder, tokenizer
        self.answer, self.generation, self.max_length = answer, generation, max_length
        self.in_tokens = in_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the decoder."""
        return num_tokens_of(self.decoder, self.tokenizer)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Compute the output ``answer`` for texts.

        Args:
            tokens: tokens of the texts, ``(rows, longest)`` integers, padded behind the texts.
            lengths: number of tokens of each text, ``(rows,)``.

        Returns:
            For a continuation, its bytes in UTF-8, ``(rows, longest)`` int16, or its tokens, int64, both padded with
            -1. For a log-likelihood, ``(rows, 2)``: the sum of the log-probabilities of the tokens after the first,
            and their number. For an embedding, ``(rows, width)``: the mean of the last layer's output.
        """
        if self.answer == "logLikelihood":
            return self._log_likelihood(tokens, lengths)
        if self.answer == "embedding":
            return self._embedding(tokens, lengths)
        continuations = self.continuations(tokens, lengths)
        if self.in_tokens:
            return _in_rows([np.array(tokens, np.int64) for tokens in continuations], np.int64)
        return as_bytes([self.decode(tokens) for tokens in continuations])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; the model must have a tokenizer."""
        assert not isinstance(self.tokenizer, TokenNumbers), "texts need a tokenizer"
        return self.tokenizer.decode(tokens)

    def continuations(self, tokens: Tensor, lengths: Tensor) -> list[list[int]]:
        """Return the tokens that continue each text, without the end token."""
        return continue_texts(
            self.decoder,
            tokens,
            lengths,
            generation=self.generation,
            num_tokens=self.num_tokens,
            end=self.tokenizer.end,
            max_length=self.max_length,
            before=self.tokenizer.before,
        )

    def _log_likelihood(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Sum and number of the log-probabilities of each text's tokens after the first, ``(rows, 2)``.

        A text longer than ``max_length`` is read in windows of ``max_length`` tokens that overlap by half. Each window
        adds the tokens that the previous window did not reach, so that every token after the first window has at least
        half a window before it. Every window begins with the tokens that the tokenizer puts before a text.
        """
        totals = torch.zeros(len(tokens), 2, device=tokens.device)
        overlap = self.max_length // 2
        before = tokens.new_tensor(self.tokenizer.before if len(self.tokenizer.before) < overlap else ())
        begin, done, lead = 0, 1, 0
        while (rows := (lengths > done).nonzero()[:, 0]).numel():
            window = tokens[rows, begin : begin + self.max_length - lead]
            reached = begin + window.shape[1]
            window = torch.cat([before[:lead].expand(len(rows), lead), window], dim=1)
            first = done - begin + lead
            logs = logits_of(self.decoder, window[:, :-1])[:, first - 1 :].float().log_softmax(dim=-1)
            following = logs.gather(-1, window[:, first:, None]).squeeze(-1)
            counted = torch.arange(done, reached, device=tokens.device) < lengths[rows, None]
            totals[rows] += torch.stack([(following * counted).sum(dim=1), counted.sum(dim=1)], dim=1)
            begin, done, lead = reached - overlap, reached, len(before)
        return totals

    def _embedding(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        if isinstance(self.decoder, Decoder):
            states = self.decoder.states(tokens)
        else:
            decoder: Any = self.decoder
            states = decoder(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states[-1]
        counted = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]).to(states.dtype)
        mean: Tensor = (states * counted[..., None]).sum(dim=1) / counted.sum(dim=1, keepdim=True)
        return mean


def as_bytes(texts: Sequence[str]) -> Tensor:
    """Return texts as one tensor: their bytes in UTF-8, ``(texts, longest)`` int16, padded with -1."""
    return _in_rows([np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts], np.int16)


def _in_rows(values: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
    """Return rows of non-negative numbers as one tensor, ``(rows, longest)``, padded with -1."""
    rows = np.full((len(values), max(map(len, values), default=0)), -1, dtype)
    for row, value in zip(rows, values, strict=True):
        row[: len(value)] = value
    return torch.from_numpy(rows)
