"""Mends inside Petastorm's own classes, for what facades cannot give; applied when a module is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def _keep_strings_as_objects(module: ModuleType) -> None:
    """Give the row decoder of ``make_reader`` strings as objects with None.

    pandas 3 makes strings a dtype of its own, with NaN for null, which the decoder takes for a float.
    """
    worker = module.PyDictReaderWorker
    original = worker._read_with_shuffle_row_drop

    def read(self: Any, piece: Any, *args: Any) -> Any:
        return original(self, _ObjectStringsPiece(piece), *args)

    worker._read_with_shuffle_row_drop = read


class _ObjectStringsPiece:
    def __init__(self, piece: Any) -> None:
        self._piece = piece

    def read(self, **options: Any) -> _ObjectStringsTable:
        return _ObjectStringsTable(self._piece.read(**options))


class _ObjectStringsTable:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        frame = self._table.to_pandas(**options)
        for index, field in enumerate(self._table.schema):
            if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
                values = self._table.column(index).to_pylist()
                frame.isetitem(index, pd.Series(values, frame.index, dtype=object))
        return frame


def _contain_child_processes(module: ModuleType) -> None:
    """Let the children of Petastorm's process pool install the containment before they import Petastorm."""
    original = module.subprocess

    class _Subprocess:
        @staticmethod
        def Popen(args: list[str], **options: Any) -> Any:  # noqa: N802 - the name of subprocess
            interpreter, _, module_name, *rest = args  # python -m MODULE ...
            code = (
                "import runpy; from sparkdl.data.petastorm.containment import install; install(); "
                f"runpy.run_module({module_name!r}, run_name='__main__', alter_sys=True)"
            )
            return original.Popen([interpreter, "-c", code, *rest], **options)

    module.subprocess = _Subprocess  # type: ignore[attr-defined]  # a module of any kind


REPAIRS: dict[str, Callable[[ModuleType], None]] = {
    "petastorm.py_dict_reader_worker": _keep_strings_as_objects,
    "petastorm.workers_pool.exec_in_new_process": _contain_child_processes,
}
"""By the name of Petastorm's module."""
