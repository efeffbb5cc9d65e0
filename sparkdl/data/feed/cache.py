"""Caches of decoded row groups and of parsed Parquet footers. Runs on the reader threads of every *rank*.

Decoded blocks are kept in memory or as files on a disk, within a limit. A row group that no longer fits is
read again in every epoch; that is logged once. If the disk is full, the part of a row group that was written is
removed.

Parsed footers are kept between the row groups of a file and between epochs. Parsing one takes 2 ms for 100 row groups
of 28 columns, which is more than reading a small row group. The bytes of a footer are compared before it is reused,
so that a replaced file is read with its own footer.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from sparkdl.data.dataset.arrow import CHECKING
from sparkdl.data.dataset.blocks import num_bytes
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.data.dataset.blocks import Block


logger = logging.getLogger(__name__)


class BlockCache:
    """Blocks by row group; callers must not write to a block that they get.

    Args:
        kind: ``"memory"``, or ``"disk"`` for memory-mapped files in a folder of its own.
        limit_bytes: upper bound of the bytes of all blocks together.
        folder: folder in which that folder is made; by default the system's folder for temporary files.

    Raises:
        ParamError: if the folder cannot be made.

    Attributes:
        num_bytes: bytes of all blocks together.
    """

    def __init__(self, kind: str, limit_bytes: int, folder: str | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()
        self._writing: set[int] = set()
        self._closed = False
        self._said: set[str] = set()
        self._folder = _own_folder(folder) if kind == "disk" else None
        self.num_bytes = 0

    def get(self, row_group: int, read: Callable[[], Block]) -> Block:
        """Return the block of a row group; ``read`` returns it if it is not kept yet."""
        with self._lock:
            block = self._blocks.get(row_group)
            if block is not None:
                return block
        block = read()
        if self._folder is not None and any(array.dtype.hasobject for array in block):
            self._say_once(
                "objects",
                "columns of strings, arrays of varying length and other objects cannot be stored in memory-mapped "
                "files, so their row groups are read again in every epoch; cache='memory' keeps them",
            )
            return block
        return self._keep(row_group, block)

    def close(self) -> None:
        """Forget the blocks, keep no more, and remove the files; calling it again does nothing.

        If a thread is still writing a file, that thread removes the files when it is done.
        """
        with self._lock:
            self._closed = True
            self._blocks.clear()
            self.num_bytes = 0
        self._remove_if_closed()

    def _keep(self, row_group: int, block: Block) -> Block:
        size = num_bytes(block)
        with self._lock:
            if row_group in self._blocks:
                return self._blocks[row_group]
            if self._closed or row_group in self._writing:
                return block
            fits = self.num_bytes + size <= self._limit_bytes
            if fits:
                self.num_bytes += size
                self._writing.add(row_group)
        if not fits:
            self._say_once(
                "limit",
                f"it holds {self.num_bytes >> 20} of {self._limit_bytes >> 20} MiB, and what does not fit is read "
                "again in every epoch; raise cache_limit_bytes to keep more",
            )
            return block
        kept = None
        try:
            kept = block if self._folder is None else _on_disk(block, self._folder, row_group)
        except OSError as error:
            self._say_once(
                "disk", f"{self._folder} cannot be written ({error}); row groups are read again instead"
            )
        finally:
            with self._lock:
                self._writing.discard(row_group)
                if not self._closed:
                    if kept is None:
                        self.num_bytes -= size
                    else:
                        self._blocks[row_group] = kept
            self._remove_if_closed()
        return block if kept is None else kept

    def _remove_if_closed(self) -> None:
        with self._lock:
            remove = self._closed and not self._writing
        if remove and self._folder is not None:
            shutil.rmtree(
                self._folder, ignore_errors=True
            )  # mapped files remain until no batch refers to them

    def _say_once(self, reason: str, what: str) -> None:
        with self._lock:
            is_new = reason not in self._said
            self._said.add(reason)
        if is_new:
            logger.warning("The feed's cache does not keep all: %s.", what)


def _own_folder(parent: str | None) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="sparkdl-feed-", dir=parent))
    except OSError as error:
        raise ParamError(
            f"cache_folder {parent or tempfile.gettempdir()!r} cannot be written: {error.strerror or error}. "
            "Give a folder that exists on every machine and can be written."
        ) from error


def _on_disk(block: Block, folder: Path, row_group: int) -> Block:
    """Write the arrays of a block to files and map them; if one cannot be written, all files are removed."""
    paths = [folder / f"{row_group}-{index}" for index in range(len(block))]
    mapped: Block = []
    try:
        for path, array in zip(paths, block, strict=True):
            if array.size:
                path.write_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                mapped.append(np.memmap(path, array.dtype, "r", shape=array.shape))
            else:
                mapped.append(array)
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    return mapped


_TAIL_BYTES = 8  # four bytes with the length of the footer, and "PAR1"
_MAX_BYTES = 32 << 20
_READING: dict[str, Any] = {
    **CHECKING,
    # Timestamps of Spark 2 and Hive; as nanoseconds, years after 2262 would wrap around.
    "coerce_int96_timestamp_unit": "us",
}


class FooterCache:
    """Footers by path; the least recently used ones are removed first.

    Args:
        max_bytes: upper bound of the bytes of the footers in the files; parsed footers take a few times as much.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._footers: OrderedDict[str, tuple[bytes, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: str, source: Any) -> pq.ParquetFile:
        """Return an open Parquet file, whose page checksums are verified if pyarrow can do so.

        Args:
            path: path of the file, under which its footer is kept.
            source: the open file, which the caller closes.

        Raises:
            pyarrow.ArrowInvalid: if it is not a Parquet file.
        """
        raw = _raw_footer(source)
        if raw is None:
            return pq.ParquetFile(source)  # raises an error that says what is wrong with the file
        with self._lock:
            kept = self._footers.get(path)
            if kept is not None and kept[0] == raw:
                self._footers.move_to_end(path)
                return pq.ParquetFile(source, metadata=kept[1], **_READING)
        file = pq.ParquetFile(source, **_READING)
        with self._lock:
            before = self._footers.pop(path, None)
            self._footers[path] = (raw, file.metadata)
            self._num_bytes += len(raw) - (len(before[0]) if before else 0)
            while self._num_bytes > self._max_bytes:
                _, (forgotten, _) = self._footers.popitem(last=False)
                self._num_bytes -= len(forgotten)
        return file


def _raw_footer(source: Any) -> bytes | None:
    source.seek(0, 2)
    size = source.tell()
    if size < _TAIL_BYTES:
        return None
    source.seek(size - _TAIL_BYTES)
    tail = source.read(_TAIL_BYTES)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or length > size - _TAIL_BYTES:
        return None
    source.seek(size - _TAIL_BYTES - length)
    raw: bytes = source.read(length)
    return raw
