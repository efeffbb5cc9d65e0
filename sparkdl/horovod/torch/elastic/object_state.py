"""What is committed and restored: the contract of every state, and one of Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from sparkdl.horovod.torch.elastic.commits import keep_commit

_numbers = count()


class State:
    """Variables of a training, kept as they were at the last commit. Subclasses know which.

    They are kept in memory, and where :class:`sparkdl.Runner` starts lost ranks again, in files as well.

    Args:
        bcast_object: gives rank 0's object to all ranks.
        get_rank: the number of this rank.
    """

    _num_commits = 0

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        # Horovod's names, which states of users know.
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        # By which a later process of the same program finds its commits.
        self._number = next(_numbers)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions called whenever the ranks begin again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Make up for a new beginning of the ranks."""
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
        """Nothing: hosts do not come and go. Horovod interrupts the training here when they did."""

    def save(self) -> None:
        """Remember the variables as they are now, on this rank."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the variables to what was remembered."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the variables of all ranks to rank 0's, and remember them."""
        raise NotImplementedError

    def reset(self) -> None:
        """What a subclass does when the ranks begin again."""

    def _sharded_parts(self) -> list[str]:
        """The names of the parts of which each rank keeps a piece."""
        return []

    def _committed(self) -> dict[str, dict[str, Any]] | None:
        """What was remembered last, for :class:`CommitKeeper`; None if it cannot outlive this process."""
        return None

    def _set_committed(self, contents: dict[str, dict[str, Any]]) -> None:
        """Remember what :meth:`_committed` gave, and set the variables to it."""
        raise NotImplementedError

    def _set_committed_parts(self, parts: dict[str, Any]) -> None:
        """The same for some of its parts alone."""
        raise NotImplementedError


class ObjectState(State):
    """Python objects, each an attribute of the state."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        """Begin with the attributes that are given by name."""
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """See :class:`State`."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """See :class:`State`."""
        self._set_attributes()

    def sync(self) -> None:
        """See :class:`State`."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _committed(self) -> dict[str, dict[str, Any]] | None:
        return {"parts": {}, "objects": self._saved_state}

    def _set_committed(self, contents: dict[str, dict[str, Any]]) -> None:
        self._saved_state = contents["objects"]
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
