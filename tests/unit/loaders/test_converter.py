"""The data loader of a converter: every rank gets its exact rows, for any number of epochs."""

from __future__ import annotations

import pickle
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkdl.data import SparkDatasetConverter, scan_dataset
from sparkdl.data.petastorm.containment import install
from sparkdl.errors import ParamError, ShardingError

install()
from petastorm.predicates import in_lambda  # noqa: E402
from petastorm.transform import TransformSpec, edit_field  # noqa: E402

NUM_ROWS = 33


@pytest.fixture
def converter(tmp_path: Path) -> SparkDatasetConverter:
    for index, (start, stop) in enumerate([(0, 13), (13, NUM_ROWS)]):
        ids = np.arange(start, stop)
        table = pa.table(
            {"id": ids, "pair": pa.array(np.stack([ids, -ids], 1).tolist(), pa.list_(pa.float32()))}
        )
        pq.write_table(table, tmp_path / f"part-{index}.parquet", row_group_size=7)
    return SparkDatasetConverter(scan_dataset(str(tmp_path)))


def epochs_of_ranks(
    converter: SparkDatasetConverter, world_size: int, **options: Any
) -> list[list[torch.Tensor]]:
    batches_of_ranks = []
    for rank in range(world_size):
        with converter.make_torch_dataloader(cur_shard=rank, shard_count=world_size, **options) as loader:
            batches = list(loader)
            assert len(batches) == len(loader)
        for batch in batches:
            assert torch.equal(batch["pair"], torch.stack([batch["id"], -batch["id"]], 1).float())
        batches_of_ranks.append([batch["id"] for batch in batches])
    return batches_of_ranks


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
@pytest.mark.parametrize("batch_size", [2, 8])
def test_every_row_comes_once_per_epoch_in_equal_steps_and_no_batch_is_empty(
    converter: SparkDatasetConverter, world_size: int, batch_size: int
) -> None:
    ranks = epochs_of_ranks(converter, world_size, batch_size=batch_size, num_epochs=2)
    assert len({len(batches) for batches in ranks}) == 1
    assert min(len(ids) for batches in ranks for ids in batches) >= 1
    steps = len(ranks[0]) // 2
    for epoch in range(2):
        ids = torch.cat([ids for batches in ranks for ids in batches[epoch * steps : (epoch + 1) * steps]])
        assert torch.bincount(ids).tolist() == [1] * NUM_ROWS


def test_without_num_epochs_batches_are_full_and_epochs_follow_each_other(
    converter: SparkDatasetConverter,
) -> None:
    ids = []
    for rank in range(3):  # shards of 11 rows each
        with converter.make_torch_dataloader(batch_size=4, cur_shard=rank, shard_count=3) as loader:
            batches = list(islice(loader, 11))
            with pytest.raises(TypeError, match="without num_epochs"):
                len(loader)
        assert [len(batch["id"]) for batch in batches] == [4] * 11
        ids.append(torch.cat([batch["id"] for batch in batches]))
    for epoch in range(4):
        rows = torch.cat([of_rank[11 * epoch : 11 * (epoch + 1)] for of_rank in ids])
        assert torch.bincount(rows).tolist() == [1] * NUM_ROWS


def test_second_iteration_continues_with_the_next_epoch(converter: SparkDatasetConverter) -> None:
    with converter.make_torch_dataloader(batch_size=5, num_epochs=1) as loader:
        first, second = ([batch["id"] for batch in loader] for _ in range(2))
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert torch.equal(torch.cat(first).sort().values, torch.cat(second).sort().values)


def test_rows_come_in_file_order_by_row_group_or_shuffled_as_requested(
    converter: SparkDatasetConverter,
) -> None:
    def order(**options: Any) -> list[int]:
        with converter.make_torch_dataloader(batch_size=8, num_epochs=1, **options) as loader:
            return torch.cat([batch["id"] for batch in loader]).tolist()

    everything = list(range(NUM_ROWS))
    assert order(shuffle_row_groups=False) == everything
    by_row_group = order(shuffling_queue_capacity=0)
    assert by_row_group != everything
    ascents = sum(after == before + 1 for before, after in pairwise(by_row_group))
    assert ascents >= NUM_ROWS - 5, "rows of the five row groups stay together"
    assert sum(after == before + 1 for before, after in pairwise(order())) < 10
    assert order(seed=1) == order(seed=1) != order(seed=2)


def test_dataloader_passes_predicates_transforms_columns_and_caches_to_the_feed(
    converter: SparkDatasetConverter,
) -> None:
    spec = TransformSpec(
        lambda frame: frame.assign(square=frame["id"] ** 2),
        edit_fields=[edit_field("square", np.int64, ())],
        removed_fields=["id"],
    )
    with converter.make_torch_dataloader(
        batch_size=8,
        num_epochs=2,
        shuffle_row_groups=False,
        predicate=in_lambda(["id"], lambda number: number < 5),
        transform_spec=spec,
        schema_fields=["id"],
        cache_type="local-disk",
        cache_size_limit=1 << 20,
        workers_count=1,
    ) as loader:
        batches = list(loader)
    assert [list(batch) for batch in batches] == [["square"]] * 2
    assert [batch["square"].tolist() for batch in batches] == [[0, 1, 4, 9, 16]] * 2


def test_converter_has_size_and_files_and_can_be_sent_to_ranks(
    converter: SparkDatasetConverter, tmp_path: Path
) -> None:
    sent = pickle.loads(pickle.dumps(converter))
    assert len(sent) == sent.dataset_size == NUM_ROWS
    assert sent.file_urls == [f"file://{tmp_path}/part-0.parquet", f"file://{tmp_path}/part-1.parquet"]
    sent.delete()
    assert len(list(tmp_path.iterdir())) == 2, "files of somebody else stay"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cur_shard": 1}, "cur_shard is 1 and shard_count None; give both"),
        ({"cur_shard": 3, "shard_count": 2}, "^cur_shard must be .* got 3"),
        ({"workers_count": 0}, "^workers_count must be .* got 0"),
        ({"shuffling_queue_capacity": -1}, "^shuffling_queue_capacity must be .* got -1"),
        ({"cache_size_limit": 0}, "^cache_size_limit must be .* got 0"),
        (
            {"cache_location": "/nowhere", "cache_type": "local-disk"},
            "^cache_location must be .* got '/nowhere'",
        ),
        ({"num_epochs": 0}, "num_epochs must be at least 1"),
        ({"cache_type": "redis"}, "cache_type must be 'memory', 'local-disk' or None, got 'redis'"),
        ({"shuffle_row_groups": False, "shuffling_queue_capacity": 9}, "is 9, .* shuffle_row_groups=True"),
        ({"reader_pool_type": "process"}, "takes no 'reader_pool_type' here"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(
    converter: SparkDatasetConverter, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParamError, match=message):
        converter.make_torch_dataloader(**options)


def test_more_ranks_than_rows_are_an_error(converter: SparkDatasetConverter) -> None:
    with pytest.raises(ShardingError, match="33 rows cannot be shared by 34 ranks"):
        converter.make_torch_dataloader(cur_shard=0, shard_count=34)
