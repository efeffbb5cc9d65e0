"""What a fit's features are: the columns that Params name, as the model is called with them. On the *driver*."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sparkdl.errors import DataError, ParamError
from sparkdl.model.inputs import ModelInputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.estimators.params import _TorchEstimatorParams
    from sparkdl.model.heads import Head
    from sparkdl.model.inputs import PrepareFunction

_OTHER_WAYS = {
    "string": "; or index them with StringIndexer, as an embedding takes them. TorchClassifier and TorchRegressor take "
    "strings as categories, TextClassifier takes texts",
    "binary": "; ImageClassifier takes images as the bytes of their files",
    "image": "; ImageClassifier takes such images",
    "date": "; or cast them to numbers, for instance with unix_date",
    "timestamp": "; or cast them to numbers, for instance with unix_timestamp",
}


def make_inputs(params: _TorchEstimatorParams, dataset: ParquetDataset) -> ModelInputs:
    """Return the inputs of a fit; their dtypes are found out later.

    Raises:
        DataError: if a column holds what only prepareFeatures can make numbers of, or no part of a matrix.
        ParamError: if prepareFeatures and a matrix are wanted.
    """
    columns = tuple(dataset.column(name) for name in params.getFeaturesCols())
    if params.getPaddingValue() is not None:
        columns = tuple(
            _as_ragged(each) if each.shape and each.kind == "number" else each for each in columns
        )
    prepare = params.getPrepareFeatures()
    if prepare is None:
        for column in columns:
            _check_numbers(column)
    if params.getPassFeaturesBy() == "matrix":
        _check_matrix(columns, prepare)
    return ModelInputs(
        columns=columns,
        given_by=params.getPassFeaturesBy(),
        padding_value=params.getPaddingValue(),
        prepare=prepare,
    )


def check_names(inputs: Iterable[str], params: _TorchEstimatorParams) -> None:
    """Check that an input that is no column is not called like a label or the weights, beside which it lies.

    Raises:
        ParamError: if something is.
    """
    is_matrix = params.getPassFeaturesBy() == "matrix"
    if params.getPrepareFeatures() is None and not is_matrix:
        return
    others = {*params.label_names(), params.weight_column()}
    for name in inputs:
        if name in others:
            raise ParamError(
                f"The matrix of the features is called {name!r}, and so is a label or weight column. Give that another "
                "name, with withColumnRenamed."
                if is_matrix
                else f"Param prepareFeatures returned {name!r}, which is a label or weight column. Choose another name."
            )


def check_indexed_features(inputs: ModelInputs, heads: Iterable[Head]) -> None:
    """Check that no column goes to the model as it is and is indexed as a label.

    Raises:
        ParamError: if one is.
    """
    for head in heads:
        if head.label.classes is not None and inputs.prepare is None and head.label.name in inputs.names:
            raise ParamError(
                f"Column {head.label.name!r} is a feature and a label whose values have to be indexed. Give it a "
                "second name, with withColumn, for one of the two."
            )


def _as_ragged(column: Column) -> Column:
    """A column of arrays that had one length so far, where others may come."""
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


def _check_numbers(column: Column) -> None:
    element = column.element[0] if column.kind == "ragged" else column.kind
    if element != "number":
        raise DataError(
            f"Column {column.name!r} holds {element} values, not numbers. Give prepareFeatures a function that makes "
            f"numbers of them{_OTHER_WAYS.get(element, '')}."
        )
