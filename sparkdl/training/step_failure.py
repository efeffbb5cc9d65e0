"""Has what the user's code raises on a rank told with rank, epoch and step. Runs on a *rank*."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from sparkdl.collective.membership import is_consequence
from sparkdl.errors import DataError, ParamError, SparkdlError, TrainingError
from sparkdl.torch import collective_errors
from sparkdl.training.columns import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkdl.training.objective import Batch

_OF_USERS_CODE = (DataError, ParamError, TrainingError)


@contextmanager
def told_with_place(what: str, *, rank: int, place: str, batch: Batch | None = None) -> Iterator[None]:
    """Raise errors that say nothing of where they happened from within one that does.

    Those with which sparkdl answers functions of the user's, labels and columns keep their type; as they are pass those
    that tell a step already, those behind which another rank's failure is, and a lack of memory.

    Args:
        what: fails.
        rank: on which it does.
        place: in which epoch, and in which step of it.
        batch: that it was given.

    Raises:
        TrainingError: from the error, whose type and message it repeats.
        DataError: where one was raised; likewise ParamError.
    """
    try:
        # Else what torch makes of a failed collective looks like an error of the model.
        with collective_errors():
            yield
    except MemoryError:
        raise
    except SystemExit as error:
        status = "" if error.code is None else repr(error.code)
        raise TrainingError(
            f"In {place} on rank {rank} {what} failed: it called sys.exit({status}).{_described(batch)}"
        ) from error
    except Exception as error:
        if is_consequence(error):
            raise
        if isinstance(error, SparkdlError):
            if type(error) not in _OF_USERS_CODE or ", step " in str(error):
                raise
            raise type(error)(f"In {place} on rank {rank}: {error}") from error
        raise TrainingError(
            f"In {place} on rank {rank} {what} failed: {type(error).__name__}: {str(error).rstrip('.')}."
            f"{_described(batch)}"
        ) from error


def _described(batch: Batch | None) -> str:
    if batch is None:
        return ""
    columns = (
        f"{name} {dtype_name(values.dtype) if isinstance(values, Tensor) else values.dtype} {tuple(values.shape)}"
        for name, values in batch.items()
    )
    return f" The batch: {', '.join(columns)}."
