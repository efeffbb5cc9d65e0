from __future__ import annotations

from itertools import pairwise

import pytest

from sparkdl.collective.byte_exchange import agree
from sparkdl.collective.error_origin import Origin, is_consequence, origin_of
from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    MismatchError,
    RankLostError,
    TransportUnavailableError,
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


def test_an_agreed_error_is_of_the_ranks_that_raise_it_whatever_failed_there() -> None:
    def load() -> None:
        try:
            raise CommunicatorError("libnccl.so.2 is missing")
        except CommunicatorError as error:
            raise TransportUnavailableError("there is no NCCL here") from error

    with pytest.raises(TransportUnavailableError, match="rank 0: .*no NCCL here") as caught:
        agree(
            lambda outcome: [outcome],
            load,
            lambda failures: TransportUnavailableError(f"rank 0: {failures[0]}"),
        )
    assert origin_of(caught.value.__cause__) is Origin.ABORTED
    assert origin_of(caught.value) is Origin.OWN
