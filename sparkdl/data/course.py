"""The epochs of a feed, some of which may go on where another feed stopped. Pure numbers, on every *rank*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkdl.data.epoch_plan import EpochPlan, Stretch, Taken, taken_by
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
    num_taken: Taken = 0
    stretches: tuple[Stretch, ...] = ()

    def rows_to_come(self) -> list[int]:
        """Return how many rows each rank still gets."""
        shards = enumerate(self.plan.rows_of_ranks())
        return [max(rows - taken_by(rank, self.num_taken), 0) for rank, rows in shards]

    def taken_after(self, given: Taken) -> Taken:
        """Return how many rows each rank has had of its shard when it was given so many more, or all that are left."""
        if isinstance(given, int) and isinstance(self.num_taken, int):
            return self.num_taken + given
        shards = enumerate(self.plan.rows_of_ranks())
        return tuple(
            min(taken_by(rank, self.num_taken) + taken_by(rank, given), rows) for rank, rows in shards
        )


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
        self._resumed: dict[int, Leg] = {}

    def afresh(self) -> Course:
        """Return a course of the same epochs of which none was resumed."""
        here = self._here
        return Course(
            self._row_counts,
            world_size=here.world_size,
            buffer_rows=here.buffer_rows,
            seed=self._seed,
            shuffle=self._shuffle,
        )

    def leg(self, epoch: int) -> Leg:
        """Return what is given of an epoch."""
        return self._resumed.get(epoch) or Leg(plan=self._whole(epoch, self._here.world_size))

    def resume(self, progress: Progress) -> None:
        """Have epochs go on from where they were; their earlier stretches are gone through again, in numbers."""
        begun = {progress.epoch: progress.stretches, **progress.later}
        self._resumed = {epoch: self._leg_after(epoch, stretches) for epoch, stretches in begun.items()}

    def seek(self, epoch: int, num_taken: int) -> None:
        """Have an epoch begin after so many rows of each rank, and all others whole; what was resumed is forgotten."""
        self._resumed = {}
        if num_taken:
            self._resumed[epoch] = Leg(plan=self._whole(epoch, self._here.world_size), num_taken=num_taken)

    def progress(self, epoch: int, num_given: int) -> Progress:
        """Return how far the ranks have come when each was given so many rows of an epoch's leg."""
        if num_given >= max(self.leg(epoch).rows_to_come()):
            return self._progress(epoch + 1, {})
        return self._progress(epoch, {epoch: num_given})

    def progress_running_on(self, epoch: int, num_given: int) -> Progress:
        """Return how far the ranks have come when each was given so many rows from an epoch's leg on.

        A rank whose shard is shorter than those of others goes on with the next epoch before them.
        """
        left = [num_given] * self._here.world_size
        given: dict[int, Taken] = {}
        last_resumed = max(self._resumed, default=epoch - 1)
        while any(left):
            to_come = self.leg(epoch).rows_to_come()
            if not given and epoch > last_resumed:  # from here on all epochs are alike
                whole = min(rows // shard for rows, shard in zip(left, to_come, strict=True))
                if whole:
                    epoch += whole
                    left = [rows - whole * shard for rows, shard in zip(left, to_come, strict=True)]
                    continue
            taken = [min(rows, shard) for rows, shard in zip(left, to_come, strict=True)]
            left = [rows - part for rows, part in zip(left, taken, strict=True)]
            if given or taken != to_come:
                most = max(taken)
                alike = all(part == min(most, shard) for part, shard in zip(taken, to_come, strict=True))
                given[epoch] = most if alike else tuple(taken)
            epoch += 1
        return self._progress(min(given, default=epoch), given)

    def _progress(self, epoch: int, given: Mapping[int, Taken]) -> Progress:
        done = {
            each: self._done(each, given.get(each, 0))
            for each in sorted({*given, *self._resumed})
            if each >= epoch
        }
        stretches = done.pop(epoch, ())
        return Progress(epoch=epoch, stretches=stretches, later={each: of for each, of in done.items() if of})

    def _done(self, epoch: int, given: Taken) -> tuple[Stretch, ...]:
        leg = self.leg(epoch)
        taken = leg.taken_after(given)
        here = Stretch(world_size=self._here.world_size, buffer_rows=self._here.buffer_rows, num_taken=taken)
        has_begun = taken > 0 if isinstance(taken, int) else any(taken)
        return (*leg.stretches, here) if has_begun else leg.stretches

    def _leg_after(self, epoch: int, stretches: tuple[Stretch, ...]) -> Leg:
        num_taken: Taken = 0
        if stretches and self._is_here(stretches[-1]):
            num_taken, stretches = stretches[-1].num_taken, stretches[:-1]
        world_sizes = [*(stretch.world_size for stretch in stretches), self._here.world_size]
        plan = self._whole(epoch, world_sizes[0])
        for stretch, world_size in zip(stretches, world_sizes[1:], strict=True):
            plan = plan.after(stretch, world_size)
        return Leg(plan=plan, num_taken=num_taken, stretches=stretches)

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
