"""Rank processes that persist between calls, for tests that call them hundreds of times."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import threading
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.collective import Deadline
from tests.run_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tests.run_ranks import RankEnvironment

    Serve = Callable[..., AbstractContextManager[Callable[[Any], Any]]]

_LEAVE_S = 20.0
_CALL_TIMEOUT_S = 500.0
_LIFE_S = 24 * 3600.0
"""Longer than any caller lives; the ranks end with the caller."""


class LastingRanks:
    """Ranks that answer calls until they are closed, or until one of them fails or is late; a context manager.

    Args:
        world_size: number of ranks.
        serve: function at the top of a module that is called on every rank as ``serve(environment, *args)``; it
            returns a context manager whose value is the function that answers the calls.
        args: further arguments of ``serve``.
        transport: default transport of the ranks' communicators.
    """

    def __init__(self, world_size: int, serve: Serve, *args: Any, transport: str = "auto") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._failure: BaseException | None = None
        key = secrets.token_bytes(32)
        address = str(Path(self._folder.name, "calls"))
        self._thread = threading.Thread(
            target=self._run, args=(world_size, address, key, serve, args, transport), name="lasting-ranks"
        )
        callers: dict[int, tuple[int, Connection]] = {}
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            self._thread.start()
            while len(callers) < world_size and self._failure is None:
                connection = listener.accept()
                with contextlib.suppress(EOFError):
                    rank, pid = connection.recv()
                    callers[rank] = pid, connection
        self._pids = [pid for pid, _ in callers.values()]
        self._connections = [callers[rank][1] for rank in sorted(callers)]
        if self._failure is not None:
            self.close()
            raise self._failure

    @property
    def is_alive(self) -> bool:
        """Whether further calls can be made."""
        return bool(self._connections)

    def call(self, argument: Any) -> list[Any]:
        """Call all ranks and return their answers by rank; when this raises, all of them have ended.

        Raises:
            RankError: if the call raised on a rank, or a rank died.
            TimeoutError: if some ranks do not answer in time.
        """
        deadline = Deadline(_CALL_TIMEOUT_S)
        answers: dict[int, Any] = {}
        try:
            for connection in self._connections:
                connection.send(argument)
            while len(answers) < len(self._connections):
                waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
                ready = wait(list(waiting), deadline.remaining_s())
                if not ready:
                    break
                for connection in ready:
                    assert isinstance(connection, Connection)
                    answers[waiting[connection]] = connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise self._failure or error from None
        if late := sorted(waiting.values() if len(answers) < len(self._connections) else ()):
            self._kill()
            self.close()
            raise TimeoutError(f"ranks {late} did not answer within {_CALL_TIMEOUT_S:g} s")
        return [answers[rank] for rank in range(len(answers))]

    def close(self) -> None:
        """End the ranks; may be called repeatedly."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            self._kill()
            self._thread.join()
        self._folder.cleanup()

    def __enter__(self) -> LastingRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(
        self, world_size: int, address: str, key: bytes, serve: Serve, args: tuple[Any, ...], transport: str
    ) -> None:
        try:
            run_ranks(world_size, _answer, address, key, serve, args, transport=transport, timeout_s=_LIFE_S)
        except BaseException as error:
            self._failure = error
            # Unblocks a caller that still waits for the ranks to connect.
            with contextlib.suppress(OSError):
                Client(address, "AF_UNIX", authkey=key).close()

    def _kill(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _answer(
    environment: RankEnvironment, address: str, key: bytes, serve: Serve, args: tuple[Any, ...]
) -> None:
    with Client(address, "AF_UNIX", authkey=key) as connection:
        connection.send((environment.rank, os.getpid()))
        with serve(environment, *args) as answer:
            while True:
                try:
                    argument = connection.recv()
                except EOFError:
                    return
                connection.send(answer(argument))
