"""One fit, from its rows to the trained model: what happens between ``fit(df)`` and the model. Runs on the *driver*."""

from __future__ import annotations

import tempfile
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from sparkdl.data.spark.jobs import jobs_of
from sparkdl.estimators.column_check import check_columns
from sparkdl.estimators.fit_checkpoints import (
    FinishedFit,
    checkpoints_of,
    find_finished,
    newest_place,
    with_checkpoints,
)
from sparkdl.estimators.fit_inputs import check_picklable, prepare_fit
from sparkdl.estimators.fit_listener import FitListener
from sparkdl.estimators.fit_on_rank import IMPORTED_FIRST, FitOutcome, fit_on_rank
from sparkdl.estimators.fit_tracking import describe_dataset, log_outcome, run_of_fit
from sparkdl.estimators.logged_params import params_to_log
from sparkdl.estimators.place_of_fit import ALONE, PlaceOfFit
from sparkdl.estimators.progress import ProgressLine
from sparkdl.estimators.stored_spec import fetch_module, store_spec
from sparkdl.estimators.summary import TrainingSummary
from sparkdl.launch import Restarts, check_cluster, prepare_in_task, run_on_ranks, run_with_restarts
from sparkdl.model.saved_model import SavedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from sparkdl.collective import WorldReport
    from sparkdl.data import ParquetDataset
    from sparkdl.estimators.params import _TorchEstimatorParams
    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.estimators.training_rows import TrainingRows
    from sparkdl.tracking import FitRun
    from sparkdl.training.spec import TrainingSpec

M = TypeVar("M", bound="TorchModel")


def fit_on_rows(
    params: _TorchEstimatorParams,
    spark: SparkSession,
    rows: TrainingRows,
    make_model: Callable[[SavedModel, TrainingSummary], M],
    *,
    place: PlaceOfFit = ALONE,
) -> M:
    """Run a fit whose Params have been checked, on rows that other fits may share, and return its model.

    Raises:
        SparkdlError: whatever :meth:`sparkdl.estimators.TorchEstimator.fit` raises.
    """
    check_columns(params, rows.available)
    check_picklable(params)
    check_cluster(spark, num_ranks=params.getNumWorkers(), gpus_per_rank=params.getGpusPerWorker())
    with _progress(show=params.getShowProgress()) as progress:
        progress.status("Preparing the rows")
        store = params.getStore()
        with (
            rows.use(lambda: progress.status("Writing the rows to the Store"), _prepare(params)) as parquet,
            store.scratch_folder("weights") as weights,
            checkpoints_of(params, progress.status) as (checkpoints, check_alone),
        ):
            params.learn(parquet, spark)
            inputs = prepare_fit(params, parquet)
            inputs = replace(inputs, spec=with_checkpoints(inputs.spec, params, checkpoints))
            finished = find_finished(inputs.spec, parquet)
            with (
                tempfile.TemporaryDirectory(prefix="sparkdl-tracking-") as folder,
                run_of_fit(params, place.group, place.tags) as run,
            ):
                run.log_params(params_to_log(params, parquet))
                if run.is_tracked and run.switches.log_datasets:
                    run.log_dataset(describe_dataset(params, parquet, rows.source))
                listener = FitListener(run, progress, check_alone)
                communication = None
                if finished is None:
                    outcome = _train(params, spark, inputs.spec, parquet, weights, listener, run)
                    finished, communication = outcome
                else:
                    for record in finished.history:
                        listener.track(asdict(record))
                    progress.status(f"All {params.getEpochs()} epochs are done: {checkpoints} has the model")
                progress.status("Logging the model to MLflow" if run.is_tracked else "")
                model = make_model(SavedModel(finished.module, inputs.signature), _summary(finished, run))
                log_outcome(
                    run,
                    params,
                    model,
                    communication,
                    example=inputs.example,
                    folder=Path(folder),
                    checkpoints=params.getCheckpointDir(),
                )
            return model._logged_as(run.run_id, run.model_uri)


def _prepare(params: _TorchEstimatorParams) -> Callable[[int], None] | None:
    """What tasks that write the rows do for the ranks that follow."""
    if params.getGpusPerWorker():
        return None
    return partial(prepare_in_task, num_ranks=params.getNumWorkers(), modules=IMPORTED_FIRST)


def _summary(finished: FinishedFit, run: FitRun) -> TrainingSummary:
    return TrainingSummary(history=finished.history, model_epoch=finished.model_epoch, run_id=run.run_id)


def _train(
    params: _TorchEstimatorParams,
    spark: SparkSession,
    spec: TrainingSpec,
    parquet: ParquetDataset,
    weights: str,
    listener: FitListener,
    tracking: FitRun,
) -> tuple[FinishedFit, WorldReport | None]:
    stored = store_spec(spec, weights)

    def run(num_ranks: int) -> FitOutcome:
        listener.progress.status(f"Starting {num_ranks} rank{'s' if num_ranks > 1 else ''}")
        outcomes = run_on_ranks(
            fit_on_rank,
            stored,
            parquet,
            num_ranks=num_ranks,
            spark=spark,
            transport=params.getTransport(),
            wire=params.getWire(),
            gpus_per_rank=params.getGpusPerWorker(),
            hang_timeout_s=params.getHangTimeoutSeconds(),
            tells_progress=params.getHangTimeoutSeconds() is not None,
            modules=IMPORTED_FIRST,
            on_event=listener.hear,
            on_log=listener.log,
            on_wait=listener.progress.status,
            is_watched=tracking.is_tracked,
        )
        return cast("FitOutcome", outcomes[0])

    with jobs_of("training"):
        outcome = run_with_restarts(
            run,
            Restarts(max_restarts=params.getMaxRestarts(), min_ranks=params.getMinWorkers()),
            spark=spark,
            num_ranks=params.getNumWorkers(),
            where=lambda: newest_place(spec),
        )
    module = fetch_module(outcome.module, weights).eval()
    return FinishedFit(module, outcome.history, outcome.model_epoch), outcome.communication


@contextmanager
def _progress(*, show: bool) -> Iterator[ProgressLine]:
    """The progress of a fit, which leaves the terminal in order and says when the user stopped it."""
    with closing(ProgressLine(is_shown=show)) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            progress.print("Interrupted: the ranks were ended.")
            raise
