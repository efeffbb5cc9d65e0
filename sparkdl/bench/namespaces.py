"""Namespaces with a network and a ``/dev/shm`` for some processes; needs root, ``ip`` and ``unshare``."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING

from sparkdl.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CLONE_NEWNET = 0x40000000
_COMMANDS = ("ip", "tc", "unshare", "nsenter")
_END_TIMEOUT_S = 10.0


class Namespace(Closing):
    """Namespaces that exist as long as a process that does nothing else; a context manager.

    They have no names that a killed test could leave behind: their process ends when its standard input does, which
    happens when this process ends in any way; then the kernel removes their interfaces and mounts.

    Attributes:
        pid: process id of the process whose namespaces these are.
    """

    def __init__(self) -> None:
        # cat echoes the first line once unshare has created the namespaces and executed cat.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "cat"],  # noqa: S607  # found where the user has it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        try:
            self._holder.stdin.write(b"here\n")
            self._holder.stdin.flush()
            answer = self._holder.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer != b"here\n":
            _, complaint = self._holder.communicate()
            raise OSError(
                f"cannot make namespaces: {complaint.decode().strip()}; in a container this takes CAP_SYS_ADMIN and "
                "CAP_NET_ADMIN"
            )
        self.pid = self._holder.pid
        self.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])  # noqa: S108  # of the namespace

    def command(self) -> list[str]:
        """The prefix of a command line that runs inside."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--wd"]

    def run(self, command: Sequence[str], text: str = "") -> str:
        """Run a command inside with ``text`` as its input; return its output."""
        done = subprocess.run(
            [*self.command(), *command], input=text, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}\n{text}")
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Create sockets and threads of the calling thread in this network while the block runs."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            inside = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
            try:
                _enter(inside)
            finally:
                os.close(inside)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def close(self) -> None:
        """End the process that holds the namespaces."""
        self._holder.communicate(timeout=_END_TIMEOUT_S)


@cache
def why_impossible() -> str:
    """The reason why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "making hosts of network namespaces takes root"
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"{', '.join(missing)} missing; apt-get install iproute2 util-linux"
    try:
        with Namespace() as namespace:
            configure(
                namespace, ["link add bridge0 type bridge", "link add cable0 type veth peer name cable1"]
            )
            limit(namespace, "cable0", 1.0)
    except OSError as error:
        return str(error)
    return ""


INTERFACE = "eth0"
"""Name of a host's interface."""

_BURST = "256kb"
"""Size of the token bucket: it must hold the largest packet before the kernel segments it, 64 KiB."""

_QUEUE_MS = 10


def limit(namespace: Namespace, interface: str, gigabits_per_s: float) -> None:
    """Limit the rate at which an interface sends, by a token bucket (``tc``'s tbf)."""
    rate = f"rate {round(gigabits_per_s * 1e9)}bit burst {_BURST} latency {_QUEUE_MS}ms"
    namespace.run(["tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate.split()])


def configure(namespace: Namespace, commands: Sequence[str]) -> None:
    """Run commands of ``ip`` inside."""
    namespace.run(["ip", "-batch", "-"], "\n".join(commands) + "\n")


@contextmanager
def limited_hosts(number: int, gigabits_per_s: float) -> Iterator[tuple[Namespace, ...]]:
    """Make hosts with a cable each to one switch; all cables are limited in both directions."""
    with ExitStack() as stack:
        switch = stack.enter_context(Namespace())
        configure(switch, ["link add switch0 type bridge mcast_snooping 0", "link set switch0 up"])
        hosts = tuple(stack.enter_context(Namespace()) for _ in range(number))
        for index, host in enumerate(hosts):
            port = f"port{index}"
            cable = f"link add {port} type veth peer name {INTERFACE} netns {host.pid}"
            configure(switch, [cable, f"link set {port} master switch0", f"link set {port} up"])
            address = f"10.77.1.{index + 1}/24"
            configure(
                host, ["link set lo up", f"address add {address} dev {INTERFACE}", f"link set {INTERFACE} up"]
            )
            limit(host, INTERFACE, gigabits_per_s)
            limit(switch, port, gigabits_per_s)
        yield hosts


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
