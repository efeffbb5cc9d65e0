"""The Spark ML estimator. Runs on the *driver*; the training runs on the ranks."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, overload

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkdl.data import ParquetDataset
from sparkdl.estimators.checked_params import check_param_map
from sparkdl.estimators.fit_checkpoints import (
    FinishedFit,
    find_finished,
    newest_place,
    with_checkpoints,
)
from sparkdl.estimators.fit_inputs import FitInputs, check_picklable, prepare_fit
from sparkdl.estimators.fit_multiple import FittedModels, check_frame, check_maps, with_param_maps
from sparkdl.estimators.fit_on_rank import FitOutcome, fit_on_rank
from sparkdl.estimators.model_logging import log_model_or_warn
from sparkdl.estimators.params import _TorchEstimatorParams
from sparkdl.estimators.progress import ProgressLine
from sparkdl.estimators.restarts import run_with_restarts
from sparkdl.estimators.stored_spec import store_spec
from sparkdl.estimators.summary import TrainingSummary
from sparkdl.estimators.torch_model import TorchModel
from sparkdl.estimators.training_rows import TrainingRows, share_rows
from sparkdl.launch import check_cluster, run_on_ranks
from sparkdl.tracking import FitRun, TrackingMode, open_run
from sparkdl.training.architecture import unpack_module
from sparkdl.training.saved_model import SavedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame

    from sparkdl.data import Store
    from sparkdl.training.callbacks import Callback
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.losses import LossFunction
    from sparkdl.training.metrics import Metric
    from sparkdl.training.model_inputs import PrepareFunction
    from sparkdl.training.spec import AugmentFunction, OptimizerFactory
    from sparkdl.training.user_step import UserStep


_logger = logging.getLogger(__name__)


class TorchEstimator(Estimator[TorchModel], _TorchEstimatorParams, MLReadable["TorchEstimator"], MLWritable):
    """Trains a torch module on the machines of a Spark cluster; ``fit(df)`` returns a :class:`TorchModel`.

    Args:
        model: any ``torch.nn.Module``; ``fit`` trains a copy.
        optimizer: function that takes the model's parameters and returns a torch optimizer.
        loss: a loss of ``torch.nn``, or a function of ``(outputs, labels)`` that returns the mean over the rows; with
            several label columns one for all of them, or a list of one for each.
        trainStep: function of ``(model, batch)`` in the place of loss: ``batch`` is a dict of tensors, the model's
            inputs and the label and weight columns by name; it returns the mean loss over the rows, or a tuple of that
            and the outputs, which metrics need.
        featuresCol: column of numbers, vectors, or arrays; or a list of several; default ``"features"``. Integers stay
            integers where the model takes them, as an embedding does.
        passFeaturesBy: how the model is called with several: by ``"position"`` (default), or by ``"name"``.
        prepareFeatures: function that makes the model's inputs of feature columns that are no numbers (strings, bytes,
            images) or not yet as the model takes them. It gets a dict by name, arrays with an item per row, and
            returns an array or tensor, or a dict of several; ``transform`` calls it too.
        paddingValue: with which arrays whose length differs from row to row are filled up to the longest of a batch;
            default: they have to have one length.
        augment: function of a dict of the arrays of a batch, inputs, labels and weights by name, that returns them
            changed, called before the model is trained on it, not in validation and ``transform``.
        labelCol: column of labels; default ``"label"``. Class labels are integers or doubles that count from 0, or any
            integers, booleans or strings, which are indexed in ascending order, and predicted as they are called. A
            list of columns for a model with an output for each: a tuple in this order, or a dict by these names.
        lossWeights: what the loss of each label column weighs in their sum; default 1 each.
        predictionCol: column that the model adds; default ``"prediction"``.
        weightCol: column of non-negative row weights.
        validationIndicatorCol: column of booleans, true for the rows that the model is validated on and not trained on.
        validationFraction: share of the rows to validate on instead, drawn by lot: each row group of the training rows
            in the Store gives its part. The same ``seed`` draws the same rows again as long as those lie there; Spark
            may write them in another order the next time.
        metrics: by name what is found beside the loss, of the training rows while the model is trained, and as
            ``val_<name>`` of the validation rows after each epoch: functions of ``(outputs, labels)`` that return one
            value per row or their mean, or metrics of torchmetrics. Rows count alike, whatever their weights.
        earlyStoppingPatience: epochs in a row without an improvement after which the fit ends, on all ranks together:
            of bestMetric, or where that is not set of the loss on the validation rows, or without any of the loss.
        earlyStoppingMinDelta: by more than which an epoch has to be better to count; default 0.
        bestMetric: ``"loss"``, ``"val_loss"``, the name of a metric or that with ``val_``: the model is that of the
            epoch in which it was best. Its weights are kept in the memory of rank 0's host, as a second copy of the
            model. Default: the model is that of the last epoch, also when the fit has stopped early.
        bestMode: whether bestMetric is best where it is ``"min"`` or ``"max"``; ``"min"`` for a loss.
        callbacks: list of :class:`Callback`, of which each rank runs copies.
        scheduler: function that takes the optimizer and how often the schedule goes on during the whole fit, and
            returns a scheduler of ``torch.optim.lr_scheduler``. One that waits for a plateau is told the loss on the
            validation rows, or without any that on the training rows.
        schedulerInterval: when it goes on: after each ``"epoch"`` (default) or after each ``"step"``, an update of the
            weights.
        learningRateScaling: what the optimizer's learning rate is multiplied with, as numWorkers batches lead to one
            update: ``"none"`` (1, default), ``"linear"`` (numWorkers), ``"sqrt"`` (its root, for Adam).
        warmupSteps: updates over which the learning rate grows to its full value; default 0.
        gradientAccumulationSteps: batches of each rank that lead to one update of the weights; default 1.
        maxGradNorm: to which the norm of all gradients together is clipped; default: no clipping.
        precision: in which the model computes where it bears it, by torch's autocast: ``"float32"`` (default),
            ``"bfloat16"``, or ``"float16"`` with scaled losses. Weights stay as they are.
        batchSize: rows per rank and step; default 32.
        epochs: how often every row is visited; default 1.
        numWorkers: ranks that train together, one slot of the cluster each; default 1.
        gpusPerWorker: 0 trains on CPU (default), 1 on a GPU per rank.
        seed: of the order of rows and of all random numbers during the fit; default 0. From the same weights a fit
            repeats to the bit on CPU: call ``torch.manual_seed`` before you make the model.
        shuffle: whether each epoch has its own order of rows; default True.
        cache: whether ranks keep decoded rows after the first epoch: ``"off"`` (default), in ``"memory"`` or on
            ``"disk"``, up to 4 GiB each, and 1 GiB of rows to validate on.
        store: :class:`sparkdl.data.Store`, path or URL for the training rows, reached by driver and executors.
        keepRowsSeconds: how long the training rows stay there after their last use, for the next fit on the same
            DataFrame; default a day, or what the Store says; 0 removes them after the fit.
        checkpointDir: path or URL, as ``store`` takes them, where the fit keeps checkpoints. A fit that was interrupted
            goes on from the last one when it is run again with the same Params and rows, and ends with the same
            weights; one that was finished returns its model at once, or trains on where ``epochs`` is larger.
        checkpointEverySteps: updates of the weights from one checkpoint to the next; default: there is one at the end
            of each epoch alone.
        keepCheckpoints: how many of the last checkpoints stay; default 2.
        maxRestarts: how often the fit goes on by itself when a process, an executor or a host is lost; default 0. What
            code raises is never tried again. Without a ``checkpointDir`` the checkpoints lie in the Store meanwhile.
        minWorkers: with how many ranks a restarted fit makes do, where slots are gone; default numWorkers.
        transport: how ranks exchange gradients: ``"auto"`` (default), ``"native"``, ``"shm"``, ``"tcp"``, ``"mpi"``; on
            several hosts with GPUs also ``"hierarchical"`` and ``"hierarchical-mpi"``: NCCL inside a host, and TCP or
            MPI across.
        tracking: MLflow: ``"auto"`` (default: on when it is installed), ``"on"`` or ``"off"``.
        experiment: MLflow experiment; default: the active one.
        runName: name of the MLflow run.
        showProgress: whether ``fit`` shows its progress, on stderr or in the notebook; default True.
        predictionBatchSize: rows per forward pass of ``transform``; default 1024.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: OptimizerFactory | None = None,
        loss: LossFunction | Sequence[LossFunction] | None = None,
        trainStep: UserStep | None = None,
        featuresCol: str | Sequence[str] | None = None,
        passFeaturesBy: str | None = None,
        prepareFeatures: PrepareFunction | None = None,
        paddingValue: float | None = None,
        augment: AugmentFunction | None = None,
        labelCol: str | Sequence[str] | None = None,
        lossWeights: Sequence[float] | None = None,
        predictionCol: str | None = None,
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        validationFraction: float | None = None,
        metrics: Mapping[str, Metric] | None = None,
        earlyStoppingPatience: int | None = None,
        earlyStoppingMinDelta: float | None = None,
        bestMetric: str | None = None,
        bestMode: str | None = None,
        callbacks: Sequence[Callback] | None = None,
        scheduler: SchedulerFactory | None = None,
        schedulerInterval: str | None = None,
        learningRateScaling: str | None = None,
        warmupSteps: int | None = None,
        gradientAccumulationSteps: int | None = None,
        maxGradNorm: float | None = None,
        precision: str | None = None,
        batchSize: int | None = None,
        epochs: int | None = None,
        numWorkers: int | None = None,
        gpusPerWorker: int | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        cache: str | None = None,
        store: Store | str | None = None,
        keepRowsSeconds: float | None = None,
        checkpointDir: str | None = None,
        checkpointEverySteps: int | None = None,
        keepCheckpoints: int | None = None,
        maxRestarts: int | None = None,
        minWorkers: int | None = None,
        transport: str | None = None,
        tracking: str | None = None,
        experiment: str | None = None,
        runName: str | None = None,
        showProgress: bool | None = None,
        predictionBatchSize: int | None = None,
    ) -> None:
        super().__init__()
        self.setParams(
            model=model,
            optimizer=optimizer,
            loss=loss,
            trainStep=trainStep,
            featuresCol=featuresCol,
            passFeaturesBy=passFeaturesBy,
            prepareFeatures=prepareFeatures,
            paddingValue=paddingValue,
            augment=augment,
            labelCol=labelCol,
            lossWeights=lossWeights,
            predictionCol=predictionCol,
            weightCol=weightCol,
            validationIndicatorCol=validationIndicatorCol,
            validationFraction=validationFraction,
            metrics=metrics,
            earlyStoppingPatience=earlyStoppingPatience,
            earlyStoppingMinDelta=earlyStoppingMinDelta,
            bestMetric=bestMetric,
            bestMode=bestMode,
            callbacks=callbacks,
            scheduler=scheduler,
            schedulerInterval=schedulerInterval,
            learningRateScaling=learningRateScaling,
            warmupSteps=warmupSteps,
            gradientAccumulationSteps=gradientAccumulationSteps,
            maxGradNorm=maxGradNorm,
            precision=precision,
            batchSize=batchSize,
            epochs=epochs,
            numWorkers=numWorkers,
            gpusPerWorker=gpusPerWorker,
            seed=seed,
            shuffle=shuffle,
            cache=cache,
            store=store,
            keepRowsSeconds=keepRowsSeconds,
            checkpointDir=checkpointDir,
            checkpointEverySteps=checkpointEverySteps,
            keepCheckpoints=keepCheckpoints,
            maxRestarts=maxRestarts,
            minWorkers=minWorkers,
            transport=transport,
            tracking=tracking,
            experiment=experiment,
            runName=runName,
            showProgress=showProgress,
            predictionBatchSize=predictionBatchSize,
        )

    def write(self) -> MLWriter:
        """Return a writer: ``estimator.write().overwrite().save(path)``."""
        from sparkdl.estimators.persistence import TorchEstimatorWriter

        return TorchEstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchEstimator]:
        """Return a reader; :meth:`load` is the shortcut."""
        from sparkdl.estimators.persistence import TorchEstimatorReader

        return TorchEstimatorReader(cls)

    @overload
    def fit(self, dataset: DataFrame, params: dict[Param[Any], Any] | None = None) -> TorchModel: ...

    @overload
    def fit(
        self, dataset: DataFrame, params: list[dict[Param[Any], Any]] | tuple[dict[Param[Any], Any]]
    ) -> list[TorchModel]: ...

    def fit(self, dataset: DataFrame, params: Any = None) -> Any:
        """Train on a DataFrame, or once for each of several Param maps.

        Args:
            dataset: of classic Spark or Spark Connect.
            params: Param map that goes before the Params that are set, or a list of such maps, for a model each.

        Returns:
            The :class:`TorchModel`; with a list of maps, a list of models.

        Raises:
            ParamError: if a Param has a value that cannot work, or is one of something else.
            DataError: if rows or columns cannot be used.
            LaunchError: if the cluster cannot run the ranks.
            RankError: if a rank fails.
        """
        check_frame(dataset)
        if isinstance(params, dict):
            check_param_map(self, params)
        return super().fit(dataset, params)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> FittedModels:
        """Return a thread-safe iterator of ``(index, model)``, a model for each Param map, on rows written once.

        A model is fitted when it is asked for. Fits that are asked for at once, from several threads, run side by
        side as far as the cluster has slots for their ranks, and else one after the other.

        Raises:
            ParamError: if a map cannot work; it says which one.
        """
        check_frame(dataset)
        check_maps(paramMaps)
        return FittedModels(dataset, with_param_maps(self, paramMaps))

    def _fit(self, dataset: DataFrame) -> TorchModel:
        self.check_values()
        (rows,) = share_rows(dataset, [self])
        return self._fit_rows(dataset, rows)

    def _fit_rows(self, dataset: DataFrame, rows: TrainingRows) -> TorchModel:
        """Fit on rows of a DataFrame that other fits may share; values of Params are checked already."""
        check_picklable(self)
        check_cluster(
            dataset.sparkSession, num_ranks=self.getNumWorkers(), gpus_per_rank=self.getGpusPerWorker()
        )
        with _progress(show=self.getShowProgress()) as progress:
            progress.status("Preparing the rows")
            store = self.getStore()
            with (
                rows.use(lambda: progress.status("Writing the rows to the Store")) as parquet,
                store.scratch_folder("weights") as weights,
                self._checkpoint_url() as checkpoints,
            ):
                inputs = prepare_fit(self, parquet)
                inputs = replace(inputs, spec=with_checkpoints(inputs.spec, self, checkpoints))
                finished = find_finished(inputs.spec, parquet)
                mode = cast("TrackingMode", self.getTracking())
                with open_run(mode, experiment=self.getExperiment(), run_name=self.getRunName()) as run:
                    run.log_params(self._params_to_log(parquet))
                    if finished is None:
                        listener = _Listener(run, progress)
                        finished = self._train(dataset, inputs, parquet, weights, listener)
                    else:
                        progress.status(
                            f"All {self.getEpochs()} epochs are done: {checkpoints} has the model"
                        )
                    progress.status("Logging the model to MLflow" if run.run_id else "")
                    return self._make_model(inputs, finished, run)

    def _checkpoint_url(self) -> AbstractContextManager[str | None]:
        """Give where checkpoints lie: as the Param says, or in the Store until the fit ends if it may be restarted."""
        if self.getCheckpointDir() is None and self.getMaxRestarts():
            return self.getStore().scratch_folder("checkpoints")
        return nullcontext(self.getCheckpointDir())

    def _train(
        self,
        dataset: DataFrame,
        inputs: FitInputs,
        parquet: ParquetDataset,
        weights: str,
        listener: _Listener,
    ) -> FinishedFit:
        stored = store_spec(inputs.spec, weights)

        def run(num_ranks: int) -> FitOutcome:
            listener.progress.status(f"Starting {num_ranks} ranks")
            outcomes = run_on_ranks(
                fit_on_rank,
                stored,
                parquet,
                num_ranks=num_ranks,
                spark=dataset.sparkSession,
                transport=self.getTransport(),
                gpus_per_rank=self.getGpusPerWorker(),
                on_event=listener.hear,
                on_log=listener.log,
            )
            return cast("FitOutcome", outcomes[0])

        outcome = run_with_restarts(
            run,
            spark=dataset.sparkSession,
            num_ranks=self.getNumWorkers(),
            min_ranks=self.getMinWorkers(),
            max_restarts=self.getMaxRestarts(),
            where=lambda: newest_place(inputs.spec),
        )
        return FinishedFit(unpack_module(outcome.module).eval(), outcome.history, outcome.model_epoch)

    def _make_model(self, inputs: FitInputs, outcome: FinishedFit, run: FitRun) -> TorchModel:
        saved = SavedModel(outcome.module, inputs.signature)
        uri = log_model_or_warn(saved, inputs.example, run)
        summary = TrainingSummary(
            history=outcome.history, model_epoch=outcome.model_epoch, run_id=run.run_id, model_uri=uri
        )
        model = TorchModel(saved, summary)
        # As all models of Spark ML have it: the estimator's Params are then the model's as well, in Param maps.
        model._resetUid(self.uid)
        return self._copyValues(model)

    def _params_to_log(self, parquet: ParquetDataset) -> dict[str, object]:
        objects = [
            self.model,
            self.optimizer,
            self.loss,
            self.metrics,
            self.callbacks,
            *self.function_params(),
        ]
        params = {
            param.name: value for param, value in self.extractParamMap().items() if param not in objects
        }
        functions = {
            param.name: _name_of(self.getOrDefault(param))
            for param in (self.optimizer, self.loss, *self.function_params())
            if self.isSet(param)
        }
        model = self.getModel()
        return {
            **params,
            **functions,
            "model": type(model).__name__,
            **({"metrics": ", ".join(self.getMetrics())} if self.getMetrics() else {}),
            **(
                {"callbacks": ", ".join(type(each).__name__ for each in self.getCallbacks())}
                if self.getCallbacks()
                else {}
            ),
            "numParameters": sum(parameter.numel() for parameter in model.parameters()),
            "numRows": parquet.num_rows,
        }


class _Listener:
    """Hands the events of rank 0 to the progress line and the run.

    Attributes:
        progress: of the fit.
    """

    def __init__(self, run: FitRun, progress: ProgressLine) -> None:
        self._run = run
        self.progress = progress

    def hear(self, rank: int, event: Mapping[str, Any]) -> None:
        del rank  # only rank 0 reports
        self.progress.update(event)
        if event.get("kind") == "epoch":
            names = ("loss", "rows_per_s", "seconds", "data_wait_share", "learning_rate")
            metrics = {name: float(event[name]) for name in names}
            self._run.log_epoch(int(event["epoch"]), {**metrics, **event["metrics"]})

    def log(self, rank: int, line: str) -> None:
        self.progress.print(f"[rank {rank}] {line}")


@contextmanager
def _progress(*, show: bool) -> Iterator[ProgressLine]:
    """The progress of a fit, which leaves the terminal in order and says when the user stopped it."""
    with closing(ProgressLine(is_shown=show)) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            progress.print("Interrupted: the ranks were ended.")
            raise


def _name_of(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_name_of, value))
    return str(getattr(value, "__name__", type(value).__name__))
