"""A fit whose rows are on S3, written by Spark's executors and read by its ranks."""

from __future__ import annotations

import pytest
import s3fs

from sparkdl.errors import StoreError
from tests.servers.s3_server import s3, s3_endpoint
from tests.spark.estimators.estimator_examples import make_estimator

__all__ = ["s3", "s3_endpoint"]


@pytest.fixture
def environment_of_executors(spark, s3):
    """Sets the variables that ``spark.executorEnv.*`` would set at the start of a session."""
    of_workers = spark.sparkContext.environment
    of_workers.update(s3.environment)
    yield
    for name in s3.environment:
        of_workers.pop(name)


@pytest.mark.any_spark_will_do
@pytest.mark.usefixtures("environment_of_executors")
def test_rows_are_written_to_s3_once_and_trained_on_from_there(frame, s3, tmp_path):
    bucket = s3.make_bucket()
    estimator = make_estimator(tmp_path, store=f"s3://{bucket}/rows", keepRowsSeconds=3600, epochs=2)
    first = estimator.fit(frame)
    written = s3fs.S3FileSystem().find(f"{bucket}/rows")
    assert any(path.endswith(".parquet") for path in written)
    again = estimator.fit(frame)
    s3fs.S3FileSystem.clear_instance_cache()
    assert s3fs.S3FileSystem().find(f"{bucket}/rows") == written
    assert [record.loss for record in first.history] == [record.loss for record in again.history]
    assert first.history[1].loss < first.history[0].loss


@pytest.mark.slow  # tests/unit/data/store/test_s3_failures.py has the message daily
@pytest.mark.any_spark_will_do
def test_executors_without_credentials_end_the_fit_with_the_settings_to_make(frame, s3, tmp_path):
    estimator = make_estimator(tmp_path, store=f"s3://{s3.make_bucket()}/rows", epochs=1)
    with pytest.raises(StoreError, match="no credentials"):
        estimator.fit(frame)
