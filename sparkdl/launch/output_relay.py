"""Passes on what a rank prints, line by line. Runs where ranks are started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import IO

from sparkdl.collective import Deadline

_LOOK_S = 0.05
"""Between two looks at whether a reader still takes a line, which lengthens the wait for the last one."""


class OutputRelay:
    """Reads one stream of a rank to its end, from a thread of its own.

    Args:
        output: our end of the stream's pipe; closed at its end.
        on_line: called with each line.
        on_error: called with what ``on_line`` raised, after which nothing is passed on any more.
        name: of the thread.
        max_bytes: of a line; a longer one is passed on in pieces. Any, when negative.
    """

    def __init__(
        self,
        output: IO[bytes],
        *,
        on_line: Callable[[bytes], None],
        on_error: Callable[[OSError], None],
        name: str,
        max_bytes: int = -1,
    ) -> None:
        self._output, self._on_line, self._on_error = output, on_line, on_error
        self._max_bytes = max_bytes
        self._awaits_line = True
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def finish(self, deadline: Deadline, *, is_patient: bool) -> bool:
        """Wait for the last line of a rank that has ended; False if somebody still holds its stream open.

        Args:
            deadline: until when that is waited for.
            is_patient: wait longer while ``on_line`` takes a line: whoever reads may have stopped for a while.
        """
        while self._thread.is_alive():
            if deadline.expired and (self._awaits_line or not is_patient):
                self._is_over = True
                return not self._awaits_line
            self._thread.join(_LOOK_S)
        return True

    def _run(self) -> None:
        with self._output:
            try:
                while line := self._output.readline(self._max_bytes):
                    self._awaits_line = False
                    if self._is_over:
                        return
                    self._on_line(line)
                    self._awaits_line = True
            except OSError as error:
                # Nobody takes what the rank says any more, so it would block, and the others with it.
                self._on_error(error)
