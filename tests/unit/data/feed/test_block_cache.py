from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.data.dataset.blocks import Block
from sparkdl.data.feed.cache import BlockCache


def block_of(value: int) -> Block:
    return [np.full(100, value), np.full((100, 3), value, np.float32)]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_block_that_was_read_while_the_cache_was_closed_is_not_kept(tmp_path: Path, kind: str) -> None:
    cache = BlockCache(kind, 1 << 20, str(tmp_path))
    reads: list[int] = []

    def read() -> Block:
        cache.close()
        reads.append(0)
        return block_of(1)

    for number in (1, 2):
        np.testing.assert_array_equal(cache.get(0, read)[0], block_of(1)[0])
        assert list(tmp_path.iterdir()) == []
        assert (cache.num_bytes, len(reads)) == (0, number)


def test_files_that_are_being_written_when_the_cache_is_closed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache("disk", 1 << 20, str(tmp_path))
    cache.get(0, lambda: block_of(0))
    writing, closed, save = threading.Event(), threading.Event(), Path.write_bytes

    def save_late(path: Path, content: np.ndarray[Any, Any]) -> None:
        writing.set()
        assert closed.wait(10)
        save(path, content)

    monkeypatch.setattr(Path, "write_bytes", save_late)
    found: list[Block] = []
    thread = threading.Thread(target=lambda: found.append(cache.get(1, lambda: block_of(1))))
    thread.start()
    assert writing.wait(10)
    cache.close()
    closed.set()
    thread.join(10)
    np.testing.assert_array_equal(found[0][1], block_of(1)[1])
    assert list(tmp_path.iterdir()) == []


def test_two_threads_that_read_one_row_group_do_not_write_into_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache("disk", 1 << 20, str(tmp_path))
    save, paths = Path.write_bytes, []

    def save_and_read_again(path: Path, content: np.ndarray[Any, Any]) -> None:
        paths.append(path)
        save(path, content)
        np.testing.assert_array_equal(cache.get(0, lambda: block_of(2))[0], block_of(2)[0])

    monkeypatch.setattr(Path, "write_bytes", save_and_read_again)
    cache.get(0, lambda: block_of(1))
    assert len(paths) == len(set(paths)) == 2
    np.testing.assert_array_equal(cache.get(0, lambda: block_of(3))[0], block_of(1)[0])
    cache.close()
    assert list(tmp_path.iterdir()) == []
