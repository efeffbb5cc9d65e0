"""A logged model as a function of Spark SQL, by MLflow."""

from __future__ import annotations

import mlflow
import numpy as np
import pytest
from pyspark.sql import functions as F

import sparkdl.mlflow
from tests.unit.mlflow.model_examples import expected, many_into_many, rows


@pytest.mark.slow
@pytest.mark.no_cluster_needed
def test_a_function_of_spark_sql_tells_what_the_model_tells(spark, tmp_path):
    model = many_into_many()
    path = str(tmp_path / "model")
    sparkdl.mlflow.save_model(model, path, input_example=rows(2))
    schema = "matrix array<array<double>>, tokens array<long>, count long"
    df = spark.createDataFrame(rows(6).values.tolist(), schema).repartition(2)
    tell = mlflow.pyfunc.spark_udf(spark, path, env_manager="local", params={"batch_size": 2})
    found = df.withColumn("told", tell(F.struct(*df.columns))).orderBy("count").collect()
    told = expected(model.module, rows(6))
    assert [row["told"]["kind"] for row in found] == told["kind"].tolist()
    for name in ("kind_probability", "place"):
        np.testing.assert_allclose([row["told"][name] for row in found], told[name], rtol=1e-5)
