from __future__ import annotations

import pytest

from sparkdl import errors
from sparkdl.jobs.command import Terminated, exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.JobFileError("x"), 2),
        (errors.ParamError("x"), 2),
        (errors.ParamTypeError("x"), 2),
        (errors.DataError("x"), 1),
        (errors.StoreError("x"), 1),
        (errors.LaunchError("x"), 1),
        (errors.RankError("x", rank=0, host="h"), 1),
        (errors.CheckpointError("x"), 1),
        (ZeroDivisionError("x"), 1),
        (errors.RankDiedError("x", rank=0, host="h"), 75),
        (errors.HangError("x", rank=0, host="h"), 75),
        (errors.HangError("x", rank=0, host="h", is_in_code=True), 1),
        (errors.ExecutorsLostError("x"), 75),
        (errors.ClusterLostError("x"), 75),
        (errors.SlotsMissingError("x"), 75),
        (errors.CheckpointsInUseError("x"), 75),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_exit_code_tells_a_scheduler_whether_to_try_again(error, code):
    assert exit_code(error) == code
