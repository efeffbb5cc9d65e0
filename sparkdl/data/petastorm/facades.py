"""pyarrow, NumPy and distutils as Petastorm 0.12.1 expects them: the real modules plus removed names.

Facades never enter ``sys.modules``; :mod:`.containment` hands them to Petastorm's modules.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
from packaging.version import Version

from sparkdl.data.petastorm import legacy_parquet


class Facade(ModuleType):
    """A view of a module with names added."""

    def __init__(self, name: str, **added: Any) -> None:
        super().__init__(name)
        self.__dict__.update(added)

    def __getattr__(self, name: str) -> Any:
        original = sys.modules.get(self.__name__)
        if original is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(original, name)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _facade_of, (self.__name__,)  # another process finds its own by name


class _HadoopFileSystem:
    """Stands for ``pyarrow.hdfs.HadoopFileSystem``, a name that Petastorm checks instances against."""


def _connect_hdfs(host: str = "default", port: int = 0, user: str | None = None, **_: Any) -> Any:
    """Stands for ``pyarrow.hdfs.connect``."""
    import fsspec

    return fsspec.filesystem("hdfs", host=host, port=port, user=user)


def _is_string(arrow_type: pa.DataType) -> bool:
    # pandas 3 gives strings to Arrow as large_string, which Petastorm does not know.
    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def _facade_of(name: str) -> Facade:
    return FACADES[name]


_PYARROW = {
    "parquet": Facade(
        "pyarrow.parquet",
        ParquetDataset=legacy_parquet.ParquetDataset,
        ParquetDatasetPiece=legacy_parquet.ParquetDatasetPiece,
        ParquetPartitions=legacy_parquet.ParquetPartitions,
        PartitionSet=legacy_parquet.PartitionSet,
    ),
    "filesystem": Facade("pyarrow.filesystem", LocalFileSystem=legacy_parquet.LocalFileSystem),
    "hdfs": Facade("pyarrow.hdfs", HadoopFileSystem=_HadoopFileSystem, connect=_connect_hdfs),
    "types": Facade("pyarrow.types", is_string=_is_string),
}
_DISTUTILS_VERSION = Facade("distutils.version", LooseVersion=Version)

FACADES: dict[str, Facade] = {
    **{facade.__name__: facade for facade in _PYARROW.values()},
    "pyarrow": Facade(
        "pyarrow",
        __path__=[],
        localfs=legacy_parquet.LOCAL_FILESYSTEM,
        LocalFileSystem=legacy_parquet.LocalFileSystem,
        **_PYARROW,
    ),
    "numpy": Facade(
        "numpy",
        NaN=np.nan,
        bool=np.bool_,
        float_=np.float64,
        in1d=np.isin,
        string_=np.bytes_,
        unicode_=np.str_,
    ),
    "distutils.version": _DISTUTILS_VERSION,
    "distutils": Facade("distutils", __path__=[], version=_DISTUTILS_VERSION),
}
"""By the name under which Petastorm imports them."""

WITHOUT_ORIGINAL = frozenset({"pyarrow.filesystem", "pyarrow.hdfs", "distutils", "distutils.version"})
"""Facades whose module no longer exists in every supported version, so that it must not be imported first."""
