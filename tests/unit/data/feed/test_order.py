"""The order of a feed's rows does not depend on the order in which its reads complete."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from sparkdl.data import ParquetDataset, ParquetFeed

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


class LateFile(io.FileIO):
    """A local file that calls a function when it is closed."""

    def __init__(self, path: str, on_close: Callable[[], None]) -> None:
        super().__init__(path)
        self._on_close = on_close

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._on_close()


class LateFiles(LocalFileSystem):
    """Local files; of each two opened files the first waits until the other one has been read."""

    protocol = "late"
    cachable = False
    lock = threading.Lock()
    opened: ClassVar[list[str]] = []
    closed: ClassVar[list[str]] = []
    waiting: ClassVar[threading.Event | None] = None

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        del mode, options
        cls = type(self)
        with cls.lock:
            cls.opened.append(path)
            other, mine = cls.waiting, threading.Event()
            cls.waiting = mine if other is None else None
        if other is None:
            assert mine.wait(30)

        def on_close() -> None:
            cls.closed.append(path)
            if other is not None:
                other.set()

        return LateFile(path, on_close)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("late://"))


@pytest.fixture
def late_files() -> type[LateFiles]:
    fsspec.register_implementation("late", LateFiles, clobber=True)
    LateFiles.opened, LateFiles.closed, LateFiles.waiting = [], [], None
    return LateFiles


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_come_in_one_order_whichever_of_the_reads_are_delayed(
    write_dataset: WriteDataset, late_files: type[LateFiles], shuffle: bool, num_threads: int
) -> None:
    local = write_dataset([[7]] * 12)
    delayed = replace(local, url=f"late://{local.url}", versions={})

    def read(dataset: ParquetDataset, **options: Any) -> np.ndarray:
        with ParquetFeed(
            dataset, columns=["id"], batch_size=5, shuffle=shuffle, shuffle_buffer_rows=16, **options
        ) as feed:
            return np.concatenate([batch["id"] for batch in feed.epoch(1)])

    expected = read(local, num_threads=1)
    np.testing.assert_array_equal(read(delayed, num_threads=num_threads), expected)
    assert len(late_files.opened) == len(late_files.closed) == 12
    assert late_files.closed != late_files.opened, "reads were done in another order than begun"
