"""The Python stacks of a rank that hangs, and the position of one that died, as its barrier task reads them.

Getting the stacks does not require the GIL: the barrier task sends a signal on which :mod:`faulthandler` writes them,
without taking a lock, to a :class:`StackFile` that the task reads.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import sparkdl
from sparkdl.collective import Deadline

STACK_SIGNAL = signal.SIGRTMIN + 8
"""On this signal a rank writes the Python stacks of all its threads; no library is known to use it."""

POSITION_BYTES = 4096
"""Size of the first page of the file for the stacks, which holds the rank's position in UTF-8, terminated by a zero."""

MAX_STACK_CHARS = 20_000
"""The stacks of a rank are cut to this length."""

TAKE_TIMEOUT_S = 3.0
_POLL_S = 0.03
_NUM_QUIET_POLLS = 4
"""faulthandler does not mark the end of a dump: it is complete when nothing was added in this number of polls."""

_HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", re.MULTILINE)

_PACKAGE = f'File "{Path(sparkdl.__file__).parent}{os.sep}'
_LAUNCHER = f'{_PACKAGE}launch{os.sep}rank{os.sep}process.py"'
_THREADING = f'File "{threading.__file__}"'

_STATES = {
    "T": "is stopped, as by SIGSTOP",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel for a disk or a network file system, where no signal reaches it",
    "Z": "has ended",
}


def process_state(pid: int) -> str:
    """Describe why a process cannot continue, from its state in the kernel; empty if it can."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return _STATES.get(fields[0], "")


class RankStacks:
    """The rank's end of a :class:`StackFile`: once it is created, a signal makes the rank write its stacks to the file.

    Args:
        fd: file descriptor of the file.
    """

    def __init__(self, fd: int) -> None:
        self._position = mmap.mmap(fd, POSITION_BYTES)
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)

    def note_position(self, position: str) -> None:
        """Note the rank's position in shared memory, where its task reads it if the rank dies."""
        text = position.encode()[: POSITION_BYTES - 1] + b"\0"
        self._position[: len(text)] = text


class StackFile:
    """The file in memory that a rank writes its stacks to, after a page with its position.

    Attributes:
        fd: file descriptor of the file, for the rank to inherit.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("sparkdl-stacks", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, POSITION_BYTES)
        os.lseek(self.fd, POSITION_BYTES, os.SEEK_SET)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def position(self) -> str:
        """Return the position that the rank noted last, also after its death; empty if it noted none."""
        return os.pread(self.fd, POSITION_BYTES, 0).partition(b"\0")[0].decode("utf-8", "replace")

    def take(self, pid: int, threads: Mapping[str, str]) -> str:
        """Make the rank write the stacks of its threads, and return them; empty if it does not do so in time.

        A stopped process is continued. The process must handle the signal, which would end it otherwise.

        Args:
            pid: process id of the rank.
            threads: names of the rank's threads, by their identifiers in Python.
        """
        start = os.fstat(self.fd).st_size
        was_stopped = process_state(pid) == _STATES["T"]
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            if was_stopped:
                os.kill(pid, signal.SIGCONT)
        size = await_dump(self.fd, start)
        return name_threads(os.pread(self.fd, size - start, start).decode("utf-8", "replace"), threads)


def await_dump(fd: int, start: int) -> int:
    """Wait until a file has grown beyond ``start`` and stopped growing, or until a timeout; return its size."""
    deadline, pause = Deadline(TAKE_TIMEOUT_S), threading.Event()
    size, num_quiet = start, 0
    while not deadline.expired and num_quiet < _NUM_QUIET_POLLS:
        pause.wait(_POLL_S)
        before, size = size, os.fstat(fd).st_size
        num_quiet = num_quiet + 1 if size == before > start else 0
    return size


def name_threads(dump: str, threads: Mapping[str, str]) -> str:
    """Name the threads of a dump of faulthandler; put the main thread first and leave out sparkdl's own threads.

    The frames of sparkdl that called the user's function are left out of the main thread.

    Args:
        dump: text that faulthandler wrote.
        threads: names of the threads, by their identifiers; other threads keep their identifier.
    """
    heads = list(_HEAD.finditer(dump))
    ends = [*(head.start() for head in heads[1:]), len(dump)][: len(heads)]
    parts = []
    for head, end in zip(heads, ends, strict=True):
        name = threads.get(str(int(head[1], 16)), f"0x{head[1]}")
        frames = dump[head.end() : end].strip("\n").splitlines()
        is_main = name == "MainThread"
        if is_main:
            frames = list(takewhile(lambda frame: _LAUNCHER not in frame, frames)) or frames
        elif all(_PACKAGE in frame or _THREADING in frame for frame in frames):
            continue
        parts.append((not is_main, "\n".join([f"Thread {name} (most recent call first):", *frames])))
    text = "\n".join(part for _, part in sorted(parts, key=lambda part: part[0]))
    return text if len(text) <= MAX_STACK_CHARS else f"{text[:MAX_STACK_CHARS]}\n..."
