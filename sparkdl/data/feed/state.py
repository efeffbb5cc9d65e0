"""The state of a feed, as a small dict for JSON, and the checks that another feed can resume from it.

A state is the same on all ranks that have taken the same number of batches: the state of any rank serves all of them,
also on another number of ranks. :class:`EpochSchedule` computes for every epoch how its rows are divided, including
epochs that resume where another feed stopped; it uses row counts only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkdl.checks import check_state
from sparkdl.data.feed.epoch_plan import EpochPlan, Stretch, Taken
from sparkdl.errors import DataError
from sparkdl.identity import checksum, differences

if TYPE_CHECKING:
    from sparkdl.data.dataset.dataset import ParquetDataset


_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Position of the ranks.

    Attributes:
        epoch: number of the epoch, from 0.
        stretches: completed stretches of the epoch, the first one first; empty at its beginning.
        later: completed stretches of later epochs that some ranks have begun, by number of the epoch. Ranks of a blend
            do so if their shards differ in size.
    """

    epoch: int = 0
    stretches: tuple[Stretch, ...] = ()
    later: Mapping[int, tuple[Stretch, ...]] = field(default_factory=dict)


def identity_of_feed(
    dataset: ParquetDataset, row_counts: Sequence[int], *, seed: int, shuffle: bool
) -> dict[str, Any]:
    """Return what two feeds must have in common for one to continue where the other stopped.

    Args:
        dataset: dataset of the feed.
        row_counts: number of rows that each row group feeds, which are those that pass the row filter.
        seed: seed of the order.
        shuffle: whether rows are shuffled.
    """
    row_groups = [
        (group.path, group.index, group.num_rows, count)
        for group, count in zip(dataset.row_groups, row_counts, strict=True)
    ]
    versions = sorted(dataset.versions.items())  # empty if the filesystem does not report any
    return {
        "the number of files": len({group.path for group in dataset.row_groups}),
        "the number of row groups": len(row_groups),
        "the number of selected rows": sum(row_counts),
        "seed": seed,
        "shuffle": shuffle,
        "the names of the files, or the rows that their row groups feed": checksum(repr(row_groups).encode()),
        "the files, which were written again or copied": checksum(repr(versions).encode())
        if versions
        else None,
    }


def to_json(progress: Progress, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state as a dict that :func:`json.dumps` takes."""
    state = {
        "format": _FORMAT,
        "epoch": progress.epoch,
        "stretches": _stretches_to_json(progress.stretches),
        "of": dict(identity),
    }
    if progress.later:
        state["later"] = [
            [epoch, _stretches_to_json(stretches)] for epoch, stretches in progress.later.items()
        ]
    return state


def from_json(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Progress:
    """Return the position in a state.

    Raises:
        ParamError: if it is not a state of a feed.
        DataError: if it has a newer format, or belongs to another dataset or other options than ``identity``.
    """
    check_state(state, "feed", _FORMAT, "epoch", "stretches", "of")
    if changes := differences(state["of"], identity):
        raise DataError(
            f"The feed cannot continue from this state, as it was taken on something else: {'; '.join(changes)}. Give "
            "the feed the dataset and the options that it had."
        )
    return Progress(
        epoch=state["epoch"],
        stretches=_stretches_from_json(state["stretches"]),
        later={epoch: _stretches_from_json(stretches) for epoch, stretches in state.get("later", [])},
    )


def _stretches_to_json(stretches: Sequence[Stretch]) -> list[list[Any]]:
    return [
        [
            stretch.world_size,
            stretch.buffer_rows,
            stretch.num_taken if isinstance(stretch.num_taken, int) else list(stretch.num_taken),
        ]
        for stretch in stretches
    ]


def _stretches_from_json(stretches: Sequence[Sequence[Any]]) -> tuple[Stretch, ...]:
    return tuple(
        Stretch(
            world_size=world_size,
            buffer_rows=buffer_rows,
            num_taken=taken if isinstance(taken, int) else tuple(taken),
        )
        for world_size, buffer_rows, taken in stretches
    )


class EpochSchedule:
    """Computes for every epoch how its rows are divided among the ranks.

    Args:
        row_counts: number of rows of every row group.
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
        self._resumed: dict[int, EpochPlan] = {}

    def afresh(self) -> EpochSchedule:
        """Return a schedule of the same epochs in which none is resumed."""
        fresh = copy(self)
        fresh._resumed = {}
        return fresh

    def plan_of(self, epoch: int) -> EpochPlan:
        """Return the part of an epoch that is yielded."""
        return self._resumed.get(epoch) or self._whole(epoch, self._here.world_size)

    def resume(self, progress: Progress) -> None:
        """Continue epochs from a position; the division of their earlier stretches is computed again."""
        begun = {progress.epoch: progress.stretches, **progress.later}
        self._resumed = {epoch: self._plan_after(epoch, stretches) for epoch, stretches in begun.items()}

    def seek(self, epoch: int, num_taken: int) -> None:
        """Begin an epoch after the first ``num_taken`` rows of each rank, and all other epochs at their first row."""
        self._resumed = {}
        if num_taken:
            self._resumed[epoch] = replace(self._whole(epoch, self._here.world_size), num_taken=num_taken)

    def progress(self, epoch: int, num_given: int) -> Progress:
        """Return the position after each rank got ``num_given`` rows of an epoch's plan."""
        if num_given >= max(self.plan_of(epoch).rows_to_come()):
            return self._progress(epoch + 1, {})
        return self._progress(epoch, {epoch: num_given})

    def progress_across_epochs(self, epoch: int, num_given: int) -> Progress:
        """Return the position after each rank got ``num_given`` rows of an epoch's plan and the following epochs.

        A rank whose shard is shorter than others continues with the next epoch before them.
        """
        left = [num_given] * self._here.world_size
        taken_of_epochs: dict[int, Taken] = {}
        last_resumed = max(self._resumed, default=epoch - 1)
        while any(left):
            to_come = self.plan_of(epoch).rows_to_come()
            if not taken_of_epochs and epoch > last_resumed:  # from here on all epochs are alike
                num_epochs = min(rows // shard for rows, shard in zip(left, to_come, strict=True))
                if num_epochs:
                    epoch += num_epochs
                    left = [rows - num_epochs * shard for rows, shard in zip(left, to_come, strict=True)]
                    continue
            taken = [min(rows, shard) for rows, shard in zip(left, to_come, strict=True)]
            left = [rows - part for rows, part in zip(left, taken, strict=True)]
            if taken_of_epochs or taken != to_come:
                most = max(taken)
                alike = all(part == min(most, shard) for part, shard in zip(taken, to_come, strict=True))
                taken_of_epochs[epoch] = most if alike else tuple(taken)
            epoch += 1
        return self._progress(min(taken_of_epochs, default=epoch), taken_of_epochs)

    def _progress(self, epoch: int, given: Mapping[int, Taken]) -> Progress:
        done = {
            number: self._done(number, given.get(number, 0))
            for number in sorted({*given, *self._resumed})
            if number >= epoch
        }
        stretches = done.pop(epoch, ())
        return Progress(
            epoch=epoch, stretches=stretches, later={number: of for number, of in done.items() if of}
        )

    def _done(self, epoch: int, given: Taken) -> tuple[Stretch, ...]:
        plan = self.plan_of(epoch)
        taken = plan.taken_after(given)
        has_begun = taken > 0 if isinstance(taken, int) else any(taken)
        return (*plan.stretches, replace(self._here, num_taken=taken)) if has_begun else plan.stretches

    def _plan_after(self, epoch: int, stretches: tuple[Stretch, ...]) -> EpochPlan:
        num_taken: Taken = 0
        if stretches and replace(stretches[-1], num_taken=0) == self._here:
            num_taken, stretches = stretches[-1].num_taken, stretches[:-1]
        world_sizes = [*(stretch.world_size for stretch in stretches), self._here.world_size]
        plan = self._whole(epoch, world_sizes[0])
        for stretch, world_size in zip(stretches, world_sizes[1:], strict=True):
            plan = plan.after(stretch, world_size)
        return replace(plan, num_taken=num_taken)

    def _whole(self, epoch: int, world_size: int) -> EpochPlan:
        return EpochPlan(
            row_counts=self._row_counts,
            world_size=world_size,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
        )
