"""The context of the function on a rank: its rank, communicator and topology, and its reports to the driver."""

from __future__ import annotations

from typing import Any

from sparkdl.collective import Communicator, PrefixRendezvous, Rendezvous, find_hosts, open_communicator
from sparkdl.collective.job import RankJob
from sparkdl.collective.telemetry.stalls import NotedWait
from sparkdl.launch.rank.heartbeat import RankHeartbeat
from sparkdl.launch.rank.stacks import RankStacks
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.topology import Topology


class RankContext:
    """First argument of every function that runs on the ranks.

    Attributes:
        rank: number of this rank.
        world_size: number of ranks.
        rendezvous: key-value store shared by the ranks.
        job: how this rank finds the others, and the options of the communicator.
    """

    def __init__(
        self,
        *,
        job: RankJob,
        rendezvous: Rendezvous,
        task: MessageConnection,
        heartbeat: RankHeartbeat,
        stacks: RankStacks,
    ) -> None:
        self.rank = job.rank
        self.world_size = job.world_size
        self.rendezvous = rendezvous
        self.job = job
        self._task = task
        self._heartbeat = heartbeat
        self._stacks = stacks
        self._communicator: Communicator | None = None
        self._topology: Topology | None = None

    @property
    def communicator(self) -> Communicator:
        """The communicator of all ranks; opened on first use, for which every rank has to call this."""
        if self._communicator is None:
            self._communicator = open_communicator(
                rendezvous=self.rendezvous,
                rank=self.rank,
                world_size=self.world_size,
                secret=self.job.secret,
                transport=self.job.transport,
                wire=self.job.wire,
                timeout_s=self.job.timeout_s,
                host_of_rank=self.topology.host_of_rank,
            )
        return self._communicator

    @property
    def has_communicator(self) -> bool:
        """Whether the communicator was opened."""
        return self._communicator is not None

    @property
    def topology(self) -> Topology:
        """Which ranks share a host; determined on first use, for which every rank has to call this."""
        if self._topology is None:
            timeout_s = self.job.timeout_s
            with NotedWait("world", tuple(range(self.world_size)), "opening", timeout_s):
                hosts = find_hosts(
                    PrefixRendezvous(self.rendezvous, "topology"),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout_s=timeout_s,
                )
            self._topology = Topology(rank=self.rank, host_of_rank=hosts)
        return self._topology

    def report(self, event: dict[str, Any]) -> None:
        """Send an event to the driver's ``on_event``; its values must have types that JSON can encode."""
        self._task.send({"kind": "event", "event": event})

    def progress(self, *, done: bool = False) -> None:
        """Report progress. Costs next to nothing; call it as often as you like.

        From the first call on, a rank that does not call this for ``hang_timeout_s``, and waits for no other rank
        meanwhile, counts as hanging. A function that never calls it may compute for as long as no other rank waits
        for it.

        Args:
            done: whether this was the last step; the rest of the function may then take as long as no other rank waits
                for this one.
        """
        if done:
            self._heartbeat.expect_no_progress()
        else:
            self._heartbeat.note_progress()

    def note_position(self, position: str) -> None:
        """Note the position of the function, such as ``epoch 2, step 5``, for the error if the process dies there.

        Costs next to nothing. The position is kept until the next call; an empty text removes it.
        """
        self._stacks.note_position(position)

    def close(self, *, failed: bool = False, reason: str = "") -> None:
        """Close the communicator, or abort it so that no other rank waits for this one."""
        if self._communicator is None:
            return
        if failed:
            self._communicator.abort(reason)
        self._communicator.close()
        self._communicator = None
