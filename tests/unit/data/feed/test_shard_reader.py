from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from sparkdl.data.feed.shard_reader import ShardReader
from sparkdl.errors import DataError


def test_a_reader_that_is_closed_in_the_middle_of_a_look_is_not_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: Future[ShardReader] = Future()

    def bytes_of(row_group: int) -> int:
        if row_group:
            made.result(30.0)._stopped.wait(30.0)  # the second row group is not requested before the end
        return 1

    reader = ShardReader(
        [(row_group, range(1)) for row_group in range(8)],
        lambda row_group, _: [np.array([row_group])],
        num_threads=1,
        timeout_s=30.0,
        budget_bytes=100,
        bytes_of=bytes_of,
        name_of=str,
    )
    made.set_result(reader)
    assert next(reader)[0] == 0
    completed = reader._ventilator.completed

    def close_and_look() -> bool:
        reader.close()
        return completed()

    monkeypatch.setattr(reader._ventilator, "completed", close_and_look)
    with pytest.raises(DataError, match="closed while an epoch was being read"):
        next(reader)
