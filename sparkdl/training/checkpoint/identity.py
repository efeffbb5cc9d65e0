"""The identity of a fit: the model's structure, the dataset, and the settings that determine the weights.

Runs on the *driver* and on a *rank*. A checkpoint holds the identity of its fit, and only a fit with the same
identity resumes from it. The identity leaves out the number of ranks, settings that do not change results, and the
values of the module's own initial weights, which a checkpoint replaces. The files of initial weights that are read from
a folder belong to it, as nothing else tells apart two models of the same structure.

Objects of a fit are described in text. An object has the same description in every process. Two functions may have the
same description: it consists of the name and of what :func:`functools.partial` binds, not of what the function does.

A dataset is identified by its columns, its row groups and a checksum of its rows, in their order; of a large dataset
only the first rows are read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sparkdl import data
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import CheckpointError
from sparkdl.foreign_errors import store_error
from sparkdl.identity import checksum, differences, digest
from sparkdl.training.spec import DRAWN
from sparkdl.training.update import make_optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.training.checkpoint.fit_manifest import FitManifest
    from sparkdl.training.spec import TrainingSpec


_LONGEST = 300
_DIGEST_TIMEOUT_S = 600.0
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe(value: object) -> str | None:
    """Return a description of an object; None for None.

    A plain value is described by its repr, a module by its class and options, a frozen dataclass by its fields, a
    partial function by what it binds, any other object by its name or the name of its class. Long texts are truncated
    and end with a checksum.
    """
    return None if value is None else _text_of(value)


def describe_modules(module: nn.Module) -> dict[str, str]:
    """Return the class and options of each submodule, by its name.

    The options of torch modules and torchmetrics metrics are their plain attributes, such as ``p`` of a Dropout; for
    other modules they are ``extra_repr()``, because attributes may change in training.
    """
    return {name: f"{type(part).__qualname__}({_options(part)})" for name, part in module.named_modules()}


def describe_optimizer(optimizer: Optimizer, module: nn.Module) -> dict[str, str]:
    """Return the options of an optimizer for each of its groups of parameters, and which parameters those are."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [
        _join_pairs(
            {
                name: value
                for name, value in sorted(group.items())
                if isinstance(value, bool | int | float | str | tuple)
                or (isinstance(value, Tensor) and value.numel() == 1)
            }
        )
        for group in optimizer.param_groups
    ]
    members = [
        [names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups
    ]
    return {
        "optimizer": f"{type(optimizer).__name__}({'; '.join(groups)})",
        "parameters of the optimizer": checksum(repr(members).encode()),
    }


def is_plain(value: object) -> bool:
    """Whether a value is None, a bool, a number or a string, or a tuple or list of such values."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _text_of(value: object) -> str:
    if is_plain(value):
        return _short(repr(value))
    if isinstance(value, functools.partial):
        bound = [*map(_text_of, value.args), *_pairs(value.keywords)]
        return f"{_text_of(value.func)}({', '.join(bound)})"
    if isinstance(value, Tensor):
        numbers = value.detach().to("cpu", torch.float64).numpy()
        return f"{tuple(value.shape)} {checksum(numbers.tobytes())}"
    if isinstance(value, nn.Module):
        parts = [f"{name}: {of}" if name else of for name, of in describe_modules(value).items()]
        # The buffers of a torch loss, such as class weights; those of other modules may be counters.
        constants = dict(value.named_buffers()) if type(value).__module__.startswith("torch.nn.") else {}
        return _short(", ".join([*parts, *_pairs(constants)]))
    options = getattr(type(value), "__dataclass_params__", None)
    if options is not None and options.frozen:
        names = (field.name for field in dataclasses.fields(cast("Any", value)))
        fields = {name: getattr(value, name) for name in names}
        return f"{type(value).__qualname__}({_join_pairs(fields)})"
    if isinstance(value, Mapping):
        return _short(f"{{{_join_pairs({str(name): item for name, item in value.items()})}}}")
    if isinstance(value, tuple | list):
        return _short(f"[{', '.join(map(_text_of, value))}]")
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _options(module: nn.Module) -> str:
    if not type(module).__module__.startswith(("torch.nn.", "torchmetrics.")):
        return _short(_ADDRESS.sub("", module.extra_repr()))
    plain = {
        name: value
        for name, value in sorted(vars(module).items())
        if name != "training" and not name.startswith("_") and value is not None and is_plain(value)
    }
    return _join_pairs(plain)


def _join_pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(_pairs(values))


def _pairs(values: Mapping[str, Any]) -> Iterable[str]:
    return [f"{name}={_text_of(value)}" for name, value in values.items()]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({checksum(text.encode())})"


_FIRST_ROWS = 64
_COMPARED_BYTES = 64 << 20
"""Maximum size in memory of a dataset whose rows are all compared, which takes about half a second."""
_ROWS_AT_ONCE = 4096


def dataset_identity(dataset: ParquetDataset, spec: TrainingSpec, read_timeout_s: float) -> dict[str, Any]:
    """Return the identity of the rows that a fit trains on, as a dict that can be stored as JSON."""
    marks = () if spec.training_rows is None else tuple(spec.training_rows.columns)
    names = tuple(dict.fromkeys((*spec.columns(), *marks)))
    num_bytes = dataset.num_rows * sum(dataset.column(name).row_bytes for name in names)
    num_compared = _FIRST_ROWS if num_bytes > _COMPARED_BYTES else dataset.num_rows
    chosen = None if spec.training_rows is None else spec.training_rows.counts
    return {
        "the dataset's number of rows": dataset.num_rows,
        **{f"the dataset's column {name!r}": _column(dataset, name) for name in names},
        "the dataset's row groups": counts_checksum(dataset.row_counts),
        "the dataset's training rows": counts_checksum(chosen or dataset.row_counts),
        "the dataset's rows": _rows_checksum(dataset, names, num_compared, read_timeout_s),
    }


def dataset_digest(dataset: ParquetDataset, names: Sequence[str]) -> str:
    """Return a hash of columns of a dataset: of their types, the row counts of row groups, and the first 64 rows."""
    return digest(
        {
            "columns": {name: _column(dataset, name) for name in names},
            "row groups": counts_checksum(dataset.row_counts),
            "rows": _rows_checksum(dataset, names, _FIRST_ROWS, _DIGEST_TIMEOUT_S),
        }
    )


def counts_checksum(counts: Sequence[int]) -> str:
    """Return a checksum of row counts."""
    return checksum(np.array(counts, dtype=np.int64).tobytes())


def _column(dataset: ParquetDataset, name: str) -> str:
    column = dataset.column(name)
    return f"{column.kind} {column.dtype} {tuple(column.shape)}"


def _rows_checksum(
    dataset: ParquetDataset, names: Sequence[str], num_rows: int, read_timeout_s: float
) -> str:
    """Return a checksum of the first rows, in their order: a checkpoint counts the rows that were read."""
    digests = {name: hashlib.sha256(name.encode()) for name in names}
    with data.ParquetFeed(
        dataset,
        columns=tuple(names),
        batch_size=min(num_rows, _ROWS_AT_ONCE, dataset.num_rows),
        shuffle=False,
        read_timeout_s=read_timeout_s,
    ) as feed:
        for batch in itertools.islice(feed.epoch(0), math.ceil(num_rows / _ROWS_AT_ONCE)):
            for name, values in batch.items():
                for content in map(_content, values) if values.dtype == object else (values.tobytes(),):
                    digests[name].update(content)
    return checksum(b"".join(hashing.digest() for hashing in digests.values()))


def _content(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    content = value if isinstance(value, bytes) else str(value).encode()
    return f"{len(content)} ".encode() + content


_MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*model*.bin",
    "*model*.bin.index.json",
    "config.json",
    "adapter_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""Files of a folder that belong to a model and its tokenizer; others, such as notes and logs, may change."""

_WHOLE_FILE_BYTES = 64 << 20
"""Maximum size of a file that is read as a whole."""
_NUM_BLOCKS = 256
_BLOCK_BYTES = 4096


def model_files_identity(path: str) -> dict[str, str]:
    """Return a description of the content of each file of a model, by file name, independent of the folder.

    Of a file of more than 64 MiB, only the size and 256 evenly spaced blocks of 4 KiB are read, the first and the last
    bytes among them. Training changes weights everywhere, so that another model of the same size differs in them.

    Args:
        path: path or URL of a folder with the weights of a model and, possibly, its configuration and tokenizer; or of
            a single file of weights.

    Raises:
        StoreError: if the files cannot be read.
    """
    location = open_location(path)
    filesystem = location.filesystem
    try:
        if filesystem.isfile(location.path):
            files = [filesystem.info(location.path)]
        else:
            files = [
                file
                for file in filesystem.ls(location.path, detail=True)
                if file["type"] != "directory"
                and any(fnmatchcase(posixpath.basename(file["name"]), pattern) for pattern in _MODEL_FILES)
            ]
        sizes = {posixpath.basename(file["name"]): (file["name"], int(file["size"])) for file in files}
        return {name: _content_of_file(filesystem, *sizes[name]) for name in sorted(sizes)}
    except OSError as error:
        raise store_error(f"The initial weights in {path} cannot be read", error) from error


def _content_of_file(filesystem: Any, path: str, size: int) -> str:
    if size <= _WHOLE_FILE_BYTES:
        blocks = [filesystem.cat_file(path)]
    else:
        # One call, as filesystems of object stores then send these requests at the same time.
        starts = [(size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1) for number in range(_NUM_BLOCKS)]
        ends = [start + _BLOCK_BYTES for start in starts]
        blocks = filesystem.cat_ranges([path] * _NUM_BLOCKS, starts, ends, on_error="raise")
    return f"{size} bytes {checksum(b''.join(blocks))}"


def fit_identity(
    spec: TrainingSpec, dataset: ParquetDataset, *, read_timeout_s: float = 600.0
) -> dict[str, Any]:
    """Return the identity of a fit, as a dict that can be stored as JSON; it reads rows of the dataset.

    Args:
        spec: spec of the fit.
        dataset: dataset of the fit.
        read_timeout_s: seconds to wait for a row group.
    """
    settings = {
        "loss": "trainStep"
        if spec.user_step is not None
        else ", ".join(str(describe(head.loss)) for head in spec.heads),
        "lossWeights": [head.weight for head in spec.heads],
        "classWeights": [describe(head.class_weights) for head in spec.heads],
        "labelCol": list(spec.label_names),
        **{f"labels {head.label.name!r}": describe(head.label) for head in spec.heads},
        "trainStep": describe(spec.user_step),
        "featuresCol": list(spec.inputs.names),
        "passFeaturesBy": spec.inputs.given_by,
        "paddingValue": describe(spec.inputs.padding_value),
        "prepareFeatures": describe(spec.inputs.prepare),
        "inputs of the model": [f"{column.name} as {column.dtype}" for column in spec.inputs.inputs],
        "augment": describe(spec.augment),
        **describe_optimizer(make_optimizer(spec.optimizer, spec.model), spec.model),
        # A schedule is made for a number of epochs.
        "scheduler": None
        if spec.scheduler is None
        else f"{describe(spec.scheduler)} for {spec.epochs} epochs",
        "rows to train on": _rows(spec.training_rows),
        **_goals(spec),
        **_plain_fields(spec),
    }
    drawn = DRAWN if spec.initial_weights == DRAWN else None
    return {
        **{f"the model's {name}": text for name, text in _tensors(spec.model).items()},
        **{
            f"the model's {name}".removesuffix("'s "): text
            for name, text in describe_modules(spec.model).items()
        },
        **dataset_identity(dataset, spec, read_timeout_s),
        # The weights of the module itself are not compared: a checkpoint replaces them.
        "the initial weights": drawn if spec.initial_files is None else dict(spec.initial_files),
        # A setting that is not there has its default.
        **{name: value for name, value in settings.items() if value is not None},
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
    return f"{sum(choice.counts)} in {counts_checksum(choice.counts)}{marked}"


def _goals(spec: TrainingSpec) -> dict[str, Any]:
    """Return the settings that select the epoch of the returned model and the end of the fit."""
    watched = spec.watched if spec.patience is not None else None
    deciding = {goal.metric.removeprefix("val_") for goal in (spec.best, watched) if goal is not None}
    return {
        "bestMetric": None if spec.best is None else spec.best.metric,
        "bestMode": None if spec.best is None else spec.best.mode,
        "earlyStoppingPatience": None if spec.patience is None else spec.patience.epochs,
        "earlyStoppingMinDelta": None if spec.patience is None else spec.patience.min_delta,
        "metric to stop early by": None if watched is None else f"{watched.metric}, {watched.mode}",
        **{f"metric {name!r}": describe(spec.metrics[name]) for name in deciding if name in spec.metrics},
    }


def _plain_fields(spec: TrainingSpec) -> dict[str, Any]:
    """Return the plain settings by the names of their Params, in camelCase unless the metadata has another name."""
    parts = {}
    for field in dataclasses.fields(spec):
        if "identity" not in field.metadata:
            value = getattr(spec, field.name)
            assert is_plain(value), f"{field.name} has to be described"
            first, *others = field.name.split("_")
            parts[field.metadata.get("param", first + "".join(map(str.capitalize, others)))] = value
    return parts


def check_identity(then: Mapping[str, Any], now: Mapping[str, Any], url: str) -> None:
    """Check that a fit may resume from the checkpoints at a URL.

    Args:
        then: identity of the fit that wrote the checkpoints.
        now: identity of the fit that reads them.
        url: URL of the folder, used in the error message.

    Raises:
        CheckpointError: if the identities differ; the message names the differences.
    """
    changes = differences(then, now)
    if changes:
        raise CheckpointError(
            f"checkpointDir {url} holds checkpoints of another fit: {'; '.join(changes)}. Choose another "
            "checkpointDir, make these as they were, or remove the checkpoints."
        )


def check_progress(url: str, manifest: FitManifest, identity: dict[str, Any], epochs: int) -> None:
    """Check that a fit of ``epochs`` epochs may resume from a checkpoint.

    Raises:
        CheckpointError: if it may not; the message says why.
    """
    check_identity(manifest.identity, identity, url)
    if manifest.epoch > epochs:
        raise CheckpointError(
            f"checkpointDir {url} holds a fit that has reached {manifest.position}, and epochs is {epochs}. Raise "
            "epochs, or choose another checkpointDir."
        )
