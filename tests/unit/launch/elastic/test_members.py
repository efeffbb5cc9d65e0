from __future__ import annotations

from typing import Any

import pytest

from sparkdl.errors import ExecutorsLostError
from sparkdl.launch.elastic.members import values_of_world


def raise_lost() -> list[Any]:
    raise ExecutorsLostError("lost")


def test_values_of_members_that_were_lost_after_rank_0_had_returned_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert values_of_world([lambda: [1, 2], None, raise_lost, lambda: [3, 4]], group_size=2) == [
        *(1, 2, None, None, None, None, 3, 4)
    ]
    assert "Rank 4 ended after rank 0 had returned: lost" in caplog.text


def test_the_error_of_the_member_with_rank_0_is_that_of_the_run() -> None:
    with pytest.raises(ExecutorsLostError):
        values_of_world([raise_lost, lambda: [1]], group_size=1)
