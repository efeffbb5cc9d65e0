"""Feeds on real ranks with a row filter, whose matches the ranks count together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import sparkdl.data.feed.epoch_reader  # noqa: F401 - loaded before time is measured
from sparkdl.data import ParquetFeed, RowFilter
from sparkdl.errors import DataError
from tests.training.scenes.faulty_files import register

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment


def read_filtered(environment: RankEnvironment, folder: str) -> tuple[list[int], int]:
    """The rows of this rank's epoch, and the number of row groups that it read to count."""
    looked_at = []

    def keep(values: dict[str, np.ndarray]) -> np.ndarray:
        looked_at.append(len(values["id"]))
        return values["id"] % 3 == 0

    with (
        environment.communicator() as communicator,
        ParquetFeed(
            folder,
            rank=communicator.rank,
            world_size=communicator.world_size,
            batch_size=4,
            row_filter=RowFilter(["id"], keep),
            communicator=communicator,
        ) as feed,
    ):
        counted = len(looked_at)
        return [int(row) for batch in feed for row in batch["id"]], counted


def fail_to_count(environment: RankEnvironment, source: Any, fails: str) -> tuple[str, str]:
    """Type and message of the feed's error on this rank when counting fails on rank 1, in its filter or its file."""
    if fails in ("silent", "expired"):
        register(fails)

    def keep(values: dict[str, np.ndarray]) -> np.ndarray:
        if fails == "filter" and environment.rank == 1:
            raise ValueError("no such luck")
        return values["id"] >= 0

    environment.meet("start")  # from here on time counts: all ranks have started and finished their imports
    with environment.communicator(timeout_s=6.0) as communicator:
        try:
            ParquetFeed(
                source,
                rank=communicator.rank,
                world_size=communicator.world_size,
                batch_size=4,
                row_filter=RowFilter(["id"], keep),
                communicator=communicator,
            )
        except DataError as error:
            return type(error).__name__, str(error)
    return "", "no error"
