"""Runs a job, from opening its Spark session to writing the model to its output.

Runs on the *driver*; the training runs on the ranks.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.cli.local_session import quiet_libraries, spark_options, use_own_spark
from sparkdl.data.files.lease import hold_alone
from sparkdl.errors import ClusterLostError, ParamError, count_of
from sparkdl.estimators.fit.inputs import check_columns, column_names
from sparkdl.estimators.fit.progress import JsonProgress
from sparkdl.estimators.summary import describe_values
from sparkdl.identity import differences
from sparkdl.jobs.identity import ROWS, TEST_ROWS, identity_of, key_of_files
from sparkdl.jobs.imports import checksums, code_files, importable, loggable, ship
from sparkdl.jobs.make_estimator import make_estimator, model_size
from sparkdl.jobs.output import JobOutput, make_result
from sparkdl.jobs.plan import key_of_rows, make_plan, open_rows, plan_text
from sparkdl.jobs.yaml_tree import write_tree
from sparkdl.spark.failures import cluster_lost_error, mentions_stopped_context
from sparkdl.spark.jobs import jobs_of, purpose_of_jobs
from sparkdl.spark.session import is_connect, is_context_stopped
from sparkdl.tracking import add_to_run, log_with_fits, use_tracking_uri, without_credentials
from sparkdl.training.checkpoint.fit_manifest import fit_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.jobs.job import SparkChoice, TrainingJob


_SECRET = re.compile(r"secret|password|token|access.?key|credential", re.IGNORECASE)
"""Pattern of the names of secret settings: that of Spark's default ``spark.redaction.regex``, and more."""


@contextmanager
def own_session(choice: SparkChoice, num_ranks: int, *, name: str) -> Iterator[SparkSession]:
    """Open the session of a command, with the settings of the job's ``spark``, and stop it at the end."""
    from pyspark.sql import SparkSession

    quiet_libraries()
    use_own_spark()
    master = choice.master or f"local[{num_ranks}]"
    with tempfile.TemporaryDirectory(prefix="sparkdl-job-") as folder:
        settings = {
            **spark_options(master, Path(folder)),
            "spark.master": master,
            "spark.app.name": name,
            **choice.config,
        }
        _start_java({key: value for key, value in settings.items() if not _SECRET.search(key)})
        with _open(SparkSession.builder.config(map={**settings}), master) as session:
            yield session


def _start_java(settings: Mapping[str, str]) -> None:
    """Start the JVM with the settings that are not secret.

    pyspark passes these settings as arguments of the JVM, which all users of the machine can read. The secret settings
    are passed later, over pyspark's connection to the JVM.
    """
    from pyspark import SparkConf, SparkContext

    context: Any = SparkContext
    context._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(settings.items())))


@contextmanager
def given_session(_num_ranks: int, *, name: str) -> Iterator[SparkSession]:
    """Yield the active session, or a new one with the settings of spark-submit, which is stopped at the end."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    with _open(SparkSession.builder.appName(name), "that spark-submit was given") as session:
        yield session


def _open(builder: Any, master: str) -> SparkSession:
    try:
        session: SparkSession = builder.getOrCreate()
    except Exception as error:
        # If no master accepts the application, Spark stops the context while its constructor is still running.
        if not mentions_stopped_context(error):
            raise
        raise ClusterLostError(
            f"The master {master} did not accept the application: it does not answer, or its secret "
            "(spark.authenticate) differs from the one here. See Spark's log."
        ) from error
    return session


def is_lost(session: SparkSession) -> bool:
    """Return whether the application of a session has ended by itself, for example because its cluster went away."""
    if is_connect(session):
        return False
    context: Any = session.sparkContext
    return context._jsc is not None and is_context_stopped(session)  # _jsc is None after a call of stop()


OpenSession = Callable[[int], AbstractContextManager["SparkSession"]]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A job that was checked as far as possible before Spark starts, and the results of the checks."""

    job: TrainingJob
    estimator: Any
    code: list[Path]
    identity: dict[str, Any]
    output: JobOutput
    earlier_result: dict[str, Any] | None
    columns: list[str]
    files: str | None


def run_job(
    job: TrainingJob,
    open_session: OpenSession,
    *,
    say: Say,
    is_again: bool = False,
    is_dry_run: bool = False,
    has_own_session: bool = False,
) -> None:
    """Train the model of a job, test it, and write it to the output, unless the output has the result of this job.

    If only the test failed, the next run does only the test. With ``fastDevRun`` the job tries training and test,
    whatever the output has, and leaves output and checkpoints as they are.

    Args:
        job: the job.
        open_session: function that opens the session for the greatest number of ranks.
        say: function that is called with lines that report progress.
        is_again: whether to train even if the output has a result, which is then replaced.
        is_dry_run: whether to report the plan instead; ranks are started without training.
        has_own_session: whether the session has no settings but those of the job and of Spark's defaults.

    Raises:
        ParamError: if the job is not valid, or the output has the result of another job.
        ClusterLostError: if the Spark application ended while the job ran.
        SparkdlError: any exception of :meth:`sparkdl.estimators.TorchEstimator.fit`.
    """
    code = code_files(job)
    with importable(code):
        checked = _check(job, code, has_own_session=has_own_session)
        if not is_dry_run:
            if job.log_format == "json":
                say = JsonProgress(sys.stderr).print
            if not is_again:
                _refuse_another(checked)
                if _is_done_whatever_spark_says(checked):
                    say(_done_before_text(checked))
                    return
            checked.output.check_writable()
        if job.tracking_uri is not None:
            use_tracking_uri(job.tracking_uri)
        with watched_session(open_session, checked.estimator.getMaxWorkers()) as spark:
            ship(code, spark)
            with jobs_of(f"train {job.file.stem}"):
                frame = open_rows(job.data, spark)
                check_columns(checked.estimator, checked.estimator._columns_of_fit(), frame.columns)
                keys = {ROWS: key_of_rows(job.data, frame, checked.columns)}
                test = None
                if job.test is not None:
                    test = open_rows(job.test, spark)
                    columns = _columns_of_test(checked.estimator)
                    check_columns(checked.estimator, columns, test.columns)
                    names = [name for _, names in columns for name in names]
                    keys[TEST_ROWS] = key_of_rows(job.test, test, names)
                checked = replace(checked, identity={**checked.identity, **keys})
                if is_dry_run:
                    say(_plan(checked, frame, is_again=is_again))
                    return
            if not is_again:
                _refuse_another(checked)
                if checked.earlier_result is not None:
                    if test is not None and _lacks_test(checked):
                        _test_trained(checked, test, say)
                    else:
                        say(_done_before_text(checked))
                    return
            _train(checked, frame, test, say, is_again=is_again)


def _check(job: TrainingJob, code: list[Path], *, has_own_session: bool) -> _Checked:
    estimator = make_estimator(job)
    output = JobOutput(job.output)
    earlier = output.result()
    return _Checked(
        job=job,
        estimator=estimator,
        code=code,
        identity=identity_of(job, checksums(code)),
        output=output,
        earlier_result=None if estimator.getFastDevRun() else earlier,
        columns=list(dict.fromkeys(name for _, names in estimator._columns_of_fit() for name in names)),
        files=key_of_files(job) if has_own_session else None,
    )


def _columns_of_test(estimator: Any) -> list[tuple[Any, Any]]:
    """Return the columns that test rows need, with the Params that name them."""
    return [
        (param, names)
        for param, names in estimator._columns_of_fit()
        if param.name in ("featuresCol", "labelCol", "weightCol")
    ]


def _is_done_whatever_spark_says(checked: _Checked) -> bool:
    """Whether the output has the result of this job, which needs no Spark to see.

    That is so if Spark could not identify the rows of the result, or if no file and no setting has changed since.
    """
    result = checked.earlier_result
    if result is None or _lacks_test(checked):
        return False
    if all(result["job"].get(name) is None for name in (ROWS, TEST_ROWS)):
        return True
    return _has_same_files(checked)


def _lacks_test(checked: _Checked) -> bool:
    """Whether the output has a trained model whose test failed."""
    result = checked.earlier_result
    return result is not None and checked.job.test is not None and "test" not in result


def _has_same_files(checked: _Checked) -> bool:
    """Whether it is known that the result is of the same files and settings."""
    result = checked.earlier_result
    return result is not None and checked.files is not None and result.get("files") == checked.files


def _train(checked: _Checked, frame: DataFrame, test: DataFrame | None, say: Say, *, is_again: bool) -> None:
    estimator, began = checked.estimator, datetime.now(timezone.utc)
    checkpoints = estimator.getCheckpointDir()
    is_trial = estimator.getFastDevRun()
    if is_again and checkpoints is not None and not is_trial:
        _remove_checkpoints(checkpoints, say)
    length = "a trial (fastDevRun)" if is_trial else count_of(estimator.getEpochs(), "epoch")
    say(
        f"Training {checked.job.estimator} of {checked.job.file.name} on {checked.job.data}: "
        f"{length} on {count_of(estimator.getNumWorkers(), 'rank')}."
    )
    with log_with_fits(files={"job.yaml": _yaml_of(checked.job)}, code=loggable(checked.code)):
        model = estimator.fit(frame)
    result = make_result(checked.job, checked.identity, model, began=began) | {"files": checked.files}
    tested = ""
    try:
        if test is not None:
            result["test"] = _test(model, test)
            tested = f"; in the test {_show(result['test'])}"
    finally:
        if not is_trial:
            checked.output.write(model, result)
    place = (
        f"Nothing is written to {checked.output.url}" if is_trial else f"{checked.output.url} has the model"
    )
    values = describe_values(model.summary)
    say(f"Done: {count_of(len(model.history), 'epoch')}, {values}{tested}. {place}.")


def _test_trained(checked: _Checked, test: DataFrame, say: Say) -> None:
    """Test the model in the output, and write its metrics there."""
    result = checked.earlier_result
    assert result is not None
    say(f"{checked.output.url} has the trained model of this job, without its test: testing it.")
    model = checked.output.model()
    metrics = _test(model, test)
    checked.output.write(model, result | {"test": metrics})
    say(f"Done: in the test {_show(metrics)}. {checked.output.url} has the model.")


def _show(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _test(model: Any, rows: DataFrame) -> dict[str, float]:
    """Return the metrics of a model for test rows, with several label columns under ``label.name``."""
    if hasattr(model, "perplexity"):
        metrics = {"perplexity": model.perplexity(rows)}
        if model.summary.run_id is not None:  # evaluate does so for other models
            add_to_run(model.summary.run_id, {f"test_{name}": value for name, value in metrics.items()}, {})
        return metrics
    evaluated = model.evaluate(rows)
    if not isinstance(evaluated, dict):
        return dict(evaluated.metrics)
    return {
        f"{label}.{name}": value
        for label, evaluation in evaluated.items()
        for name, value in evaluation.metrics.items()
    }


def _yaml_of(job: TrainingJob) -> bytes:
    """The job with its overrides, without ``spark`` and without user and password of the tracking URI."""
    content = deepcopy(job.content)
    if isinstance(tracking := content.get("tracking"), dict) and "uri" in tracking:
        tracking["uri"] = without_credentials(str(tracking["uri"]))
    return write_tree(content).encode()


def _plan(checked: _Checked, frame: DataFrame, *, is_again: bool) -> str:
    params, rows = checked.estimator._plan_rows(frame)
    has_model = params.isSet(params.model)
    size = model_size(params.getModel(), params.getOptimizer()) if has_model else None
    columns = column_names(params)
    plan = make_plan(params, frame, columns, size, rows)
    what = "" if rows is None else "packed"
    return plan_text(checked.job, plan, columns, _state(checked, is_again=is_again), what=what)


def _state(checked: _Checked, *, is_again: bool) -> str:
    """Return the state of the output, as text."""
    url = checked.output.url
    if checked.estimator.getFastDevRun():
        return f"{url} stays as it is: a trial (fastDevRun) writes nothing"
    if checked.earlier_result is not None:
        if is_again:
            return f"{url} has a result, which will be replaced"
        if changes := differences(checked.earlier_result["job"], checked.identity):
            return f"{url} has the result of another job: {'; '.join(changes)}. The job needs --again to replace it"
        if _lacks_test(checked):
            return f"{url} has the model of this job, whose test is missing: nothing will be trained"
        return f"{url} has the result of this job: nothing will be trained"
    checkpoints = checked.estimator.getCheckpointDir()
    if checkpoints is not None and not is_again and fit_folder(checkpoints).names():
        return f"{url} is empty; the fit will continue from the checkpoints in {checkpoints}"
    return f"{url} is empty"


def _refuse_another(checked: _Checked) -> None:
    """Raise a :class:`ParamError` if the output has the result of a different job."""
    if checked.earlier_result is None:
        return
    changes = differences(checked.earlier_result["job"], checked.identity)
    if changes:
        raise ParamError(
            f"The output {checked.output.url} has the result of another job: {'; '.join(changes)}. Choose another "
            "output, or replace it with --again."
        )


def _done_before_text(checked: _Checked) -> str:
    assert checked.earlier_result is not None
    earlier = checked.earlier_result
    is_known = None not in (checked.identity[ROWS], earlier["job"].get(ROWS)) or _has_same_files(checked)
    unknown = "" if is_known else " Spark cannot tell whether its rows are the same."
    return (
        f"Already done at {earlier.get('ended')}: {checked.output.url} has the result of this "
        f"job.{unknown} Use --again to train it again."
    )


def _remove_checkpoints(url: str, say: Say) -> None:
    """Remove the checkpoints, so that the fit does not continue from them."""
    folder = fit_folder(url)
    if names := folder.names():
        with hold_alone(folder.url, say):
            for name in names:
                folder.remove(name)
        say(f"Removed {count_of(len(names), 'checkpoint')} in {folder.url}, to train from the beginning.")


@contextmanager
def watched_session(open_session: OpenSession, num_ranks: int) -> Iterator[SparkSession]:
    """Open the session; if its application ends by itself, raise exceptions as :class:`ClusterLostError`."""
    with open_session(num_ranks) as spark:
        try:
            yield spark
        except ClusterLostError:
            raise
        except Exception as error:
            if is_lost(spark):
                raise cluster_lost_error(error, purpose_of_jobs()) from error
            raise
