"""Predicts the rows of a job file with the model of a training, or with a logged one: ``sparkdl predict``.

Runs on the *driver*; the predictions run on the executors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.cores import usable_cores
from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.data.spark.columns import quote
from sparkdl.data.spark.reading import reading_job
from sparkdl.errors import DataError, JobFileError, ParamError, list_names
from sparkdl.foreign_errors import store_errors
from sparkdl.jobs.imports import code_files, importable, ship
from sparkdl.jobs.output import JobOutput
from sparkdl.jobs.plan import open_rows
from sparkdl.jobs.run_job import watched_session
from sparkdl.mlflow.flavor import load_model
from sparkdl.spark.jobs import jobs_of
from sparkdl.tracking import use_tracking_uri
from sparkdl.tracking.torch_model import is_logged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.jobs.job import PredictionJob
    from sparkdl.jobs.run_job import OpenSession, Say


def run_prediction(job: PredictionJob, open_session: OpenSession, *, say: Say) -> None:
    """Predict the rows of a job, and write them with their predictions.

    Args:
        job: the job.
        open_session: function that opens the session for a number of tasks at once.
        say: function that is called with lines that report progress.

    Raises:
        ParamError: if the job is not valid, there is no such model, or the output exists.
        ClusterLostError: if the Spark application ended while the job ran.
        SparkdlError: any exception of :meth:`sparkdl.estimators.TorchModel.transform`.
    """
    code = code_files(job)
    with importable(code):
        if job.tracking_uri is not None:
            use_tracking_uri(job.tracking_uri)
        result = None if is_logged(job.model) else _result_of(job.model)
        _refuse_existing_folder(job)
        with watched_session(open_session, usable_cores()) as spark:
            ship(code, spark)
            with jobs_of(f"predict {job.file.stem}"):
                model = load_model(job.model) if result is None else JobOutput(job.model).model()
                _set_params(job, model)
                _refuse_existing_table(job, spark)
                predicted = _predict(job, model, open_rows(job.data, spark))
                say(f"Predicting {job.data} with the model of {job.model}, to {job.output}.")
                _write(job, predicted)
    say(f"Done: {job.output} has the predictions.")


def _result_of(url: str) -> dict[str, Any]:
    result = JobOutput(url).result()
    if result is None:
        raise ParamError(
            f"{url} has no model: run the training first, by sparkdl train, or set predict.model."
        )
    return result


def _set_params(job: PredictionJob, model: Any) -> None:
    try:
        model.setParams(**job.params)
    except ParamError as error:
        raise JobFileError(f"{job.params_position}: predict.params: {error}") from error


def _predict(job: PredictionJob, model: Any, rows: DataFrame) -> DataFrame:
    missing = [name for name in job.columns if name not in rows.columns]
    if missing:
        raise DataError(
            f"predict.columns names {missing[0]!r}, and the rows have {list_names(rows.columns)}."
        )
    predicted: DataFrame = model.transform(rows)
    if not job.columns:
        return predicted
    added = [name for name in predicted.columns if name not in rows.columns]
    return predicted.select(*[quote(name) for name in (*job.columns, *added)])


def _refuse_existing_folder(job: PredictionJob) -> None:
    if job.is_table or job.mode != "error":
        return
    url = absolute_url(job.output)
    with store_errors(f"The output {url} cannot be read"):
        location = open_location(url)
        location.filesystem.invalidate_cache()
        exists = location.filesystem.exists(location.path)
    if exists:
        raise _exists(job)


def _refuse_existing_table(job: PredictionJob, spark: SparkSession) -> None:
    if job.is_table and job.mode == "error":
        with reading_job(spark, "looking for the table"):
            exists = spark.catalog.tableExists(job.output)
        if exists:
            raise _exists(job)


def _exists(job: PredictionJob) -> ParamError:
    return ParamError(
        f"The output {job.output} of the predictions exists. Choose another predict.output, or set predict.mode to "
        "overwrite or append."
    )


def _write(job: PredictionJob, predicted: DataFrame) -> None:
    writer = predicted.write.mode(job.mode)
    with reading_job(predicted.sparkSession, "predicting", waits_for_tasks=True):
        if job.is_table:
            writer.saveAsTable(job.output)
        else:
            location = open_location(absolute_url(job.output))
            writer.parquet(location.path if location.is_local else location.spark_url)
