"""Data: from a DataFrame to Parquet files in a Store, and from there to NumPy batches on every rank.

The *driver* materializes a DataFrame, validates it, and counts rows and steps. It sends no shards: every *rank*
computes its own shard from the row counts, and reads it through :class:`ParquetFeed`. This package does not import
torch, and imports pyspark only inside the functions that use it. Only :mod:`sparkdl.data.petastorm` imports the package
petastorm; the feed loads one file of it. Begin with ``spark/materialization`` on the driver and with ``feed/feed`` on a
rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.lazy import attributes, guest_names

if TYPE_CHECKING:
    from sparkdl.data.blend.blending import BlendedFeed
    from sparkdl.data.blend.mixture import Mixture
    from sparkdl.data.blend.packing import PackedBatch, SequencePacker
    from sparkdl.data.dataset.dataset import Column, ParquetDataset, RowGroup
    from sparkdl.data.dataset.footers import scan_dataset
    from sparkdl.data.dataset.row_choice import RowFilter
    from sparkdl.data.feed.feed import ParquetFeed
    from sparkdl.data.feed.planned_feed import PlannedFeed
    from sparkdl.data.spark.materialization import materialize, use_materialized
    from sparkdl.data.store.store import Store, open_dataset

# Loaded on first use, so that serving a model, which only uses Column, does not need pyarrow. The names of guests are
# here because users look for them here: blends, and the converter as in Petastorm.
_MODULES = {
    "Column": ".dataset.dataset",
    "ParquetDataset": ".dataset.dataset",
    "ParquetFeed": ".feed.feed",
    "PlannedFeed": ".feed.planned_feed",
    "RowFilter": ".dataset.row_choice",
    "RowGroup": ".dataset.dataset",
    "Store": ".store.store",
    "materialize": ".spark.materialization",
    "use_materialized": ".spark.materialization",
    "open_dataset": ".store.store",
    "scan_dataset": ".dataset.footers",
    **guest_names(__name__),
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
    "SequencePacker",
    "SparkDatasetConverter",
    "Store",
    "make_spark_converter",
    "materialize",
    "open_dataset",
    "scan_dataset",
    "use_materialized",
]


__getattr__, __dir__ = attributes(__name__, _MODULES)
