"""The epochs of a feed, one of which may go on where another feed stopped. Pure numbers, on every *rank*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.data.epoch_plan import EpochPlan, Stretch
from sparkdl.data.feed_state import Progress


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What a feed gives of one epoch.

    Attributes:
        plan: how the rows are divided.
        num_taken: rows that each rank has had of its shard before.
        stretches: what had happened in the epoch before this plan.
    """

    plan: EpochPlan
    num_taken: int = 0
    stretches: tuple[Stretch, ...] = ()

    def rows_to_come(self) -> list[int]:
        """Return how many rows each rank still gets."""
        return [max(rows - self.num_taken, 0) for rows in self.plan.rows_of_ranks()]


class Course:
    """Says for every epoch how its rows are divided.

    Args:
        row_counts: rows of every row group.
        world_size: number of ranks.
        buffer_rows: rows of the shuffle buffers; 0 without shuffling.
        seed: any integer.
        shuffle: whether rows are shuffled.
    """

    def __init__(
        self, row_counts: Sequence[int], *, world_size: int, buffer_rows: int, seed: int, shuffle: bool
    ) -> None:
        self._row_counts = tuple(row_counts)
        self._here = Stretch(world_size=world_size, buffer_rows=buffer_rows, num_taken=0)
        self._seed, self._shuffle = seed, shuffle
        self._resumed: tuple[int, Leg] | None = None

    def leg(self, epoch: int) -> Leg:
        """Return what is given of an epoch."""
        if self._resumed is not None and self._resumed[0] == epoch:
            return self._resumed[1]
        return Leg(plan=self._whole(epoch, self._here.world_size))

    def resume(self, progress: Progress) -> None:
        """Have an epoch go on from where it was; its earlier stretches are gone through again, in numbers."""
        stretches, num_taken = progress.stretches, 0
        if stretches and self._is_here(stretches[-1]):
            num_taken, stretches = stretches[-1].num_taken, stretches[:-1]
        world_sizes = [*(stretch.world_size for stretch in stretches), self._here.world_size]
        plan = self._whole(progress.epoch, world_sizes[0])
        for stretch, world_size in zip(stretches, world_sizes[1:], strict=True):
            plan = plan.after(stretch, world_size)
        self._resumed = progress.epoch, Leg(plan=plan, num_taken=num_taken, stretches=stretches)

    def seek(self, epoch: int, num_taken: int) -> None:
        """Have an epoch begin after so many rows of each rank, all others being whole; what it resumed is forgotten."""
        self._resumed = None
        if num_taken:
            self._resumed = epoch, Leg(plan=self._whole(epoch, self._here.world_size), num_taken=num_taken)

    def progress(self, epoch: int, num_given: int) -> Progress:
        """Return how far the ranks have come when each was given so many rows of an epoch's leg."""
        leg = self.leg(epoch)
        if num_given >= max(leg.rows_to_come()):
            return Progress(epoch=epoch + 1)
        num_taken = leg.num_taken + num_given
        here = Stretch(
            world_size=self._here.world_size, buffer_rows=self._here.buffer_rows, num_taken=num_taken
        )
        return Progress(epoch=epoch, stretches=(*leg.stretches, here) if num_taken else leg.stretches)

    def _whole(self, epoch: int, world_size: int) -> EpochPlan:
        return EpochPlan(
            row_counts=self._row_counts,
            world_size=world_size,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
        )

    def _is_here(self, stretch: Stretch) -> bool:
        here = self._here
        return (stretch.world_size, stretch.buffer_rows) == (here.world_size, here.buffer_rows)
