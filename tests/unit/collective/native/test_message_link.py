from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.collective.native.message_link import MessageLink
from sparkdl.collective.native.point_to_point import AnySource
from sparkdl.errors import CommunicatorAbortedError

TIMEOUT_S = 30.0

RENDEZVOUS: Any = SimpleNamespace(view=lambda *_: RENDEZVOUS)


class Pair:
    """A communicator of two ranks whose other end says nothing."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()
        self.reason = ""

    def broadcast(self, array: object, **_: Any) -> None:
        self.is_aborted.wait()
        raise CommunicatorAbortedError(self.reason)

    def abort(self, reason: str) -> None:
        self.reason = reason
        self.is_aborted.set()

    def close(self) -> None:
        pass


class Parent:
    """The communicator of a link, which opens pairs once it may."""

    name, rank, world_ranks, secret = "world", 0, (0, 1), b""
    world_size, requested_transport = 2, "tcp"
    topology = SimpleNamespace(hosts_of=lambda _: [0, 0])

    def __init__(self) -> None:
        self.is_asked, self.may_open = threading.Event(), threading.Event()
        self.pairs: list[Pair] = []

    def open_other(self, **_: Any) -> Pair:
        self.is_asked.set()
        assert self.may_open.wait(TIMEOUT_S)
        self.pairs.append(Pair())
        return self.pairs[-1]


def test_a_link_that_is_closed_while_it_opens_ends() -> None:
    parent: Any = Parent()
    anyone: Any = SimpleNamespace(called=lambda _: nullcontext())
    link = MessageLink(parent, RENDEZVOUS, 1, TIMEOUT_S, anyone)
    assert parent.is_asked.wait(TIMEOUT_S)
    link.finish()
    while link._broken is None:  # the end has decided that there is nothing to close yet
        link._threads[1].join(0.01)
    parent.may_open.set()
    joining = threading.Thread(target=link.join, daemon=True)
    joining.start()
    joining.join(TIMEOUT_S)
    assert not joining.is_alive()
    assert [pair.is_aborted.is_set() for pair in parent.pairs] == [True, True]


def test_no_message_waits_for_a_thread_that_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    messages: Any = set()  # not used before a thread has started
    communicator: Any = Parent()
    source = AnySource(messages, communicator, RENDEZVOUS)
    message: Any = SimpleNamespace(tag=3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            source.put(message)
    assert source.take(3) is None
    source.join()
