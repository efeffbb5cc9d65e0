"""The schedules of a pipeline: which rank has which stages, and into how many microbatches a batch is cut.

Sources: Y. Huang et al., "GPipe" (2019); D. Narayanan et al., "PipeDream" (2019) and "Efficient Large-Scale Language
Model Training on GPU Clusters" (2021), for 1F1B and its interleaved form; P. Qi et al., "Zero Bubble Pipeline
Parallelism" (2023), for the zero-bubble schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import ParamError
from sparkdl.parallel.parallelism import SCHEDULES

if TYPE_CHECKING:
    from sparkdl.parallel.parallelism import Parallelism


_IN_ROUNDS = ("interleaved-1f1b", "zero-bubble")
"""Schedules in which a rank changes between its stages after each round of microbatches."""


def stages_of_rank(schedule: str, rank: int, ranks: int) -> list[int]:
    """Numbers of the stages that a rank of a pipeline has.

    Raises:
        ParamError: if there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise ParamError(f"There is no pipeline schedule {schedule!r}; there are {', '.join(SCHEDULES)}.")
    kind = SCHEDULES[schedule]
    if kind.is_v:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + number * ranks for number in range(kind.stages_per_rank)]


def ranks_of_stages(schedule: str, ranks: int) -> list[int]:
    """The rank of a pipeline that has each stage."""
    owners = {stage: rank for rank in range(ranks) for stage in stages_of_rank(schedule, rank, ranks)}
    return [owners[stage] for stage in range(len(owners))]


def num_microbatches(sizes: Parallelism, rows: int) -> int:
    """Number of microbatches of equally many rows into which a pipeline cuts a batch; see :class:`Parallelism`.

    Args:
        sizes: resolved sizes.
        rows: number of rows of a batch.

    Raises:
        ParamError: if there is no such number.
    """
    schedule, ranks = sizes.schedule, sizes.pipeline
    if sizes.microbatches is not None:
        check_microbatches(schedule, ranks, sizes.microbatches)
        if rows % sizes.microbatches:
            raise ParamError(
                f"Batches of {rows} rows cannot be cut into {sizes.microbatches} microbatches of equally many rows. "
                "Choose a batch size that is a multiple of microbatches."
            )
        return sizes.microbatches
    least = _least_microbatches(schedule, ranks)
    fits = [
        number
        for number in range(least, 4 * ranks + 1)
        if rows % number == 0 and _has_equal_rounds(schedule, ranks, number)
    ]
    if not fits:
        near = rows + -rows % (2 * ranks)  # a multiple that every schedule can run
        raise ParamError(
            f"Batches of {rows} rows cannot be cut into {least} to {4 * ranks} microbatches of equally many rows, as "
            f"{ranks} pipeline ranks with the schedule {schedule!r} need them. Choose a batch size such as {near}."
        )
    return fits[-1]


def _least_microbatches(schedule: str, ranks: int) -> int:
    return 2 * ranks if schedule == "dualpipe-v" else ranks if schedule == "1f1b" else 1


def _has_equal_rounds(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether rounds, of at least as many microbatches as there are ranks, have equally many microbatches."""
    return schedule not in _IN_ROUNDS or microbatches % max(1, microbatches // ranks) == 0


def check_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    """Check that a schedule can run with a number of microbatches.

    Raises:
        ParamError: if it cannot.
    """
    least = _least_microbatches(schedule, ranks)
    if microbatches < least:
        raise ParamError(
            f"The schedule {schedule!r} on {ranks} pipeline ranks needs at least {least} microbatches, got "
            f"{microbatches}."
        )
    if not _has_equal_rounds(schedule, ranks, microbatches):
        raise ParamError(
            f"The schedule {schedule!r} on {ranks} pipeline ranks takes microbatches in rounds of equally many, which "
            f"{microbatches} cannot be. Choose a multiple of {ranks}."
        )
