"""Checks everything that a fit needs and builds its spec, before anything starts. Runs on the *driver*."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from sparkdl.data import ParquetDataset, ParquetFeed
from sparkdl.data.dataset.shards import steps_per_epoch
from sparkdl.errors import ParamError, SerializationError
from sparkdl.estimators.course_mixins import best_goal_of, patience_of
from sparkdl.estimators.fit_features import check_indexed_features, check_names, make_inputs
from sparkdl.estimators.fit_heads import make_heads, trial_labels, with_classes
from sparkdl.estimators.label_mixins import labels_by_column
from sparkdl.estimators.scored_columns import check_scored_columns
from sparkdl.estimators.scored_mixins import scored_columns_of
from sparkdl.estimators.step_trial import try_step
from sparkdl.estimators.validation_split import num_training_rows, split_rows, validation_column
from sparkdl.estimators.weights import check_row_weights
from sparkdl.model.architecture import split_module
from sparkdl.model.heads import prediction_kind
from sparkdl.model.inputs import MATRIX, dtype_name
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.training.learning_rate import make_scheduler
from sparkdl.training.probe import ProbeResult, probe
from sparkdl.training.spec import Goal, TrainingSpec
from sparkdl.training.update import updates_per_epoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.estimators.params import _TorchEstimatorParams
    from sparkdl.model.heads import Head
    from sparkdl.training.probe import Gradients


@dataclass(frozen=True)
class FitInputs:
    """A fit that may start.

    Attributes:
        spec: what goes to the ranks.
        signature: what the trained model will take and give.
        example: one row, columns of shape ``(1, *shape)``.
    """

    spec: TrainingSpec
    signature: ModelSignature
    example: dict[str, npt.NDArray[Any]]


def column_names(params: _TorchEstimatorParams) -> list[str]:
    """Return the columns that a fit reads: features, labels and, where they are set, weight and indicator."""
    others = (params.weight_column(), validation_column(params))
    names = [*params.getFeaturesCols(), *params.label_names(), *(name for name in others if name is not None)]
    return list(dict.fromkeys(names))


def check_picklable(params: _TorchEstimatorParams) -> None:
    """Check that what has to travel to the ranks can be pickled.

    Raises:
        SerializationError: naming the Param that cannot.
    """
    try:
        split_module(params.getModel())
    except SerializationError as error:
        raise SerializationError(f"Param model cannot travel to the ranks. {error}") from error
    for param in (params.optimizer, params.loss, params.scheduler, *params.function_params()):
        if params.isSet(param):
            _check_function(param.name, params.getOrDefault(param))
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
    """Try model, losses, optimizer and scheduler on the first row and build the spec.

    Raises:
        ShardingError: if there are fewer rows than ranks.
        DataError: if features do not fit the model or labels a loss, or weights are no weights.
        ParamError: if the model's outputs, the optimizer, the scheduler, a metric, or a loss with weights cannot be
            used, or validationFraction leaves no rows.
    """
    training, validation = split_rows(params, dataset)
    weight = params.weight_column()
    if weight is not None:
        check_row_weights(dataset, weight)
    inputs, heads = make_inputs(params, dataset), make_heads(params, dataset)
    if inputs.given_by == "matrix":
        check_names(
            [MATRIX], params
        )  # before the model is tried on a row in which a label may have that name
    named = labels_by_column(params.getLabels(), params.label_names())
    row = _first_row(dataset, list(dict.fromkeys((*inputs.names, *(head.label.name for head in heads)))))
    found = probe(
        params.getModel(),
        params.getOptimizer(),
        inputs=inputs,
        heads=heads,
        row=row,
        labels=trial_labels(heads, dataset, row, named),
        weighted=weight is not None,
    )
    check_names((each.name for each in found.inputs.inputs), params)
    _try_scheduler(params, found, num_training_rows(training, dataset))
    _check_precision(params)
    heads = with_classes(found.heads, found.num_classes, dataset, named)
    check_indexed_features(inputs, heads)
    spec = replace(_make_spec(params, found, heads), training_rows=training, validation_rows=validation)
    gradients = try_step(spec, dataset) or found.gradients
    _check_sparse(params, gradients)
    # Other rows may take another way through a step of the user's own than those that were tried.
    spec = replace(spec, has_unused_parameters=gradients.lack_some or spec.user_step is not None)
    signature = _signature(found, heads)
    check_scored_columns(scored_columns_of(params), signature.outputs)
    return FitInputs(spec, signature, row)


def _signature(found: ProbeResult, heads: Sequence[Head]) -> ModelSignature:
    shapes = found.prediction_shapes
    if any(head.loss is None for head in heads) or not heads:  # a step of the user's own
        values = tuple(ModelOutput(name=name, kind="value", shape=shape) for name, shape in shapes.items())
        return ModelSignature(inputs=found.inputs, outputs=values)
    outputs = tuple(
        ModelOutput(
            name=head.label.name,
            kind=prediction_kind(head.loss),
            shape=shapes[head.label.name],
            num_classes=num_classes,
            classes=head.label.classes,
        )
        for head, num_classes in zip(heads, found.num_classes, strict=True)
        if head.loss is not None
    )
    return ModelSignature(inputs=found.inputs, outputs=outputs)


def _try_scheduler(params: _TorchEstimatorParams, found: ProbeResult, num_rows: int) -> None:
    scheduler, interval = params.getScheduler(), params.getSchedulerInterval()
    if scheduler is not None:
        steps = steps_per_epoch(num_rows, params.getNumWorkers(), params.getBatchSize())
        updates = updates_per_epoch(steps, params.getGradientAccumulationSteps()) if interval == "step" else 1
        make_scheduler(scheduler, found.optimizer, params.getEpochs() * updates, interval)


def _check_precision(params: _TorchEstimatorParams) -> None:
    precision = params.getPrecision()
    others = {dtype_name(parameter.dtype) for parameter in params.getModel().parameters()} - {"float32"}
    if precision != "float32" and others:
        raise ParamError(
            f"Param precision is {precision}, which needs weights of float32; the model has "
            f"{', '.join(sorted(others))}. Call model.float(), or leave precision at 'float32'."
        )


def _check_sparse(params: _TorchEstimatorParams, gradients: Gradients) -> None:
    if gradients.are_sparse and (params.getNumWorkers() > 1 or params.getMaxGradNorm() is not None):
        raise ParamError(
            "Param model has sparse gradients, which several workers cannot average, nor maxGradNorm clip. "
            "Make its embeddings with sparse=False."
        )


def _make_spec(params: _TorchEstimatorParams, found: ProbeResult, heads: tuple[Head, ...]) -> TrainingSpec:
    """The one place where Spark's Params become the fields of the spec."""
    names = params.metric_names()
    best = best_goal_of(params, names)
    return TrainingSpec(
        model=params.getModel(),
        inputs=found.inputs,
        heads=heads,
        user_step=params.getTrainStep(),
        augment=params.getAugment(),
        optimizer=params.getOptimizer(),
        scheduler=params.getScheduler(),
        scheduler_interval=params.getSchedulerInterval(),
        learning_rate_scaling=params.getLearningRateScaling(),
        warmup_steps=params.getWarmupSteps(),
        accumulated_batches=params.getGradientAccumulationSteps(),
        max_grad_norm=params.getMaxGradNorm(),
        precision=params.getPrecision(),
        sync_batch_norm=params.getSyncBatchNorm(),
        compile=params.getCompileModel(),
        deterministic=params.getDeterministic(),
        metrics=params.getMetrics(),
        best=best,
        patience=patience_of(params),
        watched=best or Goal(metric="val_loss" if "val_loss" in names else "loss"),
        callbacks=params.getCallbacks(),
        weight=params.weight_column(),
        batch_size=params.getBatchSize(),
        epochs=params.getEpochs(),
        seed=params.getSeed(),
        shuffle=params.getShuffle(),
        cache=None if params.getCache() == "off" else params.getCache(),
        device="cuda" if params.getGpusPerWorker() else "cpu",
    )


def _first_row(dataset: ParquetDataset, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    with ParquetFeed(dataset, columns=names, rank=0, world_size=1, batch_size=1, shuffle=False) as feed:
        for batch in feed.epoch(0):
            return {name: np.array(values) for name, values in batch.items()}
    raise AssertionError("a dataset with rows has a first batch")
