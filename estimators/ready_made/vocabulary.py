"""The words of a column of texts, learned from the rows. Runs on the *driver*, and counts on the *executors*."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdl.data import ParquetFeed
from sparkdl.data.spark.jobs import spark_job
from sparkdl.errors import DataError
from sparkdl.networks.text import checked_texts, words_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice

COUNTED_HERE = 20_000
"""Rows up to which the driver counts: Spark would take longer to start."""

_ROWS_AT_ONCE = 1 << 12
_MOST_PARTS = 256
_LEAST_TEXTS = 2
"""A word of one text tells nothing about others; it teaches what a word is like that is not known."""


def learn_words(
    dataset: ParquetDataset,
    column: str,
    *,
    size: int,
    training: RowChoice | None,
    spark: SparkSession | None,
) -> tuple[str, ...]:
    """Return the words that are in most texts, the most frequent first, those as frequent in alphabetical order.

    Args:
        dataset: the rows.
        column: of texts.
        size: how many words there are at most.
        training: the rows that are trained on, whose words alone are counted; None for all.
        spark: whose executors count where there are many rows; None counts here. The words are the same.

    Raises:
        DataError: if no word is in two texts.
    """
    if spark is None or dataset.num_rows <= COUNTED_HERE:
        counts = texts_with_words(dataset, column, training)
        frequent = [(word, count) for word, count in counts.items() if count >= _LEAST_TEXTS]
        words = tuple(word for word, _ in sorted(frequent, key=lambda each: (-each[1], each[0]))[:size])
    else:
        words = _learned_by_spark(dataset, column, size, training, spark)
    if not words:
        raise DataError(
            f"No word in column {column!r} is in two of the texts that are trained on, so that there is nothing to "
            "learn by words. Take tokenizer='bytes', or more rows."
        )
    return words


def texts_with_words(
    dataset: ParquetDataset, column: str, training: RowChoice | None, part: int = 0, num_parts: int = 1
) -> Counter[str]:
    """Return for each word in how many texts it is, of one part of the rows."""
    counts: Counter[str] = Counter()
    with ParquetFeed(
        dataset,
        columns=[column],
        batch_size=_ROWS_AT_ONCE,
        rank=part,
        world_size=num_parts,
        shuffle=False,
        row_filter=training,
    ) as feed:
        for batch in feed.epoch(0):
            for text in checked_texts(batch[column], column):
                counts.update(set(words_of(text)))
    return counts


def _learned_by_spark(
    dataset: ParquetDataset, column: str, size: int, training: RowChoice | None, spark: SparkSession
) -> tuple[str, ...]:
    from pyspark.sql import functions as F

    num_parts = min(_MOST_PARTS, len(dataset.row_groups))
    count = partial(_count_parts, dataset=dataset, column=column, training=training, num_parts=num_parts)
    counted = spark.range(0, num_parts, 1, num_parts).mapInArrow(count, "word string, texts long")
    frequent = (
        counted.groupBy("word")
        .agg(F.sum("texts").alias("texts"))
        .filter(F.col("texts") >= _LEAST_TEXTS)
        .orderBy(F.desc("texts"), "word")
        .limit(size)
    )
    with spark_job(spark, "counting words"):
        rows = frequent.collect()
    return tuple(row["word"] for row in rows)


def _count_parts(
    batches: Iterator[pa.RecordBatch],
    *,
    dataset: ParquetDataset,
    column: str,
    training: RowChoice | None,
    num_parts: int,
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for part in batch.column(0).to_pylist():
            counts = texts_with_words(dataset, column, training, part, num_parts)
            yield pa.RecordBatch.from_pydict(
                {
                    "word": pa.array(counts.keys(), pa.string()),
                    "texts": pa.array(counts.values(), pa.int64()),
                }
            )
