"""The signature of a module that was trained elsewhere, found by trying the module on example rows.

A fit finds the same from its training rows, in :mod:`sparkdl.estimators.fit.inputs`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

from torch import nn

from sparkdl.data.spark.columns import check_frame, check_types, with_doubles
from sparkdl.data.spark.materialization import describe_first_rows
from sparkdl.errors import ParamError, ParamTypeError
from sparkdl.estimators.fit.inputs import check_columns, first_rows, make_inputs, most_different_rows
from sparkdl.estimators.params.estimator import _TorchEstimatorParams
from sparkdl.estimators.params.inputs import labels_by_column
from sparkdl.estimators.params.table import check_entries, default_values
from sparkdl.model.heads import NO_LABEL, Head, LabelColumn
from sparkdl.model.losses import PredictionKind
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.training.probe import prediction_shape, try_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame
    from torch import Tensor

OUTPUT_KINDS = tuple(kind for kind in get_args(PredictionKind) if kind not in ("text", "tokens"))

_NUM_ROWS = 100
"""Number of example rows that are read: they show whether arrays differ in length."""


def describe_module(
    module: nn.Module,
    example: DataFrame,
    *,
    outputs: str | Mapping[str, str],
    labels: Sequence[Any] | Mapping[str, Sequence[Any]] | None,
    **features: Any,
) -> SavedModel:
    """Try a module on the first rows of a DataFrame, and return it with its signature.

    The arguments and errors are those of :meth:`sparkdl.estimators.TorchModel.from_module`; ``features`` are the
    Params for features.
    """
    if not isinstance(module, nn.Module):
        raise ParamTypeError(
            f"TorchModel.from_module takes a torch.nn.Module, got {type(module).__module__}.{type(module).__name__}."
        )
    check_frame(example, "TorchModel.from_module")
    kinds = cast(
        "dict[str, PredictionKind]", dict(outputs) if isinstance(outputs, Mapping) else {NO_LABEL: outputs}
    )
    for name, kind in kinds.items():
        if kind not in OUTPUT_KINDS:
            raise ParamError(
                f"outputs is {kind!r} for {name!r}, and an output is one of {', '.join(OUTPUT_KINDS)}."
            )
    params = _TorchEstimatorParams()
    params._setDefault(**default_values(_TorchEstimatorParams))
    params.setParams(model=module, **features)
    check_entries(params)
    names = params.getFeaturesCols()
    check_columns(params, [(params.featuresCol, names)], example.columns)
    prepares = params.getPrepareFeatures() is not None
    rows = example if prepares else with_doubles(example, names)
    check_types(rows.schema, names, numbers_only=not prepares)
    with tempfile.TemporaryDirectory(prefix="sparkdl-example-") as folder:
        dataset = describe_first_rows(
            rows,
            names,
            folder,
            num_rows=_NUM_ROWS,
            vector_dtype=params.vector_dtype(),
            allow_ragged=prepares or params.getPaddingValue() is not None,
        )
        inputs, values = make_inputs(params, dataset), first_rows(dataset, names)
    heads = [Head(label=LabelColumn(name=name), loss=None) for name in kinds] if len(kinds) > 1 else []
    row = {name: column[:1] for name, column in values.items()}
    tried = try_outputs(module, inputs, heads, row, most_different_rows(values))
    if set(tried.outputs) != set(kinds):
        raise ParamError(
            f"outputs names {', '.join(kinds)}, and the module does not return a tensor for each of them, as a tuple "
            "in this order or as a dict with these names."
        )
    classes = labels if isinstance(labels, Mapping) else labels_by_column(labels, list(kinds))
    described = tuple(
        _describe(name, kind, tried.outputs[name], classes.get(name)) for name, kind in kinds.items()
    )
    return SavedModel(module, ModelSignature(inputs=tried.inputs, outputs=described))


def _describe(name: str, kind: PredictionKind, tensor: Tensor, classes: Sequence[Any] | None) -> ModelOutput:
    """Return the description of an output, from the tensor that the module returned for one row.

    Raises:
        ParamError: if the tensor has not the shape that the kind needs, or the number of classes differs.
    """
    num_classes = None
    if kind in ("class", "class_margin"):
        if tensor.ndim < 2:
            raise ParamError(
                f"outputs is {kind!r} for {name!r}, which takes one score per class, and the module returned shape "
                f"{tuple(tensor.shape)} for 1 row."
            )
        num_classes = int(tensor.shape[1])
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
