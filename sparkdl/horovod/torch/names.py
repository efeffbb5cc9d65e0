"""Horovod's reduction operations with Horovod's numbers, and its exceptions under Horovod's names.

The module also gives the communicator's name of each operation. Import the exceptions from
:mod:`sparkdl.horovod.torch`.
"""

from __future__ import annotations

import warnings

from sparkdl.errors import CommunicatorError, ParamError

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

_NAMES = {Average: "avg", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def name_of(op: int) -> str:
    """The communicator's name of an operation.

    Raises:
        ParamError: if it has none; ``Adasum`` has none.
    """
    if op not in _NAMES:
        raise ParamError(f"op={op!r} is not available; use hvd.Average, Sum, Min, Max or Product.")
    return _NAMES[op]


def choose(op: int | None, average: bool | None) -> int:
    """The operation that ``op`` and Horovod's deprecated ``average`` ask for; ``Average`` if neither is given.

    Raises:
        ValueError: if both are given.
        ParamError: if there is no such operation.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op != Adasum:
            name_of(op)
        return op
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


class HorovodInternalError(CommunicatorError):
    """A collective failed; ``__cause__`` is the communicator's error if the communicator raised one.

    If the ranks disagreed about a tensor, all of them get this error and can continue. After any other failure, call
    ``hvd.shutdown()`` and ``hvd.init()``, as :func:`sparkdl.horovod.torch.elastic.run` does.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # Horovod's name
    """Ranks wait to join an elastic run; ``commit`` and ``check_host_updates`` of a state raise it.

    Attributes:
        skip_sync: whether the state need not be synchronized before continuing.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
