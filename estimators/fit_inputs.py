"""Checks everything that a fit needs and builds its spec, before anything starts. Runs on the *driver*."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from sparkdl.data import ParquetDataset, ParquetFeed
from sparkdl.data.shards import steps_per_epoch
from sparkdl.errors import ParamError, SerializationError
from sparkdl.estimators.labels import check_class_labels
from sparkdl.estimators.metric_trial import try_metrics
from sparkdl.estimators.validation_split import num_training_rows, split_rows, validation_column
from sparkdl.estimators.weights import check_row_weights
from sparkdl.training.architecture import pack_module
from sparkdl.training.columns import dtype_name
from sparkdl.training.goal import Goal
from sparkdl.training.learning_rate import make_scheduler
from sparkdl.training.losses import as_module, ignored_label, prediction_kind
from sparkdl.training.probe import ProbeResult, probe
from sparkdl.training.saved_model import ModelSignature
from sparkdl.training.spec import TrainingSpec
from sparkdl.training.update import updates_per_epoch

if TYPE_CHECKING:
    from sparkdl.estimators.params import _TorchEstimatorParams


@dataclass(frozen=True)
class FitInputs:
    """A fit that may start.

    Attributes:
        spec: what goes to the ranks.
        signature: what the trained model will take and give.
        example: features of one row, ``(1, *shape)``.
    """

    spec: TrainingSpec
    signature: ModelSignature
    example: npt.NDArray[np.generic]


def column_names(params: _TorchEstimatorParams) -> list[str]:
    """Return the columns that a fit reads: features, label and, where they are set, weight and validation indicator."""
    names = (params.getFeaturesCol(), params.getLabelCol(), _weight_column(params), validation_column(params))
    return [name for name in names if name is not None]


def _weight_column(params: _TorchEstimatorParams) -> str | None:
    return params.getWeightCol() if params.isSet(params.weightCol) else None


def check_picklable(params: _TorchEstimatorParams) -> None:
    """Check that what has to travel to the ranks can be pickled.

    Raises:
        SerializationError: naming the Param that cannot.
    """
    try:
        pack_module(params.getModel())
    except SerializationError as error:
        raise SerializationError(f"Param model cannot travel to the ranks. {error}") from error
    _check_function("optimizer", params.getOptimizer())
    _check_function("loss", params.getLoss())
    _check_function("scheduler", params.getScheduler())
    for name, metric in params.getMetrics().items():
        _check_function(f"metrics: {name!r}", metric)
    for callback in params.getCallbacks():
        _check_function(f"callbacks: {type(callback).__name__}", callback)


def _check_function(name: str, value: object) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise SerializationError(
            f"Param {name} cannot travel to the ranks: {type(error).__name__}: {error}. "
            "Make what cannot be pickled inside the function."
        ) from error


def prepare_fit(params: _TorchEstimatorParams, dataset: ParquetDataset) -> FitInputs:
    """Try model, loss, optimizer and scheduler on the first row and build the spec.

    Raises:
        ShardingError: if there are fewer rows than ranks.
        DataError: if features do not fit the model or labels the loss, or weights are no weights.
        ParamError: if the model's output, the optimizer, the scheduler, a metric, or the loss with weights cannot be
            used, or validationFraction leaves no rows.
    """
    training, validation = split_rows(params, dataset)
    features, label, weight = params.getFeaturesCol(), params.getLabelCol(), _weight_column(params)
    if weight is not None:
        check_row_weights(dataset, weight)
    loss = as_module(params.getLoss())
    row = _first_row(dataset, (features, label))
    found = probe(
        params.getModel(),
        loss,
        params.getOptimizer(),
        features=row[features],
        labels=row[label],
        names=(features, label),
        weighted=weight is not None,
    )
    _try_scheduler(params, found, num_training_rows(training, dataset))
    _check_gradients(params, found)
    if found.num_classes is not None and dtype_name(found.label_dtype) == "int64":
        check_class_labels(dataset, label, found.num_classes, ignored_label(loss))
    signature = ModelSignature(
        features=features,
        features_shape=dataset.column(features).shape,
        column_dtype=dataset.column(features).dtype,
        features_dtype=dtype_name(found.features_dtype),
        prediction_kind=prediction_kind(loss),
        prediction_shape=found.prediction_shape,
    )
    spec = replace(
        _make_spec(params, loss, found, dataset), training_rows=training, validation_rows=validation
    )
    try_metrics(spec, dataset)
    return FitInputs(spec, signature, row[features])


def _try_scheduler(params: _TorchEstimatorParams, found: ProbeResult, num_rows: int) -> None:
    scheduler, interval = params.getScheduler(), params.getSchedulerInterval()
    if scheduler is not None:
        steps = steps_per_epoch(num_rows, params.getNumWorkers(), params.getBatchSize())
        updates = updates_per_epoch(steps, params.getGradientAccumulationSteps()) if interval == "step" else 1
        make_scheduler(scheduler, found.optimizer, params.getEpochs() * updates, interval)


def _check_gradients(params: _TorchEstimatorParams, found: ProbeResult) -> None:
    precision = params.getPrecision()
    others = {dtype_name(parameter.dtype) for parameter in params.getModel().parameters()} - {"float32"}
    if precision != "float32" and others:
        raise ParamError(
            f"Param precision is {precision}, which needs weights of float32; the model has "
            f"{', '.join(sorted(others))}. Call model.float(), or leave precision at 'float32'."
        )
    if found.has_sparse_gradients and (params.getNumWorkers() > 1 or params.getMaxGradNorm() is not None):
        raise ParamError(
            "Param model has sparse gradients, which several workers cannot average, nor maxGradNorm clip. "
            "Make its embeddings with sparse=False."
        )


def _make_spec(
    params: _TorchEstimatorParams, loss: Any, found: ProbeResult, dataset: ParquetDataset
) -> TrainingSpec:
    """The one place where Spark's Params become the fields of the spec."""
    names = params.metric_names()
    best = params.best_goal(names)
    return TrainingSpec(
        model=params.getModel(),
        loss=loss,
        optimizer=params.getOptimizer(),
        scheduler=params.getScheduler(),
        scheduler_interval=params.getSchedulerInterval(),
        learning_rate_scaling=params.getLearningRateScaling(),
        warmup_steps=params.getWarmupSteps(),
        accumulated_batches=params.getGradientAccumulationSteps(),
        max_grad_norm=params.getMaxGradNorm(),
        precision=params.getPrecision(),
        metrics=params.getMetrics(),
        best=best,
        patience=params.patience(),
        watched=best or Goal(metric="val_loss" if "val_loss" in names else "loss"),
        callbacks=params.getCallbacks(),
        features=params.getFeaturesCol(),
        label=params.getLabelCol(),
        weight=_weight_column(params),
        features_dtype=dtype_name(found.features_dtype),
        label_dtype=dtype_name(found.label_dtype),
        label_shape=dataset.column(params.getLabelCol()).shape,
        batch_size=params.getBatchSize(),
        epochs=params.getEpochs(),
        seed=params.getSeed(),
        shuffle=params.getShuffle(),
        cache=None if params.getCache() == "off" else params.getCache(),
        device="cuda" if params.getGpusPerWorker() else "cpu",
        has_unused_parameters=found.has_unused_parameters,
    )


def _first_row(dataset: ParquetDataset, names: tuple[str, str]) -> dict[str, npt.NDArray[Any]]:
    with ParquetFeed(dataset, columns=names, rank=0, world_size=1, batch_size=1, shuffle=False) as feed:
        for batch in feed.epoch(0):
            return {name: np.array(values) for name, values in batch.items()}
    raise AssertionError("a dataset with rows has a first batch")
