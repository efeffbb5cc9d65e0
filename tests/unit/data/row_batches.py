"""Batches of rows as Spark passes them to the function that writes them."""

from __future__ import annotations

import pyarrow as pa


def structs_of(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One column of structs in place of several columns."""
    return pa.RecordBatch.from_arrays(
        [pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))], ["row"]
    )
