"""Data: from a DataFrame to Parquet in a Store, from there to NumPy batches on every rank.

The *driver* materializes a DataFrame, validates it and plans the shards; every *rank* reads its shard through
:class:`ParquetFeed`. No torch here, and pyspark only inside the functions of the driver; Petastorm, which
reads the row groups, has its one door in :mod:`sparkdl.data.petastorm`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.data.blending import BlendedFeed
    from sparkdl.data.converter import SparkDatasetConverter, make_spark_converter
    from sparkdl.data.dataset import Column, ParquetDataset, RowGroup
    from sparkdl.data.feed import ParquetFeed
    from sparkdl.data.footers import scan_dataset
    from sparkdl.data.manifest import open_dataset
    from sparkdl.data.materialization import materialize, use_materialized
    from sparkdl.data.mixture import Mixture
    from sparkdl.data.packed_batch import PackedBatch
    from sparkdl.data.packing import SequencePacker
    from sparkdl.data.planned_feed import PlannedFeed
    from sparkdl.data.row_filter import RowFilter
    from sparkdl.data.shards import RowRange, plan_shards, rows_in_step, rows_per_rank, steps_per_epoch
    from sparkdl.data.store import Store
    from sparkdl.data.validate import check_labels

# Loaded on first use: who serves a model and only names a Column needs no pyarrow.
_MODULES = {
    "BlendedFeed": "blending",
    "Column": "dataset",
    "Mixture": "mixture",
    "PackedBatch": "packed_batch",
    "ParquetDataset": "dataset",
    "ParquetFeed": "feed",
    "PlannedFeed": "planned_feed",
    "RowFilter": "row_filter",
    "RowGroup": "dataset",
    "RowRange": "shards",
    "SequencePacker": "packing",
    "SparkDatasetConverter": "converter",
    "Store": "store",
    "check_labels": "validate",
    "make_spark_converter": "converter",
    "materialize": "materialization",
    "use_materialized": "materialization",
    "open_dataset": "manifest",
    "plan_shards": "shards",
    "rows_in_step": "shards",
    "rows_per_rank": "shards",
    "scan_dataset": "footers",
    "steps_per_epoch": "shards",
}

__all__ = [
    "BlendedFeed",
    "Column",
    "Mixture",
    "PackedBatch",
    "ParquetDataset",
    "ParquetFeed",
    "PlannedFeed",
    "RowFilter",
    "RowGroup",
    "RowRange",
    "SequencePacker",
    "SparkDatasetConverter",
    "Store",
    "check_labels",
    "make_spark_converter",
    "materialize",
    "open_dataset",
    "plan_shards",
    "rows_in_step",
    "rows_per_rank",
    "scan_dataset",
    "steps_per_epoch",
    "use_materialized",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
