"""A rank that is a program: its process, its output and its exit status. Runs in the task of the rank.

The program knows neither its task nor the driver. It finds the other ranks through environment variables, which other
users cannot read: the variables of :mod:`sparkdl.collective.job`, and the variables of ``torchrun`` for programs that
read only the latter.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

from sparkdl.collective import Deadline, PmiServer, RendezvousClient, pmi_environment
from sparkdl.collective.job import ENTERED_KEY, FAILURE_KEY, RankJob
from sparkdl.collective.torchrun_variables import torchrun_variables
from sparkdl.cores import THREADS, thread_variables
from sparkdl.errors import CommunicatorError, LaunchError
from sparkdl.launch.forkserver.guard import GuardedProcess, describe_exit
from sparkdl.launch.rank.environment import ALLOCATOR_VARIABLES
from sparkdl.launch.task.supervisor import ABORT_GRACE_S, HELD_OUTPUT, NOT_ENDED, OutputRelay, Supervisor
from sparkdl.launch.wire.messages import pack_error
from sparkdl.launch.wire.outcome import Failure, StopReason
from sparkdl.topology import Topology

if TYPE_CHECKING:
    from sparkdl.launch.wire.channel import DriverLink

_CONNECT_TIMEOUT_S = 10.0

_LOOPBACK = "lo"
"""Name of the loopback interface in Linux."""

_END_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""

_LAST_LINES_S = 3.0
"""How long to wait for the last lines of a rank once it has ended."""

OnLine = Callable[[int, int, bytes], None]
"""Called with the rank, the stream (1: standard output, 2: standard error) and one line with its line end."""

HAS_MET = {"has_met": True}
"""The event of a rank that has entered the job, or whose job another rank has entered, or that has begun MPI."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What each rank of a launch runs on this machine.

    Attributes:
        command: the program and its arguments.
        num_threads: number of threads of each rank.
        on_line: called with each line that the ranks print, from one thread per rank and stream.
    """

    command: Sequence[str]
    num_threads: int
    on_line: OnLine


class ProgramSupervisor(Supervisor):
    """One process that runs a program.

    The exception of its failure is a :class:`subprocess.CalledProcessError`, or the ``OSError`` that ``on_line``
    raised.

    Args:
        rank: number of the rank.
        program: the program.
        client: connection to the coordinator of the job, where the program may report its own failure.
        link: connection to the driver.
        mpi: end of the program's connection for MPI, and what serves the other end; None without MPI.
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        client: RendezvousClient,
        link: DriverLink,
        mpi: tuple[socket.socket, PmiServer] | None,
    ) -> None:
        super().__init__(rank)
        self._program, self._client, self._link, self._mpi = program, client, link, mpi
        self._process: GuardedProcess | None = None
        self._relays: list[OutputRelay] = []
        self._print_error: OSError | None = None
        self._is_cancelled = False

    def close(self) -> None:
        """End the program at once."""
        self._is_cancelled = True
        self._end()
        super().close()

    def begin(self, job: RankJob, member: int | None = None) -> None:  # noqa: ARG002 - no program is a member
        """Start the program, unless it was stopped; see :meth:`Supervisor.begin`.

        Raises:
            LaunchError: if it cannot be started.
        """
        if self._stop_reason is not None:
            return
        variables = {
            **thread_variables(self._program.num_threads),
            **ALLOCATOR_VARIABLES,
            # By default Gloo listens on the interface of the address to which the host name resolves; there may be
            # none.
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            **os.environ,
            THREADS: str(self._program.num_threads),
            # Output is passed on line by line, not when a buffer is full.
            "PYTHONUNBUFFERED": "1",
            **job.to_variables(),
            **torchrun_variables(job, Topology(rank=job.rank, host_of_rank=(0,) * job.world_size)),
        }
        fds = [] if self._mpi is None else [self._mpi[0].fileno()]
        for fd in fds:
            variables |= pmi_environment(fd, job.rank, job.world_size)
        try:
            self._process = GuardedProcess(
                self._program.command, environment=variables, pass_fds=fds, on_exit=self._changed.set
            )
        except OSError as error:
            raise LaunchError(f"{self._program.command[0]} cannot be started: {error.strerror}") from error
        self._link.report_start()
        self._relays = [
            OutputRelay(
                output,
                on_line=partial(self._program.on_line, self._rank, stream),
                on_error=self._fail,
                name=f"sparkdl-rank-{self._rank}",
            )
            for stream, output in enumerate(self._process.outputs, start=1)
        ]

    def cancel(self, reason: StopReason) -> None:
        """End the program at once; after the failure of another rank it has time to notice it."""
        self._is_cancelled = True
        self.stop(reason)

    def wait(self) -> Failure | None:
        """Wait until the program has ended or was stopped; return its failure, None if its exit status is 0."""
        self._changed.wait()
        if self._process is None:
            assert self._stop_reason is not None, "only a stopped rank has not begun"
            return self._failure_of_stop(self._stop_reason)
        if not self._is_cancelled:
            self._process.exited.wait(ABORT_GRACE_S)
        self._end()
        reported = self._read_report()
        if self._print_error is not None:
            return self._failure(f"its output cannot be printed: {self._print_error}", self._print_error)
        status = self._process.status
        if status == 0:
            self.result.write(pickle.dumps(None))
            return None
        if status is None:  # SIGKILL has not ended it yet
            status = -signal.SIGKILL
        ended = CalledProcessError(status, list(self._program.command))
        if reported is not None and reported["rank"] == self._rank:
            return self._failure(str(reported["error"]), ended)
        if reported is not None:
            self.stop(StopReason(f"rank {reported['rank']} failed: {reported['error']}"))
        if self._stop_reason is not None:
            return self._failure_of_stop(self._stop_reason)
        return self._failure(f"its process {describe_exit(status)}", ended, is_loss=status < 0)

    def _failure(self, text: str, error: Exception, *, is_loss: bool = False) -> Failure:
        return Failure(rank=self._rank, error=text, traceback="", is_loss=is_loss, pickled=pack_error(error))

    def _read_report(self) -> dict[str, str | int] | None:
        """Tell the driver whether the ranks have met; return what the rank that failed first has reported, if any."""
        with suppress(CommunicatorError, OSError):  # the coordinator has ended with rank 0's task
            if self._client.check([ENTERED_KEY]) or (self._mpi is not None and self._mpi[1].has_begun):
                self._link.event(HAS_MET)
            if self._client.check([FAILURE_KEY]):
                report: dict[str, str | int] = json.loads(self._client.get(FAILURE_KEY, _CONNECT_TIMEOUT_S))
                return report
        return None

    def _end(self) -> None:
        """End the program and all processes that it has started, once its last lines were passed on."""
        if self._process is None:
            return
        self._process.end(grace_s=_END_GRACE_S)
        deadline, relays, self._relays = Deadline(_LAST_LINES_S), self._relays, []
        finished = [relay.finish(deadline, is_patient=not self._is_cancelled) for relay in relays]
        notes = [] if all(finished) else [HELD_OUTPUT]
        if relays and not self._process.exited.is_set():
            notes.append(NOT_ENDED)
        for note in notes:
            with suppress(OSError):
                self._program.on_line(self._rank, 2, note.encode())

    def _fail(self, error: OSError) -> None:
        # No more output is read, so the rank would block, and the other ranks with it.
        self._print_error = error
        self._is_cancelled = True
        self._changed.set()
