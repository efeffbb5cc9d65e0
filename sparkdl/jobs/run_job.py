"""Runs a job: from what it says to the model in its output. Runs on the *driver*; the training runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sparkdl.data.spark.jobs import jobs_of
from sparkdl.errors import ClusterLostError, ParamError
from sparkdl.estimators.checkpoint_holder import held_alone
from sparkdl.estimators.column_check import check_columns
from sparkdl.estimators.fit_inputs import column_names
from sparkdl.jobs.code_files import code_files, digests, importable, loggable, ship
from sparkdl.jobs.identity import Identity, identity_of
from sparkdl.jobs.make_estimator import make_estimator
from sparkdl.jobs.model_size import model_size
from sparkdl.jobs.output import JobOutput
from sparkdl.jobs.plan import make_plan
from sparkdl.jobs.plan_text import plan_text
from sparkdl.jobs.result import make_result
from sparkdl.jobs.rows import key_of_rows, open_rows
from sparkdl.jobs.session import is_lost
from sparkdl.tracking import models_with_code, use_tracking_uri
from sparkdl.training.checkpoint.folder import CheckpointFolder

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.jobs.job import Job

OpenSession = Callable[[int], AbstractContextManager["SparkSession"]]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A job whose words were checked, before Spark starts."""

    job: Job
    estimator: Any
    code: list[Path]
    identity: Identity
    output: JobOutput
    before: dict[str, Any] | None
    columns: list[str]


def run_job(
    job: Job, open_session: OpenSession, *, say: Say, is_again: bool = False, is_dry_run: bool = False
) -> None:
    """Train the model of a job and write it to the output, unless that has been done.

    Args:
        job: the job.
        open_session: gives the session for a number of ranks.
        say: is told what happens, in lines.
        is_again: whether to train also where the output has a result, which is replaced then.
        is_dry_run: whether to say what would happen instead; ranks are started, and do nothing.

    Raises:
        ParamError: if the job cannot be run as it is, or the output has the result of another one.
        ClusterLostError: if Spark's application ended meanwhile.
        SparkdlError: whatever :meth:`sparkdl.estimators.TorchEstimator.fit` raises.
    """
    code = code_files(job)
    with importable(code):
        checked = _check(job, code)
        if not is_dry_run:
            if not is_again:
                _refuse_another(checked, checked.identity)
            checked.output.check_writable()
        if job.tracking_uri is not None:
            use_tracking_uri(job.tracking_uri)
        with _session(open_session, checked.estimator.getNumWorkers()) as spark:
            ship(code, spark)
            with jobs_of(f"train {job.file.stem}"):
                frame = open_rows(job, spark)
                check_columns(checked.estimator.params_of_fit(), frame.columns)
                checked = replace(
                    checked, identity=replace(checked.identity, rows=key_of_rows(frame, checked.columns))
                )
                if is_dry_run:
                    say(_plan(checked, frame, is_again=is_again))
                    return
            if not is_again:
                _refuse_another(checked, checked.identity)
                if checked.before is not None:
                    say(_done_before(checked))
                    return
            _train(checked, frame, say, is_again=is_again)


def _check(job: Job, code: list[Path]) -> _Checked:
    estimator = make_estimator(job)
    output = JobOutput(job.output)
    return _Checked(
        job=job,
        estimator=estimator,
        code=code,
        identity=identity_of(job, digests(code)),
        output=output,
        before=output.result(),
        columns=column_names(estimator.params_of_fit()),
    )


def _train(checked: _Checked, frame: DataFrame, say: Say, *, is_again: bool) -> None:
    estimator, began = checked.estimator, datetime.now(timezone.utc)
    checkpoints = estimator.getCheckpointDir()
    if is_again and checkpoints is not None:
        _remove_checkpoints(checkpoints, say)
    say(
        f"Training {checked.job.estimator} of {checked.job.file.name} on {checked.job.data}: "
        f"{estimator.getEpochs()} epochs on {estimator.getNumWorkers()} ranks."
    )
    with models_with_code(loggable(checked.code)):
        model = estimator.fit(frame)
    checked.output.write(model, make_result(checked.job, checked.identity, model, began=began))
    last = model.history[-1]
    numbers = ", ".join(f"{name} {value:.6g}" for name, value in {"loss": last.loss, **last.metrics}.items())
    say(f"Done: {len(model.history)} epochs, {numbers}. {checked.output.url} has the model.")


def _plan(checked: _Checked, frame: DataFrame, *, is_again: bool) -> str:
    estimator = checked.estimator
    has_model = checked.job.estimator == "TorchEstimator"
    size = model_size(estimator.getModel(), estimator.getOptimizer()) if has_model else None
    plan = make_plan(estimator, frame, checked.columns, size)
    return plan_text(checked.job, plan, checked.columns, _state(checked, is_again=is_again))


def _state(checked: _Checked, *, is_again: bool) -> str:
    """What there is already, in words."""
    url = checked.output.url
    if checked.before is not None:
        differences = checked.identity.differences(checked.before["job"])
        if is_again:
            return f"{url} has a result, which would be replaced"
        if differences:
            return f"{url} has the result of another job: {'; '.join(differences)}. It would be refused without --again"
        return f"{url} has the result of this job: nothing would be trained"
    checkpoints = checked.estimator.getCheckpointDir()
    if checkpoints is not None and not is_again and CheckpointFolder(checkpoints).names():
        return f"{url} has nothing yet; the fit would go on from the checkpoints in {checkpoints}"
    return f"{url} has nothing yet"


def _refuse_another(checked: _Checked, identity: Identity) -> None:
    """Raise where the output has the result of a job that is not equal."""
    if checked.before is None:
        return
    differences = identity.differences(checked.before["job"])
    if differences:
        raise ParamError(
            f"The output {checked.output.url} has the result of another job: {'; '.join(differences)}. Choose another "
            "output, or replace it with --again."
        )


def _done_before(checked: _Checked) -> str:
    assert checked.before is not None
    unseen = " As far as Spark tells, its rows are the same." if checked.identity.rows is None else ""
    return (
        f"Done before, at {checked.before.get('ended')}: {checked.output.url} has the result of this very job.{unseen} "
        "Train it anew with --again."
    )


def _remove_checkpoints(url: str, say: Say) -> None:
    """Have a fit begin anew: it would go on from what lies there."""
    folder = CheckpointFolder(url)
    if names := folder.names():
        with held_alone(folder.url, say):
            for name in names:
                folder.remove(name)
        say(f"Removed {len(names)} checkpoints in {folder.url}, as the job is to be done again.")


@contextmanager
def _session(open_session: OpenSession, num_ranks: int) -> Iterator[SparkSession]:
    """The session; what goes wrong because it is lost is told as that."""
    with open_session(num_ranks) as spark:
        try:
            yield spark
        except ClusterLostError:
            raise
        except Exception as error:
            if is_lost(spark):
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ClusterLostError(
                    f"Spark's application ended while the job ran: its cluster went away, or somebody ended it. "
                    f"What was seen of it: {first}"
                ) from error
            raise
