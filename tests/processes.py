"""Finds running processes and the addresses on which they listen, for tests that end or examine processes."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Sequence[int], timeout_s: float = 60.0) -> list[int]:
    """Wait for the end of processes and return those that still run."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        pause.wait(0.05)
    return left


def with_descendants(pid: int) -> set[int]:
    """A process and all its descendants that still have their parents."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def runs(pid: int, program: str) -> bool:
    """Whether a process runs a program of this name."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == program
    except (FileNotFoundError, ProcessLookupError):
        return False


def listens_on(pids: Collection[int]) -> list[tuple[int, str]]:
    """The TCP addresses on which processes of this network namespace listen, each with the process id."""
    listening = _listening_sockets()
    found = []
    for pid in pids:
        for number in _descriptors(pid):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{number}")
            except OSError:  # it is closed, like this process's own descriptor of the folder
                continue
            if target in listening:
                found.append((pid, listening[target]))
    return found


def _descriptors(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []


def _listening_sockets() -> dict[str, str]:
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:  # the kernel has no IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A":
                words = bytes.fromhex(fields[1].partition(":")[0])
                # Each word has the byte order of this machine.
                ordered = b"".join(
                    words[at : at + 4][:: -1 if sys.byteorder == "little" else 1]
                    for at in range(0, len(words), 4)
                )
                found[f"socket:[{fields[9]}]"] = str(ipaddress.ip_address(socket.inet_ntop(family, ordered)))
    return found
