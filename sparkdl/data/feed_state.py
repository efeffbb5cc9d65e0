"""Where a feed stands, as a small dict for JSON, and whether another feed can go on from there.

A state is the same on every rank that has taken as many batches: any rank's will do for all of them, also for
another number of ranks. Runs on every *rank*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.data.epoch_plan import Stretch
from sparkdl.data.state_checks import StateKind
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from sparkdl.data.dataset import ParquetDataset

_KIND = StateKind("feed", ("version", "epoch", "stretches", "of"), version=1)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the ranks have come.

    Attributes:
        epoch: number of the epoch, from 0.
        stretches: the stretches of it that are done, the first one first; none at its beginning.
        later: likewise of later epochs that some ranks have begun, which a blend's ranks do when their shards differ.
    """

    epoch: int = 0
    stretches: tuple[Stretch, ...] = ()
    later: Mapping[int, tuple[Stretch, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What two feeds must have in common for one to go on where the other stopped.

    Attributes:
        num_files: files of the dataset.
        num_row_groups: row groups of the dataset.
        num_rows: rows that are fed: those that pass the row filter.
        digest: digest of the names of the files and of the rows that each row group feeds.
        versions: digest of what tells the files from others of the same names; empty where the filesystem does not.
        seed: seed of the order.
        shuffle: whether rows are shuffled.
    """

    num_files: int
    num_row_groups: int
    num_rows: int
    digest: str
    versions: str
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
            versions=_digest_of(dataset.versions),
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
        then = other.get("versions")
        if not differences and then and self.versions and then != self.versions:
            differences = ["files were written again, or copied, under the same names"]
        if differences:
            raise DataError(
                "The feed cannot go on from this state, as it was taken on something else: "
                f"{'; '.join(differences)}. Give the feed the dataset and the options that it had."
            )


def _digest_of(versions: Mapping[str, str]) -> str:
    if not versions:
        return ""
    return hashlib.sha256(json.dumps(sorted(versions.items())).encode()).hexdigest()[:32]


def to_json(progress: Progress, identity: Identity) -> dict[str, Any]:
    """Return a state as :func:`json.dumps` takes it."""
    state = {
        "version": _KIND.version,
        "epoch": progress.epoch,
        "stretches": _stretches_to_json(progress.stretches),
        "of": vars(identity).copy(),
    }
    if progress.later:
        state["later"] = [
            [epoch, _stretches_to_json(stretches)] for epoch, stretches in progress.later.items()
        ]
    return state


def from_json(state: Mapping[str, Any], identity: Identity) -> Progress:
    """Return what a state says.

    Raises:
        ParamError: if it is no state of a feed, or a part of it cannot be; it names the part and its value.
        DataError: if a newer version wrote it, or it is of another dataset or other options than ``identity``.
    """
    _KIND.check(state)
    if not isinstance(state["of"], Mapping):
        raise _KIND.impossible("of", state["of"], "a dict that tells the dataset")
    identity.check(state["of"])
    later = state.get("later", [])
    if not isinstance(later, Sequence) or not all(
        isinstance(each, Sequence) and len(each) == 2 for each in later
    ):
        raise _KIND.impossible("later", later, "a list of pairs of an epoch and its stretches")
    return Progress(
        epoch=_checked_epoch(state["epoch"]),
        stretches=_stretches_from_json(state["stretches"]),
        later={_checked_epoch(epoch): _stretches_from_json(stretches) for epoch, stretches in later},
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


def _stretches_from_json(stretches: Any) -> tuple[Stretch, ...]:
    if not isinstance(stretches, Sequence) or isinstance(stretches, str):
        raise _KIND.impossible("stretches", stretches, "a list")
    return tuple(_stretch_from_json(stretch) for stretch in stretches)


def _stretch_from_json(stretch: Any) -> Stretch:
    if isinstance(stretch, Sequence) and not isinstance(stretch, str) and len(stretch) == 3:
        world_size, buffer_rows, taken = stretch
        of_ranks = taken if isinstance(taken, Sequence) and not isinstance(taken, str) else [taken]
        if (
            _is_count(world_size, 1)
            and all(_is_count(number, 0) for number in (buffer_rows, *of_ranks))
            and (of_ranks is not taken or len(of_ranks) == world_size)
        ):
            num_taken = tuple(of_ranks) if of_ranks is taken else taken
            return Stretch(world_size=world_size, buffer_rows=buffer_rows, num_taken=num_taken)
    raise _KIND.impossible(
        "a stretch", stretch, "[number of ranks, rows of the shuffle buffer, rows that each rank has had]"
    )


def _checked_epoch(epoch: Any) -> int:
    if not _is_count(epoch, 0):
        raise _KIND.impossible("epoch", epoch, "a whole number, at least 0")
    return int(epoch)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
