"""Errors for row groups that cannot be read, which name the file, row group and column, and say what to do.

Runs on the reader threads of every *rank*, only after a read has failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.files.failures import describe_reading_failure
from sparkdl.errors import (
    ColumnMismatchError,
    CorruptFileError,
    DataError,
    FileChangedError,
    FileVanishedError,
    StoreAccessError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.data.dataset.legacy_parquet import ParquetDatasetPiece


def reading_error(
    error: Exception, piece: ParquetDatasetPiece, columns: Sequence[str], name: str | None = None
) -> DataError:
    """Return the error to raise for a row group that could not be read.

    To find the column, the columns are read again, one by one.

    Args:
        error: exception that was raised.
        piece: the row group.
        columns: names of the columns that were read.
        name: name of the file in the message; by default its path.

    Returns:
        - :class:`FileVanishedError` if the file does not exist,
        - :class:`FileChangedError` if it is not the file that was described: a row group or column is missing, the
          number of rows differs, or the file was written again meanwhile,
        - :class:`CorruptFileError` if it is damaged,
        - :class:`StoreAccessError` if its Store can no longer be read at all, for example because credentials have
          expired or its server does not answer,
        - :class:`ColumnMismatchError` if a column has another type or length of arrays than elsewhere,
        - :class:`DataError` otherwise: the values differ from the dataset's description, or the filesystem failed.
    """
    where = f"{name or piece.path}, row group {piece.row_group}"
    if isinstance(error, FileChangedError):
        return _changed(where, str(error))
    if isinstance(error, DataError):
        kept = ColumnMismatchError if isinstance(error, ColumnMismatchError) else DataError
        return kept(f"Reading {where} failed: {error}")
    of_store = _error_of_store(error, where)
    if of_store is not None:
        return of_store
    try:
        return _look_closer(error, piece, columns, where)
    except FileChangedError as changed:
        return _changed(where, str(changed))
    except Exception as second_error:  # the filesystem can no longer be read
        return _error_of_store(second_error, where) or _unknown(error, where)


def is_damage(error: BaseException) -> bool:
    """Whether an error of Arrow means that it could not make sense of what it read.

    Arrow then raises ``ArrowInvalid``, or plain ``OSError`` without an errno. Its other errors have other classes,
    errors of the operating system have an errno, and errors of fsspec's filesystems, such as a ``PermissionError``
    without an errno, are of subclasses of ``OSError``.
    """
    return isinstance(error, pa.ArrowInvalid) or (type(error) is OSError and error.errno is None)


def _error_of_store(error: Exception, where: str) -> DataError | None:
    """Return the error for a file or filesystem that cannot be reached; None if the file may be damaged."""
    why = describe_reading_failure(error)
    if why:
        return StoreAccessError(f"Reading {where} failed: {why}")
    if isinstance(error, FileNotFoundError):
        return FileVanishedError(
            f"Reading {where} failed: the file is no longer there. Files have to stay until the last epoch is read."
        )
    if isinstance(error, OSError) and not is_damage(error):
        return _unknown(error, where)
    return None


def _look_closer(
    error: Exception, piece: ParquetDatasetPiece, columns: Sequence[str], where: str
) -> DataError:
    try:
        with piece.open_file_func(piece.path) as source, pq.ParquetFile(source) as file:
            num_row_groups, names = file.metadata.num_row_groups, file.schema_arrow.names
    except Exception as footer_error:
        if not is_damage(footer_error):
            raise
        return CorruptFileError(
            f"Reading {where} failed: {_line(footer_error)} The end of the file is damaged or missing; write it again."
        )
    if piece.row_group is not None and piece.row_group >= num_row_groups:
        return _changed(where, f"the file has only {num_row_groups} row groups now")
    for name in columns:
        if name in piece.folder_values and name not in names:
            continue
        if name not in names:
            return _changed(where, f"column {name!r} is no longer there; there are {', '.join(names)}")
        try:
            piece.read(columns=[name])
        except Exception as column_error:
            if not is_damage(column_error):
                raise
            return CorruptFileError(
                f"Reading {where}, column {name!r} failed: {_line(column_error)} The file is damaged; write it again."
            )
    return _unknown(error, where)


def _unknown(error: Exception, where: str) -> DataError:
    return DataError(f"Reading {where} failed: {type(error).__name__}: {error}")


def _changed(where: str, how: str) -> FileChangedError:
    return FileChangedError(
        f"Reading {where} failed: {how}. Files must not change while they are read; write others elsewhere, or begin "
        "anew with the new ones."
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") + "."
