"""Datasets written by Petastorm's ``materialize_dataset``, which ``petastorm.make_reader`` reads, for the feed.

Their Unischema is stored as a pickle in ``_common_metadata``. It is unpickled with an allow-list of exact names,
because a folder of data must not be able to run code.
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.dataset.arrow import bytes_of, to_arrow
from sparkdl.data.dataset.dataset import (
    ParquetDataset,
    Preparation,
    folder_values,
    missing_column_error,
)
from sparkdl.data.dataset.footers import find_parquet_files, scan_dataset
from sparkdl.data.dataset.row_choice import RowFilter, Values
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.petastorm.containment import install
from sparkdl.data.petastorm.fields import columns_of, decode_values
from sparkdl.data.petastorm.schema_names import known_class
from sparkdl.data.petastorm.transform import call_function, find_unedited, missing_result_error
from sparkdl.errors import DataError
from sparkdl.foreign_errors import errors_as

install()
from petastorm.codecs import DataframeColumnCodec
from petastorm.transform import transform_schema
from petastorm.unischema import Unischema

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class UnischemaDataset(ParquetDataset):
    """A folder of Parquet files whose values have to be decoded.

    Attributes:
        columns: columns for the fields that can be fed, described as they are after decoding.
        pickled_schema: pickled Unischema, as stored in the folder.
    """

    pickled_schema: bytes

    def preparation(self, transform: Any, names: Sequence[str] | None) -> Preparation:
        """Return the preparation that decodes row groups and then applies a ``TransformSpec`` if there is one.

        Args:
            transform: ``TransformSpec`` whose function takes and returns a dict of one decoded row; None for none.
            names: names of the fields to read; None for all, or without a transform for all that can be fed.

        Raises:
            DataError: if there is a transform and a field of ``names`` does not exist.
        """
        schema = _unpickle(self.pickled_schema, self.url)
        spec = transform
        if spec is not None and names is not None:
            for name in names:
                if name not in schema.fields:
                    raise missing_column_error(name, list(schema.fields))
            schema = Unischema(schema._name, [schema.fields[name] for name in names])
        columns, unusable = (
            columns_of(schema, self.columns)
            if spec is None
            else columns_of(transform_schema(schema, spec), find_unedited(self.columns, spec))
        )
        wanted_names = [column.name for column in columns] if names is None else names
        is_changed = spec is not None and spec.func is not None
        fields = [name for name in schema.fields if is_changed or name in wanted_names]
        by_name = {column.name: column for column in columns}

        def apply(table: pa.Table, wanted: Sequence[str]) -> pa.Table:
            decoded = {
                name: decode_values(schema, name, table.column(name).to_pylist())
                for name in (fields if is_changed else wanted)
            }
            if is_changed:
                decoded = _transform(decoded, table.num_rows, spec.func, wanted)
            return pa.table({name: to_arrow(decoded[name], by_name[name]) for name in wanted})

        return Preparation(source_names=tuple(fields), columns=columns, unusable=unusable, apply=apply)

    def filter_of(self, row_filter: RowFilter) -> RowFilter:
        """Return a filter of stored values that decodes them and calls ``row_filter`` on the result.

        Raises:
            DataError: if the filter uses a field that does not exist.
        """
        schema = _unpickle(self.pickled_schema, self.url)
        for name in row_filter.columns:
            if name not in schema.fields:
                raise missing_column_error(name, list(schema.fields))

        def keep(values: Values) -> npt.NDArray[np.bool_]:
            return row_filter.keep({name: _decode(schema, name, items) for name, items in values.items()})

        return RowFilter(row_filter.columns, keep, row_filter.counts)


def open_unischema_dataset(url: str, pickled_schema: bytes) -> UnischemaDataset:
    """Return the dataset in a folder that Petastorm wrote with this pickled Unischema.

    Raises:
        DataError: if the Unischema cannot be read, or there are no Parquet files or no rows.
        StoreError: if the filesystem cannot be opened.
    """
    columns, _ = columns_of(_unpickle(pickled_schema, url))
    paths = find_parquet_files(open_location(url), url)
    # The size of a decoded object is not known in advance; its size in the files is close enough for a bound of bytes.
    sizes = _bytes_in_folders(paths)
    objects = [column.name for column in columns if column.dtype == "object" and column.name not in sizes]
    plain = scan_dataset(url, objects, paths=paths)
    sizes |= {column.name: column.object_bytes for column in plain.columns}
    return UnischemaDataset(
        url=plain.url,
        columns=tuple(
            replace(column, object_bytes=sizes.get(column.name, 0)) if column.dtype == "object" else column
            for column in columns
        ),
        row_groups=plain.row_groups,
        versions=plain.versions,
        pickled_schema=pickled_schema,
    )


def _bytes_in_folders(paths: Sequence[str]) -> dict[str, int]:
    """Return the bytes of the largest value, as an object, of each column that is stored in folder names, by name."""
    sizes: dict[str, int] = {}
    for path in paths:
        for name, value in folder_values(path).items():
            sizes[name] = max(sizes.get(name, 0), bytes_of(value))
    return sizes


def _decode(schema: Any, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    decoded = np.empty(
        len(values), object
    )  # filled item by item, as arrays of one shape would become one array
    for row, value in enumerate(decode_values(schema, name, values.tolist())):
        decoded[row] = value
    return decoded


def _transform(
    decoded: dict[str, list[Any]], num_rows: int, function: Any, wanted: Sequence[str]
) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {name: [] for name in wanted}
    for index in range(num_rows):
        row = call_function(function, {name: values[index] for name, values in decoded.items()})
        for name, values in results.items():
            if not isinstance(row, dict) or name not in row:
                raise missing_result_error(name, list(row) if isinstance(row, dict) else [type(row).__name__])
            values.append(row[name])
    return results


def _unpickle(pickled: bytes, url: str) -> Any:
    advice = "Write it again with petastorm-generate-metadata.py."
    with errors_as(DataError, f"The Unischema of {url} cannot be read", advice):
        return _SchemaUnpickler(io.BytesIO(pickled), encoding="latin1").load()


class _SchemaUnpickler(pickle.Unpickler):
    """Unpickler that loads only the classes that a Unischema consists of."""

    def find_class(self, module: str, name: str) -> Any:
        known = known_class(module, name)
        if known is not None:
            return known
        # The user's own codecs are allowed once the user has imported them; unpickling does not import their modules.
        codec = getattr(sys.modules.get(module), name, None) if name.isidentifier() else None
        if isinstance(codec, type) and issubclass(codec, DataframeColumnCodec):
            return codec
        raise DataError(
            f"The Unischema refers to {module}.{name}, which belongs to no Unischema. If it is a codec of your own, "
            f"import {module} before the dataset is opened."
        )
