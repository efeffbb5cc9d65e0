"""A cable with latency: two network interfaces and a thread that carries packets between them.

``tc``'s netem would do the same, but many machines' kernels are built without it.
"""

from __future__ import annotations

import collections
import fcntl
import os
import selectors
import struct
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from sparkdl.bench.namespaces import Namespace

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_CHECKSUM_AND_SEGMENTATION = 0x1 | 0x2 | 0x4
_LARGEST_PACKET = 1 << 17


class DelayLine:
    """Connects a new interface in one namespace with a new one in another; a context manager.

    Packets stay as large as the kernel makes them (up to 64 KiB, with a header that says how to segment them), so that
    one thread can carry some gigabits per second.

    Args:
        here: namespace of one end.
        name_here: name of the interface in ``here``.
        there: namespace of the other end.
        name_there: name of the interface in ``there``.
        delay_s: delay of each packet in seconds; up to a millisecond is added, the resolution of epoll's timeout.
    """

    def __init__(
        self, here: Namespace, name_here: str, there: Namespace, name_there: str, *, delay_s: float
    ) -> None:
        self._delay_s = delay_s
        ends = (_open_interface(here, name_here), _open_interface(there, name_there))
        self._ends = ends
        self._under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
        self._stopped, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="delay-line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove both interfaces."""
        os.close(self._stop)
        self._thread.join()
        for fd in (*self._ends, self._stopped):
            os.close(fd)

    def __enter__(self) -> DelayLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _carry(self) -> None:
        with selectors.EpollSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ)
            for end, other in zip(self._ends, self._ends[::-1], strict=True):
                selector.register(end, selectors.EVENT_READ, other)
            while True:
                for key, _ in selector.select(self._until_next_s()):
                    if key.fd == self._stopped:
                        return
                    self._take(key.fd, key.data)
                self._deliver()

    def _until_next_s(self) -> float | None:
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def _take(self, fd: int, other: int) -> None:
        try:
            packet = os.read(fd, _LARGEST_PACKET)
        except OSError:  # no packet after all, or the interface is down
            return
        self._under_way.append((time.monotonic() + self._delay_s, other, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, fd, packet = self._under_way.popleft()
            try:
                os.write(fd, packet)
            except OSError:  # a packet for an interface that is down is lost, as on any network
                continue


def _open_interface(namespace: Namespace, name: str) -> int:
    with namespace.entered():
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _CHECKSUM_AND_SEGMENTATION)
    return fd
