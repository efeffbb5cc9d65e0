from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.standalone.cluster import StandaloneCluster

NUM_ROWS = 203


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A cluster with two workers, without authentication and encryption."""
    with StandaloneCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files of rows with four features and one of three classes that depends on them."""
    folder = tmp_path_factory.mktemp("data") / "rows"
    folder.mkdir()
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_ROWS, 4))
    classes = (features.sum(axis=1) > 0).astype(np.int32) + (features[:, 0] > 1)
    columns = {
        "image": pa.array(features.tolist()),
        "digit": pa.array(classes.astype(np.int32)),
        "is_test": pa.array(np.arange(NUM_ROWS) % 5 == 0),
    }
    pq.write_table(pa.table(columns), folder / "part-0.parquet")
    return folder
