"""What the function that runs on the ranks learns about its place, and how it speaks to the driver. Runs on a rank."""

from __future__ import annotations

from typing import Any

from sparkdl.collective import Communicator, Rendezvous, open_communicator
from sparkdl.launch.messages import MessageConnection
from sparkdl.launch.rank_pulse import RankPulse
from sparkdl.topology import Topology


class RankContext:
    """First argument of every function that runs on the ranks.

    Attributes:
        rank: number of this rank.
        world_size: how many ranks there are.
        rendezvous: key-value store shared by the ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        rendezvous: Rendezvous,
        secret: bytes,
        transport: str,
        wire: str,
        operation_timeout_s: float,
        task: MessageConnection,
        pulse: RankPulse,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.rendezvous = rendezvous
        self._secret = secret
        self._transport = transport
        self._wire = wire
        self._operation_timeout_s = operation_timeout_s
        self._task = task
        self._pulse = pulse
        self._communicator: Communicator | None = None

    @property
    def communicator(self) -> Communicator:
        """The communicator of all ranks; opened on first use, which every rank has to reach."""
        if self._communicator is None:
            self._communicator = open_communicator(
                rendezvous=self.rendezvous,
                rank=self.rank,
                world_size=self.world_size,
                secret=self._secret,
                transport=self._transport,
                wire=self._wire,
                timeout_s=self._operation_timeout_s,
            )
        return self._communicator

    @property
    def topology(self) -> Topology:
        """Which ranks share a host."""
        return self.communicator.topology

    def report(self, event: dict[str, Any]) -> None:
        """Send an event to the driver's ``on_event``; its values are those that JSON has."""
        self._task.send({"kind": "event", "event": event})

    def progress(self, *, done: bool = False) -> None:
        """Say that the function has come a step further. Costs next to nothing; call it as often as you like.

        From the first call on, a rank that does not call this for ``hang_timeout_s``, and waits for no other rank
        meanwhile, counts as hanging. A function that never calls it may compute as long as it keeps nobody waiting.

        Args:
            done: that was the last step, and what follows may take as long as it keeps nobody waiting.
        """
        if done:
            self._pulse.expect_no_progress()
        else:
            self._pulse.note_progress()

    def close(self, *, failed: bool = False, reason: str = "") -> None:
        """Close the communicator, or abort it so that no other rank waits for this one."""
        if self._communicator is None:
            return
        if failed:
            self._communicator.abort(reason)
        self._communicator.close()
        self._communicator = None
