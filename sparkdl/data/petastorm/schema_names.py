"""What the names in a pickled Unischema mean: an allow-list of exact names, because data must not be able to run code.

Petastorm pickles the Unischema of a dataset with it. Python 2, NumPy 1 and pyspark before 3.3 left their own names in
such pickles, which no longer exist; they are mapped to what they meant.
"""

from __future__ import annotations

import copyreg
import importlib
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import numpy as np

from sparkdl.errors import DataError

OLD_NUMPY_TYPES: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    "float_": np.float64,
    "string_": np.bytes_,
    "unicode_": np.str_,
}
"""Types of NumPy under names that not every version has."""


class _SparkType:
    """Stand-in for a Spark type where pyspark is not installed; codecs use these types only for writing."""


def _restore(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Restore a field that pyspark before 3.3 pickled, as ``pyspark.serializers._restore`` does any named tuple."""
    if name != "UnischemaField":
        raise DataError(f"The Unischema holds a named tuple {name!r}, which belongs to no Unischema.")
    return _class_of_petastorm("UnischemaField")(**dict(zip(fields, values, strict=True)))


def _scalar(dtype: Any, value: bytes | str) -> Any:
    """``numpy.core.multiarray.scalar``, for a length in a shape; Python 2 pickled its bytes as text."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
        raise DataError(f"The Unischema holds a value of {dtype}, which belongs to no Unischema.")
    return np.frombuffer(value.encode("latin1") if isinstance(value, str) else value, dtype)[0].item()


_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, bytes, float, int, object, str, tuple)},
    "long": int,
    "unicode": str,
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, name): kind for module in ("builtins", "__builtin__") for name, kind in _TYPES.items()},
    **{(module, "_reconstructor"): copyreg._reconstructor for module in ("copyreg", "copy_reg")},  # type: ignore[attr-defined]
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    ("collections", "OrderedDict"): OrderedDict,
    ("decimal", "Decimal"): Decimal,
    ("numpy", "dtype"): np.dtype,
    ("pyspark.serializers", "_restore"): _restore,
}
"""What a Unischema may refer to, also under the names of Python 2, NumPy 1 and pyspark before 3.3."""


def known_class(module: str, name: str) -> Any:
    """Return the class or function that a pickled Unischema names; None if no Unischema uses that name."""
    if module == "petastorm.unischema" and name in ("Unischema", "UnischemaField"):
        return _class_of_petastorm(name)
    if module == "pyspark.sql.types" and name.isidentifier():
        return _spark_type(name)
    if module == "numpy" and name != "dtype":
        dtype = OLD_NUMPY_TYPES.get(name) or getattr(np, name, None)
        return dtype if isinstance(dtype, type) and issubclass(dtype, np.generic) else None
    return _ALLOWED.get((module, name))


def _class_of_petastorm(name: str) -> Any:
    return getattr(
        importlib.import_module("petastorm.unischema"), name
    )  # which may have to be contained first


def _spark_type(name: str) -> type:
    try:
        from pyspark.sql import types
    except ImportError:
        return _SparkType
    spark_type = getattr(types, name, None)
    if isinstance(spark_type, type) and issubclass(spark_type, types.DataType):
        return spark_type
    raise DataError(f"The Unischema refers to pyspark.sql.types.{name}, which is not a type.")
