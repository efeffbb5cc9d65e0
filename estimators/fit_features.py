"""What a fit's features are: the columns that Params name, as the model is called with them. On the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import DataError, ParamError
from sparkdl.training.model_inputs import ModelInputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.estimators.params import _TorchEstimatorParams


def make_inputs(params: _TorchEstimatorParams, dataset: ParquetDataset) -> ModelInputs:
    """Return the inputs of a fit; their dtypes are found out later.

    Raises:
        DataError: if a column holds what only prepareFeatures can make numbers of.
    """
    columns = tuple(dataset.column(name) for name in params.getFeaturesCols())
    prepare = params.getPrepareFeatures()
    if prepare is None:
        for column in columns:
            _check_numbers(column)
    return ModelInputs(
        columns=columns,
        by_name=params.getPassFeaturesBy() == "name",
        padding_value=params.getPaddingValue(),
        prepare=prepare,
    )


def check_names(inputs: Iterable[str], params: _TorchEstimatorParams) -> None:
    """Check that what prepareFeatures returns is not called like a label or the weights, beside which it lies.

    Raises:
        ParamError: if something is.
    """
    if params.getPrepareFeatures() is None:
        return
    others = {*params.label_names(), params.weight_column()}
    for name in inputs:
        if name in others:
            raise ParamError(
                f"Param prepareFeatures returned {name!r}, which is a label or weight column. Choose another name."
            )


def _check_numbers(column: Column) -> None:
    element = column.element[0] if column.kind == "ragged" else column.kind
    if element != "number":
        raise DataError(
            f"Column {column.name!r} holds {element} values, not numbers. Give prepareFeatures a function that makes "
            "numbers of them."
        )
