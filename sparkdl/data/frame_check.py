"""Whether what a function was given is a DataFrame of Spark that ends. Runs on the *driver*; imports no pyspark."""

from __future__ import annotations

from typing import Any

from sparkdl.errors import DataError


def check_frame(df: Any, taker: str, *, of_streams: str = "") -> None:
    """Check that it is a DataFrame of classic Spark or Spark Connect, and not a stream; nothing runs for that.

    Args:
        df: what was given.
        taker: the function that takes it, as its caller spells it.
        of_streams: what the message ends with about a stream: what takes one.

    Raises:
        DataError: if it is something else, or a stream.
    """
    if not (hasattr(df, "sparkSession") and hasattr(df, "schema")):
        found = f"{type(df).__module__}.{type(df).__name__}"
        raise DataError(
            f"{taker} takes a Spark DataFrame, got {found}. Read files with spark.read, and make one of other data "
            "with spark.createDataFrame(...)."
        )
    if df.isStreaming:
        raise DataError(
            f"{taker} takes a DataFrame that ends, and this one is a stream. Read its source with spark.read, or call "
            f"{taker} on each batch that writeStream.foreachBatch(...) gives{of_streams}."
        )
