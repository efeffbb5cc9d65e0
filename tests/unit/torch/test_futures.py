from __future__ import annotations

import threading

import pytest
import torch

from sparkdl.torch.futures import FutureCompleter
from tests.collective.eventually import eventually


class Work:
    def __init__(self) -> None:
        self._is_over = threading.Event()

    def wait(self) -> bool:
        return self._is_over.wait()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def end(self) -> None:
        self._is_over.set()


def test_futures_complete_after_a_thread_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of threads is reached while a callback waits for a later future."""
    refused = threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "completer" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    completer = FutureCompleter("completer", timeout_s=30.0)
    works = [Work() for _ in range(3)]
    sources: list[torch.futures.Future[None]] = [torch.futures.Future() for _ in works]
    completer.submit(works[0], sources[0])
    line = completer._line
    assert line is not None
    assert line._owner is not None
    monkeypatch.setattr(threading.Thread, "start", refuse)
    waited = sources[0].then(lambda _: sources[1].wait())
    completer.submit(works[1], sources[1])
    for work in works:
        work.end()
    assert refused.wait(30.0)
    assert eventually(sources[1].done, timeout_s=30.0)  # the next look has started a thread
    waited.wait()
    completer.submit(works[2], sources[2])
    assert eventually(sources[2].done, timeout_s=30.0)
    completer.close(30.0)
