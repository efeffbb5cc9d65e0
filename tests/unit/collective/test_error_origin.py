from __future__ import annotations

from itertools import pairwise

import pytest

from sparkdl.collective.error_origin import Origin, is_consequence, origin_of
from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    MismatchError,
    RankLostError,
)
from sparkdl.horovod.torch import HorovodInternalError


def raised(*errors: BaseException) -> BaseException:
    """The last of these errors, each raised from the one before."""
    for cause, error in pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


def raised_while_handling(first: BaseException, second: BaseException) -> BaseException:
    second.__context__ = first
    return second


@pytest.mark.parametrize(
    ("error", "origin"),
    [
        (LookupError("in vain"), Origin.OWN),
        (SystemExit(3), Origin.OWN),
        (MemoryError(), Origin.OWN),
        (KeyboardInterrupt(), Origin.OWN),
        (raised(TypeError("a dtype"), HorovodInternalError("Horovod has been shut down.")), Origin.OWN),
        (
            raised(TypeError("a dtype"), HorovodInternalError("shut down"), HorovodInternalError("again")),
            Origin.OWN,
        ),
        (raised_while_handling(LookupError("first"), MismatchError("in finally")), Origin.OWN),
        (MismatchError("shapes"), Origin.SHARED),
        (raised(HorovodInternalError("shapes"), HorovodInternalError("shapes")), Origin.SHARED),
        (CommunicatorAbortedError("rank 1 failed"), Origin.ABORTED),
        (CommunicatorError("rank 1 closed it"), Origin.ABORTED),
        (raised(OSError("reset"), CommunicatorError("the coordinator is gone")), Origin.ABORTED),
        (raised(CommunicatorTimeoutError("rank 1"), HorovodInternalError("shut down")), Origin.LATE),
        (raised(RankLostError("rank 1"), HorovodInternalError("shut down")), Origin.LOST),
        (raised(RankLostError("rank 1"), ValueError("no gradients")), Origin.LOST),
        (raised_while_handling(RankLostError("rank 1"), KeyError("cleaning up")), Origin.LOST),
    ],
)
def test_origin_of_an_error_decides_whether_it_is_a_consequence(error: BaseException, origin: Origin) -> None:
    assert origin_of(error) is origin
    assert is_consequence(error) is (origin in (Origin.ABORTED, Origin.LATE, Origin.LOST))
