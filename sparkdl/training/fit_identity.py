"""What makes two fits one fit: the model's structure, the dataset, and what else the course of the weights hangs on.

A checkpoint holds the identity of its fit, and only a fit with the same one goes on from it
(:mod:`sparkdl.training.identity_check`). Not part of it are the
first weights, which a checkpoint replaces, the number of ranks, and what changes no number. Runs on the *driver* and
on a *rank*.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sparkdl.training.dataset_identity import counts_digest, dataset_identity
from sparkdl.training.descriptions import (
    described,
    described_modules,
    described_optimizer,
    is_plain,
)
from sparkdl.training.optimizer import make_optimizer

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.data import ParquetDataset
    from sparkdl.data.row_filter import RowChoice
    from sparkdl.training.spec import TrainingSpec

_WITHOUT_EFFECT = frozenset(
    {
        "epochs",
        "cache",
        "device",
        "compile",
        "num_threads",
        "num_reader_threads",
        "has_unused_parameters",
        "validation_rows",  # what is not trained on
        "callbacks",
        "checkpoints",
    }
)
"""Fields of the spec that may be others when a fit goes on."""

_DESCRIBED = frozenset(
    {
        "model",
        "inputs",
        "heads",
        "user_step",
        "augment",
        "optimizer",
        "scheduler",
        "training_rows",
        "metrics",
        "best",
        "patience",
        "watched",
    }
)
"""Fields that are no plain values, and are compared by descriptions of them."""

_PARAM_OF_FIELD = {
    "accumulated_batches": "gradientAccumulationSteps",
    "weight": "weightCol",
}
"""How users spell fields whose Params are not their names in camelCase."""


def fit_identity(
    spec: TrainingSpec, dataset: ParquetDataset, *, read_timeout_s: float = 600.0
) -> dict[str, Any]:
    """Return the identity of a fit as JSON holds it; reads rows of the dataset, in that time."""
    return {
        "tensors": _tensors(spec.model),
        "modules": described_modules(spec.model),
        "dataset": dataset_identity(dataset, spec, read_timeout_s),
        "settings": {
            "loss": "trainStep"
            if spec.user_step is not None
            else ", ".join(str(described(head.loss)) for head in spec.heads),
            "lossWeights": [head.weight for head in spec.heads],
            "labelCol": list(spec.label_names),
            **{f"labels {head.label.name!r}": described(head.label) for head in spec.heads},
            "trainStep": described(spec.user_step),
            "featuresCol": list(spec.inputs.names),
            "passFeaturesBy": spec.inputs.given_by,
            "paddingValue": described(spec.inputs.padding_value),
            "prepareFeatures": described(spec.inputs.prepare),
            "inputs of the model": [f"{each.name} as {each.dtype}" for each in spec.inputs.inputs],
            "augment": described(spec.augment),
            **described_optimizer(make_optimizer(spec.optimizer, spec.model), spec.model),
            # A schedule is made for a number of epochs.
            "scheduler": None
            if spec.scheduler is None
            else f"{described(spec.scheduler)} for {spec.epochs} epochs",
            "rows to train on": _rows(spec.training_rows),
            **_goals(spec),
            **_plain_fields(spec),
        },
    }


def _tensors(module: nn.Module) -> dict[str, str]:
    return {
        **{
            name: f"{_shape(parameter)}{'' if parameter.requires_grad else ', frozen'}"
            for name, parameter in module.named_parameters()
        },
        **{name: f"{_shape(buffer)}, a buffer" for name, buffer in module.named_buffers()},
    }


def _shape(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _rows(choice: RowChoice | None) -> str:
    if choice is None:
        return "all"
    assert choice.counts is not None, "the rows to train on were counted before the fit"
    marked = f" by {', '.join(choice.columns)}" if choice.columns else ""
    return f"{sum(choice.counts)} in {counts_digest(choice.counts)}{marked}"


def _goals(spec: TrainingSpec) -> dict[str, Any]:
    """What decides on the epoch that the model is from and on the end of the fit."""
    watched = spec.watched if spec.patience is not None else None
    deciding = {goal.metric.removeprefix("val_") for goal in (spec.best, watched) if goal is not None}
    return {
        "bestMetric": None if spec.best is None else spec.best.metric,
        "bestMode": None if spec.best is None else spec.best.mode,
        "earlyStoppingPatience": None if spec.patience is None else spec.patience.epochs,
        "earlyStoppingMinDelta": None if spec.patience is None else spec.patience.min_delta,
        "metric to stop early by": None if watched is None else f"{watched.metric}, {watched.mode}",
        **{f"metric {name!r}": described(spec.metrics[name]) for name in deciding if name in spec.metrics},
    }


def _plain_fields(spec: TrainingSpec) -> dict[str, Any]:
    fields = {}
    for name in (field.name for field in dataclasses.fields(spec)):
        if name not in _WITHOUT_EFFECT | _DESCRIBED:
            value = getattr(spec, name)
            assert is_plain(value), f"{name} has to be described"
            fields[_param_name(name)] = value
    return fields


def _param_name(field: str) -> str:
    first, *others = field.split("_")
    return _PARAM_OF_FIELD.get(field, first + "".join(map(str.capitalize, others)))
