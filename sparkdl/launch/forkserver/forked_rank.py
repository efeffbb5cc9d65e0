"""A rank process, forked from the one that has imported for it: started, watched, ended. In the barrier task."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver.guard import KILL_TIMEOUT_S, end_process_group
from sparkdl.launch.forkserver.kept import Kind, ask_nursery, give_back
from sparkdl.launch.rank.pulse import process_state


class ForkedRank:
    """A rank process, in a group of its own, with its output in a pipe.

    Args:
        environment: its variables.
        more_variables: that it has besides; libraries that are imported already do not see them.
        modules: what it need not import any more.
        name: by which ``ps`` calls it, of at most 15 characters.
        task: file descriptor of its connection to the task.
        stacks: file descriptor that it writes the stacks of its threads to when it is asked to.
        inherited: further descriptors, by the variables that tell it their numbers.
        on_start: called from a thread once the process is there.
        on_exit: called from a thread once it has ended by itself or was ended, or could not be started.

    Attributes:
        output: our end of its pipe.
        exited: set once it has ended.
        status: its exit status then, as of :class:`subprocess.Popen`; None before.
        refusal: why it could not be started, and what was printed meanwhile; None if it could.

    Raises:
        LaunchError: if it cannot be started.
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
            self._kind = Kind(dict(environment), tuple(modules))
            self._nursery = ask_nursery(self._kind, request, [writing, task, stacks, *inherited.values()])
        except BaseException:
            self.output.close()
            raise
        finally:
            os.close(writing)
        self._on_start, self._on_exit = on_start, on_exit
        self._pid: int | None = None
        self._is_settled = threading.Event()
        self.refusal: tuple[str, str] | None = None
        self._is_reaped = False
        self._is_given_up = False
        self._is_unborn = False
        self._nursery_has_ended = False
        self.exited = threading.Event()
        self.status: int | None = None
        threading.Thread(target=self._await_exit, name=f"sparkdl-exit-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id, waiting until it has one.

        Raises:
            LaunchError: if it could not be started.
        """
        self._is_settled.wait()
        if self._pid is None:
            raise LaunchError(self.refusal[0] if self.refusal else "it was ended before it was there")
        return self._pid

    @property
    def is_settled(self) -> bool:
        """Whether it is there, or is known not to come any more."""
        return self._is_settled.is_set()

    @property
    def was_there(self) -> bool:
        """Whether there is or was a process."""
        return self._pid is not None

    def locate_nursery(self) -> tuple[str, str]:
        """Return why what it is forked from cannot go on, in words, nothing if it can, and where it is."""
        state = process_state(self._nursery.pid)
        return state, self._nursery.last_words() if state else self._nursery.where()

    def end(self, *, grace_s: float) -> None:
        """End it and all that it has started; it may take ``grace_s`` after a polite request. May be called again.

        What SIGKILL does not end in time, as ``exited`` then tells, is left to itself, with what it was forked from.

        Its output is the caller's to read to its end and to close.
        """
        if self._is_reaped:
            return
        if not self._is_settled.is_set():
            self._is_unborn = True
            self._nursery.leave()  # and be rid of the rank, should it be there by now
        if self._pid is not None:
            end_process_group(self._pid, self.exited, grace_s=grace_s)
        self._is_reaped = True
        if not self.exited.wait(KILL_TIMEOUT_S):
            self._is_given_up = True
            return
        if self._nursery_has_ended:
            return
        try:
            if self._pid is not None:
                self._nursery.ask({"kind": "reap"})
        except OSError:  # somebody ended it after the rank
            self._nursery.leave()
            return
        give_back(self._kind, self._nursery)

    def _await_exit(self) -> None:
        while (news := self._nursery.hear()) is not None:
            if "pid" in news:
                self._pid = news["pid"]
                self._is_settled.set()
                self._on_start()
                continue
            self.status = news.get("exited")
            if "failure" in news:
                self.refusal = news["failure"], ""
            break
        else:
            self._nursery_has_ended = True
            self.status = -signal.SIGKILL
            if self._pid is not None:
                end_process_group(self._pid, self.exited, grace_s=0.0)
            elif not self._is_unborn:
                how = f"the process that imports for it {self._nursery.how_it_ended()}"
                self.refusal = how, self._nursery.last_words()
            self._nursery.leave()
        self._is_settled.set()
        self.exited.set()
        self._on_exit()
        if self._is_given_up:
            self._nursery.leave()
