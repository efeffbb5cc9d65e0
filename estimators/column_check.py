"""Names the Param behind a column that a DataFrame lacks, before anything starts. Runs on the *driver*."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING, Any

from sparkdl.data.dataset.dataset import listed
from sparkdl.data.spark.columns import ambiguous_column_error
from sparkdl.errors import DataError
from sparkdl.estimators.validation_split import validation_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.ml.param import Param

    from sparkdl.estimators.params import _TorchEstimatorParams


def check_columns(params: _TorchEstimatorParams, available: Sequence[str]) -> None:
    """Check that a DataFrame has the columns that Params name.

    Raises:
        DataError: naming Param and column, and those there are; or a name that several columns have.
    """
    others = (
        (params.weightCol, params.weight_column()),
        (params.validationIndicatorCol, validation_column(params)),
    )
    named: list[tuple[Param[Any], Sequence[str]]] = [
        (params.featuresCol, params.getFeaturesCols()),
        (params.labelCol, params.label_names()),
        *((param, [name]) for param, name in others if name is not None),
    ]
    num_columns = Counter(available)
    for param, names in named:
        for name in names:
            if name not in num_columns:
                raise _missing(params, param, name, available)
            if num_columns[name] > 1:
                raise ambiguous_column_error(name, num_columns[name])


def _missing(
    params: _TorchEstimatorParams, param: Param[Any], name: str, available: Sequence[str]
) -> DataError:
    verb = "is" if isinstance(params.getOrDefault(param), str) else "names"
    default = "" if params.isSet(param) else " (the default)"
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return DataError(
        f"Param {param.name} {verb} {name!r}{default}, and the DataFrame has no such column.{hint} Its columns are: "
        f"{listed(available)}."
    )
