"""A rank's part in an elastic launch: it waits for the next world, and learns when to leave the current one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, RankLostError
from sparkdl.launch.wire.world import (
    ANSWER_KEY,
    ARRIVALS,
    BROKEN_KEY,
    LEAVE_KEY,
    Answer,
    MemberArrival,
    World,
)

if TYPE_CHECKING:
    from sparkdl.rendezvous.store import Rendezvous

Value = TypeVar("Value")

_WATCH_S = 3600.0
_SLICE_S = 0.25
"""How often a wait for another rank looks whether that rank is lost."""


class Membership:
    """The membership of this process in an elastic launch.

    Args:
        rendezvous: rendezvous that the driver serves.
        member: number of the member, the ranks that live and end together.
        place: number of this rank among them.
        on_break: called from a thread when another rank of the current world is lost, with the reason.

    Attributes:
        world: the current world; None before the first.
    """

    def __init__(
        self, rendezvous: Rendezvous, member: int, place: int, on_break: Callable[[str], None]
    ) -> None:
        self._rendezvous = rendezvous.view("members")
        self._worlds = rendezvous.view("worlds")
        self._on_break = on_break
        self._member, self._place = member, place
        self.world: World | None = None
        self._signals = _Signals()
        # The coordinator notices the end of this process within milliseconds, also of one that was killed.
        self._rendezvous.post_if_lost(ARRIVALS, self._arrival(is_lost=True).to_json())

    @property
    def rank(self) -> int:
        """The rank of this process in the current world."""
        assert self.world is not None
        return self.world.rank_of(self._member, self._place)

    def _arrival(self, **fields: Any) -> MemberArrival:
        return MemberArrival(member=self._member, place=self._place, **fields)

    @property
    def is_to_leave(self) -> bool:
        """Whether the members of the current world are to leave it after their current step."""
        return self._signals.leave.is_set()

    def enter(self, *, progress: int = -1, is_done: bool = False) -> World | None:
        """Wait for the next world, for as long as it takes: the driver ends this process if there will be none.

        Args:
            progress: how far this member's state has come, such as a number of steps: members that are behind, or
                have no state (-1), take over that of one that is ahead.
            is_done: whether the function has returned on this rank.

        Returns:
            The next world; None if the run is over, which happens only with ``is_done``.

        Raises:
            CommunicatorError: if the driver has no world for this member, as after it was replaced by another one.
        """
        after = 0 if self.world is None else self.world.number
        arrival = self._arrival(after=after, progress=progress, is_done=is_done)
        key = ANSWER_KEY.format(self._rendezvous.post(ARRIVALS, arrival.to_json()))
        answer = Answer.from_json(self._wait_for(key))
        self._rendezvous.delete(key)
        if answer.refusal:
            raise CommunicatorError(answer.refusal)
        if answer.world is None:
            return None
        self.world, self._signals = answer.world, _Signals()
        for watch in (self._watch_for_leave, self._watch_for_break):
            threading.Thread(
                target=watch, args=(answer.world, self._signals), name="sparkdl-membership", daemon=True
            ).start()
        return answer.world

    def ask_to_leave(self) -> None:
        """Ask that this rank's member may leave the run after the current step, as its machine is to go."""
        self._rendezvous.post(ARRIVALS, self._arrival(is_leaving=True).to_json())

    def leave(self) -> None:
        """Say that this rank returns its value, as the others of its member do, and waits for no answer."""
        self._rendezvous.post(ARRIVALS, self._arrival(is_done=True, has_left=True).to_json())

    def rendezvous(self) -> Rendezvous:
        """The rendezvous of the current world, whose waits end when one of its ranks is lost."""
        assert self.world is not None
        return self._worlds.view(str(self.world.number), self.check)

    def unless_broken(self, open_: Callable[[], Value], discard: Callable[[Value], None]) -> Value:
        """Call a function that waits for other ranks; raise an error as soon as one of them is lost.

        The call then continues in its thread until its own deadline, and its value is discarded.

        Raises:
            RankLostError: if a rank of the current world is lost.
            Exception: what the function raises.
        """
        future, signals = Future[Value](), self._signals

        def call() -> None:
            try:
                future.set_result(open_())
            except BaseException as error:
                future.set_exception(error)

        def drop(late: Future[Value]) -> None:
            if late.exception() is None:
                discard(late.result())

        threading.Thread(target=call, name="sparkdl-opening", daemon=True).start()
        while not wait([future], _SLICE_S).done:
            if signals.broken.is_set():
                future.add_done_callback(drop)
                self.check()
        return future.result()

    def check(self) -> None:
        """Raise an error if a rank of the current world is lost.

        Raises:
            RankLostError: if so.
        """
        if self._signals.broken.is_set():
            raise RankLostError("a rank of this world was lost while its ranks met")

    def is_broken(self, *, timeout_s: float) -> bool:
        """Whether a rank of the current world is lost, or is noticed to be within this time."""
        return self._signals.broken.wait(timeout_s)

    def _wait_for(self, key: str) -> bytes:
        while True:
            try:
                return self._rendezvous.get(key, _WATCH_S)
            except CommunicatorTimeoutError:
                pass

    def _watch_for_leave(self, world: World, signals: _Signals) -> None:
        """Wait until the members are to leave a world; the driver says so at the latest when the next one begins."""
        try:
            self._wait_for(LEAVE_KEY.format(world.number))
        except CommunicatorError:
            return  # the driver has ended, and ends this process
        signals.leave.set()

    def _watch_for_break(self, world: World, signals: _Signals) -> None:
        """Wait until a member of a world is lost, or the next one begins."""
        try:
            reason = self._wait_for(BROKEN_KEY.format(world.number)).decode()
        except CommunicatorError:
            return
        signals.broken.set()
        if self.world is world and reason:
            self._on_break(reason)


@dataclass(frozen=True)
class _Signals:
    """What the driver has said about one world."""

    leave: threading.Event = field(default_factory=threading.Event)
    broken: threading.Event = field(default_factory=threading.Event)
