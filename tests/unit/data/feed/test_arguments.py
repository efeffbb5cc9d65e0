"""Kinds of numbers that a feed accepts as arguments."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sparkdl.data import ParquetFeed
from sparkdl.errors import ParamError


def test_integers_of_numpy_are_accepted_as_arguments(write_dataset):
    dataset = write_dataset([[40, 60]])
    counts = {
        "batch_size": 8,
        "world_size": 2,
        "rank": 1,
        "seed": 3,
        "num_threads": 1,
        "shuffle_buffer_rows": 50,
        "read_ahead_bytes": 1 << 20,
        "cache_limit_bytes": 1 << 20,
        "read_timeout_s": 60,
    }
    found = []
    for kind in (int, np.int64):
        given = {name: kind(count) for name, count in counts.items()}
        with ParquetFeed(dataset, columns=["id"], cache="memory", **given) as feed:
            ids = [batch["id"].tolist() for batch in feed]
            found.append((ids, json.dumps(feed.state())))
    assert found[0] == found[1]


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e300, 0, -1.0, True, "60", None])
def test_a_timeout_is_a_finite_number_above_zero(write_dataset, timeout):
    with pytest.raises(ParamError, match="read_timeout_s must be a number of seconds above 0"):
        ParquetFeed(write_dataset([[4]]), batch_size=2, read_timeout_s=timeout)
