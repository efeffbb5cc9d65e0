from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sparkdl.launch import RankContext, run_on_ranks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUM_BYTES = 2_362_232_013  # 2.2 GiB, no multiple of a chunk size: more than an int32 counts


def large_value(context: RankContext, num_bytes: int) -> bytes | str:
    """The bytes on rank 0, their checksum on the other ranks."""
    value = np.random.default_rng(7).bytes(num_bytes)
    return value if context.rank == 0 else hashlib.sha256(value).hexdigest()


@pytest.mark.slow
@pytest.mark.any_spark_will_do
@pytest.mark.timeout(1200)
def test_result_above_two_gib_arrives_whole(spark: SparkSession) -> None:
    whole, digest = run_on_ranks(large_value, NUM_BYTES, num_ranks=2, spark=spark)
    assert len(whole) == NUM_BYTES
    assert hashlib.sha256(whole).hexdigest() == digest
