"""The checksums of Parquet pages, of which pyarrow knows since version 15. Runs where Parquet is read."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_ARGUMENT = "page_checksum_verification"

ARE_CHECKED = _ARGUMENT in inspect.signature(pq.ParquetFile.__init__).parameters
"""Whether this pyarrow compares the checksum of a page with the page."""

CHECKING: dict[str, Any] = {_ARGUMENT: True} if ARE_CHECKED else {}
"""Keyword arguments of ``ParquetFile`` that have it do so."""

_logger = logging.getLogger(__name__)


@functools.cache
def warn_if_unchecked() -> None:
    """Say, once in a process, that damage can go unnoticed."""
    if not ARE_CHECKED:
        _logger.warning(
            "pyarrow %s does not look at the checksums of Parquet pages: numbers that were damaged on the way from "
            "their Store may be trained on. Install pyarrow 15 or later.",
            pa.__version__,
        )
