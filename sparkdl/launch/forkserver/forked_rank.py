"""A rank process that is forked from the forkserver: started, watched and ended by the barrier task."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver.guard import KILL_TIMEOUT_S, end_process_group
from sparkdl.launch.forkserver.reuse import ForkserverKind, keep, request_rank
from sparkdl.launch.rank.stacks import process_state


class ForkedRank:
    """A rank process, in a process group of its own, with its output in a pipe.

    Args:
        environment: environment variables of the process and of its forkserver.
        more_variables: further environment variables, set after the fork; libraries that are already imported do not
            see them.
        modules: modules that the forkserver has imported.
        name: name of the process in ``ps``, of at most 15 characters.
        task: file descriptor of the rank's connection to the task.
        stacks: file descriptor to which the rank writes the stacks of its threads on request.
        inherited: further descriptors, by the environment variables that hold their numbers.
        on_start: called from a thread once the process runs.
        on_exit: called from a thread once the process has ended, or could not be started.

    Attributes:
        output: reading end of the pipe.
        start_is_decided: event that is set once the process has started, or is known not to start any more.
        exited: event that is set once the process has ended, or could not be started.
        status: exit status of the ended process, as :class:`subprocess.Popen` reports it; None before its end.
        refusal: why the process could not be started, and the output of the forkserver; None without such a failure.

    Raises:
        LaunchError: if the process cannot be started.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        more_variables: Mapping[str, str],
        modules: Sequence[str],
        name: str,
        task: int,
        stacks: int,
        inherited: Mapping[str, int],
        on_start: Callable[[], None],
        on_exit: Callable[[], None],
    ) -> None:
        request = {
            "kind": "fork",
            "variables": dict(more_variables),
            "folder": os.getcwd(),
            "name": name,
            "inherited": list(inherited),
        }
        reading, writing = os.pipe()
        self.output: IO[bytes] = os.fdopen(reading, "rb")
        try:
            self._kind = ForkserverKind(dict(environment), tuple(modules))
            self._forkserver = request_rank(self._kind, request, [writing, task, stacks, *inherited.values()])
        except BaseException:
            self.output.close()
            raise
        finally:
            os.close(writing)
        self._on_start, self._on_exit = on_start, on_exit
        self._pid: int | None = None
        self.start_is_decided = threading.Event()
        self.refusal: tuple[str, str] | None = None
        self._is_reaped = False
        self._is_abandoned = False
        self._was_ended_before_start = False
        self._forkserver_has_ended = False
        self.exited = threading.Event()
        self.status: int | None = None
        threading.Thread(target=self._await_exit, name=f"sparkdl-exit-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the rank; waits until the process has started.

        Raises:
            LaunchError: if the process could not be started.
        """
        self.start_is_decided.wait()
        if self._pid is None:
            raise LaunchError(self.refusal[0] if self.refusal else "it was ended before it had started")
        return self._pid

    @property
    def has_started(self) -> bool:
        """Whether the process was started; it may have ended since."""
        return self._pid is not None

    def examine_forkserver(self) -> tuple[str, str]:
        """Return a text that says why the forkserver cannot continue, empty if it can, and its last output.

        If it can continue, the output ends with the stacks of its threads.
        """
        state = process_state(self._forkserver.pid)
        return state, self._forkserver.last_output() if state else self._forkserver.dump_stacks()

    def end(self, *, grace_s: float) -> None:
        """End the rank and all processes that it has started: SIGTERM, then SIGKILL. May be called again.

        If SIGKILL does not end the rank in time, which ``exited`` shows, it is abandoned together with its forkserver.

        The caller has to read the rank's output to the end and close it.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL.
        """
        if self._is_reaped:
            return
        if not self.start_is_decided.is_set():
            self._was_ended_before_start = True
            self._forkserver.disconnect()  # also ends the rank if it has started meanwhile
        if self._pid is not None:
            end_process_group(self._pid, self.exited, grace_s=grace_s)
        self._is_reaped = True
        if not self.exited.wait(KILL_TIMEOUT_S):
            self._is_abandoned = True
            if self.exited.is_set():  # just now: the thread that waits for the exit may have seen no flag
                self._forkserver.disconnect()
            return
        if self._forkserver_has_ended:
            return
        try:
            if self._pid is not None:
                self._forkserver.send({"kind": "reap"})
        except OSError:  # the forkserver was ended after the rank
            self._forkserver.disconnect()
            return
        keep(self._kind, self._forkserver)

    def _await_exit(self) -> None:
        while (message := self._forkserver.receive()) is not None:
            if "pid" in message:
                self._pid = message["pid"]
                self.start_is_decided.set()
                self._on_start()
                continue
            self.status = message.get("exited")
            if "failure" in message:
                self.refusal = message["failure"], ""
            break
        else:
            self._forkserver_has_ended = True
            self.status = -signal.SIGKILL
            if self._pid is not None:
                end_process_group(self._pid, self.exited, grace_s=0.0)
            elif not self._was_ended_before_start:
                how = f"the forkserver {self._forkserver.describe_exit()}"
                self.refusal = how, self._forkserver.last_output()
            self._forkserver.disconnect()
        self.start_is_decided.set()
        self.exited.set()
        self._on_exit()
        if self._is_abandoned:
            self._forkserver.disconnect()
