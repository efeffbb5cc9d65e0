"""Checks everything that a fit needs, and builds its spec, before the ranks start.

In the order of the code: the features, and how the model is called with them; the weights of the rows; the spec; and
the check that the DataFrame has all columns, which reports a missing column with the Param that names it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl import data
from sparkdl.collective.torchrun_variables import as_single_rank
from sparkdl.data import ParquetDataset
from sparkdl.data.dataset.dataset import row_weights_error
from sparkdl.data.feed.shards import steps_per_epoch
from sparkdl.data.spark.columns import ambiguous_column_error
from sparkdl.errors import (
    DataError,
    ParamError,
    SavedModelError,
    SerializationError,
    StoreError,
    did_you_mean,
    list_names,
)
from sparkdl.estimators.fit.dry_run import try_step
from sparkdl.estimators.fit.labels import and_more, make_heads, stored_values, trial_labels, with_classes
from sparkdl.estimators.fit.probe import ProbeResult, probe
from sparkdl.estimators.fit.recipe import Recipe
from sparkdl.estimators.fit.split import split_rows, validation_column
from sparkdl.estimators.params.inputs import labels_by_column, scored_columns_of
from sparkdl.estimators.params.table import check_of, spec_fields
from sparkdl.estimators.params.training import best_goal_of, num_readers
from sparkdl.estimators.scoring.columns import check_scored_columns
from sparkdl.launch.wire.messages import pickle_for_ranks
from sparkdl.lazy import load_entry
from sparkdl.model.architecture import parameter_with_hook, split_module
from sparkdl.model.decisions import with_thresholds
from sparkdl.model.inputs import MATRIX, ModelInputs, dtype_name, number_dtype
from sparkdl.model.losses import prediction_kind
from sparkdl.model.named_metrics import named_metric
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.training.callbacks import Patience
from sparkdl.training.learning_rate import make_scheduler
from sparkdl.training.spec import DRAWN, Goal, TrainingSpec
from sparkdl.training.update import make_optimizer, optimizer_bytes, updates_per_epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.ml.param import Param, Params

    from sparkdl.data import Column
    from sparkdl.estimators.fit.probe import Gradients
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.model.heads import Head
    from sparkdl.model.inputs import PrepareFunction
    from sparkdl.parallel import Parallelism
    from sparkdl.training.metrics import Metric


def make_inputs(
    params: _TorchEstimatorParams, dataset: ParquetDataset, prepare: PrepareFunction | None
) -> ModelInputs:
    """Return the inputs of a fit; their dtypes are determined later.

    Args:
        params: Params of the fit.
        dataset: rows of the fit.
        prepare: function that makes the model's inputs from the feature columns; None for the columns unchanged.

    Raises:
        DataError: if a column holds arrays that cannot be part of a matrix.
        ParamError: if prepareFeatures is set and the features are to be passed as a matrix.
    """
    columns = tuple(dataset.column(name) for name in params.getFeaturesCols())
    if params.getPaddingValue() is not None:
        columns = tuple(
            _as_ragged(column) if column.shape and column.kind == "number" else column for column in columns
        )
    if params.getPassFeaturesBy() == "matrix":
        _check_matrix(columns, prepare)
    return ModelInputs(
        columns=columns,
        given_by=params.getPassFeaturesBy(),
        padding_value=params.getPaddingValue(),
        prepare=prepare,
    )


def check_names(names: Iterable[str], inputs: ModelInputs, params: _TorchEstimatorParams) -> None:
    """Check that a matrix or an input of prepareFeatures does not have the name of a label or weight column.

    Inputs, labels and weights are in one dict by name.

    Raises:
        ParamError: if an input does.
    """
    is_matrix = inputs.given_by == "matrix"
    if inputs.prepare is None and not is_matrix:
        return
    others = {*params._label_names(), params._weight_column()}
    for name in names:
        if name in others:
            raise ParamError(
                f"The matrix of the features is called {name!r}, and so is a label or weight column. Give that another "
                "name, with withColumnRenamed."
                if is_matrix
                else f"Param prepareFeatures returned {name!r}, which is a label or weight column. Choose another name."
            )


def check_indexed_features(inputs: ModelInputs, heads: Iterable[Head]) -> None:
    """Check that no column is both passed to the model unchanged and indexed as a label.

    Raises:
        ParamError: if a column is.
    """
    for head in heads:
        if head.label.classes is not None and inputs.prepare is None and head.label.name in inputs.names:
            raise ParamError(
                f"Column {head.label.name!r} is a feature and a label whose values have to be indexed. Give it a "
                "second name, with withColumn, for one of the two."
            )


def _as_ragged(column: Column) -> Column:
    """Return a column of arrays of one length as a column of arrays that may differ in length."""
    return replace(
        column,
        dtype="object",
        shape=(),
        kind="ragged",
        lengths=(None, *column.shape[1:]),
        element=("number", column.dtype),
    )


def _check_matrix(columns: Iterable[Column], prepare: PrepareFunction | None) -> None:
    if prepare is not None:
        raise ParamError(
            'Param passFeaturesBy is "matrix", and prepareFeatures makes the inputs. Leave one of them out; the '
            "function may return a matrix itself."
        )
    for column in columns:
        if column.kind != "number" or column.shape:
            raise DataError(
                f"Column {column.name!r} holds arrays, and a matrix is made of columns of one number each. Leave "
                'passFeaturesBy="matrix" out: an array goes to the model as a matrix of its own.'
            )


def vector_dtype(module: nn.Module) -> str:
    """Return the dtype in which vectors of Spark ML are stored: float64 if the module takes that, else float32."""
    return "float64" if number_dtype(module) == torch.float64 else "float32"


def check_row_weights(dataset: ParquetDataset, name: str) -> None:
    """Check that a column holds finite numbers of at least 0, and not only zeros, in float32. Reads the column.

    Raises:
        DataError: if it does not; the message names the column and what it holds.
    """
    has_weight = False
    for values in stored_values(dataset, name):
        with np.errstate(over="ignore"):
            weights = values.astype(np.float32)  # as they enter the loss
        bad = ~np.isfinite(weights) | (weights < 0)
        if bad.any():
            size = ", too large for float32" if np.isinf(weights[bad][0]) else ""
            raise row_weights_error(f"column {name!r} holds {values[bad][0]}{and_more(bad)}{size}")
        has_weight = has_weight or bool((weights > 0).any())
    if not has_weight:
        raise DataError(
            f"Every weight in column {name!r} is 0, or too small for float32, so no row would count."
        )


@dataclass(frozen=True)
class FitInputs:
    """Everything that a fit needs to start, checked.

    Attributes:
        spec: spec of the fit, for the ranks.
        signature: signature of the trained model: its inputs and outputs.
        examples: inputs that two of the rows make for the model, together and alone.
    """

    spec: TrainingSpec
    signature: ModelSignature
    examples: tuple[Mapping[str, torch.Tensor], ...] = ()


def named_columns(params: _TorchEstimatorParams) -> list[tuple[Param[Any], Sequence[str]]]:
    """Return the columns that a fit reads, with the Params that name them.

    They are features, labels, and weight and indicator columns if they are set.
    """
    others = (
        (params.weightCol, params._weight_column()),
        (params.validationIndicatorCol, validation_column(params)),
    )
    return [
        (params.featuresCol, params.getFeaturesCols()),
        (params.labelCol, params._label_names()),
        *((param, [name]) for param, name in others if name is not None),
    ]


def column_names(params: _TorchEstimatorParams) -> list[str]:
    """Return the names of the columns that a fit reads."""
    return list(dict.fromkeys(name for _, names in named_columns(params) for name in names))


def check_picklable(params: _TorchEstimatorParams) -> None:
    """Check that the Params that are sent to the ranks can be pickled.

    Raises:
        SerializationError: if a Param cannot; the message names it.
    """
    apart = (params.model, params.metrics, params.callbacks, params.onEpoch)  # the last stays on the driver
    if params.isSet(params.model):
        try:
            split_module(params.getModel(), with_meta=params.getInitialWeights() is not None)
        except SerializationError as error:
            raise SerializationError(f"Param model cannot travel to the ranks. {error}") from error
    for param in params._object_params():
        if param not in apart:
            _check_function(param.name, params.getOrDefault(param))
    for name, metric in params.getMetrics().items():
        _check_function(f"metrics: {name!r}", metric)
    for callback in params.getCallbacks():
        _check_function(f"callbacks: {type(callback).__name__}", callback)


def _check_function(name: str, value: object) -> None:
    try:
        pickle_for_ranks(value)
    except SerializationError as error:
        raise SerializationError(f"Param {name} cannot travel to the ranks: {error}.") from error
    except Exception as error:
        raise SerializationError(
            f"Param {name} cannot travel to the ranks: {type(error).__name__}: {error}. "
            "Make what cannot be pickled inside the function."
        ) from error


@as_single_rank()
def prepare_fit(
    params: _TorchEstimatorParams, dataset: ParquetDataset, recipe: Recipe | None = None
) -> FitInputs:
    """Try model, losses, optimizer and scheduler on the first row, and build the spec.

    Args:
        params: Params of the fit.
        dataset: rows of the fit.
        recipe: what is trained; None for what the Params say.

    Raises:
        ShardingError: if there are fewer rows than ranks.
        DataError: if features do not fit the model or labels a loss, or the weight column does not hold valid weights.
        ParamError: if the model's outputs, the optimizer, the scheduler, a metric, or a loss with weights cannot be
            used, or validationFraction leaves no rows.
    """
    recipe = recipe or Recipe.of(params)
    training, validation = split_rows(params, dataset)
    weight = params._weight_column()
    if weight is not None:
        check_row_weights(dataset, weight)
    inputs = make_inputs(params, dataset, recipe.prepare)
    heads = make_heads(params, dataset, recipe.loss)
    if inputs.given_by == "matrix":  # before the model is tried on a row in which a label may have that name
        check_names([MATRIX], inputs, params)
    named = labels_by_column(params.getLabels(), params._label_names())
    rows = first_rows(dataset, list(dict.fromkeys((*inputs.names, *(head.label.name for head in heads)))))
    row = {name: values[:1] for name, values in rows.items()}
    pair = most_different_rows({name: rows[name] for name in inputs.names})
    probed = probe(
        recipe.model,
        params.getOptimizer(),
        inputs=inputs,
        heads=heads,
        row=row,
        labels=trial_labels(heads, dataset, row, named),
        weighted_by=_weighted_by(params),
        pair=pair,
    )
    check_names((entry.name for entry in probed.inputs.inputs), inputs, params)
    _check_hooks(recipe.model)
    _check_precision(params, recipe.model)
    heads = with_classes(probed.heads, probed.num_classes, dataset, named)
    if params.getClassWeights() is not None or params.getSampling() != "all":
        from sparkdl.estimators.fit.class_balance import balance_classes  # needed by few fits

        heads, training = balance_classes(params, heads, probed.num_classes, dataset, training)
    num_rows = dataset.num_rows if training is None else sum(training.counts or ())
    _try_scheduler(params, recipe, probed, num_rows)
    check_indexed_features(inputs, heads)
    _check_parallelism(params, recipe.model)
    _check_initial_weights(params, recipe.model)
    spec = replace(
        _make_spec(params, recipe, probed, heads),
        metrics=_metrics(params, recipe, heads, probed.num_classes, rows),
        training_rows=training,
        validation_rows=validation,
    )
    gradients = try_step(spec, dataset) or probed.gradients
    _check_sparse(params, gradients)
    if isinstance(params.getParallelism(), str):
        spec = _with_planner(spec, params, row)
    # In a user's training step, other rows may use other parameters than the rows that were tried.
    spec = replace(spec, has_unused_parameters=gradients.any_missing or spec.user_step is not None)
    signature = _signature(probed, heads)
    check_scored_columns(scored_columns_of(params), signature.outputs)
    with_thresholds(signature.outputs, params.getThresholds())
    return FitInputs(spec, signature, probed.inputs.example_batches(pair))


def _weighted_by(params: _TorchEstimatorParams) -> str:
    """Return the name of a Param that gives rows weights in the loss; empty if none does."""
    if params.getClassWeights() is not None:
        return "classWeights"
    if params.getSampling() != "all":
        return "sampling"
    return "" if params._weight_column() is None else "weightCol"


def _signature(probed: ProbeResult, heads: Sequence[Head]) -> ModelSignature:
    shapes = probed.prediction_shapes
    if any(head.loss is None for head in heads) or not heads:  # a user's training step
        values = tuple(ModelOutput(name=name, kind="value", shape=shape) for name, shape in shapes.items())
        return ModelSignature(inputs=probed.inputs, outputs=values)
    outputs = tuple(
        ModelOutput(
            name=head.label.name,
            kind=prediction_kind(head.loss),
            shape=shapes[head.label.name],
            num_classes=num_classes,
            classes=head.label.classes,
        )
        for head, num_classes in zip(heads, probed.num_classes, strict=True)
        if head.loss is not None
    )
    return ModelSignature(inputs=probed.inputs, outputs=outputs)


def _try_scheduler(params: _TorchEstimatorParams, recipe: Recipe, probed: ProbeResult, num_rows: int) -> None:
    scheduler, interval = params.getScheduler(), params.getSchedulerInterval()
    if scheduler is not None:
        steps = steps_per_epoch(num_rows, num_readers(params), params.getBatchSize())
        updates = updates_per_epoch(steps, params.getGradientAccumulationSteps()) if interval == "step" else 1
        num_steps, watched = params.getEpochs() * updates, _goals(params, recipe)[1]
        make_scheduler(scheduler, probed.optimizer, num_steps, interval, watched)


def _check_hooks(model: nn.Module) -> None:
    name = parameter_with_hook(model)
    if name is not None:
        raise ParamError(
            f"The gradient of {name!r} of Param model has a hook, and ranks train a copy of the model without it. "
            "Remove the hook, and register it on the ranks: in on_fit_start of a callback, for a parameter of "
            "context.module."
        )


def _check_precision(params: _TorchEstimatorParams, model: nn.Module) -> None:
    precision = params.getPrecision()
    if precision == "float8" and not params.getGpusPerWorker():
        raise ParamError(
            "Param precision is 'float8', which CPUs do not have: it takes GPUs of compute capability 8.9 or newer. "
            "Set gpusPerWorker to 1, or use 'bfloat16'."
        )
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    others = {dtype_name(parameter.dtype) for parameter in trained} - {"float32"}
    if precision != "float32" and others:
        raise ParamError(
            f"Param precision is {precision}, which needs trained weights of float32; the model has "
            f"{', '.join(sorted(others))}. Call model.float(), or leave precision at 'float32'."
        )


def _check_parallelism(params: _TorchEstimatorParams, model: nn.Module) -> None:
    parallelism = params.getParallelism()
    if parallelism is None or isinstance(parallelism, str):
        return
    from sparkdl.parallel.parallelize import check_parts  # with torch's device meshes, which few fits need

    sizes = parallelism.resolve(params.getNumWorkers())
    check_parts(model, sizes, params.getBatchSize())
    _check_division(params, model, sizes)


def _check_division(params: _TorchEstimatorParams, model: nn.Module, sizes: Parallelism) -> None:
    """Refuse other Params that resolved sizes do not support."""
    replicas = (sizes.data or 1) * sizes.num_ranks_of_replica
    if sizes.tensor * sizes.shard * sizes.context > 1:
        _check_divided_optimizer(params, model)
    if sizes.pipeline > 1:
        _check_pipeline(params, model)
    if sizes.offload and not params.getGpusPerWorker():
        raise ParamError(
            "Param parallelism has offload, which keeps the weights of a GPU in host memory, and gpusPerWorker is 0. "
            "Set gpusPerWorker to 1, or leave offload out."
        )
    if params.getPrecision() == "float16" and sizes.data != replicas:
        raise ParamError(
            "Param precision is 'float16', whose loss scaling is not supported if parallelism divides the model. Use "
            "'bfloat16' with parallelism."
        )
    if params.getSyncBatchNorm() and sizes.tensor * sizes.context > 1:
        raise ParamError(
            "Param syncBatchNorm is True, and parallelism has ranks with the same rows (tensor or context), whose rows "
            "would be counted twice. Leave syncBatchNorm out, or use shard alone."
        )


def _with_planner(
    spec: TrainingSpec, params: _TorchEstimatorParams, row: Mapping[str, npt.NDArray[Any]]
) -> TrainingSpec:
    """Return the spec with what chooses its layout on the ranks, for Param ``parallelism`` with the value auto."""
    from sparkdl.parallel import Parallelism

    def suits(name: str) -> bool:
        try:
            sizes: dict[str, Any] = {"data": 1, name: 2}
            _check_division(params, spec.model, Parallelism(**sizes))
        except ParamError:
            return False
        return True

    inputs = spec.inputs.tensors(spec.inputs.prepare_batch(row), torch.device("cpu"))
    with check_of("parallelism"):
        planner = load_entry("Param parallelism with the value 'auto'").make_planner(
            spec.model,
            inputs if spec.inputs.given_by == "name" else tuple(inputs.values()),
            batch_size=spec.batch_size,
            passes=spec.accumulated_batches,
            precision=spec.precision,
            optimizer_bytes=optimizer_bytes(spec.model, spec.optimizer),
            dimensions=[name for name in ("data", "shard", "tensor", "context", "pipeline") if suits(name)],
        )
    return replace(spec, planner=planner.choose)


def _check_divided_optimizer(params: _TorchEstimatorParams, model: nn.Module) -> None:
    """Refuse optimizers of torch whose step fails on the parts of parameters that a rank has."""
    try:
        made = make_optimizer(params.getOptimizer(), model)
    except ParamError:
        return  # the trial of the optimizer says what is wrong
    if isinstance(made, torch.optim.Adafactor | torch.optim.Rprop):
        raise ParamError(
            f"Param optimizer makes {type(made).__name__}, which needs whole parameters, and with Param parallelism "
            "each rank has a part of them. Choose another one, such as AdamW, or train replicas: leave parallelism out."
        )


def _check_initial_weights(params: _TorchEstimatorParams, model: nn.Module) -> None:
    weights = params.getInitialWeights()
    if weights is None:
        return
    from sparkdl.parallel.weights import check_drawable, check_weights  # needed by few fits

    try:
        if weights == DRAWN:
            check_drawable(model)
        else:
            check_weights(model, weights)
    except (StoreError, SavedModelError, ParamError) as error:
        raise type(error)(f"Param initialWeights cannot be used: {error}") from error


def _check_pipeline(params: _TorchEstimatorParams, model: nn.Module) -> None:
    """Refuse settings that pipeline parallelism does not support, or whose result would differ from one process."""
    norms = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    if norms:
        raise ParamError(
            f"Param parallelism has pipeline stages, and {norms[0]!r} of the model is a BatchNorm, which would "
            "normalize each microbatch for itself. Use GroupNorm or LayerNorm, or shard in place of pipeline."
        )
    for name, is_set in (
        ("trainStep", params.getTrainStep() is not None),
        ("compileModel", params.getCompileModel()),
        ("labelCol", len(params.getLabelCols()) > 1),
    ):
        if is_set:
            why = "is a list" if name == "labelCol" else "is set"
            raise ParamError(
                f"Param parallelism has pipeline stages, and Param {name} {why}: the last stage computes one loss from "
                f"the output of the model alone. Leave {name} out, or use shard in place of pipeline."
            )


def _metrics(
    params: _TorchEstimatorParams,
    recipe: Recipe,
    heads: Sequence[Head],
    num_classes: Sequence[int | None],
    rows: Mapping[str, npt.NDArray[Any]],
) -> dict[str, Metric]:
    """Return the metrics of a fit; names stand for metrics that fit the loss.

    Raises:
        ParamError: if a name does not stand for a metric of this model.
    """
    metrics: dict[str, Metric] = {}
    for name, metric in recipe.metrics.items():
        if not isinstance(metric, str):
            metrics[name] = metric
            continue
        loss = heads[0].loss if len(heads) == 1 else None
        if loss is None:
            why = (
                "trainStep computes the loss"
                if params.getTrainStep() is not None
                else f"the model has the label columns {list_names(params._label_names())}"
            )
            raise ParamError(
                f"Param metrics has the name {metric!r}, and {why}. Give functions of (outputs, labels) in place of "
                "names."
            ).about("metrics")
        labels = rows[heads[0].label.name]
        center = float(np.mean(labels)) if labels.dtype.kind in "biuf" else 0.0
        with check_of("metrics"):
            metrics[name] = named_metric(metric, loss, num_classes=num_classes[0], center=center)
    return metrics


def _check_sparse(params: _TorchEstimatorParams, gradients: Gradients) -> None:
    if gradients.are_sparse and (params.getNumWorkers() > 1 or params.getMaxGradNorm() is not None):
        raise ParamError(
            "Param model has sparse gradients, which can neither be averaged over ranks nor clipped. "
            "Make its embeddings with sparse=False."
        )


def _make_spec(
    params: _TorchEstimatorParams, recipe: Recipe, probed: ProbeResult, heads: tuple[Head, ...]
) -> TrainingSpec:
    """Build the spec; the only place where Spark's Params become the fields of the spec."""
    best, watched = _goals(params, recipe)
    patience = params.getEarlyStoppingPatience()
    fields = spec_fields(params, model=recipe.model, augment=recipe.augment)
    if isinstance(params.getParallelism(), str):
        fields["parallelism"] = None  # until the ranks choose it
    return TrainingSpec(
        **fields,
        inputs=probed.inputs,
        heads=heads,
        best=best,
        patience=(
            None
            if patience is None
            else Patience(epochs=patience, min_delta=params.getEarlyStoppingMinDelta())
        ),
        watched=watched,
        weight=params._weight_column(),
        cache=None if params.getCache() == "off" else params.getCache(),
        device="cuda" if params.getGpusPerWorker() else "cpu",
    )


def _goals(params: _TorchEstimatorParams, recipe: Recipe) -> tuple[Goal | None, Goal]:
    """Return the metric that selects the best epoch, None without one, and the metric that has to improve."""
    names = params._metric_names(recipe.metrics)
    best = best_goal_of(params, names)
    return best, best or Goal(metric="val_loss" if "val_loss" in names else "loss")


_NUM_ROWS_TRIED = 8
"""Number of first rows among which two are chosen that differ."""


def most_different_rows(rows: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the first row and the one that differs most from it: in lengths of arrays, then in values."""

    def difference(index: int) -> tuple[int, int]:
        pairs = [(values[0], values[index]) for values in rows.values()]
        lengths = sum(np.shape(one)[:1] != np.shape(other)[:1] for one, other in pairs)
        return lengths, sum(str(one) != str(other) for one, other in pairs)

    num_rows = len(next(iter(rows.values())))
    second = max(range(num_rows), key=difference)
    return {name: values[[0, second]] for name, values in rows.items()}


def first_rows(dataset: ParquetDataset, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the first rows of columns, arrays with an item per row."""
    with data.ParquetFeed(
        dataset, columns=names, rank=0, world_size=1, batch_size=_NUM_ROWS_TRIED, shuffle=False
    ) as feed:
        for batch in feed.epoch(0):
            return {name: np.array(values) for name, values in batch.items()}
    raise AssertionError("a dataset with rows has a first batch")


_MOST_HINTS = 3
"""Number of missing columns for which an error names a similar one."""


def check_columns(
    params: Params, named: Iterable[tuple[Param[Any], Sequence[str]]], available: Sequence[str]
) -> None:
    """Check that a DataFrame has the columns that Params name.

    Raises:
        DataError: if columns are missing, or several have one name; the message names all of them, their Params and
            the columns of the DataFrame.
    """
    num_columns = Counter(available)
    problems = {}
    for param, names in named:
        if missing := [name for name in dict.fromkeys(names) if name not in num_columns]:
            problems[f"missing {param.name}"] = _about_missing(params, param, missing, available)
        for name in names:
            if num_columns[name] > 1:
                problems[f"several {name}"] = str(ambiguous_column_error(name, num_columns[name]))
    if problems:
        raise DataError(
            " ".join([*problems.values(), f"The DataFrame's columns are: {list_names(available)}."])
        )


def _about_missing(params: Params, param: Param[Any], names: Sequence[str], available: Sequence[str]) -> str:
    verb = "is" if isinstance(params.getOrDefault(param), str) else "names"
    default = "" if params.isSet(param) else " (the default)"
    similar = [did_you_mean(name, available, show=repr) for name in names[:_MOST_HINTS]]
    return " ".join(
        [
            f"Param {param.name} {verb} {list_names(map(repr, names))}{default}, and the DataFrame has no such "
            f"column{'s' * (len(names) > 1)}.",
            *filter(None, similar),
        ]
    )
