"""Reads token arrays from Megatron-LM's ``.bin`` and ``.idx`` files.

A pair of files holds *sequences* of tokens; a *document* is one or several of them. ``PREFIX.bin`` has the tokens of
all sequences, one after another. ``PREFIX.idx`` has, in little endian::

    9 bytes         MMIDIDX and two zeros
    uint64          version, 1
    uint8           type of the tokens: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
    uint64          S, the number of sequences
    uint64          D, one more than the number of documents
    int32[S]        number of tokens of each sequence
    int64[S]        offset of each sequence in PREFIX.bin, in bytes
    int64[D]        the first sequence of each document, and S at the end
    int8[S]         mode of each sequence, in multimodal files only

Source: ``megatron/core/datasets/indexed_dataset.py`` of Megatron-LM, which calls it an indexed dataset.

The *driver* reads the header of the index; each task on the *executors* reads its range of documents.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.checks import check_counts
from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.errors import DataError, StoreError
from sparkdl.foreign_errors import reading_from

if TYPE_CHECKING:
    import os

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_HEAD = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_PARTITION_BYTES = 32 << 20
_BATCH_BYTES = 4 << 20


def read_indexed(
    spark: SparkSession, prefix: str | os.PathLike[str], *, num_partitions: int | None = None
) -> DataFrame:
    """Return the documents of a pair of Megatron-LM files as a DataFrame, for example for ``LanguageModel``.

    Args:
        spark: classic or Connect session.
        prefix: path or URL of the files without ``.bin`` and ``.idx``, which the driver and all executors can read.
        num_partitions: number of partitions, among which the documents are divided equally; by default one for each
            32 MiB of tokens.

    Returns:
        One row per document, in their order: ``document``, its number from 0, and ``tokens``, an array of integers.

    Raises:
        DataError: if a file is not of this format, or its size disagrees with the index.
        StoreError: if a file cannot be read.
    """
    index = _open_index(absolute_url(prefix).removesuffix(".idx").removesuffix(".bin"))
    if num_partitions is None:
        num_partitions = max(1, math.ceil(index.num_tokens * index.dtype.itemsize / _PARTITION_BYTES))
    check_counts(least=1, num_partitions=num_partitions)
    borders = np.linspace(0, index.num_documents, num_partitions + 1).astype(np.int64).tolist()

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                try:
                    yield from index.read(borders[part], borders[part + 1])
                except StoreError as error:
                    raise StoreError(
                        f"An executor on {socket.gethostname()} cannot read what the driver can: {error} The files "
                        "have to lie where all executors read them."
                    ) from error

    kind = "bigint" if index.dtype.itemsize == 8 else "int"
    parts = spark.range(0, num_partitions, 1, num_partitions)
    return parts.mapInArrow(read, f"document bigint, tokens array<{kind}>")


@dataclass(frozen=True, kw_only=True)
class _Index:
    """The header of an index that agrees with the sizes of its files.

    Attributes:
        prefix: absolute path or URL of the files without ``.bin`` and ``.idx``.
        dtype: dtype of the tokens, in little endian.
        num_sequences: number of sequences in the index.
        num_documents: number of documents in the index.
        num_tokens: number of tokens of all sequences together.
    """

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    num_tokens: int

    def read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the documents ``[start, stop)`` in batches of a few MiB."""
        import pyarrow as pa

        if start == stop:
            return
        with _open(f"{self.prefix}.idx") as index, _open(f"{self.prefix}.bin") as tokens:
            borders = self._part(index, "documents", start, stop + 1)
            first, last = int(borders[0]), int(borders[-1])
            if first < 0 or last > self.num_sequences or (np.diff(borders) < 0).any():
                raise DataError(
                    f"{self.prefix}.idx is damaged: documents {start} to {stop - 1} are made of sequences "
                    f"{borders.tolist()[:9]}."
                )
            lengths = self._part(index, "lengths", first, last).astype(np.int64)
            starts = self._part(index, "starts", first, last)
            ends = starts + lengths * self.dtype.itemsize
            if (lengths < 0).any() or (starts[1:] != ends[:-1]).any():
                raise DataError(
                    f"{self.prefix}.idx is damaged: sequences {first} to {last - 1} do not follow one another."
                )
            # Start of each document, in tokens from the first one.
            at = np.concatenate([[0], np.cumsum(lengths)])[borders - first]
            offset = int(starts[0]) if len(starts) else 0
            for low, high in _slices(at, _BATCH_BYTES // self.dtype.itemsize):
                values = _read_array(
                    tokens,
                    f"{self.prefix}.bin",
                    self.dtype,
                    offset + int(at[low]) * self.dtype.itemsize,
                    int(at[high] - at[low]),
                )
                kind = pa.int64() if self.dtype.itemsize == 8 else pa.int32()
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.array(np.arange(start + low, start + high)),
                        pa.ListArray.from_arrays(
                            pa.array((at[low : high + 1] - at[low]).astype(np.int32)), pa.array(values, kind)
                        ),
                    ],
                    names=["document", "tokens"],
                )

    def _part(self, file: Any, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the entries ``[start, stop)`` of an array of the index."""
        dtype: np.dtype[Any] = np.dtype("<i4" if name == "lengths" else "<i8")
        before = {"lengths": 0, "starts": 4, "documents": 12}[name] * self.num_sequences
        place = _HEAD.size + before
        return _read_array(file, f"{self.prefix}.idx", dtype, place + start * dtype.itemsize, stop - start)


def _open_index(prefix: str) -> _Index:
    """Read the header of an index, and check that the sizes of the files agree with it."""
    path = f"{prefix}.idx"
    with _open(path) as file:
        head = file.read(_HEAD.size)
        size = file.seek(0, 2)
        if head[: len(_MAGIC)] != _MAGIC:
            raise DataError(
                f"{path} is not an index of Megatron's memory-mapped datasets: it begins with {head[: len(_MAGIC)]!r}, "
                f"not with {_MAGIC!r}."
            )
        if len(head) < _HEAD.size:
            raise DataError(f"{path} is truncated: it has {size} bytes, and its head alone has {_HEAD.size}.")
        _, version, code, num_sequences, num_borders = _HEAD.unpack(head)
        if version != _VERSION:
            raise DataError(f"{path} has version {version}; only version {_VERSION} is supported.")
        dtype = _TYPES.get(code)
        if dtype is None or not np.issubdtype(dtype, np.integer):
            of = f"{dtype}, which are not token types" if dtype else "a type that the format does not have"
            raise DataError(f"{path} has type {code} for its tokens: {of}.")
        expected = _HEAD.size + 12 * num_sequences + 8 * num_borders
        if size == expected + num_sequences and num_sequences:
            raise DataError(
                f"{path} belongs to a multimodal dataset, as its sequences have modes; only text is supported."
            )
        if size != expected or not num_borders:
            raise DataError(
                f"{path} has {size} bytes, and an index of {num_sequences} sequences and {num_borders} borders of "
                f"documents has {expected}. Was it written to its end?"
            )
        index = _Index(
            prefix=prefix,
            dtype=np.dtype(dtype).newbyteorder("<"),
            num_sequences=num_sequences,
            num_documents=num_borders - 1,
            num_tokens=0,
        )
        (last,) = index._part(file, "documents", num_borders - 1, num_borders)
        if last != num_sequences:
            raise DataError(f"{path} is damaged: its documents end with sequence {last} of {num_sequences}.")
        num_bytes = 0
        if num_sequences:
            (start,) = index._part(file, "starts", num_sequences - 1, num_sequences)
            (length,) = index._part(file, "lengths", num_sequences - 1, num_sequences)
            num_bytes = int(start) + int(length) * index.dtype.itemsize
    with _open(f"{prefix}.bin") as file:
        size = file.seek(0, 2)
    if size != num_bytes:
        raise DataError(
            f"{prefix}.bin has {size} bytes, and {path} describes {num_bytes}. Is it truncated, or does it belong "
            "to another index?"
        )
    return replace(index, num_tokens=num_bytes // index.dtype.itemsize)


@contextmanager
def _open(url: str) -> Iterator[Any]:
    with ExitStack() as stack:
        with reading_from(url):
            location = open_location(url)
            file = stack.enter_context(location.filesystem.open(location.path, "rb"))
        yield file


def _read_array(file: Any, url: str, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
    with reading_from(url):
        file.seek(offset)
        content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise DataError(
            f"{url} is truncated: {count * dtype.itemsize} bytes from {offset} on are needed, and there are "
            f"{len(content)}."
        )
    return np.frombuffer(content, dtype)


def _slices(borders: npt.NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents with at most ``most`` tokens each, or of one document that has more.

    ``borders`` has the start of each document, in tokens, and the end of the last one.
    """
    low, end = 0, len(borders) - 1
    while low < end:
        high = max(low + 1, int(np.searchsorted(borders, borders[low] + most, side="right")) - 1)
        yield low, high
        low = high
