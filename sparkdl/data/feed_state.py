"""Where a feed stands, as a small dict for JSON, and whether another feed can go on from there.

A state is the same on every rank that has taken as many batches: any rank's will do for all of them, also for
another number of ranks. Runs on every *rank*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.data.epoch_plan import Stretch
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from sparkdl.data.dataset import ParquetDataset

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the ranks have come.

    Attributes:
        epoch: number of the epoch, from 0.
        stretches: the stretches of it that are done, the first one first; none at its beginning.
    """

    epoch: int = 0
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What two feeds must have in common for one to go on where the other stopped.

    Attributes:
        num_files: files of the dataset.
        num_row_groups: row groups of the dataset.
        num_rows: rows that are fed: those that pass the row filter.
        digest: digest of the names of the files and of the rows that each row group feeds.
        seed: seed of the order.
        shuffle: whether rows are shuffled.
    """

    num_files: int
    num_row_groups: int
    num_rows: int
    digest: str
    seed: int
    shuffle: bool

    @classmethod
    def of(cls, dataset: ParquetDataset, row_counts: Sequence[int], *, seed: int, shuffle: bool) -> Identity:
        """Return the identity of a feed of this dataset of whose row groups so many rows are fed."""
        digest = hashlib.sha256()
        for row_group, count in zip(dataset.row_groups, row_counts, strict=True):
            digest.update(f"{row_group.path}\0{row_group.index}\0{row_group.num_rows}\0{count}\n".encode())
        return cls(
            num_files=len({row_group.path for row_group in dataset.row_groups}),
            num_row_groups=len(dataset.row_groups),
            num_rows=sum(row_counts),
            digest=digest.hexdigest()[:32],
            seed=seed,
            shuffle=shuffle,
        )

    def check(self, other: Mapping[str, Any]) -> None:
        """Check that another identity, as a state holds it, is this one.

        Raises:
            DataError: naming what differs.
        """
        differences = [
            f"{what} {other.get(name)!r} then and {mine!r} now"
            for name, what, mine in (
                ("num_files", "the files number", self.num_files),
                ("num_row_groups", "the row groups number", self.num_row_groups),
                ("num_rows", "the rows that are fed number", self.num_rows),
                ("seed", "seed was", self.seed),
                ("shuffle", "shuffle was", self.shuffle),
            )
            if other.get(name) != mine
        ]
        if not differences and other.get("digest") != self.digest:
            differences = ["files have other names, or row groups feed other numbers of rows"]
        if differences:
            raise DataError(
                "The feed cannot go on from this state, as it was taken on something else: "
                f"{'; '.join(differences)}. Give the feed the dataset and the options that it had."
            )


def to_json(progress: Progress, identity: Identity) -> dict[str, Any]:
    """Return a state as :func:`json.dumps` takes it."""
    return {
        "version": _VERSION,
        "epoch": progress.epoch,
        "stretches": [
            [stretch.world_size, stretch.buffer_rows, stretch.num_taken] for stretch in progress.stretches
        ],
        "of": vars(identity).copy(),
    }


def from_json(state: Mapping[str, Any], identity: Identity) -> Progress:
    """Return what a state says.

    Raises:
        DataError: if it is no state of a feed, a newer version wrote it, or it is of another dataset or other
            options than ``identity``.
    """
    if not isinstance(state, Mapping) or "version" not in state or "of" not in state:
        raise DataError(f"This is no state of a feed: {str(state)[:80]}. Give what state() returned.")
    if state["version"] != _VERSION:
        raise DataError(
            f"The state has version {state['version']}; this sparkdl reads version {_VERSION}. Resume with the "
            "version of sparkdl that wrote it."
        )
    identity.check(state["of"])
    return Progress(
        epoch=int(state["epoch"]),
        stretches=tuple(
            Stretch(world_size=world_size, buffer_rows=buffer_rows, num_taken=num_taken)
            for world_size, buffer_rows, num_taken in state["stretches"]
        ),
    )
