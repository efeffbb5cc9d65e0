"""Jobs in an existing session, as on a platform that provides one."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import sparkdl.jobs
from sparkdl.errors import DataError, JobFileError, ParamError
from sparkdl.estimators import LanguageModelModel, TorchClassificationModel
from sparkdl.jobs.job import read_job, read_prediction_job
from sparkdl.jobs.predict import run_prediction
from sparkdl.jobs.run_job import run_job
from sparkdl.jobs.yaml_tree import read_override
from sparkdl.spark.session import is_connect

SCRIPT = Path(sparkdl.jobs.__file__).parent / "script" / "sparkdl_job.py"

JOB = """\
data:
  sql: SELECT image, digit, id % 5 = 0 AS is_test FROM rows_of_jobs
  validation: is_test
  test:
    sql: SELECT image, digit FROM test_rows_of_jobs WHERE id < 50
model: TorchClassifier
params:
  featuresCol: image
  labelCol: digit
  hiddenSizes: [8]
  metrics: {{sure: "metrics_of_jobs:sure"}}
  batchSize: 16
  epochs: 2
  numWorkers: 2
  store: {folder}/store
  keepRowsSeconds: 0
  showProgress: false
tracking: off
output: {folder}/out
predict:
  sql: SELECT * FROM rows_of_jobs
  output: {folder}/scored
  columns: [id, digit]
  params: {{probabilityCol: probability}}
"""

METRICS = """\
def sure(outputs, labels):
    return outputs.softmax(1).amax(1)
"""


def runs_of(spark: Any, frame: Any, folder: Path) -> Callable[..., str]:
    """A function that runs the job with overrides, and returns what was said."""
    for view in ("rows_of_jobs", "test_rows_of_jobs"):
        frame.createOrReplaceTempView(view)
    (folder / "metrics_of_jobs.py").write_text(METRICS)
    file = folder / "job.yaml"
    file.write_text(JOB.format(folder=folder))

    def run(*arguments: str, **options: bool) -> str:
        said: list[str] = []
        job = read_job(file, [read_override(argument) for argument in arguments])
        run_job(job, lambda _: nullcontext(spark), say=said.append, **options)
        return "\n".join(said)

    return run


def predicted(spark: Any, folder: Path, *arguments: str) -> Any:
    """Predict with the job, and return the rows in its folder of predictions."""
    job = read_prediction_job(folder / "job.yaml", [read_override(argument) for argument in arguments])
    run_prediction(job, lambda _: nullcontext(spark), say=print)
    return spark.read.parquet(str(folder / "scored"))


@pytest.mark.no_cluster_needed
@pytest.mark.slow_elsewhere
def test_job_is_planned_run_once_and_run_again_on_request(spark, frame, tmp_path, monkeypatch):
    run = runs_of(spark, frame, tmp_path)
    plan = run(is_dry_run=True)
    assert "rows     203 of sql SELECT image, digit" in plan
    assert "162 for training, 41 for validation" in plan
    assert "steps    6 per epoch; 12 in 2 epochs" in plan
    assert "as the rows determine the model" in plan
    assert "test     rows of sql SELECT image, digit" in plan
    assert "2 ranks (0, 1)" in plan
    assert f"output   {tmp_path / 'out'} is empty" in plan
    assert not (tmp_path / "out").exists()

    weighted = "data.sql=SELECT image, digit, id % 5 = 0 AS is_test, 1.0 AS weight FROM rows_of_jobs"
    with pytest.raises(DataError, match="weightCol is 'weight', and the DataFrame has no such column"):
        run(weighted, "weightCol=weight", is_dry_run=True)

    lost = "IF(digit >= 0, CAST(raise_error('rows are lost') AS INT), digit)"
    frame.withColumn("digit", F.expr(lost)).createOrReplaceTempView("test_rows_of_jobs")
    with pytest.raises(Exception, match="rows are lost"):
        run()
    assert "model of this job, whose test is missing: nothing will be trained" in run(is_dry_run=True)
    frame.createOrReplaceTempView("test_rows_of_jobs")
    said = run()
    assert "Training" not in said
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert sorted(result["metrics"]) == ["sure", "val_loss", "val_sure"]
    model = TorchClassificationModel.load(str(tmp_path / "out" / "model"))
    assert model.transform(frame).filter("prediction IN (0, 1, 2)").count() == 203
    accuracy = model.transform(frame.where("id < 50")).selectExpr("avg(int(prediction = digit))").first()[0]
    assert result["test"]["accuracy"] == pytest.approx(accuracy)
    assert f"Done: in the test accuracy {accuracy:.4g}" in said

    checkpoint = tmp_path / "checkpoints" / "fit-1-0123abcd"
    checkpoint.mkdir(parents=True)
    trial = ("fastDevRun=true", f"checkpointDir={checkpoint.parent}")
    assert "out stays as it is" in run(*trial, is_dry_run=True)
    assert re.search(
        r"Done: 1 epoch, .* in the test accuracy .*Nothing is written to", run(*trial, is_again=True)
    )
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    assert checkpoint.exists()

    if is_connect(spark):
        scored = predicted(spark, tmp_path)
    else:  # as spark-submit runs it
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--predict", str(tmp_path / "job.yaml")])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert ended.value.code == 0
        scored = spark.read.parquet(str(tmp_path / "scored"))
    assert scored.columns == ["id", "digit", "rawPrediction", "probability", "prediction"]
    assert scored.count() == 203
    with pytest.raises(ParamError, match="scored of the predictions exists.*predict.mode"):
        predicted(spark, tmp_path)
    again = "predict.mode=append", "predict.columns=", "predict.sql=SELECT * FROM rows_of_jobs LIMIT 7"
    with pytest.raises(JobFileError, match="predict.params: .*no Param 'probabilty'"):
        predicted(spark, tmp_path, *again, "predict.params={probabilty: p}")
    with pytest.raises(DataError, match="predict.columns names 'nothing'"):
        predicted(spark, tmp_path, *again, "predict.columns=nothing")
    assert predicted(spark, tmp_path, *again).count() == 210
    with pytest.raises(ParamError, match="has no model: run the training first"):
        predicted(spark, tmp_path, *again, f"predict.model={tmp_path / 'nothing'}")
    into_table = predicted(
        spark, tmp_path, "predict.output={table: scored_by_jobs}", "predict.mode=overwrite"
    )
    assert into_table.count() == 210
    assert spark.table("scored_by_jobs").count() == 203
    spark.sql("DROP TABLE scored_by_jobs")

    # The view is of rows in memory, which cannot be compared between runs.
    assert "cannot tell whether its rows are the same" in run()
    assert "nothing will be trained" in run(is_dry_run=True)
    with pytest.raises(ParamError, match="another job: params.epochs was 2 and is 1"):
        run("epochs=1")
    table = "data.table=rows_of_jobs", "data.validation=", f"output={tmp_path / 'of the table'}"
    assert "rows     203 of table rows_of_jobs" in run(*table, is_dry_run=True)
    with pytest.raises(JobFileError, match=r"': data.sql: Spark cannot read it: .*no_such_column"):
        run("data.sql=SELECT no_such_column FROM rows_of_jobs", f"output={tmp_path / 'other'}")


@pytest.mark.slow  # tests/spark/launch/test_elastic.py has such fits daily
@pytest.mark.any_spark_will_do
def test_job_says_that_its_ranks_come_and_go_and_its_own_session_has_a_slot_for_each(spark, frame, tmp_path):
    runs_of(spark, frame, tmp_path)
    changes = ("elastic=true", "numWorkers=1", "minWorkers=1", "maxWorkers=2", "tracking=off")
    job = read_job(tmp_path / "job.yaml", [read_override(change) for change in changes])
    said, slots = [], []

    def open_session(num_slots: int) -> Any:
        slots.append(num_slots)
        return nullcontext(spark)

    run_job(job, open_session, say=said.append)
    assert slots == [2]
    assert "Done: 2 epochs, loss " in "\n".join(said)
    refused = read_job(tmp_path / "job.yaml", [read_override("maxWorkers=3")])
    with pytest.raises(JobFileError, match=r"maxWorkers is 3, and the fit is not elastic"):
        run_job(refused, open_session, say=said.append)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_job_is_run_on_a_table_as_on_a_query(spark, frame, tmp_path):
    run = runs_of(spark, frame, tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(file.read_text().replace('  metrics: {sure: "metrics_of_jobs:sure"}\n', ""))
    run("data.table=rows_of_jobs", "data.validation=", "epochs=1", f"output={tmp_path / 'of the table'}")
    of_table = json.loads((tmp_path / "of the table" / "result.json").read_text())
    assert of_table["epochs"] == 1
    assert [*of_table["metrics"]] == [*of_table["history"][0]["metrics"]] == ["accuracy"], "unasked"


LANGUAGE_JOB = """\
data:
  sql: SELECT concat('the row ', id, ' is about ', digit) AS text, 'all' AS corpus FROM rows_of_jobs
  test:
    sql: SELECT concat('the row ', id) AS text FROM rows_of_jobs WHERE id < 9
model: LanguageModel
params:
  featuresCol: text
  corpusCol: corpus
  corpusWeights: {{all: 1}}
  vocabularySize: 300
  embeddingSize: 32
  numLayers: 1
  maxLength: 32
  numWorkers: 2
  parallelism: {{shard: 2}}
  store: {folder}/store
  showProgress: false
tracking: {{mode: on, uri: '{uri}'}}
output: {folder}/out
"""


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_a_job_of_a_language_model_is_planned_done_and_tested_with_packed_rows(
    spark, frame, tracked, tmp_path
):
    import mlflow

    frame.createOrReplaceTempView("rows_of_jobs")
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    (tmp_path / "job.yaml").write_text(LANGUAGE_JOB.format(folder=tmp_path, uri=uri))
    job, said = read_job(tmp_path / "job.yaml"), []
    run_job(job, lambda _: nullcontext(spark), say=said.append, is_dry_run=True)
    lines = dict(line.split(maxsplit=1) for line in said.pop().splitlines())
    _, num_rows = lines["rows"].split()[:2]
    assert lines["rows"].startswith(f"about {num_rows} packed of sql SELECT concat")
    assert lines["columns"].startswith("tokens, documents, labels: ")
    assert "parameters: weights" in lines["model"]
    run_job(job, lambda _: nullcontext(spark), say=said.append)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    # Some packed rows are not full.
    assert 0.6 * result["history"][0]["rows"] < int(num_rows) <= result["history"][0]["rows"]
    model = LanguageModelModel.load(str(tmp_path / "out" / "model"))
    assert isinstance(model.generate("the row"), str)
    logged = mlflow.MlflowClient(uri).get_run(result["run_id"]).data.metrics
    assert logged["test_perplexity"] == pytest.approx(result["test"]["perplexity"])
    with pytest.raises(DataError, match="Param corpusCol is 'corpos'"):
        changed = read_job(tmp_path / "job.yaml", [read_override("corpusCol=corpos")])
        run_job(changed, lambda _: nullcontext(spark), say=said.append, is_dry_run=True)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_job_is_tracked_and_its_model_registered_as_the_job_file_says(spark, frame, tracked, tmp_path):
    import mlflow

    for view in ("rows_of_jobs", "test_rows_of_jobs"):
        frame.createOrReplaceTempView(view)
    file = tmp_path / "job.yaml"
    text = JOB.format(folder=tmp_path)
    (tmp_path / "metrics_of_jobs.py").write_text(METRICS)
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    tracking = f"tracking: {{mode: on, experiment: jobs, runName: nightly, uri: '{uri}'}}"
    file.write_text(text.replace("tracking: off", f"{tracking}\nregistry: {{name: digits, alias: champion}}"))
    run_job(read_job(file), lambda _: nullcontext(spark), say=print)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    client = mlflow.MlflowClient(uri)
    run = client.get_run(result["run_id"])
    assert (run.info.run_name, run.info.status) == ("nightly", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == "jobs"
    assert client.get_model_version_by_alias("digits", "champion").run_id == result["run_id"]
    logged = Path(mlflow.artifacts.download_artifacts(result["model_uri"], tracking_uri=uri))
    assert (logged / "code" / "metrics_of_jobs.py").is_file()
