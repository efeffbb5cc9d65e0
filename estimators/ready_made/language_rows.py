"""The rows that a language model is trained on: texts or token arrays of a DataFrame, packed on the *executors*."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.dataset.dataset import missing_column_error
from sparkdl.data.spark.columns import quoted, stored_type
from sparkdl.errors import DataError
from sparkdl.networks.language import LanguageTokenizer, TextPacker, check_tokens

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PACKED_TYPE = "tokens array<bigint>, documents array<bigint>, labels array<bigint>"
"""What packed rows are for Spark."""

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


def holds_tokens(dataset: DataFrame, name: str) -> bool:
    """Return whether a column holds token arrays; else it holds texts.

    Raises:
        DataError: if there is no such column, or it holds something else.
    """
    if name not in dataset.columns:
        raise missing_column_error(name, dataset.columns)
    kind, dtype, depth = stored_type(dataset.schema[name].dataType) or ("", "object", 0)
    if (kind, depth) == ("string", 0):
        return False
    if (kind, depth) == ("number", 1) and dtype.startswith("int"):
        return True
    raise DataError(
        f"Column {name!r} holds {dataset.schema[name].dataType.simpleString()}, and LanguageModel takes strings, or "
        "arrays of integers, which are the tokens of texts."
    )


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Takes the tokens of the texts out of a column, on an *executor*.

    Attributes:
        column: its name.
        tokenizer: of texts; None for a column of token arrays.
        num_tokens: how many tokens there are.
    """

    column: str
    tokenizer: LanguageTokenizer | None
    num_tokens: int

    def __call__(self, values: pa.Array) -> Iterator[Tokens]:
        """Yield the tokens of each row.

        Raises:
            DataError: if a row holds no text, or a token that there is not.
        """
        if self.tokenizer is None:
            yield from self._arrays(values)
            return
        for text in values.to_pylist():
            if text is None:
                raise DataError(f"Column {self.column!r} holds null, which is no text. Leave those rows out.")
            yield self.tokenizer.encode(text)

    def _arrays(self, values: pa.Array) -> Iterator[Tokens]:
        if values.null_count or values.flatten().null_count:
            raise DataError(
                f"Column {self.column!r} holds null, or arrays with null, which is no token. Leave those rows out."
            )
        tokens = values.flatten().to_numpy(zero_copy_only=False)
        check_tokens(tokens, self.num_tokens, self.column)
        borders = values.offsets.to_numpy()
        for start, stop in zip(borders[:-1] - borders[0], borders[1:] - borders[0], strict=True):
            yield tokens[start:stop]


def packed(dataset: DataFrame, texts: Texts, *, length: int, end: int | None) -> DataFrame:
    """Return the packed rows of a DataFrame; see :class:`~sparkdl.networks.language.TextPacker`."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        packer = TextPacker(length, end)
        for batch in batches:
            for tokens in texts(batch.column(0)):
                yield from map(_batch, packer.add(tokens))
        yield from map(_batch, packer.finish())

    return dataset.select(quoted(texts.column)).mapInArrow(pack, PACKED_TYPE)


def _batch(row: dict[str, npt.NDArray[np.int64]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array([values]) for name, values in row.items()})
