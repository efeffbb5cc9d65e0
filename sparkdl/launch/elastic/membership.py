"""A rank's part in an elastic launch: it waits for the next world, and learns when to leave the current one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError
from sparkdl.launch.elastic.world import ARRIVALS, Answer, Arrival, World, answer_key, leave_key

if TYPE_CHECKING:
    from sparkdl.rendezvous.store import Rendezvous

_WATCH_S = 3600.0


class Membership:
    """The membership of this process in an elastic launch.

    Args:
        rendezvous: rendezvous that the driver serves.
        member: number of this member.

    Attributes:
        member: number of this member.
        world: the current world; None before the first.
    """

    def __init__(self, rendezvous: Rendezvous, member: int) -> None:
        self._rendezvous = rendezvous
        self.member = member
        self.world: World | None = None
        self._is_to_leave = threading.Event()
        # The coordinator notices the end of this process within milliseconds, also of one that was killed.
        rendezvous.post_if_lost(ARRIVALS, Arrival(member=member, is_lost=True).to_json())

    @property
    def is_to_leave(self) -> bool:
        """Whether the members of the current world are to leave it after their current step."""
        return self._is_to_leave.is_set()

    def enter(self, *, updates: int = -1, is_done: bool = False) -> World | None:
        """Wait for the next world, for as long as it takes: the driver ends this process if there will be none.

        Args:
            updates: number of updates of this member's state, so that members with fewer take over the state of one
                with most; -1 if it has no state.
            is_done: whether the function has returned on this rank.

        Returns:
            The next world; None if the run is over, which happens only with ``is_done``.

        Raises:
            CommunicatorError: if the driver has no world for this member, as after it was replaced by another one.
        """
        after = 0 if self.world is None else self.world.number
        arrival = Arrival(member=self.member, after=after, updates=updates, is_done=is_done)
        number = self._rendezvous.post(ARRIVALS, arrival.to_json())
        answer = Answer.from_json(self._wait_for(answer_key(number)))
        if answer.refusal:
            raise CommunicatorError(answer.refusal)
        if answer.world is None:
            return None
        self.world = answer.world
        self._is_to_leave = is_to_leave = threading.Event()
        threading.Thread(
            target=self._watch, args=(answer.world, is_to_leave), name="sparkdl-membership", daemon=True
        ).start()
        return answer.world

    def _wait_for(self, key: str) -> bytes:
        while True:
            try:
                return self._rendezvous.get(key, _WATCH_S)
            except CommunicatorTimeoutError:
                pass

    def _watch(self, world: World, is_to_leave: threading.Event) -> None:
        """Wait until the members are to leave a world; the driver says so at the latest when the next one begins."""
        try:
            self._wait_for(leave_key(world.number))
        except CommunicatorError:
            return  # the driver has ended, and ends this process
        is_to_leave.set()
