"""One fit, from its rows to the trained model, and fits on one DataFrame with several Param maps.

The second part holds the checks of ``fit`` and ``fitMultiple``, and the iterator that ``fitMultiple`` returns.
"""

from __future__ import annotations

import math
import socket
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sparkdl.data.dataset.row_choice import spread_rows
from sparkdl.data.feed.shards import steps_per_epoch
from sparkdl.data.spark.columns import check_frame
from sparkdl.data.spark.input_files import input_files, table_of
from sparkdl.errors import LaunchError, ParamError, ParamTypeError, count_of
from sparkdl.estimators.fit.checkpoints import (
    FinishedFit,
    find_finished,
    hold_checkpoints,
    newest_position,
    with_checkpoints,
)
from sparkdl.estimators.fit.inputs import (
    check_columns,
    check_picklable,
    first_rows,
    named_columns,
    prepare_fit,
)
from sparkdl.estimators.fit.progress import FitListener, FitProgress, open_progress
from sparkdl.estimators.fit.rows import check_column_types, share_rows
from sparkdl.estimators.fit.tracking import (
    NestedRun,
    describe_dataset,
    group_of_fits,
    log_outcome,
    params_to_log,
    run_of_fit,
)
from sparkdl.estimators.params.base import check_param_map
from sparkdl.estimators.params.training import num_readers
from sparkdl.estimators.summary import TrainingSummary, describe_values
from sparkdl.launch import Restarts, Start, check_cluster, run_on_ranks, run_with_restarts
from sparkdl.model.architecture import count_parameters
from sparkdl.model.saved_model import SavedModel
from sparkdl.spark.jobs import describe_progress, jobs_of, named_jobs
from sparkdl.spark.session import task_cpus, threads_by_settings
from sparkdl.training.remote.fit_on_rank import IMPORTED_FIRST, fit_on_rank
from sparkdl.training.remote.transfer import fetch_module, store_spec
from sparkdl.training.update import updates_per_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.data import ParquetDataset
    from sparkdl.data.files.lease import SoleLease
    from sparkdl.estimators.fit.rows import TrainingRows
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.estimators.torch_estimator import FittingEstimator
    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.launch.elastic.roster import ElasticLimits
    from sparkdl.tracking import FitRun, RunGroup
    from sparkdl.training.history import FitOutcome
    from sparkdl.training.spec import TrainingSpec


M = TypeVar("M", bound="TorchModel")


@dataclass(frozen=True)
class TrialRun:
    """What a fit with ``fastDevRun`` does.

    Attributes:
        num_updates: number of updates of the weights.
        receive: function that gets the learning rate and the loss of each update, which makes the fit a range test;
            None for none.
    """

    num_updates: int = 3
    receive: Callable[[Sequence[tuple[float, float]]], object] | None = None


def fit_on_rows(
    params: _TorchEstimatorParams,
    spark: SparkSession,
    rows: TrainingRows,
    make_model: Callable[[SavedModel, TrainingSummary], M],
    *,
    nested: NestedRun | None = None,
    first_input: Callable[[], Mapping[str, Any]] | None = None,
    trial: TrialRun | None = None,
) -> M:
    """Run a fit whose Params have been checked, on rows that other fits may share, and return its model.

    Args:
        params: Params of the fit.
        spark: session.
        rows: training rows.
        make_model: function that makes the model from what was trained.
        nested: place of the fit's MLflow run among the runs of several Param maps; None for a single fit.
        first_input: function that returns the input example for MLflow, columns of shape ``(1, *shape)``; None for one
            of the first rows.
        trial: what the fit does if fastDevRun is set; None for a few updates.

    Raises:
        SparkdlError: as :meth:`sparkdl.estimators.TorchEstimator.fit`.
    """
    check_columns(params, named_columns(params), rows.df.columns)
    check_column_types(params, rows.df)
    check_picklable(params)
    params = _without_records(params)
    elastic = _elastic_limits(params)
    check_cluster(
        spark,
        num_ranks=params.getNumWorkers() if elastic is None else elastic.least,
        is_barrier=elastic is None or elastic.is_barrier,
    )
    if params.getGpusPerWorker():
        check_gpus(spark)
    with _progress(show=params.getShowProgress(), log_format=params.getLogFormat()) as progress:
        progress.status("Preparing the rows")
        store = params.getStore()
        with (
            rows.use(
                on_write=lambda: progress.status("Writing the rows to the Store"),
                in_tasks=_prepare(params, params.getThreadsPerWorker() or threads_by_settings(spark)),
            ) as written,
            store.scratch_folder("weights") as weights,
            hold_checkpoints(params, progress.status) as lease,
        ):
            parquet = written.with_nulls(params._caller._nulls())
            recipe = params._caller._learn(params, parquet, spark)
            inputs = prepare_fit(params, parquet, recipe)
            if params.getFastDevRun():
                spec = _few_updates(inputs.spec, params, parquet, trial or TrialRun())
                inputs = replace(inputs, spec=spec)
            inputs = replace(inputs, spec=with_checkpoints(inputs.spec, params, lease.url if lease else None))
            finished = find_finished(inputs.spec, parquet)
            with (
                tempfile.TemporaryDirectory(prefix="sparkdl-tracking-") as folder,
                run_of_fit(params, recipe, nested, parquet) as run,
            ):
                if run is not None:
                    run.check_begun()
                    run.log_params(params_to_log(params, recipe, parquet))
                    run.log_dataset(
                        describe_dataset(params, parquet, input_files(rows.df), table_of(rows.df))
                    )
                check = (lambda: None) if lease is None else lease.check
                listener = FitListener(
                    run, progress, check, params.getOnEpoch(), partial(describe_progress, spark)
                )
                outcome = None
                if finished is None:
                    monitor = params.getMonitor()
                    name = params.getRunName() or type(recipe.model).__name__
                    watching = (
                        nullcontext() if monitor is None else monitor.on_driver(name, listener.log_metrics)
                    )
                    with watching as listener.board:
                        finished, outcome = _train(
                            params, spark, inputs.spec, parquet, weights, listener, run, lease
                        )
                else:
                    for record in finished.history:
                        listener.track(asdict(record))
                    progress.status(
                        f"All {params.getEpochs()} epochs are done: {params.getCheckpointDir()} has the model"
                    )
                if trial is not None and trial.receive is not None and outcome is not None:
                    trial.receive(outcome.losses)
                num_parameters, num_trained = count_parameters(recipe.model)
                summary = TrainingSummary(
                    history=finished.history,
                    model_epoch=finished.model_epoch,
                    run_id=None if run is None else run.run_id,
                    num_parameters=num_parameters,
                    num_trained_parameters=num_trained,
                )
                if params.getShowProgress() and params.getBestMetric() is not None:
                    progress.print(describe_values(summary))
                if run is not None:
                    progress.status("Logging the model to MLflow")
                model = make_model(SavedModel(finished.module, inputs.signature, inputs.examples), summary)
                log_outcome(
                    run,
                    params,
                    model,
                    None if outcome is None else outcome.communication,
                    worlds=listener.worlds,
                    example=first_input or partial(first_rows, parquet, inputs.signature.inputs.names),
                    folder=Path(folder),
                    checkpoints=params.getCheckpointDir(),
                )
                if run is not None and run.place and params.getShowProgress():
                    progress.print(run.place)
            return model if run is None else model._note_run(run.run_id, run.model_uri)


def _without_records(params: _TorchEstimatorParams) -> _TorchEstimatorParams:
    """Return the Params of a fit; those of a trial have one epoch, and neither MLflow nor checkpoints."""
    if not params.getFastDevRun():
        return params
    trial = params.copy().setParams(tracking="off", epochs=1)
    for param in (trial.checkpointDir, trial.checkpointEverySteps, trial.registeredModelName):
        trial.clear(param)
    return trial


def _few_updates(
    spec: TrainingSpec, params: _TorchEstimatorParams, parquet: ParquetDataset, trial: TrialRun
) -> TrainingSpec:
    """Return the spec of a trial: some rows for a few updates of the weights, and for as many validation batches."""
    num_updates = trial.num_updates
    of_step = num_readers(params) * spec.batch_size
    num_rows = max(num_updates * of_step * spec.accumulated_batches, params.getNumWorkers())
    training = spread_rows(parquet.row_counts, spec.training_rows, num_rows)
    steps = steps_per_epoch(sum(training.counts), num_readers(params), spec.batch_size)
    validation = spec.validation_rows
    if validation is not None:
        validation = spread_rows(
            parquet.row_counts, validation, max(num_updates * of_step, params.getNumWorkers())
        )
    return replace(
        spec,
        training_rows=training,
        validation_rows=validation,
        is_range_test=trial.receive is not None,
        epochs=math.ceil(num_updates / updates_per_epoch(steps, spec.accumulated_batches)),
    )


def _prepare(params: _TorchEstimatorParams, num_threads: int | None) -> Callable[[int], None] | None:
    """Return the function that tasks call when they write the rows, to prepare for the ranks; None for GPU ranks."""
    if params.getGpusPerWorker():
        return None
    num_ranks, modules = params.getNumWorkers(), IMPORTED_FIRST

    def prepare(task: int) -> None:
        from sparkdl.launch import prepare_in_task  # the driver does not need it

        prepare_in_task(task, num_ranks=num_ranks, num_threads=num_threads, modules=modules)

    return prepare


def _train(
    params: _TorchEstimatorParams,
    spark: SparkSession,
    spec: TrainingSpec,
    parquet: ParquetDataset,
    weights: str,
    listener: FitListener,
    tracking: FitRun | None,
    lease: SoleLease | None,
) -> tuple[FinishedFit, FitOutcome]:
    stored = store_spec(spec, weights)
    num_threads = params.getThreadsPerWorker() or threads_by_settings(spark)
    threads = count_of(num_threads or task_cpus(spark), "thread")

    def run(start: Start) -> FitOutcome:
        num_ranks = start.num_ranks
        ranks = f"1 rank with {threads}" if num_ranks == 1 else f"{num_ranks} ranks with {threads} each"
        num_parameters, num_trained = count_parameters(spec.model)
        trained = "" if num_trained == num_parameters else f"{num_trained:,} of "
        listener.progress.status(f"Starting {ranks}, to train {trained}{num_parameters:,} parameters")
        outcomes = run_on_ranks(
            partial(
                fit_on_rank,
                has_gpu=params.getGpusPerWorker() > 0,
                reports_progress=params.getHangTimeoutSeconds() is not None,
                reports_load=tracking is not None,
                lease=start.lease,
                planned_ranks=None if params.getGlobalBatchSize() is None else params.getNumWorkers(),
                monitor=params.getMonitor(),
            ),
            stored,
            parquet,
            num_ranks=num_ranks,
            spark=spark,
            transport=params.getTransport(),
            wire=params.getWire(),
            gpus_per_rank=params.getGpusPerWorker(),
            threads_per_rank=num_threads,
            hang_timeout_s=params.getHangTimeoutSeconds(),
            modules=IMPORTED_FIRST,
            on_event=listener.handle_event,
            on_log=listener.log,
            on_wait=listener.progress.status,
            **start.options,
        )
        return cast("FitOutcome", outcomes[0])

    with jobs_of("training"):
        outcome = run_with_restarts(
            run,
            Restarts(
                max_restarts=params.getMaxRestarts(),
                min_ranks=params.getMinWorkers(),
                elastic=_elastic_limits(params),
            ),
            lease=lease,
            spark=spark,
            num_ranks=params.getNumWorkers(),
            where=lambda: newest_position(spec),
        )
    module = fetch_module(outcome.module, weights).eval()
    return FinishedFit(module, outcome.history, outcome.model_epoch), outcome


def _elastic_limits(params: _TorchEstimatorParams) -> ElasticLimits | None:
    """Return the limits of an elastic fit; None for a fit whose ranks start and end together."""
    if not params.getElastic():
        return None
    from sparkdl.launch.elastic.roster import MAX_RESTARTS, ElasticLimits  # other fits do without it

    parallelism = params.getParallelism()
    assert not isinstance(parallelism, str), "refused with elastic"
    group_size = 1 if parallelism is None else parallelism.num_ranks_of_replica
    return ElasticLimits(
        group_size=group_size,
        least=params.getMinWorkers() if params.isSet(params.minWorkers) else group_size,
        most=params.getMaxWorkers(),
        max_restarts=params.getMaxRestarts() if params.isSet(params.maxRestarts) else MAX_RESTARTS,
        max_retries=params.getCommunicationRetries(),
    )


@contextmanager
def _progress(*, show: bool, log_format: str) -> Iterator[FitProgress]:
    """Give the progress of a fit; close it at the end, and print a message if the user interrupts the fit."""
    with closing(open_progress(is_shown=show, log_format=log_format)) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            progress.print("Interrupted: the ranks were ended.")
            raise


E = TypeVar("E", bound="FittingEstimator[Any]")


class FittedModels(Iterator[tuple[int, M]], Generic[M]):
    """Iterator of ``(index, model)`` for each Param map; each call of ``next`` fits a model.

    Several threads may call ``next`` at once, each for another model, as ``CrossValidator`` does with ``parallelism``.
    The rows are written once, with the columns of all maps, and kept until the last model is fitted or the iterator is
    dropped. In MLflow each fit has its own run, nested under the active run, or under one that is opened for them.
    """

    def __init__(self, dataset: DataFrame, estimators: Sequence[FittingEstimator[M]]) -> None:
        self._df = dataset
        self._estimators = list(estimators)
        params = [_without_records(estimator._params_of_fit()) for estimator in estimators]
        self._rows = share_rows(dataset, params)
        self._indices = iter(range(len(params)))
        self._num_left = len(params)
        self._lock = threading.Lock()
        self._group: RunGroup | None = None
        if params:
            maps = f"{len(params)} Param maps" if len(params) > 1 else "1 Param map"
            name = f"{type(estimators[0]).__name__}, {maps}"
            self._group = group_of_fits(params[0], name)
        if self._group is not None:
            weakref.finalize(self, self._group.close)
        for rows in set(self._rows):
            weakref.finalize(self, rows.release)

    def __next__(self) -> tuple[int, M]:
        with self._lock:
            index = next(self._indices)
        nested = None if self._group is None else NestedRun(self._group, index)
        try:
            fitted = self._estimators[index]._fit_rows(self._df, self._rows[index], nested)
        except BaseException as error:
            if self._group is not None:
                is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
                self._group.close("KILLED" if is_stopped else "FAILED")
            raise
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last and self._group is not None:
            self._group.close()  # at exit, the group's run would end before its finalizer
        return index, fitted

    next = __next__
    """Iterators of pyspark have this method, too."""


def check_rows_to_fit(dataset: Any) -> None:
    """Check that a dataset is a Spark DataFrame that is not a stream.

    Raises:
        DataError: if it is another object, or a streaming DataFrame.
    """
    check_frame(dataset, "fit", of_streams="; the model's transform takes streams")


def with_param_maps(estimator: E, maps: Sequence[dict[Any, Any]]) -> list[E]:
    """Return a checked copy of an estimator for each Param map; several copies get separate folders of checkpoints.

    Raises:
        ParamTypeError: if ``maps`` is not a list of Param maps.
        ParamError: if a map cannot work; the message says which map, and why.
    """
    if not isinstance(maps, list | tuple) or not all(isinstance(param_map, dict) for param_map in maps):
        raise ParamTypeError(
            f"fitMultiple takes a list of Param maps, got {type(maps).__name__}. Write [{{estimator.epochs: 3}}]."
        )
    copies = []
    for index, param_map in enumerate(maps):
        try:
            check_param_map(estimator, param_map)
            copy = estimator.copy(param_map)
            copy._check_values()
        except ParamError as error:
            explained = type(error)(f"In the Param map with index {index}: {error}")
            raise explained.about(*error.params) from error
        folder = copy.getOrDefault("checkpointDir") if copy.isSet("checkpointDir") else None
        if folder is not None and len(maps) > 1:  # each is another fit
            copy.setParams(checkpointDir=f"{folder.rstrip('/')}/fit-{index}")
        copies.append(copy)
    return copies


def check_gpus(spark: SparkSession) -> None:
    """Check that torch sees a GPU on an executor, before rows are written for ranks with GPUs.

    Raises:
        LaunchError: if it does not.
    """
    with named_jobs(spark, "looking for GPUs"):
        (row,) = (
            spark.range(0, 1, 1, 1).mapInArrow(_count_gpus, "gpus int, torch string, host string").collect()
        )
    if not row["gpus"]:
        raise LaunchError(
            f"Param gpusPerWorker is 1, and torch {row['torch']} sees no GPU on {row['host']}. Leave gpusPerWorker out "
            "to train on CPUs, or give the executors GPUs and a CUDA build of torch."
        )


def _count_gpus(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the number of GPUs that torch sees on the machine of this *task*."""
    import pyarrow as pa
    import torch

    for _ in batches:
        pass  # the row only makes Spark call this
    facts = {
        "gpus": [torch.cuda.device_count()],
        "torch": [str(torch.__version__)],
        "host": [socket.gethostname()],
    }
    yield pa.RecordBatch.from_pydict(
        facts, schema=pa.schema([("gpus", pa.int32()), ("torch", pa.string()), ("host", pa.string())])
    )
