from __future__ import annotations

import os
import threading
from typing import BinaryIO

import pytest

from sparkdl.collective import Deadline
from sparkdl.launch.task.supervisor import OutputRelay
from tests.collective.eventually import eventually


@pytest.fixture
def pipe() -> tuple[BinaryIO, int]:
    read_fd, write_fd = os.pipe()
    return os.fdopen(read_fd, "rb"), write_fd


def test_reader_that_stops_to_read_gets_its_line_and_an_open_stream_is_told(
    pipe: tuple[BinaryIO, int],
) -> None:
    output, write_fd = pipe
    lines: list[bytes] = []
    gate = threading.Event()

    def take(line: bytes) -> None:
        gate.wait(10.0)
        lines.append(line)

    relay = OutputRelay(output, on_line=take, on_error=_raise, name="relay")
    os.write(write_fd, b"first\n")
    assert eventually(lambda: not relay._awaits_line)
    threading.Timer(0.2, gate.set).start()
    assert not relay.finish(Deadline(0.0), is_patient=True), "the stream is still open"
    assert lines == [b"first\n"]
    os.close(write_fd)


def test_reader_that_has_stopped_is_not_waited_for_without_patience(pipe: tuple[BinaryIO, int]) -> None:
    output, write_fd = pipe
    gate = threading.Event()
    relay = OutputRelay(output, on_line=lambda _: gate.wait(10.0) and None, on_error=_raise, name="relay")
    os.write(write_fd, b"first\n")
    os.close(write_fd)
    assert eventually(lambda: not relay._awaits_line)
    assert relay.finish(Deadline(0.0), is_patient=False)
    assert not gate.is_set()
    gate.set()


def test_stream_that_ends_is_finished(pipe: tuple[BinaryIO, int]) -> None:
    output, write_fd = pipe
    lines: list[bytes] = []
    relay = OutputRelay(output, on_line=lines.append, on_error=_raise, name="relay")
    os.write(write_fd, b"only\nno end")
    os.close(write_fd)
    assert relay.finish(Deadline(5.0), is_patient=True)
    assert lines == [b"only\n", b"no end"]


def _raise(error: OSError) -> None:
    raise error
