"""A module that was trained elsewhere, and its signature, found by trying the module on example rows.

A fit finds the same from its training rows, in :mod:`sparkdl.estimators.fit.inputs`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import nn

from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.data.spark.columns import check_case, check_frame, check_types, quote, with_doubles
from sparkdl.data.spark.materialization import describe_first_rows
from sparkdl.errors import DataError, EmptyDatasetError, ParamError, ParamTypeError, list_names
from sparkdl.estimators.fit.inputs import (
    check_columns,
    first_rows,
    make_inputs,
    most_different_rows,
    vector_dtype,
)
from sparkdl.estimators.fit.probe import prediction_shape, try_outputs
from sparkdl.estimators.params.estimator import _TorchEstimatorParams
from sparkdl.estimators.params.inputs import to_label_list
from sparkdl.estimators.params.table import check_entries, default_values
from sparkdl.foreign_errors import errors_as, reading_from, store_errors
from sparkdl.lazy import load_entry
from sparkdl.model.decisions import BINARY, CLASSES
from sparkdl.model.export import export_model, format_of
from sparkdl.model.heads import NO_LABEL, Head, LabelColumn, check_named, outputs_of_rows
from sparkdl.model.losses import PredictionKind
from sparkdl.model.program import NetworkProgram, program_of, read_program
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.tracking.torch_model import is_logged, load_logged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from pyspark.sql import DataFrame
    from torch import Tensor

    from sparkdl.data import ParquetDataset

_logger = logging.getLogger(__name__)

_EXACT, _ROUNDED = 1e-4, 1e-2
"""Distances of a sum of probabilities from 1 as rounding makes them, in single and in half precision."""

OUTPUT_KINDS = tuple(kind for kind in get_args(PredictionKind) if kind not in ("text", "tokens"))

_NUM_ROWS = 100
"""Number of example rows that are read: they show whether arrays differ in length."""

_NUM_TRIED = 16
"""Most rows that the module gets at once on the driver, which may have little memory."""


def load_module(module: Any) -> nn.Module:
    """Return a network on the CPU and in ``eval()`` mode, from what :meth:`TorchModel.from_module` takes.

    Raises:
        ParamTypeError: if it is none of these.
        ParamError: if there is no such file or model, it holds something else, or it takes one number of rows only.
    """
    if isinstance(module, str) and is_logged(module):
        module = load_logged(module)
    if isinstance(module, str | os.PathLike):
        module = _read_file(os.fspath(module))
    if isinstance(module, torch.export.ExportedProgram | torch.jit.ScriptModule):
        module = program_of(module)
    if not isinstance(module, nn.Module):
        raise ParamTypeError(
            "TorchModel.from_module takes a torch.nn.Module, an exported program, or the path or MLflow URI of one, "
            f"got {type(module).__module__}.{type(module).__name__}."
        )
    try:
        return module.to("cpu").eval()
    except NotImplementedError as error:  # what ExportedProgram.module() returns has no modes
        raise ParamError(
            f"The module {type(module).__name__} has no eval() mode: {error} Of a program of torch.export, give the "
            "program itself, or the path of its file."
        ) from error


def _read_file(path: str) -> nn.Module:
    url = absolute_url(path)
    with reading_from(url):
        location = open_location(url)
        if not location.filesystem.isfile(location.path):
            raise ParamError(
                f"There is no file {path}. TorchModel.from_module takes a torch.nn.Module; the path or URL of a file "
                "that torch.jit.save or torch.export.save wrote; or an MLflow URI such as models:/name/1. A folder or "
                "a name of a Hugging Face model is for TorchModel.from_pretrained."
            )
        with location.filesystem.open(location.path, "rb") as file:
            content: bytes = file.read()
    return read_program(content, path)


def describe_module(
    module: Any,
    example: DataFrame,
    *,
    outputs: str | Mapping[str, str],
    labels: Sequence[Any] | Mapping[str, Sequence[Any]] | None,
    imageTransform: Callable[[Any], Any] | None,
    **features: Any,
) -> SavedModel:
    """Try a module on the first rows of a DataFrame, and return it with its signature.

    The arguments and errors are those of :meth:`sparkdl.estimators.TorchModel.from_module`; ``features`` are the
    Params for features.
    """
    module = load_module(module)
    check_frame(example, "TorchModel.from_module")
    kinds = cast(
        "dict[str, PredictionKind]", dict(outputs) if isinstance(outputs, Mapping) else {NO_LABEL: outputs}
    )
    for name, kind in kinds.items():
        if kind not in OUTPUT_KINDS:
            raise ParamError(
                f"outputs is {kind!r} for {name!r}, and an output is one of {', '.join(OUTPUT_KINDS)}."
            )
    if imageTransform is not None:
        features["prepareFeatures"] = _on_images(imageTransform, features)
    params = _TorchEstimatorParams()
    params._setDefault(**default_values(_TorchEstimatorParams))
    params.setParams(model=module, **features)
    check_entries(params)
    names = params.getFeaturesCols()
    check_columns(params, [(params.featuresCol, names)], example.columns)
    prepares = params.getPrepareFeatures() is not None
    rows = example if prepares else with_doubles(example, names)
    check_types(rows.schema, names, numbers_only=not prepares)
    with _examples(
        rows,
        names,
        vector_dtype=vector_dtype(module),
        allow_ragged=prepares or params.getPaddingValue() is not None,
    ) as dataset:
        inputs, values = make_inputs(params, dataset, params.getPrepareFeatures()), first_rows(dataset, names)
    output_names = list(kinds)
    max_rows = module.max_rows if isinstance(module, NetworkProgram) else None
    heads = [
        Head(label=LabelColumn(name=name), loss=None) for name in output_names if output_names != [NO_LABEL]
    ]
    row = {name: column[:1] for name, column in values.items()}
    pair = most_different_rows(values)
    inputs, tried, trial, _ = try_outputs(module, inputs, heads, row, pair)
    with (
        torch.no_grad(),
        errors_as(DataError, f"The module {type(module).__name__} fails on the example rows"),
    ):
        some = {name: column[: min(max_rows or _NUM_TRIED, _NUM_TRIED)] for name, column in values.items()}
        returned = inputs.apply(trial, inputs.prepare_batch(some), torch.device("cpu"))
    check_named(returned, output_names)
    if set(tried) != set(kinds):
        raise ParamError(
            f"outputs names {list_names(kinds)}, and the module does not return a tensor for each of them, as a tuple "
            "in this order or as a dict with these names."
        )
    given = outputs_of_rows(returned, heads, len(next(iter(some.values()))))
    classes = _labels_by_output(labels, output_names)
    described = tuple(
        _describe(name, kind, tried[name], given[name], classes.get(name)) for name, kind in kinds.items()
    )
    signature = ModelSignature(
        inputs=inputs, outputs=described, batch_size=inputs.rows_at_once, max_batch_size=max_rows
    )
    return SavedModel(module, signature, inputs.example_batches(pair))


@contextmanager
def _examples(
    rows: DataFrame, names: Sequence[str], *, vector_dtype: str, allow_ragged: bool
) -> Iterator[ParquetDataset]:
    """Context manager that yields the first rows of a DataFrame as a dataset: with NaN if there are no others."""
    describe = partial(
        describe_first_rows, num_rows=_NUM_ROWS, vector_dtype=vector_dtype, allow_ragged=allow_ragged
    )
    with tempfile.TemporaryDirectory(prefix="sparkdl-example-") as folder:
        check_case(rows, names)
        try:
            dataset = describe(rows.dropna(subset=[*map(quote, names)]), names, folder)
        except EmptyDatasetError:
            dataset = describe(rows, names, folder)
        yield dataset


def export_to(
    path: str | os.PathLike[str], model: SavedModel, rows: DataFrame | None, format_: str | None
) -> None:
    """Write a module to a file; see :meth:`sparkdl.estimators.TorchModel.export`.

    Args:
        path: path or URL of the file.
        model: the module and its signature.
        rows: example rows with the feature columns alone, in their order; None for those that the model has.
        format_: format of the file; None for the one that its name ends with.
    """
    url = absolute_url(path)
    format_ = format_of(url, format_)
    if rows is None and not model.examples:
        raise ParamError(
            "The file is checked with example rows, and the model keeps none. Give some: "
            "model.export(path, example=df)."
        )
    examples = (
        model.examples if rows is None else model.signature.inputs.example_batches(read_examples(model, rows))
    )
    with tempfile.TemporaryDirectory(prefix="sparkdl-export-") as folder:
        export_model(model, examples, Path(folder, url.rpartition("/")[2]), format_)
        with store_errors(f"{url} cannot be written"):
            location = open_location(url)
            for file in Path(folder).iterdir():  # ONNX has weights above 2 GiB in a file of their own
                location.filesystem.put_file(str(file), f"{location.path.rpartition('/')[0]}/{file.name}")


def read_examples(model: SavedModel, rows: DataFrame) -> dict[str, npt.NDArray[Any]]:
    """Return the first rows without nulls, as arrays with an item per row, by the names of the model's columns.

    Args:
        model: the module and its signature.
        rows: rows with the feature columns alone, in their order.
    """
    inputs = model.signature.inputs
    is_ragged = inputs.prepare is not None or inputs.padding_value is not None
    with _examples(
        rows, rows.columns, vector_dtype=vector_dtype(model.module), allow_ragged=is_ragged
    ) as dataset:
        read = first_rows(dataset, rows.columns)
    return dict(zip(inputs.names, read.values(), strict=True))


def _on_images(transform: Callable[[Any], Any], features: Mapping[str, Any]) -> Any:
    """Return the function that prepares a column of images by a transform of one image."""
    if features["prepareFeatures"] is not None:
        raise ParamError(
            "imageTransform and prepareFeatures are set, and both make the module's inputs. Set one."
        )
    column = features["featuresCol"]
    if not isinstance(column, str):
        raise ParamError(
            f"imageTransform takes the images of one column, and featuresCol is {list(column)}. Name one column, or "
            "take prepareFeatures, which gets all of them."
        )
    return load_entry("imageTransform").TransformedImages(column=column, transform=transform)


def _labels_by_output(
    labels: Sequence[Any] | Mapping[str, Sequence[Any]] | None, names: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the labels of the classes of each output that has some, by its name, as Param ``labels`` takes them.

    Raises:
        ParamError: if they do not say for which output they are, or there is no such output.
        ParamTypeError: if they cannot be labels.
    """
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        if len(names) > 1:
            raise ParamError(
                f"labels is a list, and outputs names {', '.join(names)}. Give labels a dict, with a list by the name "
                "of each output of classes."
            )
        labels = {names[0]: labels}
    if unknown := [name for name in labels if name not in names]:
        raise ParamError(
            f"labels has {', '.join(map(repr, unknown))}, and the outputs are {', '.join(map(repr, names))}. "
            + ("Give a list." if names == [NO_LABEL] else "Give the labels by these names.")
        )
    found = {}
    for name, value in labels.items():
        try:
            found[name] = to_label_list(value)
        except TypeError as error:
            raise ParamTypeError(f"labels cannot be used for {name!r}: {error}.") from error
    return found


def _check_numbers(name: str, kind: PredictionKind, rows: Tensor) -> None:
    """Check that an output of example rows can mean what the user says: probabilities, or scores that are none.

    Raises:
        ParamError: if it cannot; the message names the kind that fits.
    """
    numbers = rows.double()
    are_between = bool(((numbers > -_EXACT) & (numbers < 1 + _EXACT)).all())
    distance = float((numbers.sum(dim=1) - 1).abs().max()) if numbers.ndim > 1 else 1.0
    found, fitting = "", ""
    has_class_each = kind == "class" or (kind in BINARY and numbers.shape[1:] == (2,))
    if has_class_each and are_between and distance < _EXACT:
        found, fitting = "which are between 0 and 1 and add up to 1, as probabilities do", "class_probability"
    elif kind == "class_probability" and not (are_between and distance < _ROUNDED):
        found, fitting = "which are no probabilities that add up to 1", "class"
    elif kind == "binary_probability" and not are_between:
        found, fitting = "which are not all between 0 and 1", "binary_logit"
    if found:
        raise ParamError(
            f"outputs is {kind!r} for {name!r}, and the first example row has {_first_numbers(rows)}, {found}. Set it "
            f"to {fitting!r}."
        )
    if kind == "binary_logit" and are_between and len(rows) > 1:
        _logger.warning(
            "outputs is 'binary_logit' for %r, and all of %d example rows have numbers between 0 and 1. If the module "
            "ends with a sigmoid, set it to 'binary_probability'.",
            name,
            len(rows),
        )


def _first_numbers(rows: Tensor) -> str:
    return list_names(f"{number:.4g}" for number in rows[0].flatten().tolist())


def _describe(
    name: str, kind: PredictionKind, tensor: Tensor, rows: Tensor, classes: Sequence[Any] | None
) -> ModelOutput:
    """Return the description of an output.

    Args:
        name: name of the output.
        kind: what the user says that it means.
        tensor: tensor that the module returned for one row.
        rows: tensor that it returned for the example rows.
        classes: labels of the classes; None for their numbers.

    Raises:
        ParamError: if a tensor has not the shape that the kind needs, or other values, or the number of classes
            differs.
    """
    num_classes = None
    if kind in CLASSES:
        if tensor.ndim < 2 or tensor.shape[1] < 2:
            raise ParamError(
                f"outputs is {kind!r} for {name!r}, which takes one number per class, and the module returned shape "
                f"{tuple(tensor.shape)} for 1 row. One number for the second of two classes is 'binary_logit', or "
                "'binary_probability' if the module ends with a sigmoid."
            )
        num_classes = int(tensor.shape[1])
    _check_numbers(name, kind, rows)
    if classes is not None and kind in BINARY and tuple(tensor.shape[1:]) == (2,):
        raise ParamError(
            f"outputs is {kind!r} for {name!r}, which takes one number for two classes, and the module returns two, "
            "which would be two labels per row. One number per class is 'class', or 'class_probability' if the module "
            "ends with a softmax."
        )
    if classes is not None:
        expected = num_classes or (2 if kind != "value" else None)
        if expected != len(classes):
            has = "no classes" if expected is None else f"{expected} classes"
            raise ParamError(
                f"labels has {len(classes)} entries for {name!r}, and an output of kind {kind!r} and shape "
                f"{tuple(tensor.shape[1:])} has {has}."
            )
    return ModelOutput(
        name=name,
        kind=kind,
        shape=prediction_shape(kind, tensor),
        num_classes=num_classes,
        classes=None if classes is None else tuple(classes),
    )
