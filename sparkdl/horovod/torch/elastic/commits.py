"""The base class of elastic states, the state of Python objects, and commits that outlive the process.

A launcher that starts lost ranks again provides a :class:`CommitKeeper` that stores the commits. Without such a
launcher commits stay in memory and are lost with the ranks.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Protocol

from torch.utils._pytree import tree_leaves

from sparkdl.errors import CheckpointError, ParamError
from sparkdl.horovod.torch.basics import size
from sparkdl.horovod.torch.functions import broadcast_object, pickle_for_others, refuse_shards
from sparkdl.horovod.torch.operations.barrier_and_join import barrier

logger = logging.getLogger(__name__)


class CommitKeeper(Protocol):
    """Stores the last commit of every state of rank 0, where restarted ranks find it.

    If parts of a state are sharded, every rank stores its own pieces before rank 0 completes the commit by
    :meth:`keep`.
    """

    def keep(self, state: int, contents: dict[str, dict[str, Any]]) -> None:
        """Store the contents of a state in place of those stored before, completely or not at all.

        Args:
            state: number of the state: the number of states that this process had created before it.
            contents: ``parts``, which have a ``state_dict``, and ``objects``, both by name; if there are pieces, also
                ``pieces``, a dict with their ``num_ranks``.
        """

    def last(self, state: int) -> dict[str, dict[str, Any]] | None:
        """Return the contents stored last; None if there are none. Their ``pieces`` are passed to :meth:`piece`."""

    def next_commit(self, state: int) -> int:
        """Return the number of the commit that :meth:`keep` will store next."""

    def keep_piece(self, state: int, commit: int, rank: int, parts: dict[str, Any]) -> None:
        """Store a rank's pieces of the sharded parts, for a commit that rank 0 has yet to complete."""

    def piece(self, state: int, pieces: dict[str, Any], rank: int) -> dict[str, Any]:
        """Return what a rank stored by :meth:`keep_piece` for the commit that has these ``pieces``."""


_keepers: list[CommitKeeper] = []


def provide_commit_keeper(keeper: CommitKeeper) -> None:
    """Set the keeper that stores the commits of this process. For launchers of ranks."""
    _keepers[:] = [keeper]


def keep_commit(state: Any) -> None:
    """If there is a commit keeper, store rank 0's last commit, and every rank's pieces if parts are sharded."""
    sharded = state._sharded_parts()
    if not _keepers or not (sharded or state._rank() == 0):
        return
    contents = state._committed()
    if contents is None:
        logger.warning(
            "The commits of a %s are lost with the ranks: only those of an ObjectState or TorchState outlive them.",
            type(state).__name__,
        )
        return
    keeper, number = _keepers[0], state._number
    if sharded:
        rank, parts = state._rank(), contents["parts"]
        commit = broadcast_object(
            keeper.next_commit(number) if rank == 0 else None, name="number of a commit"
        )
        keeper.keep_piece(number, commit, rank, {name: parts[name] for name in sharded})
        barrier()  # the commit is complete only once every rank's pieces are stored
        if rank != 0:
            return
        whole = {name: part for name, part in parts.items() if name not in sharded}
        contents = {**contents, "parts": whole, "pieces": {"num_ranks": size()}}
    keeper.keep(number, contents)


def take_up_commit(state: Any) -> bool:
    """Set rank 0's state, or every rank's if parts are sharded, to the last stored commit; return whether there is one.

    Raises:
        CheckpointError: if the stored pieces do not match the ranks or the sharded parts of the state.
    """
    sharded = state._sharded_parts()
    if not _keepers or not (sharded or state._rank() == 0):
        return False
    keeper, number, rank = _keepers[0], state._number, state._rank()
    contents = keeper.last(number) if rank == 0 else None
    pieces = None if contents is None else contents.pop("pieces", {})
    if sharded:
        pieces = broadcast_object(pieces, name="pieces of a commit")
    if pieces is None:
        return False
    if pieces and not sharded:
        raise CheckpointError(
            f"The last commit has the pieces of {pieces['num_ranks']} ranks, as parts of the state were sharded, and "
            "now none is. Shard them as before, or begin anew with another checkpoint_dir."
        )
    own: dict[str, Any] = {}
    if sharded:
        if pieces.get("num_ranks") != size():
            held = f"the pieces of {pieces['num_ranks']} ranks" if pieces else "no pieces"
            raise CheckpointError(
                f"The last commit has {held} of the sharded parts {', '.join(sharded)}, and now there are {size()} "
                "ranks. Start as many ranks as before (num_workers, and min_workers for restarts), or begin anew with "
                "another checkpoint_dir."
            )
        own = keeper.piece(number, pieces, rank)
        if sorted(own) != sorted(sharded):
            raise CheckpointError(
                f"The last commit has pieces of {', '.join(own)}, and the state's sharded parts are "
                f"{', '.join(sharded)}. Shard the same parts as before, or begin anew with another checkpoint_dir."
            )
    if contents is None:
        state._set_committed_parts(own)
    else:
        state._set_committed({**contents, "parts": {**contents["parts"], **own}})
    return True


_numbers = count()


class State:
    """Variables of a training, remembered as they were at the last commit. Subclasses define which variables.

    They are kept in memory and, if :class:`sparkdl.Runner` restarts lost ranks, in files as well.

    Args:
        bcast_object: function that returns rank 0's object on all ranks.
        get_rank: function that returns the number of this rank.
    """

    _num_commits = 0

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        # Horovod's names, which subclasses of users rely on.
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        # The number by which a later process of the same program finds its commits.
        self._number = next(_numbers)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call whenever the ranks begin again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset the state and call the callbacks, after the ranks have begun again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Remember the variables as they are now."""
        self.save()
        keep_commit(self)
        self._num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the set of hosts does not change. Horovod interrupts the training here if it has changed."""

    def save(self) -> None:
        """Remember the variables as they are now, on this rank."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the variables to the remembered values."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the variables of all ranks to rank 0's, and remember them."""
        raise NotImplementedError

    def reset(self) -> None:
        """Hook for subclasses, called when the ranks begin again."""

    def _sharded_parts(self) -> list[str]:
        """The names of the parts of which each rank keeps a piece."""
        return []

    def _committed(self) -> dict[str, dict[str, Any]] | None:
        """The remembered values, for :class:`CommitKeeper`; None if they cannot outlive this process."""
        return None

    def _set_committed(self, contents: dict[str, dict[str, Any]]) -> None:
        """Remember values that :meth:`_committed` returned, and set the variables to them."""
        raise NotImplementedError

    def _set_committed_parts(self, parts: dict[str, Any]) -> None:
        """Do the same as :meth:`_set_committed` for only some of the parts."""
        raise NotImplementedError


def _unpicklable(values: dict[str, Any], error: Exception) -> Exception:
    """An error that names the value which cannot be sent to other ranks; ``error`` itself if all can be."""
    for name, value in values.items():
        try:
            pickle_for_others(value)
        except Exception as reason:
            return ParamError(
                f"The state's {name} is a {type(value).__name__}, which cannot be pickled to be sent to the other "
                f"ranks: {reason}. Leave it out, and make it on each rank."
            )
    return error


class ObjectState(State):
    """Python objects, each an attribute of the state."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        """Set the keyword arguments as attributes."""
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """See :class:`State`.

        Raises:
            ParamError: if a value is or holds a DTensor: a commit would have rank 0's part of it alone.
        """
        values = {name: getattr(self, name) for name in self._saved_state}
        for tensor in tree_leaves(values):
            refuse_shards(tensor)
        self._saved_state = values

    def restore(self) -> None:
        """See :class:`State`."""
        self._set_attributes()

    def sync(self) -> None:
        """See :class:`State`."""
        if self._saved_state:
            try:
                self._saved_state = self._bcast_object(self._saved_state)
            except (TypeError, AttributeError, pickle.PicklingError, ParamError) as error:
                named = _unpicklable(self._saved_state, error)
                if named is error:
                    raise
                raise named from error
            self._set_attributes()

    def _committed(self) -> dict[str, dict[str, Any]] | None:
        return {"parts": {}, "objects": self._saved_state}

    def _set_committed(self, contents: dict[str, dict[str, Any]]) -> None:
        self._saved_state = contents["objects"]
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
