from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data.feed.cache import FooterCache


def write(path: Path, values: list[int], rows_per_group: int = 2) -> None:
    pq.write_table(pa.table({"x": values}), path, row_group_size=rows_per_group)


def read(cache: FooterCache, path: Path, row_group: int) -> list[int]:
    with pa.OSFile(str(path), "rb") as source, cache.open(str(path), source) as file:
        return file.read_row_group(row_group).column("x").to_pylist()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The open files whose footers pyarrow has parsed since the beginning of the test."""
    sources, open_file = [], pq.ParquetFile

    def recorded(source: Any, metadata: pq.FileMetaData | None = None, **options: Any) -> pq.ParquetFile:
        if metadata is None:
            sources.append(source)
        return open_file(source, metadata=metadata, **options)

    monkeypatch.setattr(pq, "ParquetFile", recorded)
    return sources


def test_a_footer_is_parsed_once_for_all_row_groups(tmp_path: Path, parsed: list[Any]) -> None:
    cache, path = FooterCache(), tmp_path / "a.parquet"
    write(path, [1, 2, 3, 4])
    assert read(cache, path, 0) == [1, 2]
    assert read(cache, path, 1) == [3, 4]
    assert len(parsed) == 1


def test_replaced_file_is_read_with_its_new_footer(tmp_path: Path) -> None:
    cache, path = FooterCache(), tmp_path / "a.parquet"
    write(path, [1, 2, 3, 4])
    read(cache, path, 0)
    write(path, [5, 6, 7], rows_per_group=1)
    assert [read(cache, path, 0), read(cache, path, 2)] == [[5], [7]]


def test_least_recently_used_footers_are_forgotten_beyond_the_limit(
    tmp_path: Path, parsed: list[Any]
) -> None:
    paths = [tmp_path / f"{index}.parquet" for index in range(3)]
    for path in paths:
        write(path, [1, 2])
    size = int.from_bytes(paths[0].read_bytes()[-8:-4], "little")
    cache = FooterCache(max_bytes=2 * size)
    for index, num_parsed in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (2, 3), (1, 4)):
        assert read(cache, paths[index], 0) == [1, 2]
        assert len(parsed) == num_parsed


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no Parquet at all", b"PAR1\xff\xff\xff\x7fPAR1"])
def test_file_that_is_no_parquet_is_refused_by_pyarrow(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(pa.ArrowInvalid):
        read(FooterCache(), path, 0)
