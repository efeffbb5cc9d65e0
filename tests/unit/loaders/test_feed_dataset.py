from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from sparkdl.data import BlendedFeed, ParquetFeed
from sparkdl.errors import ParamError
from sparkdl.loaders.feed_dataset import FeedDataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table({"x": np.arange(100, dtype=np.float32), "y": np.arange(100)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    return tmp_path


@pytest.fixture
def feed(folder: Path) -> Iterator[ParquetFeed]:
    with ParquetFeed(folder, batch_size=16) as feed:
        yield feed


def test_a_data_loader_gives_every_epoch_of_a_feed_as_tensors(feed: ParquetFeed) -> None:
    loader = DataLoader(FeedDataset(feed), batch_size=None)
    assert len(loader) == 7
    epochs = [torch.cat([batch["y"] for batch in loader]) for _ in range(2)]
    for rows in epochs:
        assert rows.dtype == torch.int64
        assert rows.sort().values.tolist() == list(range(100))
    assert (epochs[0] != epochs[1]).any()


def test_a_data_loader_that_leaves_batches_alone_gives_dates_timestamps_and_strings_as_arrays(
    tmp_path: Path,
) -> None:
    days = np.array(["2020-02-29", "1969-12-31", "9999-12-31"], "datetime64[D]")
    table = pa.table(
        {"day": days, "at": days.astype("datetime64[us]"), "name": ["a", "b", "c"], "y": [1.0, 2.0, 3.0]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with ParquetFeed(tmp_path, batch_size=3, shuffle=False) as feed:
        loader = DataLoader(FeedDataset(feed), batch_size=None, collate_fn=lambda batch: batch)
        (batch,) = loader
    np.testing.assert_array_equal(batch["day"], days)
    np.testing.assert_array_equal(batch["at"], days)
    assert batch["name"].tolist() == ["a", "b", "c"]
    assert torch.is_tensor(batch["y"])


class RecordingFeed(ParquetFeed):
    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for batch in super().__iter__():
            self.last = batch
            yield batch


def test_tensors_share_the_memory_of_the_batches(folder: Path) -> None:
    with RecordingFeed(folder, batch_size=16) as feed:
        tensors = next(iter(FeedDataset(feed)))
        for name in ("x", "y"):
            assert np.shares_memory(tensors[name].numpy(), feed.last[name])


def test_workers_of_a_data_loader_are_refused_as_they_would_repeat_rows(feed: ParquetFeed) -> None:
    loader = DataLoader(FeedDataset(feed), batch_size=None, num_workers=1)
    with pytest.raises(ValueError, match="Leave num_workers at 0"):
        next(iter(loader))


def test_dataset_continues_from_its_state(feed: ParquetFeed, folder: Path) -> None:
    dataset = FeedDataset(feed)
    batches = iter(dataset)
    next(batches)
    state = dataset.state_dict()
    rest = torch.cat([batch["y"] for batch in batches])
    with ParquetFeed(folder, batch_size=16) as again:
        dataset = FeedDataset(again)
        dataset.load_state_dict(state)
        assert len(dataset) == 6
        torch.testing.assert_close(torch.cat([batch["y"] for batch in dataset]), rest)


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}])
def test_a_data_loader_that_would_join_batches_is_refused(feed: ParquetFeed, options: dict[str, int]) -> None:
    loader = DataLoader(FeedDataset(feed), **options)
    with pytest.raises(ParamError, match=rf"join {options.get('batch_size', 1)} .*batch_size=None"):
        next(iter(loader))


@pytest.mark.parametrize("options", [{}, {"batch_size": None}])
def test_data_loader_around_a_bare_feed_or_blend_says_what_to_write(
    feed: ParquetFeed, options: dict[str, None]
) -> None:
    for source in (feed, BlendedFeed({"a": feed}, {"a": 1}, batch_size=4, num_steps=3)):
        with pytest.raises(ParamError, match=r"(Parquet|Blended)Feed is iterable .*\(FeedDataset\(feed\)"):
            next(iter(DataLoader(source, **options)))


def test_a_blend_is_a_data_loaders_dataset_too(feed: ParquetFeed) -> None:
    blend = BlendedFeed({"a": feed}, {"a": 1}, batch_size=4, num_steps=3)
    loader = DataLoader(FeedDataset(blend), batch_size=None)
    assert len(loader) == 3
    assert [tuple(batch["y"].shape) for batch in loader] == [(4,)] * 3
    with pytest.raises(ParamError, match="cannot be chosen"):
        loader.dataset.set_epoch(1)


def test_torch_without_its_map_of_collate_functions_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("torch.utils.data._utils.collate.default_collate_fn_map")
    spec = importlib.util.find_spec("sparkdl.loaders.feed_dataset")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "without batch_size=None will make batches of batches" in caplog.text
