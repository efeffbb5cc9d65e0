"""The ranks of one library: new processes on this machine, without Spark, that sleep until they are given a turn.

Runs where the benchmark was called. The ranks are not started by :mod:`sparkdl.launch`, as contenders are measured
without anything of sparkdl: Horovod, MPI and the readers of data get the environment and the sockets that their own
launchers give them, each rank can run in the network namespace of a host, and some are stopped by SIGSTOP between
turns, which a supervised launch would report as hanging.
"""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any

from sparkdl.bench.libraries import LIBRARIES, Inherited, rank_variables
from sparkdl.bench.namespaces import INTERFACE
from sparkdl.collective import Coordinator, Deadline, new_secret
from sparkdl.errors import CommunicatorTimeoutError, RankError
from sparkdl.rendezvous.addresses import LOOPBACK
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from sparkdl.bench.namespaces import Namespace

_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 20.0

RANK_ARGUMENTS: tuple[str, ...] = ("-m", "sparkdl.bench.contenders.rank")
"""Arguments of this Python that start a rank."""

Answer = dict[str, Any]
"""Message that a rank sends after a turn."""


class RankGroup(AbstractContextManager["RankGroup"]):
    """Ranks that have opened one library and wait for turns. A context manager, which ends all ranks on exit.

    Args:
        library: a key of :data:`sparkdl.bench.libraries.LIBRARIES`.
        world_size: number of ranks.
        hosts: the host of each rank; empty for ranks on this machine.
        wire: data type in which sums of float32 are sent between hosts.
    """

    def __init__(
        self,
        library: str,
        world_size: int,
        *,
        hosts: Sequence[Namespace] = (),
        wire: str = "float32",
    ) -> None:
        self.library = library
        self._hosts, self._wire = hosts, wire
        self._is_stopped_when_idle = LIBRARIES[library].is_stopped_when_idle
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._stack = ExitStack()
        try:
            self._start(world_size)
        except BaseException:
            self._stack.close()
            raise

    def wait_until_ready(self) -> None:
        """Wait until every rank has opened the library.

        Raises:
            RankError: if a rank failed; it holds what that rank wrote to standard error.
            CommunicatorTimeoutError: if the ranks take too long.
        """
        self._answers(_START_TIMEOUT_S)
        self._signal(signal.SIGSTOP)

    def take_turn(self, turn: Mapping[str, Any], *, timeout_s: float) -> list[Answer]:
        """Have every rank take the same turn, and return the answers in order of rank.

        Raises:
            RankError: if a rank failed; it holds what that rank wrote to standard error.
            CommunicatorTimeoutError: if the turn takes longer than ``timeout_s``.
        """
        self._signal(signal.SIGCONT)
        line = json.dumps(dict(turn)) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            # If a rank has ended, _answers() raises an error with the rank and its last output.
            with suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        answers = self._answers(timeout_s)
        self._signal(signal.SIGSTOP)
        return answers

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, world_size: int) -> None:
        secret = new_secret()
        with self._hosts[0].entered() if self._hosts else nullcontext():
            coordinator = self._stack.enter_context(
                Coordinator(secret=secret, world_size=world_size, host=None if self._hosts else LOOPBACK)
            )
        inherited = self._stack.enter_context(
            rank_variables(LIBRARIES[self.library], world_size, coordinator, secret)
        )
        self._stack.callback(self._end)
        address = coordinator.address
        for rank, of_rank in enumerate(inherited):
            process = self._start_rank(of_rank, self._hosts[rank].command() if self._hosts else [])
            assert process.stdin is not None
            message = {"library": self.library, "rank": rank, "world_size": world_size}
            message |= {
                "secret": secret.hex(),
                "hosts": address.hosts,
                "port": address.port,
                "wire": self._wire,
            }
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _start_rank(self, inherited: Inherited, prefix: Sequence[str]) -> subprocess.Popen[str]:
        variables, descriptors = inherited
        # A file, as a pipe that is not read would fill up and block the rank.
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # the stack is its context
        self._stack.callback(errors.close)
        process = subprocess.Popen(
            [*prefix, sys.executable, *RANK_ARGUMENTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Gloo cannot find the interface by the host's name, which is the same on all hosts.
            env={**variables, **({"GLOO_SOCKET_IFNAME": INTERFACE} if prefix else {})},
            pass_fds=descriptors,
        )
        self._processes.append(process)
        self._errors.append(errors)
        return process

    def _answers(self, timeout_s: float) -> list[Answer]:
        """Return one line of every rank; raise at once if a rank ends, as the others may wait for it."""
        deadline = Deadline(timeout_s)
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = selector.select(deadline.remaining_s())
                if not ready:
                    missing = [rank for rank in range(len(self._processes)) if rank not in answers]
                    raise CommunicatorTimeoutError(
                        f"{self.library}: {name_ranks(missing)} did not answer within {timeout_s:g} s"
                    )
                for key, _ in ready:
                    answers[key.data] = self._answer(key.data)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self._processes))]

    def _answer(self, rank: int) -> Answer:
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            answer: Answer = json.loads(line)
            return answer
        status = process.wait(_END_TIMEOUT_S)
        self._errors[rank].seek(0)
        errors = self._errors[rank].read()
        raise RankError(
            f"rank {rank} of {self.library} ended with status {status}: {errors.strip().rpartition(chr(10))[2]}",
            rank=rank,
            host="localhost",
            traceback_text=errors,
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._is_stopped_when_idle:
            for process in self._processes:
                process.send_signal(number)

    def _end(self) -> None:
        """End the ranks together, as some wait for each other; kill those that do not end in time."""
        self._signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the rank has ended, and the rest of its input is lost
                process.stdin.close()
        deadline = Deadline(_END_TIMEOUT_S)
        for process in self._processes:
            try:
                process.wait(deadline.remaining_s())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
