"""Entries of the table of Params for the training: model, loss, updates of the weights, and the best epoch."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasSeed
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.estimators.params.base import OneOf, check_callable, check_optimizer
from sparkdl.estimators.params.by_name import loss_by_name, optimizer_by_name, schedule_by_name
from sparkdl.estimators.params.table import AsGiven, Entry, above, at_least, optional, param
from sparkdl.model.named_metrics import MAXIMIZED, OF_CLASSES, OF_NUMBERS, check_metric_name
from sparkdl.training.callbacks import Callback
from sparkdl.training.history import EPOCH_METRICS, EpochRecord
from sparkdl.training.learning_rate import INTERVALS, SCALINGS, SchedulerFactory
from sparkdl.training.metrics import Metric
from sparkdl.training.objective import UserStep
from sparkdl.training.precision import PRECISIONS
from sparkdl.training.spec import MODES, Goal, OptimizerFactory

_NAME = re.compile(r"[A-Za-z][\w.\- ]*")


def check_module(param: Param[Any], value: object) -> None:
    """Check that a Param holds a module.

    Raises:
        ParamError: if it holds another object.
    """
    if not isinstance(value, nn.Module):
        raise ParamError(f"Param {param.name} is a {type(value).__name__}, not a torch.nn.Module.")


def check_losses(param: Param[Any], value: object) -> None:
    """Check a loss, or each loss of a list.

    Raises:
        ParamError: if a loss is not a function; the message names it.
    """
    for loss in value if isinstance(value, list | tuple) else [value]:
        check_callable(param, loss_by_name(loss) if isinstance(loss, str) else loss)


def check_scheduler(param: Param[Any], value: object) -> None:
    """Check a scheduler.

    Raises:
        ParamError: if it is neither a function nor the name of a schedule.
    """
    check_callable(param, schedule_by_name(value) if isinstance(value, str) else value)


def check_callbacks(param: Param[Any], value: object) -> None:
    """Check a list of callbacks.

    Raises:
        ParamError: if an item is not a callback; the message names it.
    """
    if not isinstance(value, list | tuple):
        raise ParamError(
            f"Param {param.name} must be a list of sparkdl.estimators.Callback; got a {type(value).__name__}."
        )
    for callback in value:
        if not isinstance(callback, Callback):
            shown = (
                f"the class {callback.__name__}, not one of its instances"
                if isinstance(callback, type)
                else f"a {type(callback).__name__}"
            )
            raise ParamError(f"Param {param.name} holds {shown}: {param.doc}.")


def check_metrics(param: Param[Any], value: object) -> None:
    """Check the names of metrics, and that they can be called.

    Raises:
        ParamError: if a metric cannot be used; the message names it and says why.
    """
    if not isinstance(value, Mapping | list | tuple) or (
        not isinstance(value, Mapping) and not all(isinstance(name, str) for name in value)
    ):
        raise ParamError(
            f"Param {param.name} must be a list of names, such as ['accuracy'], or a dict, such as {{'mae': "
            "torch.nn.L1Loss()}, of functions of (outputs, labels) that return one value per row or their mean, or of "
            f"torchmetrics metrics; got {reprlib.repr(value)}."
        )
    for name, metric in metrics_by_name(value).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ParamError(
                f"Param {param.name} has a metric named {name!r}. Use a name of letters, digits, '_', '-', '.' and "
                "spaces that begins with a letter."
            )
        if name in (*EPOCH_METRICS, "model_epoch") or name.startswith(("val_", "best_")):
            raise ParamError(
                f"Param {param.name} has a metric named {name!r}, which is reserved. Choose another; on validation "
                "rows its name begins with 'val_'."
            )
        if isinstance(metric, str):
            check_metric_name(metric)
        elif not callable(metric):
            raise ParamError(
                f"Metric {name!r} must be a function of (outputs, labels) that returns one value per row or their "
                f"mean, a torchmetrics metric, or the name of a metric; got a {type(metric).__name__}."
            )


def metrics_by_name(value: Mapping[str, Any] | Sequence[str]) -> dict[str, Metric | str]:
    """Return metrics, or names that stand for metrics, by the names under which they are reported."""
    return dict(value) if isinstance(value, Mapping) else {name: name for name in value}


class HasObjective(Params):
    """Params for the module to train and how its loss is computed; ready-made estimators set them themselves."""

    model, getModel, setModel = param(
        AsGiven[Any](),
        "torch.nn.Module to train; fit trains a copy",
        check=check_module,
        field="model",
        more="It may be any module except a TorchScript module.",
    )
    initialWeights, getInitialWeights, setInitialWeights = optional(
        TypeConverters.toString,
        "initial weights in place of the model's own weights: 'drawn' for weights drawn with the seed, or the path or "
        "URL of a folder of safetensors files",
        field="initial_weights",
        more="Each rank draws or reads its part of the weights. A model that is made within "
        "``sparkdl.parallel.on_meta()`` needs this Param; the driver never holds the weights of such a model.",
    )
    optimizer = Entry(
        AsGiven[Any](),
        "function that takes the model's parameters and returns an optimizer, or the name of an optimizer of torch, "
        "such as adamw or sgd",
        check=check_optimizer,
        field="optimizer",
        more="An optimizer by name has torch's defaults, and ``learningRate`` if that is set.",
    )
    setOptimizer = optimizer.setter()
    learningRate, getLearningRate, setLearningRate = optional(
        TypeConverters.toFloat,
        "learning rate of an optimizer that is given by name (> 0); default: torch's",
        check=above(0),
    )
    loss = Entry(
        AsGiven[Any](),
        "loss of torch.nn, a function of (outputs, labels) that returns the mean loss, or the name of a function of "
        "torch.nn.functional, such as cross_entropy or mse; or a list with one loss per label column",
        check=check_losses,
        more="A loss that is not in a list is used for all label columns.",
    )
    setLoss = loss.setter()
    trainStep, getTrainStep, setTrainStep = optional(
        AsGiven[UserStep](),
        "function of (model, batch) that returns the mean loss of the batch, or a tuple of the mean loss and the "
        "outputs; it replaces loss",
        check=check_callable,
        field="user_step",
        more="``batch`` is a dict of tensors: the model's inputs, and the label and weight columns by name. Metrics "
        "need the outputs.",
    )

    def getOptimizer(self) -> OptimizerFactory:
        """Return the function that makes the optimizer."""
        value = self.getOrDefault(self.optimizer)
        return optimizer_by_name(value, self.getLearningRate()) if isinstance(value, str) else value

    def getLoss(self) -> Any:
        """Return the loss, or a list with one loss per label column."""
        value = self.getOrDefault(self.loss)
        if isinstance(value, list | tuple):
            return [loss_by_name(loss) if isinstance(loss, str) else loss for loss in value]
        return loss_by_name(value) if isinstance(value, str) else value


class HasFunctions(Params):
    """Params of all estimators that hold functions or objects, such as scheduler, metrics and callbacks."""

    scheduler = Entry(
        AsGiven[Any](),
        "function that takes the optimizer and the number of steps of the schedule, and returns a torch scheduler; or "
        "cosine or linear, which lower the learning rate to 0",
        check=check_scheduler,
        field="scheduler",
        more="cosine and linear are stepped for each update of the weights, unless schedulerInterval is set. A "
        "``ReduceLROnPlateau`` is stepped with bestMetric if its mode is bestMode, and otherwise, with mode ``min``, "
        "with the loss on the validation rows, or on the training rows if there are no validation rows.",
    )
    setScheduler = scheduler.setter()
    schedulerInterval = Entry(
        OneOf(*INTERVALS),
        "interval at which the scheduler is stepped: epoch, or step for each update of the weights",
        default="epoch",
        field="scheduler_interval",
    )
    setSchedulerInterval = schedulerInterval.setter()
    metrics = Entry(
        AsGiven[Any](),
        "list of names of metrics, such as accuracy, auroc, mae, rmse, r2 and f1_score, or dict of metrics by name: "
        "functions of (outputs, labels) that return one value per row or their mean, or metrics of torchmetrics",
        check=check_metrics,
        field="metrics",
        more="Names other than accuracy, auroc (of two classes), mae, mse, rmse and r2 need torchmetrics. Metrics are "
        "computed on the training rows during training, and as ``val_<name>`` on the validation rows "
        "after each epoch. All rows count equally, whatever their weights.",
    )
    setMetrics = metrics.setter()
    callbacks = Entry(
        AsGiven[Any](),
        "list of sparkdl.estimators.Callback instances; each rank runs copies of them",
        check=check_callbacks,
        field="callbacks",
    )
    setCallbacks = callbacks.setter()
    onEpoch, getOnEpoch, setOnEpoch = optional(
        AsGiven[Callable[[EpochRecord], object]](),
        "function that the driver calls with the record of each epoch; an exception that it raises ends the fit",
        check=check_callable,
        more="A search for hyperparameters reports values and prunes trials there. Epochs that are repeated after a "
        "restart are not reported again. Inside of an active MLflow run, such a fit logs to a nested run of its own.",
    )

    def getScheduler(self) -> SchedulerFactory | None:
        """Return the function that makes the scheduler; None without one."""
        value = self.getOrDefault(self.scheduler) if self.isSet(self.scheduler) else None
        return schedule_by_name(value) if isinstance(value, str) else value

    def getSchedulerInterval(self) -> str:
        """Return the interval at which the scheduler is stepped."""
        is_named = self.isSet(self.scheduler) and isinstance(self.getOrDefault(self.scheduler), str)
        return (
            "step"
            if is_named and not self.isSet(self.schedulerInterval)
            else self.getOrDefault("schedulerInterval")
        )

    def getMetrics(self) -> dict[str, Metric | str]:
        """Return the metrics, or the names that stand for them, by name; an empty dict if there are none."""
        return metrics_by_name(self.getOrDefault(self.metrics)) if self.isDefined(self.metrics) else {}

    def getCallbacks(self) -> tuple[Callback, ...]:
        """Return the callbacks; an empty tuple if they are not set."""
        return tuple(self.getOrDefault(self.callbacks)) if self.isSet(self.callbacks) else ()


class HasTraining(HasSeed):
    """Params for the epochs of a fit, the updates of the weights, and the epoch whose weights a fit returns."""

    batchSize = Entry(
        TypeConverters.toInt,
        "number of rows per rank and step (> 0), unless globalBatchSize is set",
        default=32,
        check=at_least(1),
        field="batch_size",
    )
    setBatchSize = batchSize.setter()
    globalBatchSize, getGlobalBatchSize, setGlobalBatchSize = optional(
        TypeConverters.toInt,
        "number of rows of all ranks together per step, a multiple of numWorkers, in place of batchSize",
        check=at_least(1),
        more="Ranks that read the same rows, by ``tensor``, ``context`` and ``pipeline`` of ``parallelism``, count as "
        "one. In an elastic fit a step then has as many rows with any number of ranks. With ``batchSize`` it has more "
        "or fewer rows when ranks come or go.",
    )
    epochs, getEpochs, setEpochs = param(
        TypeConverters.toInt,
        "number of passes over the training rows (> 0)",
        default=1,
        check=at_least(1),
        field="epochs",
    )
    fastDevRun, getFastDevRun, setFastDevRun = param(
        TypeConverters.toBoolean,
        "whether to try a fit: three updates of the weights and three batches of validation, without MLflow and "
        "checkpoints",
        default=False,
        more="Rows are written as in the whole fit, which then finds them in the Store. The returned model is hardly "
        "trained.",
    )
    seed = Entry(
        TypeConverters.toInt,
        "seed of the order of rows and of all random numbers during a fit",
        default=0,
        field="seed",
        more="With the same initial weights, a fit on CPU repeats to the bit: call ``torch.manual_seed`` before you "
        "make the model. Ready-made estimators also draw the initial weights with this seed.",
    )
    setSeed = seed.setter()
    shuffle, getShuffle, setShuffle = param(
        TypeConverters.toBoolean,
        "whether the rows are shuffled in each epoch",
        default=True,
        field="shuffle",
    )
    learningRateScaling, getLearningRateScaling, setLearningRateScaling = param(
        OneOf(*SCALINGS),
        "factor applied to the optimizer's learning rate: none (1), linear (numWorkers) or sqrt (square "
        "root of numWorkers)",
        default="none",
        field="learning_rate_scaling",
        more="Each update is computed from the batches of numWorkers ranks; use sqrt for Adam. With ``parallelism``, "
        "ranks that read the same rows count once.",
    )
    warmupSteps, getWarmupSteps, setWarmupSteps = param(
        TypeConverters.toInt,
        "number of updates over which the learning rate grows to its full value (>= 0)",
        default=0,
        check=at_least(0),
        field="warmup_steps",
    )
    gradientAccumulationSteps, getGradientAccumulationSteps, setGradientAccumulationSteps = param(
        TypeConverters.toInt,
        "number of batches per rank whose gradients are accumulated for one update (> 0)",
        default=1,
        check=at_least(1),
        field="accumulated_batches",
    )
    maxGradNorm, getMaxGradNorm, setMaxGradNorm = optional(
        TypeConverters.toFloat,
        "maximum norm of all gradients together, to which they are clipped (> 0); default: no clipping",
        check=above(0),
        field="max_grad_norm",
    )
    precision, getPrecision, setPrecision = param(
        OneOf(*PRECISIONS),
        "precision of the model's computations with torch's autocast: float32, bfloat16, float16 or float8",
        default="float32",
        field="precision",
        more="With float16, losses are scaled. Weights keep their dtype. float8 needs torchao and a GPU that supports "
        "it, and is used for linear layers only; all other layers compute in bfloat16.",
    )
    syncBatchNorm, getSyncBatchNorm, setSyncBatchNorm = param(
        TypeConverters.toBoolean,
        "whether BatchNorm layers normalize over the rows of all ranks in a step, instead of the rows of each rank",
        default=False,
        field="sync_batch_norm",
    )
    compareReplicas, getCompareReplicas, setCompareReplicas = param(
        TypeConverters.toBoolean,
        "whether the ranks compare their weights after the first step and each epoch, and at checkpoints",
        default=True,
        field="compare_replicas",
        more="If they differ, the fit ends with an error that names a parameter, the ranks, and when the weights were "
        "still equal. Differences by rounding are removed. Buffers are not compared: rank 0's count.",
    )
    compileModel, getCompileModel, setCompileModel = param(
        TypeConverters.toBoolean,
        "whether each rank compiles the model with torch.compile",
        default=False,
        field="compile",
        more="This needs a C++ compiler on each host, and takes up to a minute at the beginning of a fit.",
    )
    deterministic, getDeterministic, setDeterministic = param(
        TypeConverters.toBoolean,
        "whether operations whose results can differ from run to run are refused, also on a GPU",
        default=False,
        field="deterministic",
    )
    earlyStoppingPatience, getEarlyStoppingPatience, setEarlyStoppingPatience = optional(
        TypeConverters.toInt,
        "number of consecutive epochs without an improvement after which the fit ends (> 0); default: no early "
        "stopping",
        check=at_least(1),
        more="All ranks end after the same epoch. The metric that has to improve is bestMetric. If that is not set, "
        "it is the loss on the validation rows, or on the training rows if there are no validation rows.",
    )
    earlyStoppingMinDelta, getEarlyStoppingMinDelta, setEarlyStoppingMinDelta = param(
        TypeConverters.toFloat,
        "difference from the best value so far that an improvement has to exceed (>= 0)",
        default=0.0,
        check=at_least(0),
    )
    bestMetric, getBestMetric, setBestMetric = optional(
        TypeConverters.toString,
        "metric whose best value selects the epoch of the returned weights: loss, val_loss or the name of a "
        "metric; default: none, the model has the weights of the last epoch",
        more="For a metric on the validation rows, put ``val_`` before its name. The weights of the best epoch are "
        "kept in the memory of rank 0's host, as a second copy of the model.",
    )
    bestMode, getBestMode, setBestMode = optional(
        OneOf(*MODES),
        "whether the best value of bestMetric is its minimum or its maximum: min or max; default: min for a loss",
        more="It is required if bestMetric is a function, or a metric of torchmetrics.",
    )

    def getBatchSize(self) -> int:
        """Return the number of rows per rank and step."""
        of_all: int | None = self.getGlobalBatchSize()
        if of_all is None:
            return self.getOrDefault(self.batchSize)
        return of_all // num_readers(self)


def num_readers(params: Any) -> int:
    """Return the number of ranks that read rows of their own; ranks that share a model's layers read the same ones."""
    num_ranks: int = params.getNumWorkers()
    parallelism = params.getParallelism()
    if parallelism is None or isinstance(parallelism, str):  # the planner keeps the rows of a step
        return num_ranks
    sizes = parallelism.resolve(num_ranks)
    return int(sizes.data * sizes.shard)


def best_goal_of(params: HasTraining, available: Sequence[str]) -> Goal | None:
    """Return the metric that selects the best epoch, for the spec; None if the fit returns the last epoch's weights.

    Args:
        params: Params of the estimator.
        available: names of the losses and metrics that a fit with these Params has.

    Raises:
        ParamError: if there is no such metric, or it is not known whether it is minimized or maximized.
    """
    metric, mode = params.getBestMetric(), params.getBestMode()
    if metric is None:
        if mode is not None:
            raise ParamError(f"Param bestMode is {mode!r}, but bestMetric is not set. Set it, or clear both.")
        return None
    if metric not in available:
        raise ParamError(
            f"Param bestMetric is {metric!r}, but this fit has {', '.join(available)}. Choose one of them, or set "
            "metrics, validationFraction or validationIndicatorCol so that there is such a metric."
        )
    named = params.getMetrics().get(metric.removeprefix("val_")) if isinstance(params, HasFunctions) else None
    if mode is None and named in (*OF_CLASSES, *OF_NUMBERS):
        mode = "max" if named in MAXIMIZED else "min"
    if mode is None and metric not in ("loss", "val_loss"):
        raise ParamError(
            f"Param bestMetric is {metric!r}, and bestMode is not set. Set bestMode to 'min' if smaller values of "
            f"{metric!r} are better, or to 'max' if larger values are better."
        )
    return Goal(metric=metric, mode=mode or "min")
