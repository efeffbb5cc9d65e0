"""Has what the user's code raises on a rank told with rank, epoch and step. Runs on a *rank*."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from sparkdl.collective.membership import is_consequence
from sparkdl.errors import SparkdlError, TrainingError
from sparkdl.torch import collective_errors
from sparkdl.training.columns import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkdl.training.objective import Batch


@contextmanager
def told_with_place(what: str, *, rank: int, place: str, batch: Batch | None = None) -> Iterator[None]:
    """Raise errors that say nothing of where they happened from within one that does.

    As they are pass those that sparkdl raises, those behind which another rank's failure is, and a lack of memory.

    Args:
        what: fails.
        rank: on which it does.
        place: in which epoch, and in which step of it.
        batch: that it was given.

    Raises:
        TrainingError: from the error, whose type and message it repeats.
    """
    try:
        # Else what torch makes of a failed collective looks like an error of the model.
        with collective_errors():
            yield
    except (SparkdlError, MemoryError):
        raise
    except Exception as error:
        if is_consequence(error):
            raise
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
