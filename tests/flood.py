"""Strangers that flood a port from their own process: thousands of connections that never authenticate.

``with flooded(port, 5000):`` keeps that many connections open; those that the listener closes are opened again. Some
are silent; some send garbage; some send garbage or a handshake one byte at a time; some send a handshake with a false
proof; some are reset as soon as they are open. As a program: ``python -m tests.flood PORT NUM``.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import secrets
import selectors
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = ("silent", "garbage", "drip", "slow handshake", "false proof", "reset")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_DROPS_AT_ONCE = 50
_MAGIC = b"sparkdl\x02"


@contextmanager
def flooded(port: int, num_connections: int) -> Iterator[None]:
    """Flood a port of loopback; enter the block when all connections have been opened once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = min(num_connections, max(hard - 100, 100) if hard != resource.RLIM_INFINITY else num_connections)
    num_processes = -(-num_connections // each)
    command = [sys.executable, "-m", "tests.flood", str(port), str(each)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for _ in range(num_processes)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
        yield
        assert all(process.poll() is None for process in processes), "they still press"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


class _Stranger:
    def __init__(self, port: int, number: int, kind: str) -> None:
        self.kind = kind
        self.sock = socket.socket()
        self.sock.setblocking(False)
        # Use many source addresses: the ports of one would run out, also for legitimate peers.
        self.sock.bind((f"127.1.{number // 200 % 200}.{number % 200 + 1}", 0))
        code = self.sock.connect_ex(("127.0.0.1", port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        self._handshake = iter(_MAGIC + secrets.token_bytes(64))

    def begin(self) -> bool:
        """Send the first bytes of this kind of stranger; return whether it stays connected."""
        if self.kind == "garbage":
            self.sock.send(secrets.token_bytes(300))
        elif self.kind == "false proof":
            self.sock.send(_MAGIC + secrets.token_bytes(64))
        elif self.kind == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        return self.kind != "reset"

    def drip(self) -> None:
        if self.kind == "drip":
            self.sock.send(b"\0")
        elif self.kind == "slow handshake":
            self.sock.send(bytes([next(self._handshake, 0)]))


def main(port: int, num_connections: int) -> None:
    """Flood until killed or until standard input ends; print a line once ``num_connections`` were opened."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    numbers, kinds = itertools.count(), itertools.cycle(_KINDS)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    strangers: dict[int, _Stranger] = {}
    num_opened = 0
    dripping: Iterator[_Stranger] = iter(())

    def leave(stranger: _Stranger) -> None:
        selector.unregister(stranger.sock)
        del strangers[stranger.sock.fileno()]
        stranger.sock.close()

    while True:
        for _ in range(min(num_connections - len(strangers), 500)):
            with suppress(OSError):
                stranger = _Stranger(port, next(numbers), next(kinds))
                strangers[stranger.sock.fileno()] = stranger
                selector.register(stranger.sock, selectors.EVENT_WRITE, stranger)
        for key, events in selector.select(0.01):
            if key.data is None:
                return
            stranger = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    num_opened += 1
                    selector.modify(stranger.sock, selectors.EVENT_READ, stranger)
                    if not stranger.begin():
                        leave(stranger)
                    if num_opened == num_connections:
                        print("open", flush=True)
                elif not stranger.sock.recv(1000):
                    leave(stranger)
            except OSError:
                leave(stranger)
        for _ in range(_DROPS_AT_ONCE):
            next_one = next(dripping, None)
            if next_one is None:
                dripping = iter(list(strangers.values()))
                break
            with suppress(OSError):
                next_one.drip()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
