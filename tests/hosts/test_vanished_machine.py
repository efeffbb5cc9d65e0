"""A machine that vanishes is noticed within half a minute, also while data is on its way to it."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from sparkdl.bench.namespaces import Namespace, configure, why_impossible
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.rendezvous.dialing import GONE_S, give_up_undelivered, make_prompt

GRACE_S = 30.0
"""Pauses between the kernel's attempts, and between the looks of a connection."""


def seconds_until_gone(sock: socket.socket) -> float:
    began = time.monotonic()
    sock.settimeout(2 * GONE_S + GRACE_S)
    try:
        assert sock.recv(1) == b""
    except TimeoutError as error:
        if error.errno is None:  # of settimeout, and not of the kernel
            raise
    except OSError:
        pass
    return time.monotonic() - began


def seconds_until_unheard(sock: socket.socket) -> float:
    began = time.monotonic()
    assert MessageConnection(sock).receive_while_heard() is None
    return time.monotonic() - began


@pytest.mark.slow
def test_a_vanished_machine_is_noticed_by_idle_and_by_sending_connections() -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    with ExitStack() as stack:
        near, far = stack.enter_context(Namespace()), stack.enter_context(Namespace())
        configure(near, [f"link add eth0 type veth peer name eth0 netns {far.pid}"])
        for number, host in enumerate((near, far), start=1):
            configure(
                host, ["link set lo up", f"address add 10.77.0.{number}/24 dev eth0", "link set eth0 up"]
            )
        with far.entered():
            listener = stack.enter_context(socket.create_server(("10.77.0.2", 0)))
        with near.entered():
            idle, rendezvous, to_driver = (
                stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(3)
            )
        for sock in (idle, rendezvous, to_driver):
            make_prompt(sock)
            stack.enter_context(listener.accept()[0])
        give_up_undelivered(rendezvous)
        configure(far, ["route replace blackhole 10.77.0.1/32"])
        rendezvous.send(b"an answer")
        to_driver.send(b"a heartbeat")
        with ThreadPoolExecutor() as pool:
            waits = [
                pool.submit(seconds_until_gone, idle),
                pool.submit(seconds_until_gone, rendezvous),
                pool.submit(seconds_until_unheard, to_driver),
            ]
        assert all(wait.result() < GONE_S + GRACE_S for wait in waits), [wait.result() for wait in waits]
