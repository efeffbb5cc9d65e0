"""A logged model as a Spark SQL function made by MLflow."""

from __future__ import annotations

import importlib
import inspect
import sys

import mlflow
import numpy as np
import pytest
from pyspark.sql import functions as F

import sparkdl.mlflow
from sparkdl.estimators import TorchModel
from sparkdl.model.saved_model import SavedModel
from tests.servers.mlflow_servers import environments_of_mlflow
from tests.training.signatures import make_signature
from tests.unit.mlflow.model_examples import expected, many_into_many, rows


@pytest.mark.slow
@pytest.mark.no_cluster_needed
def test_spark_udf_returns_the_predictions_of_the_model(spark, tmp_path):
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
    spark.udf.register("score", tell)
    df.createOrReplaceTempView("rows_to_score")
    query = "SELECT score(matrix, tokens, count).kind AS kind FROM rows_to_score ORDER BY count"
    assert [row["kind"] for row in spark.sql(query).collect()] == told["kind"].tolist()


LAYER = """
import sparkdl
import torch

class WhereSparkdlIs(torch.nn.Module):
    def forward(self, x):
        return x + (10.0 if ".whl" in sparkdl.__file__ else 0.0)
"""


@pytest.mark.slow
@pytest.mark.no_cluster_needed
@pytest.mark.any_spark_will_do
@pytest.mark.timeout(1700)
@pytest.mark.skipif(
    "extra_env" not in inspect.signature(mlflow.pyfunc.spark_udf).parameters,
    reason="this MLflow gives what serves on the executors the PYTHONPATH of the tests, and with it this checkout",
)
@pytest.mark.parametrize("manager", ["virtualenv", "uv"])
def test_a_function_of_spark_sql_runs_in_an_environment_made_of_its_requirements(
    spark, tmp_path, monkeypatch, manager
):
    source = tmp_path / "layer_of_a_udf_test.py"
    source.write_text(LAYER)
    path = str(tmp_path / "model")
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        layer = importlib.import_module(source.stem).WhereSparkdlIs()
        saved = SavedModel(layer, make_signature())
        sparkdl.mlflow.save_model(TorchModel(saved), path, code_paths=[str(source)])
    sys.modules.pop(source.stem)
    variables = environments_of_mlflow(tmp_path, manager)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tell = mlflow.pyfunc.spark_udf(
        spark, path, env_manager=manager, extra_env={**variables, "PYTHONPATH": ""}
    )
    df = spark.createDataFrame([(float(number),) for number in range(4)], "x double")
    found = df.select("x", tell(F.struct("x")).alias("told")).collect()
    assert [row["told"] for row in found] == [row["x"] + 10.0 for row in found]
