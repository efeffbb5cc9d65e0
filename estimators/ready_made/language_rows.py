"""The rows that a language model is trained on: texts or token arrays of a DataFrame, packed on the *executors*."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.data.blend.rows import CORPUS_COLUMNS, blend_corpora, plan_shares
from sparkdl.data.dataset.dataset import missing_column_error
from sparkdl.data.spark.columns import quote, stored_type
from sparkdl.data.spark.reading import reading_job
from sparkdl.errors import DataError
from sparkdl.estimators.fit.split import RowCounts
from sparkdl.networks.language import (
    LanguageTokenizer,
    Row,
    TextPacker,
    TokenNumbers,
    Tokens,
    check_tokens,
    frame_tokens,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PACKED_TYPE = "tokens array<bigint>, documents array<bigint>, labels array<bigint>"
"""Spark schema of packed rows."""

_PARTITION_BYTES = 128 << 20
"""Approximate size of a partition of blended rows."""

_EXAMPLE_LENGTH = 1000
"""Characters or tokens of an input example."""


def holds_tokens(dataset: DataFrame, name: str) -> bool:
    """Return whether a column holds token arrays; if not, it holds texts.

    Raises:
        DataError: if there is no such column, or it holds neither texts nor token arrays.
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


def first_text(dataset: DataFrame, name: str) -> dict[str, list[Any]]:
    """Return the model's input for the beginning of the first text or token array of a column: one row, by its name."""
    with reading_job(dataset.sparkSession, "reading the input example", columns=[name]):
        row = dataset.select(quote(name)).first()
    return {} if row is None else {name: [row[0][:_EXAMPLE_LENGTH]]}


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Yields the tokens of a column of texts or token arrays, on an *executor*.

    Attributes:
        column: name of the column.
        tokenizer: tokenizer of the texts; None for a column of token arrays.
        num_tokens: size of the vocabulary.
    """

    column: str
    tokenizer: LanguageTokenizer | None
    num_tokens: int

    def __call__(self, values: pa.Array) -> Iterator[Tokens]:
        """Yield the tokens of each row.

        Raises:
            DataError: if a row holds null, or a token that is not in the vocabulary.
        """
        if self.tokenizer is None:
            yield from self._arrays(values)
            return
        for text in values.to_pylist():
            if text is None:
                raise DataError(
                    f"Column {self.column!r} holds null, which is not a text. Leave those rows out."
                )
            yield self.tokenizer.encode(text)

    def _arrays(self, values: pa.Array) -> Iterator[Tokens]:
        if values.null_count or values.flatten().null_count:
            raise DataError(
                f"Column {self.column!r} holds null, or arrays with null, which is not a token. Leave those rows out."
            )
        tokens = values.flatten().to_numpy(zero_copy_only=False)
        check_tokens(tokens, self.num_tokens, self.column)
        borders = values.offsets.to_numpy()
        for start, stop in zip(borders[:-1] - borders[0], borders[1:] - borders[0], strict=True):
            yield tokens[start:stop]


HELD_OUT = "held_out"
"""Name of the column of blended rows that is true for validation rows."""


@dataclass(frozen=True, kw_only=True)
class Blend:
    """How texts of several corpora become an epoch of rows.

    Attributes:
        column: name of the column that holds the name of each text's corpus.
        weights: weights of the corpora, by their names.
        num_rows: number of rows of an epoch; None for as many as are needed to include every row.
        held_out: fraction of the rows of each corpus that is held out for validation.
        seed: seed of the rows that are drawn.
    """

    column: str
    weights: Mapping[str, float]
    num_rows: int | None
    held_out: float
    seed: int

    def corpora(self, dataset: DataFrame) -> list[tuple[DataFrame, float]]:
        """Return the texts of each corpus, and the corpus's share of the rows of an epoch.

        Raises:
            DataError: if the column is missing, or does not hold strings.
        """
        from pyspark.sql import functions as F

        if self.column not in dataset.columns:
            raise missing_column_error(self.column, dataset.columns)
        if stored_type(dataset.schema[self.column].dataType) != ("string", "object", 0):
            raise DataError(
                f"Column {self.column!r} holds {dataset.schema[self.column].dataType.simpleString()}, and the names of "
                "corpora are strings. Cast it."
            )
        total = sum(self.weights.values())
        return [
            (dataset.filter(F.col(quote(self.column)) == name), weight / total)
            for name, weight in self.weights.items()
        ]


@contextmanager
def blend_rows(
    dataset: DataFrame,
    texts: Texts,
    blend: Blend,
    *,
    length: int,
    tokenizer: LanguageTokenizer | TokenNumbers,
) -> Iterator[DataFrame]:
    """Give an epoch of packed rows of several corpora, each row with texts of one corpus.

    The packed rows are cached on disk within this context.

    Raises:
        DataError: if a corpus has no rows.
        ParamError: if an epoch would have very many rows.
    """
    from pyspark import StorageLevel
    from pyspark.sql import functions as F

    blend.corpora(dataset)
    numbers = {name: number for number, name in enumerate(blend.weights)}

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        packers = [TextPacker(length, tokenizer.end, tokenizer.before) for _ in numbers]
        counts = [0] * len(numbers)
        part = 0

        def batch_of(corpus: int, row: Row) -> pa.RecordBatch:
            keys = {"corpus": pa.array([corpus], pa.int32()), "part": pa.array([part], pa.int32())}
            counts[corpus] += 1
            return pa.RecordBatch.from_pydict(
                {**_arrays(row), **keys, "number": pa.array([counts[corpus] - 1])}
            )

        for batch in batches:
            part = batch.column(2)[0].as_py() if batch.num_rows else part
            names = batch.column(1).to_pylist()
            for name, tokens in zip(names, texts(batch.column(0)), strict=True):
                if name not in numbers:
                    raise DataError(
                        f"Column {blend.column!r} holds {name!r}, which has no weight in Param corpusWeights. Give it "
                        "one, or leave those rows out."
                    )
                for row in packers[numbers[name]].add(tokens):
                    yield batch_of(numbers[name], row)
        for corpus, packer in enumerate(packers):
            for row in packer.finish():
                yield batch_of(corpus, row)

    columns = [F.col(quote(texts.column)), F.col(quote(blend.column)), F.spark_partition_id()]
    rows = dataset.select(*(column.alias(f"c{index}") for index, column in enumerate(columns)))
    # Persisted, so that the rows that are drawn are the rows that were counted.
    kept = rows.mapInArrow(pack, f"{PACKED_TYPE}, {CORPUS_COLUMNS}").persist(StorageLevel.DISK_ONLY)
    try:
        with reading_job(dataset.sparkSession, "packing texts"):
            groups = kept.groupBy("part", "corpus").count().collect()
        counts = {(row["part"], row["corpus"]): row["count"] for row in groups}
        shares = plan_shares(
            {
                name: sum(count for (_, corpus), count in counts.items() if corpus == number)
                for name, number in numbers.items()
            },
            blend.weights,
            num_rows=blend.num_rows,
            held_out=blend.held_out,
            seed=blend.seed,
        )
        num_bytes = 24 * length * sum(share.num_drawn for share in shares)
        yield blend_corpora(
            kept,
            shares,
            counts,
            num_partitions=math.ceil(num_bytes / _PARTITION_BYTES),
            held_out=HELD_OUT if blend.held_out else None,
        )
    finally:
        kept.unpersist()


def pack_rows(
    dataset: DataFrame, texts: Texts, *, length: int, tokenizer: LanguageTokenizer | TokenNumbers
) -> DataFrame:
    """Return the packed rows of a DataFrame; see :class:`~sparkdl.networks.language.TextPacker`."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        packer = TextPacker(length, tokenizer.end, tokenizer.before)
        for batch in batches:
            for tokens in texts(batch.column(0)):
                yield from map(_batch, packer.add(tokens))
        yield from map(_batch, packer.finish())

    return dataset.select(quote(texts.column)).mapInArrow(pack, PACKED_TYPE)


PLANNED_TEXTS = 2_000
"""Number of first texts of each corpus from whose tokens the number of rows is estimated."""


def estimate_rows(
    dataset: DataFrame,
    texts: Texts,
    blend: Blend | None,
    *,
    length: int,
    tokenizer: LanguageTokenizer | TokenNumbers,
) -> RowCounts:
    """Estimate the number of packed rows of a fit from the number of all texts and the tokens of the first texts.

    Raises:
        DataError: if there are no texts, or a corpus has none.
        ParamError: if an epoch would have very many rows.
    """
    if blend is None:
        rows = _rows_of_corpus(dataset, texts, length, tokenizer)
        if not rows:
            raise DataError(f"There are no texts in column {texts.column!r}.")
        return RowCounts(num_rows=rows, num_marked=None, bytes_per_row=24 * length, is_exact=False)
    names = list(blend.weights)
    frames = [frame for frame, _ in blend.corpora(dataset)]
    shares = plan_shares(
        {
            name: _rows_of_corpus(frame, texts, length, tokenizer)
            for name, frame in zip(names, frames, strict=True)
        },
        blend.weights,
        num_rows=blend.num_rows,
        held_out=blend.held_out,
        seed=blend.seed,
    )
    num_marked = sum(share.num_held_out for share in shares)
    return RowCounts(
        num_rows=num_marked + sum(share.num_drawn for share in shares),
        num_marked=num_marked if blend.held_out else None,
        bytes_per_row=24 * length,
        is_exact=False,
    )


def _rows_of_corpus(
    dataset: DataFrame, texts: Texts, length: int, tokenizer: LanguageTokenizer | TokenNumbers
) -> int:
    def measure(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            sizes = [
                len(frame_tokens(tokens, tokenizer.before, tokenizer.end))
                for tokens in texts(batch.column(0))
            ]
            yield pa.RecordBatch.from_pydict({"texts": [len(sizes)], "tokens": [sum(sizes)]})

    first = dataset.select(quote(texts.column)).limit(PLANNED_TEXTS)
    with reading_job(dataset.sparkSession, "counting texts"):
        num_texts = dataset.count()
        lengths = first.mapInArrow(measure, "texts long, tokens long").collect()
    if not num_texts:
        return 0
    per_text: float = sum(row["tokens"] for row in lengths) / sum(row["texts"] for row in lengths)
    return max(1, math.ceil(per_text * num_texts / length))


def _batch(row: Row) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(_arrays(row))


def _arrays(row: Row) -> dict[str, pa.Array]:
    return {name: pa.array([values]) for name, values in row.items()}
