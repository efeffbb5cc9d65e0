"""The lease that a fit holds on its folder of checkpoints, so that no other fit uses the folder at the same time.

A fit keeps a lease in the folder as long as it runs, and looks for other leases once it has its own. If two fits begin
at the same time, one or both of them fail, but they never both continue. If a fit's process ended without removing its
lease, this is detected immediately on the same machine, and elsewhere when the lease is no longer renewed. A fit that
was only suspended, or cut off from the folder, is treated as ended, too: it detects that at the next renewal of its
lease, and ends with an error.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data.files.filesystems import open_location
from sparkdl.data.store.housekeeping import LEASE_S, Lease, file_names, modified, store_time
from sparkdl.errors import CheckpointsInUseError, SparkdlError
from sparkdl.meanings import store_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sparkdl.data.files.filesystems import Location


_PREFIX = "_fit-"
_INTERVAL_S = 0.5


@contextmanager
def held_alone(url: str, on_wait: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold the folder of checkpoints for one fit; give a cheap function that raises once the fit has lost the folder.

    Args:
        url: URL of the folder.
        on_wait: function that is called with a text if the fit has to wait for a lease whose holder may have ended.

    Raises:
        CheckpointsInUseError: if another fit uses the folder, or may have used it before the end of this one.
        StoreError: if the folder cannot be written or read.
    """
    location = open_location(url)
    try:
        lease = Lease(location, f"{_PREFIX}{uuid.uuid4().hex}", json.dumps(_this_process()).encode())
    except Exception as error:
        raise store_error(f"The folder {url} cannot be written", error) from error

    def check() -> None:
        if lease.is_lost:
            raise CheckpointsInUseError(
                f"Another fit may use the checkpointDir {url}: this one was suspended, or cut off from it, for more "
                f"than {LEASE_S:g} s, so other fits assume that it has ended. Wait until the other fit has ended and "
                "fit again, which continues from its checkpoints, or choose another checkpointDir."
            )

    try:
        _await_others(location, lease, url, on_wait)
        yield check
        lease.stop()
        lease.renew_if_held()
        check()
    finally:
        lease.end()


def _await_others(location: Location, lease: Lease, url: str, on_wait: Callable[[str], None]) -> None:
    try:
        for name in file_names(location):
            if name.startswith(_PREFIX) and not lease.path.endswith(name):
                _await_end(location, name, url, on_wait)
    except SparkdlError:
        raise
    except Exception as error:
        raise store_error(f"It cannot be determined whether another fit uses {url}", error) from error


def _await_end(location: Location, name: str, url: str, on_wait: Callable[[str], None]) -> None:
    """Wait until a lease has expired, and remove it; raise CheckpointsInUseError if it is renewed."""
    holder = _read(location, name)
    is_alive = _is_alive(holder)
    is_reported = False
    pause = threading.Event()
    with suppress(FileNotFoundError):  # the fit has ended and removed its lease meanwhile
        first = modified(location, name)
        while is_alive is None and store_time(location) - first < LEASE_S:
            if not is_reported:
                on_wait(f"Waiting whether the fit of {_called(holder)} still uses {url}")
                is_reported = True
            pause.wait(_INTERVAL_S)
            if modified(location, name) != first:
                is_alive = True
        if is_alive:
            raise CheckpointsInUseError(
                f"Another fit, of {_called(holder)}, uses the checkpointDir {url}. Wait until it has ended, or choose "
                "another checkpointDir."
            )
        location.filesystem.rm(f"{location.path}/{name}")


def _read(location: Location, name: str) -> dict[str, Any]:
    try:
        with location.filesystem.open(f"{location.path}/{name}", "rb") as file:
            content = json.loads(file.read())
    except (OSError, ValueError):  # the lease was removed, or is being written
        return {}
    return content if isinstance(content, dict) else {}


def _called(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"


def _this_process() -> dict[str, Any]:
    """Return what distinguishes this process from all others, on all machines and in all containers."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "where": _pids_from(),
        "began": _began(os.getpid()),
    }


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether a process is alive; None if that is not known, such as for a process on another machine."""
    where, pid = holder.get("where"), holder.get("pid")
    if where is None or where != _pids_from() or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    return bool(holder.get("began") == _began(pid))


def _pids_from() -> str | None:
    """Return an ID of the boot and PID namespace, which processes share that see each other's PIDs; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _began(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks of its machine; None if it does not exist or is a zombie."""
    try:
        # After the last ")": the process name, in brackets, may contain brackets.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
