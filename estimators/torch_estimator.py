"""The Spark ML estimator, and what all estimators share. Runs on the *driver*; the training runs on the ranks.

Every estimator fits on DataFrames and files, under one Param map or several.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pyspark import keyword_only
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkdl.data.spark.jobs import jobs_of, spark_job
from sparkdl.estimators.fit.fit import (
    FittedModels,
    check_maps,
    check_rows_to_fit,
    fit_on_rows,
    with_param_maps,
)
from sparkdl.estimators.fit.rows import share_rows
from sparkdl.estimators.fit.runs import nested_runs, place_of_single_fit
from sparkdl.estimators.params.base import CheckedParams, check_param_map
from sparkdl.estimators.params.estimator import _TorchEstimatorParams
from sparkdl.estimators.persistence import TorchEstimatorReader, TorchEstimatorWriter
from sparkdl.estimators.torch_model import TorchModel
from sparkdl.launch import active_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame

    from sparkdl.data import Store
    from sparkdl.estimators.fit.rows import TrainingRows
    from sparkdl.estimators.fit.runs import PlaceOfFit
    from sparkdl.estimators.params.inputs import Labels
    from sparkdl.estimators.summary import TrainingSummary
    from sparkdl.model.heads import LossFunction
    from sparkdl.model.inputs import PrepareFunction
    from sparkdl.model.saved_model import SavedModel
    from sparkdl.training.callbacks import Callback
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.metrics import Metric
    from sparkdl.training.objective import UserStep
    from sparkdl.training.spec import AugmentFunction, OptimizerFactory


M = TypeVar("M", bound=TorchModel)


class FittingEstimator(Estimator[M], CheckedParams):
    """An estimator whose ``fit`` trains on ranks.

    A class of its own says by :meth:`check_values` which Params work, by :meth:`params_of_fit` what a fit goes by, and
    by :meth:`model_class` what it returns.
    """

    @abstractmethod
    def check_values(self) -> None:
        """Check what needs no data.

        Raises:
            ParamError: naming the Param, its value and what it may be.
        """

    @abstractmethod
    def params_of_fit(self) -> _TorchEstimatorParams:
        """Return what one fit goes by; it may learn of the rows what it lacks."""

    @abstractmethod
    def model_class(self) -> type[M]:
        """Return the class of the models that fits return."""

    @overload
    def fit(self, dataset: DataFrame, params: dict[Param[Any], Any] | None = None) -> M: ...

    @overload
    def fit(
        self, dataset: DataFrame, params: list[dict[Param[Any], Any]] | tuple[dict[Param[Any], Any]]
    ) -> list[M]: ...

    def fit(self, dataset: DataFrame, params: Any = None) -> Any:
        """Train on a DataFrame, or once for each of several Param maps.

        Args:
            dataset: of classic Spark or Spark Connect.
            params: Param map that goes before the Params that are set, or a list of such maps, for a model each.

        Returns:
            The model; with a list of maps, a list of models.

        Raises:
            ParamError: if a Param has a value that cannot work, or is one of something else.
            DataError: if rows or columns cannot be used.
            LaunchError: if the cluster cannot run the ranks.
            RankError: if a rank fails.
        """
        check_rows_to_fit(dataset)
        if isinstance(params, dict):
            check_param_map(self, params)
        return super().fit(dataset, params)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> FittedModels[M]:
        """Return a thread-safe iterator of ``(index, model)``, a model for each Param map, on rows written once.

        A model is fitted when it is asked for. Fits that are asked for at once, from several threads, run side by
        side as far as the cluster has slots for their ranks, and else one after the other.

        Raises:
            ParamError: if a map cannot work; it says which one.
        """
        check_rows_to_fit(dataset)
        check_maps(paramMaps)
        estimators = with_param_maps(self, paramMaps)
        return FittedModels(dataset, estimators, nested_runs(estimators))

    def fit_on_parquet(self, path: str | os.PathLike[str]) -> M:
        """Train on Parquet files where they lie, through the active Spark session.

        Args:
            path: a folder or URL that Spark reads, and the ranks by fsspec or pyarrow.

        Raises:
            As :meth:`fit`; LaunchError if there is no active session.
        """
        spark = active_session()
        with self._jobs(), spark_job(spark, "opening the rows"):
            rows = spark.read.parquet(os.fspath(path))
        return self.fit(rows)

    def _fit(self, dataset: DataFrame) -> M:
        self.check_values()
        (rows,) = share_rows(dataset, [self.params_of_fit()])
        with place_of_single_fit() as place:
            return self._fit_rows(dataset, rows, place)

    def _fit_rows(self, dataset: DataFrame, rows: TrainingRows, place: PlaceOfFit) -> M:
        """Fit on rows of a DataFrame that other fits may share; values of Params are checked already."""
        with self._jobs():
            return fit_on_rows(
                self.params_of_fit(), dataset.sparkSession, rows, self._make_model, place=place
            )

    def _jobs(self) -> AbstractContextManager[None]:
        """What Spark's UI shows the jobs of a fit as."""
        return jobs_of(f"fit {type(self).__name__}")

    def _make_model(self, saved: SavedModel, summary: TrainingSummary) -> M:
        model = self.model_class()(saved, summary)
        # As all models of Spark ML have it: the estimator's Params are then the model's as well, in Param maps.
        model._resetUid(self.uid)
        return self._copyValues(model)


class TorchEstimator(
    _TorchEstimatorParams, FittingEstimator[TorchModel], MLReadable["TorchEstimator"], MLWritable
):
    """Trains a torch module on the machines of a Spark cluster; ``fit(df)`` returns a :class:`TorchModel`.

    Args:
        model: any ``torch.nn.Module`` but TorchScript; ``fit`` trains a copy.
        optimizer: function that takes the model's parameters and returns a torch optimizer.
        loss: a loss of ``torch.nn``, or a function of ``(outputs, labels)`` that returns the mean over the rows; with
            several label columns one for all of them, or a list of one for each.
        trainStep: function of ``(model, batch)`` in the place of loss: ``batch`` is a dict of tensors, the model's
            inputs and the label and weight columns by name; it returns the mean loss over the rows, or a tuple of that
            and the outputs, which metrics need.
        featuresCol: column of numbers, vectors, or arrays; or a list of several; default ``"features"``. Integers stay
            integers where the model takes them, as an embedding does.
        passFeaturesBy: how the model is called with several: by ``"position"`` (default), by ``"name"``, or, where each
            holds one number, with one ``"matrix"`` of shape ``(rows, columns)``, which is called ``features``.
        prepareFeatures: function that makes the model's inputs of feature columns that are no numbers (strings, bytes,
            images) or not yet as the model takes them. It gets a dict by name, arrays with an item per row, and
            returns an array or tensor, or a dict of several; ``transform`` calls it too.
        paddingValue: with which arrays whose length differs from row to row are filled up to the longest of a batch;
            default: they have to have one length.
        augment: function of a dict of the arrays of a batch, inputs, labels and weights by name, that returns them
            changed, called before the model is trained on it, not in validation and ``transform``.
        labelCol: column of labels; default ``"label"``. Class labels are integers or doubles that count from 0, or any
            integers, booleans or strings, which are indexed in ascending order, and predicted as they are called;
            decimals are doubles. A list of columns for a model with an output for each: a tuple in this order, or a
            dict by these names.
        labels: what the label column calls the classes, in the order of the model's outputs, where rows may lack one,
            as in a fold of ``CrossValidator``, or need not be read to find them; of several label columns a list for
            each, or None; default: those that the rows hold, in ascending order.
        lossWeights: what the loss of each label column weighs in their sum; default 1 each; not beside trainStep.
        predictionCol: column that the model adds; default ``"prediction"``.
        predictionType: its type: ``"auto"`` (default) as :class:`TorchModel` says; ``"double"`` and ``"long"``, where
            strings are given by the number of their class; ``"array"``; or ``"vector"``, of Spark ML.
        probabilityCol: column that the model adds, a vector of Spark ML with the probability of each class in ascending
            order or that of ``labels``, for CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss and BCELoss; with several
            label columns a struct of those that have such a loss; default "", no such column.
        rawPredictionCol: likewise, with the module's score of each class, -z and z for a logit z of two classes;
            default "", no such column.
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
        scheduler: function that takes the optimizer and how often the scheduler is stepped during the whole fit, and
            returns a scheduler of ``torch.optim.lr_scheduler``. One that waits for a plateau is told the loss on the
            validation rows, or without any that on the training rows.
        schedulerInterval: when it is stepped: after each ``"epoch"`` (default) or after each ``"step"``, an update of
            the weights.
        learningRateScaling: what the optimizer's learning rate is multiplied with, as numWorkers batches lead to one
            update: ``"none"`` (1, default), ``"linear"`` (numWorkers), ``"sqrt"`` (its root, for Adam).
        warmupSteps: updates over which the learning rate grows to its full value; default 0.
        gradientAccumulationSteps: batches of each rank that lead to one update of the weights; default 1.
        maxGradNorm: to which the norm of all gradients together is clipped; default: no clipping.
        precision: in which the model computes where it bears it, by torch's autocast: ``"float32"`` (default),
            ``"bfloat16"``, or ``"float16"`` with scaled losses. Weights stay as they are.
        syncBatchNorm: whether BatchNorms normalize by the rows of all ranks in a step, and not by those of their own
            rank; default False.
        compileModel: whether each rank compiles the model by ``torch.compile``, which takes a C++ compiler there and
            up to a minute at first; default False.
        deterministic: whether operations of torch that do not repeat to the bit are refused by name, as some on a
            GPU; default False.
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
            continues from the last one when it is run again with the same Params and rows, and ends with the same
            weights; one that was finished returns its model, or trains on where ``epochs`` is larger.
        checkpointEverySteps: updates of the weights from one checkpoint to the next; default: there is one at the end
            of each epoch alone.
        keepCheckpoints: how many of the last checkpoints stay; default 2.
        maxRestarts: how often the fit continues by itself when a process, an executor or a host is lost, or a rank
            hangs; default 0. What code raises is never tried again. Without a ``checkpointDir`` the checkpoints lie in
            the Store meanwhile.
        minWorkers: with how many ranks a restarted fit makes do, where slots are gone; default numWorkers.
        hangTimeoutSeconds: seconds after which a rank that others wait for, or that does not answer, counts as hanging:
            the fit ends with where every rank was, or continues as with a lost one; default 240. If it is set, a rank
            is also held to end a step, or a batch of validation, within that time, even if nobody waits for it.
        transport: how ranks exchange gradients: ``"auto"`` (default), ``"native"``, ``"shm"``, ``"tcp"``, ``"mpi"``; on
            several hosts with GPUs also ``"hierarchical"`` and ``"hierarchical-mpi"``: NCCL inside a host, and TCP or
            MPI across.
        wire: how sums of float32, the gradients, travel between hosts: ``"float32"`` (default), or rounded to
            ``"bfloat16"`` or ``"float16"`` (which ends at 65504), half the bytes; added up in float32. Inside a host
            nothing is rounded; MPI sends float32 alone, and so does NCCL, by which gradients on GPUs travel unless
            ``transport`` is ``"hierarchical"``: ranks warn of it.
        tracking: MLflow: ``"auto"`` (default: on when it is installed), ``"on"`` or ``"off"``.
        experiment: MLflow experiment; default: the active one.
        runName: name of the MLflow run.
        trackingTimeoutSeconds: how long a fit waits at its end for MLflow to take what it has to say, and a second more
            for each MiB of the model; default 30. What is not taken by then is kept in the Store.
        registeredModelName: name under which MLflow registers a new version of the model; in Unity Catalog
            ``"catalog.schema.model"``; default: it is logged, and not registered.
        registeredModelAlias: alias that the new version gets.
        logCheckpoints: whether the checkpoints that the fit leaves in its ``checkpointDir`` are copied into the MLflow
            run; default False.
        showProgress: whether ``fit`` shows its progress, on stderr or in the notebook; default True.
        predictionBatchSize: rows per forward pass of ``transform``; default 1024.
    """

    @keyword_only
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
        labels: Labels | Sequence[Labels | None] | None = None,
        lossWeights: Sequence[float] | None = None,
        predictionCol: str | None = None,
        predictionType: str | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
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
        syncBatchNorm: bool | None = None,
        compileModel: bool | None = None,
        deterministic: bool | None = None,
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
        hangTimeoutSeconds: float | None = None,
        transport: str | None = None,
        wire: str | None = None,
        tracking: str | None = None,
        experiment: str | None = None,
        runName: str | None = None,
        trackingTimeoutSeconds: float | None = None,
        registeredModelName: str | None = None,
        registeredModelAlias: str | None = None,
        logCheckpoints: bool | None = None,
        showProgress: bool | None = None,
        predictionBatchSize: int | None = None,
    ) -> None:
        super().__init__()
        self._set_arguments()

    def write(self) -> MLWriter:
        """Return a writer: ``estimator.write().overwrite().save(path)``."""
        return TorchEstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchEstimator]:
        """Return a reader; :meth:`load` is the shortcut."""
        return TorchEstimatorReader(cls)

    def params_of_fit(self) -> TorchEstimator:
        """Return what one fit goes by: this estimator."""
        return self

    def model_class(self) -> type[TorchModel]:
        """Return the class of the models that fits return."""
        return TorchModel
