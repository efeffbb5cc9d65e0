"""What makes two fits one fit: the model's structure, the dataset, and what else the course of the weights hangs on.

A checkpoint holds the identity of its fit, and only a fit with the same one goes on from it. Not part of it are the
first weights, which a checkpoint replaces, the number of ranks, and what changes no number. Runs on the *driver* and
on a *rank*.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.data import ParquetFeed
from sparkdl.errors import CheckpointError
from sparkdl.training.optimizer import make_optimizer

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.data import ParquetDataset
    from sparkdl.data.row_filter import RowChoice
    from sparkdl.training.spec import TrainingSpec

_FIRST_ROWS = 64

_WITHOUT_EFFECT = frozenset(
    {"epochs", "cache", "device", "compile", "num_threads", "num_reader_threads", "has_unused_parameters"}
)
"""Fields of the spec that may be others when a fit goes on."""

_PARAM_OF_FIELD = {
    "accumulated_batches": "gradientAccumulationSteps",
    "weight": "weightCol",
}
"""How users spell fields whose Params are not their names in camelCase."""


def fit_identity(
    spec: TrainingSpec, dataset: ParquetDataset, *, read_timeout_s: float = 600.0
) -> dict[str, Any]:
    """Return the identity of a fit as JSON holds it; reads the first rows of the dataset, in that time."""
    return {
        "tensors": _tensors(spec.model),
        "dataset": _dataset(dataset, spec, read_timeout_s),
        "settings": {
            "model": type(spec.model).__name__,
            "loss": ", ".join(_name(head.loss) for head in spec.heads)
            if spec.user_step is None
            else "trainStep",
            "lossWeights": [head.weight for head in spec.heads],
            "labelCol": list(spec.label_names),
            "featuresCol": list(spec.inputs.names),
            "optimizer": _optimizer(spec),
            # A schedule is made for a number of epochs.
            "scheduler": None
            if spec.scheduler is None
            else f"{_name(spec.scheduler)} for {spec.epochs} epochs",
            "rows to train on": _rows(spec.training_rows),
            **_plain_fields(spec),
        },
    }


def check_identity(then: Mapping[str, Any], now: Mapping[str, Any], url: str) -> None:
    """Check that a fit may go on from the checkpoints at a URL.

    Args:
        then: identity of the fit that wrote them.
        now: identity of the fit that reads them.
        url: of the folder, for the error.

    Raises:
        CheckpointError: naming what differs.
    """
    differences = [
        *_differing_tensors(then.get("tensors", {}), now["tensors"]),
        *_differing("the dataset's ", then.get("dataset", {}), now["dataset"]),
        *_differing("", then.get("settings", {}), now["settings"]),
    ]
    if differences:
        raise CheckpointError(
            f"checkpointDir {url} holds checkpoints of another fit: {'; '.join(differences)}. Choose another "
            "checkpointDir, make these as they were, or remove the checkpoints."
        )


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


def _dataset(dataset: ParquetDataset, spec: TrainingSpec, read_timeout_s: float) -> dict[str, Any]:
    names = spec.columns()
    chosen = None if spec.training_rows is None else spec.training_rows.counts
    return {
        "number of rows": dataset.num_rows,
        **{f"column {name!r}": _column(dataset, name) for name in names},
        "row groups": _digest(dataset.row_counts),
        "training rows": _digest(chosen or dataset.row_counts),
        "first rows": _first_rows(dataset, names, read_timeout_s),
    }


def _digest(counts: Sequence[int]) -> str:
    return hashlib.sha256(np.array(counts, dtype=np.int64).tobytes()).hexdigest()[:16]


def _rows(choice: RowChoice | None) -> str:
    if choice is None:
        return "all"
    counts = np.array(choice.counts, dtype=np.int64)
    return f"{counts.sum()} in {hashlib.sha256(counts.tobytes()).hexdigest()[:16]}"


def _column(dataset: ParquetDataset, name: str) -> str:
    column = dataset.column(name)
    return f"{column.kind} {column.dtype} {tuple(column.shape)}"


def _first_rows(dataset: ParquetDataset, names: tuple[str, ...], read_timeout_s: float) -> str:
    digest = hashlib.sha256()
    with ParquetFeed(
        dataset,
        columns=names,
        batch_size=min(_FIRST_ROWS, dataset.num_rows),
        shuffle=False,
        read_timeout_s=read_timeout_s,
    ) as feed:
        for name, values in next(feed.epoch(0)).items():
            digest.update(name.encode())
            if values.dtype == object:
                digest.update("".join(map(str, values.tolist())).encode())
            else:
                digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _optimizer(spec: TrainingSpec) -> str:
    optimizer = make_optimizer(spec.optimizer, spec.model)
    options = ", ".join(
        f"{name}={value}"
        for name, value in sorted(optimizer.defaults.items())
        if isinstance(value, (bool, int, float, str, tuple))
    )
    return f"{type(optimizer).__name__}({options})"


def _plain_fields(spec: TrainingSpec) -> dict[str, Any]:
    fields = {}
    for each in dataclasses.fields(spec):
        value = getattr(spec, each.name)
        if each.name not in _WITHOUT_EFFECT and _is_plain(value):
            fields[_param_name(each.name)] = list(value) if isinstance(value, tuple) else value
    return fields


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _param_name(field: str) -> str:
    first, *others = field.split("_")
    return _PARAM_OF_FIELD.get(field, first + "".join(map(str.capitalize, others)))


def _differing_tensors(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            was, is_ = (tensors.get(name, "not there") for tensors in (then, now))
            return [f"the model's {name} was {was} and is {is_}"]
    return []


def _differing(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differences = []
    for name in now:
        # An older version of sparkdl may not have had it.
        if name in then and then[name] != now[name]:
            hidden = name in ("row groups", "training rows", "first rows")
            values = "were others" if hidden else f"was {then[name]!r} and is {now[name]!r}"
            differences.append(f"{what}{name} {values}")
    missing = [name for name in then if name not in now and name.startswith("column ")]
    return [*differences, *(f"{what}{name} is not there" for name in missing)]
