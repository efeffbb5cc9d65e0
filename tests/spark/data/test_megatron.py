"""Token arrays read from Megatron's ``.bin`` and ``.idx`` files."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sparkdl.data.megatron import read_indexed
from sparkdl.errors import DataError, ParamError, StoreError

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "uint16": 8}
DOCUMENTS = [[[5, 6, 7], [8]], [[]], [[9] * 50, [1, 2], [3]], [[40_000]]]
"""Documents, each a list of token sequences."""


def write_indexed(prefix, documents, dtype="uint16", *, modes=b"", **head):
    """Write a pair of files as the format describes them."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    tokens = np.concatenate([np.array(sequence, dtype) for sequence in sequences] or [np.empty(0, dtype)])
    starts = (np.cumsum(lengths) - lengths) * tokens.dtype.itemsize
    borders = np.cumsum([0, *map(len, documents)])
    given = {"magic": b"MMIDIDX\0\0", "version": 1, "code": CODES[dtype], **head}
    prefix.parent.mkdir(exist_ok=True)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    prefix.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", *given.values(), len(sequences), len(borders))
        + lengths.tobytes()
        + starts.astype("<i8").tobytes()
        + borders.astype("<i8").tobytes()
        + modes
    )
    return str(prefix)


@pytest.mark.parametrize(
    ("dtype", "num_partitions", "type_of_spark"),
    [("uint16", None, "int"), ("int32", 3, "int"), ("int64", 9, "bigint")],
)
def test_each_task_reads_its_documents(spark, tmp_path, dtype, num_partitions, type_of_spark):
    prefix = write_indexed(tmp_path / "corpus", DOCUMENTS, dtype)
    found = read_indexed(spark, f"{prefix}.idx", num_partitions=num_partitions)
    assert found.dtypes == [("document", "bigint"), ("tokens", f"array<{type_of_spark}>")]
    rows = sorted(found.selectExpr("*", "spark_partition_id() as part").collect())
    assert [(row["document"], row["tokens"]) for row in rows] == [
        (number, [token for sequence in document for token in sequence])
        for number, document in enumerate(DOCUMENTS)
    ]
    assert len({row["part"] for row in rows}) == min(num_partitions or 1, len(DOCUMENTS))


@pytest.mark.any_spark_will_do
def test_documents_larger_than_a_batch_arrive_whole_and_an_empty_index_has_none(spark, tmp_path):
    length = 1_200_000  # 4.8 MB; a batch has 4 MiB, or one document
    found = read_indexed(
        spark, write_indexed(tmp_path / "corpus", [[[k] * length] for k in range(3)], "int32")
    )
    sizes = found.selectExpr("document", "size(tokens)", "array_min(tokens)", "array_max(tokens)").collect()
    assert [tuple(row) for row in sizes] == [(k, length, k, k) for k in range(3)]
    assert read_indexed(spark, write_indexed(tmp_path / "none", [])).count() == 0


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, r"corpus.idx is not an index .* begins with b'TNTIDX"),
        ({"version": 2}, "corpus.idx has version 2; only version 1"),
        ({"dtype": "float64"}, "type 6 for its tokens: float64, which are not token types"),
        ({"code": 99}, "type 99 for its tokens"),
        ({"modes": bytes(7)}, "multimodal"),
        ({"modes": bytes(3)}, "corpus.idx has 161 bytes, .* 7 sequences and 5 borders .* 158"),
    ],
)
def test_an_index_of_another_format_is_refused(spark, tmp_path, changes, words):
    with pytest.raises(DataError, match=words):
        read_indexed(spark, write_indexed(tmp_path / "corpus", DOCUMENTS, **changes))


@pytest.mark.any_spark_will_do
def test_truncated_damaged_and_missing_files_are_refused(spark, tmp_path):
    prefix = write_indexed(tmp_path / "corpus", DOCUMENTS)
    index, tokens = (tmp_path / f"corpus.{suffix}" for suffix in ("idx", "bin"))
    whole = index.read_bytes(), tokens.read_bytes()
    for length, words in ((20, "truncated: it has 20 bytes"), (100, "has 100 bytes")):
        index.write_bytes(whole[0][:length])
        with pytest.raises(DataError, match=words):
            read_indexed(spark, prefix)
    index.write_bytes(whole[0])
    tokens.write_bytes(whole[1][:-2])
    with pytest.raises(DataError, match=r"corpus.bin has 114 bytes, .* describes 116"):
        read_indexed(spark, prefix)
    tokens.write_bytes(whole[1])
    lengths = np.frombuffer(whole[0], "<i4", 7, 34).copy()
    lengths[0] += 1
    index.write_bytes(whole[0][:34] + lengths.tobytes() + whole[0][62:])
    with pytest.raises(Exception, match="DataError: .*sequences 0 to 6 do not follow one another"):
        read_indexed(spark, prefix).collect()
    tokens.unlink()
    with pytest.raises(StoreError, match=r"corpus.bin cannot be read"):
        read_indexed(spark, prefix)
    with pytest.raises(ParamError, match="num_partitions must be at least 1"):
        read_indexed(spark, write_indexed(tmp_path / "corpus", DOCUMENTS), num_partitions=0)
