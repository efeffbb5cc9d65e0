"""The manifest of a dataset: one JSON file that says what the folder holds, written when all the rest is.

Runs on the *driver*. Reading it is all that is needed to plan shards; no footer is opened again.
"""

from __future__ import annotations

import json
from typing import Any

from sparkdl.data.dataset import MANIFEST_NAME, Column, ParquetDataset, RowGroup
from sparkdl.data.filesystems import Location, absolute_url, open_location
from sparkdl.data.store_failures import describe_failure, reading_from
from sparkdl.errors import StoreError

_VERSION = 2


def write_manifest(dataset: ParquetDataset, location: Location) -> None:
    """Write the manifest of a dataset into the folder at ``location``."""
    files = list(dict.fromkeys(row_group.path for row_group in dataset.row_groups))
    position = {path: index for index, path in enumerate(files)}
    content = {
        "version": _VERSION,
        "num_rows": dataset.num_rows,
        "columns": [_column_to_json(column) for column in dataset.columns],
        "files": files,
        "row_groups": [[position[group.path], group.index, group.num_rows] for group in dataset.row_groups],
    }
    final = f"{location.path}/{MANIFEST_NAME}"
    # Object stores show a file when it is complete; elsewhere renaming makes it so.
    written = f"{final}.tmp" if location.can_rename else final
    with location.filesystem.open(written, "wb") as file:
        file.write(json.dumps(content).encode())
    if written != final:
        location.filesystem.mv(written, final)


def open_dataset(url: str) -> ParquetDataset:
    """Return the dataset that a Store keeps at ``url``.

    Raises:
        StoreAccessError: if the Store cannot be read.
        StoreError: if there is no complete dataset there, or a newer version of sparkdl wrote it.
    """
    location = open_location(url)
    with reading_from(url):
        text = _read_manifest(location, url)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise StoreError(f"The manifest of {url} cannot be read: {error}") from error
    if content.get("version") != _VERSION:
        raise StoreError(
            f"The manifest of {url} has version {content.get('version')}; this sparkdl reads version "
            f"{_VERSION}. Install the version of sparkdl that wrote it, or write the dataset again."
        )
    files = content["files"]
    return ParquetDataset(
        url=absolute_url(url),
        columns=tuple(_column_from_json(column) for column in content["columns"]),
        row_groups=tuple(
            RowGroup(path=files[position], index=index, num_rows=num_rows)
            for position, index, num_rows in content["row_groups"]
        ),
    )


def _read_manifest(location: Location, url: str) -> bytes:
    try:
        with location.filesystem.open(f"{location.path}/{MANIFEST_NAME}", "rb") as file:
            content: bytes = file.read()
    except FileNotFoundError as error:
        if describe_failure(error):  # a whole bucket is missing
            raise
        raise StoreError(f"{url} holds no complete dataset: there is no {MANIFEST_NAME}.") from error
    return content


def _column_to_json(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "dtype": column.dtype,
        "shape": list(column.shape),
        "kind": column.kind,
        "lengths": list(column.lengths),
        "element": list(column.element),
        "value_range": list(column.value_range) if column.value_range else None,
        "object_bytes": column.object_bytes,
    }


def _column_from_json(content: dict[str, Any]) -> Column:
    value_range = content["value_range"]
    return Column(
        name=content["name"],
        dtype=content["dtype"],
        shape=tuple(content["shape"]),
        kind=content["kind"],
        lengths=tuple(content["lengths"]),
        element=(content["element"][0], content["element"][1]),
        value_range=(value_range[0], value_range[1]) if value_range else None,
        object_bytes=content["object_bytes"],
    )
