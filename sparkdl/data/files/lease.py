"""The lease over a folder: a small file that is renewed as long as its holder lives.

A lease that has not been renewed for :data:`LEASE_S` seconds counts as ended, for example because its process was
killed. Times are modification times of files, by the store's own clock, so that machines whose clocks differ agree.

Any number of processes may hold a :class:`Lease` of a folder. :func:`hold_alone` admits one holder at a time: it takes
a lease first, and looks for others then. If two processes begin at the same time, one or both of them fail, but they
never both continue. If a process ended without removing its lease, this is detected immediately on the same machine,
and elsewhere when the lease is no longer renewed. A process that was only suspended, or cut off from the folder, is
treated as ended, too: it detects that at the next renewal, and ends with an error.

The name of a lease tells its holder apart from earlier and later ones. A process that acts for a holder knows the name,
and checks by :func:`check_lease` that the lease still exists before it changes the folder.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.closing import Closing
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import CheckpointsInUseError, StoreError
from sparkdl.foreign_errors import store_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sparkdl.data.files.filesystems import Location


logger = logging.getLogger(__name__)

LEASE_S = 120.0
"""Seconds after which a lease that is not renewed has expired."""

RENEWAL_S = 20.0
"""Seconds between two renewals."""

STORE_TIMEOUT_S = 10.0
"""Seconds that the end of a lease waits for the store."""

_ALONE = "_alone"
_INTERVAL_S = 0.5


class Lease(Closing):
    """A lease that lasts from its creation to :meth:`close`.

    Args:
        location: location of the folder. It is made if it does not exist.
        kind: beginning of the names of leases that exclude or protect each other.
        last_use: name of a file that is written when the lease ends; empty for none.

    Attributes:
        name: name of the lease's file.
        began: modification time of the file when it was first written, in seconds.
        is_lost: whether other processes may have considered the lease expired, because it was not renewed in time: its
            file has been removed since, or the folder has another lease of the same kind. A lease whose file was
            deleted before it expired is not lost, and not renewed either.

    Raises:
        Exception: an error of the filesystem, if the folder cannot be written.
    """

    def __init__(self, location: Location, kind: str, *, last_use: str = "") -> None:
        self._location, self._kind, self._last_use = location, kind, last_use
        self.name = f"{kind}-{uuid.uuid4().hex}"
        # What distinguishes this process from all others, on all machines and in all containers.
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "where": _pid_namespace(),
            "began": _start_time(os.getpid()),
        }
        self._content = json.dumps(holder).encode()
        location.make_folder()
        self._write(self.name)
        self.began = self._renewed = modification_time(location, self.name)
        self.is_lost = self._has_ended = False
        self._is_over = threading.Event()
        self._renewing = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="sparkdl-lease", daemon=True)
        self._thread.start()

    def change_name(self) -> str:
        """Continue under another name, and return it: processes that know the former one cannot act for the holder.

        Raises:
            Exception: an error of the filesystem.
        """
        with self._renewing:
            former, name = self.name, f"{self._kind}-{uuid.uuid4().hex}"
            self._write(name)
            before, self._renewed = self._renewed, modification_time(self._location, name)
            if self._renewed - before >= LEASE_S:
                self.is_lost |= set(_names_of_leases(self._location, self._kind)) != {former, name}
            self.name = name
            with suppress(FileNotFoundError):
                self._location.filesystem.rm(f"{self._location.path}/{former}")
        return name

    def close(self) -> None:
        """Stop renewing the lease and remove the file if possible; calling it again does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._is_over.set()
        self._within_timeout(self._remove)

    def renew_a_last_time(self) -> None:
        """Stop renewing the lease, and find out whether it is lost, unless the store does not answer."""
        self._is_over.set()
        self._within_timeout(self._look_or_warn)

    def _within_timeout(self, function: Callable[[], object]) -> None:
        """Call a function that uses the store, after the renewals have stopped; warn if the store does not answer."""
        thread = self._thread
        thread.join(STORE_TIMEOUT_S)
        if not thread.is_alive():
            thread = threading.Thread(target=function, name="sparkdl-lease-end", daemon=True)
            thread.start()
            thread.join(STORE_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("The store of %s has not answered for %g s.", self._location.path, STORE_TIMEOUT_S)

    def _renew(self) -> None:
        while not self._is_over.wait(RENEWAL_S):
            if not self._look_or_warn():
                return

    def _look_or_warn(self) -> bool:
        """Renew the lease, and return whether there is still a lease to renew."""
        try:
            with self._renewing:
                return self._look()
        except Exception as error:
            logger.warning("The use of %s could not be renewed: %s", self._location.path, error)
            return True

    def _look(self) -> bool:
        filesystem = self._location.filesystem
        filesystem.invalidate_cache()
        if not filesystem.exists(f"{self._location.path}/{self.name}"):
            # A missing file was removed by others after it expired, or deleted on purpose, with the folder or without.
            if filesystem.exists(self._location.path):
                self.is_lost |= store_time(self._location) - self._renewed >= LEASE_S
            return False
        self._write(self.name)
        before, self._renewed = self._renewed, modification_time(self._location, self.name)
        if self._renewed - before >= LEASE_S:
            # Another process may have removed the file after the check, before it was written again.
            self.is_lost |= _names_of_leases(self._location, self._kind) != [self.name]
        return True

    def _remove(self) -> None:
        path = f"{self._location.path}/{self.name}"
        with suppress(Exception):
            # A folder that was removed meanwhile must not be created again just for this record.
            if self._last_use and self._location.filesystem.exists(path):
                self._write(self._last_use)
        with suppress(Exception):
            self._location.filesystem.rm(path)

    def _write(self, name: str) -> None:
        self._location.filesystem.pipe_file(f"{self._location.path}/{name}", self._content)


def modification_time(location: Location, name: str) -> float:
    """Return the modification time of a file in a folder, in seconds.

    Raises:
        Exception: an error of the filesystem, if the file does not exist.
    """
    location.filesystem.invalidate_cache()
    return float(location.filesystem.modified(f"{location.path}/{name}").timestamp())


def store_time(location: Location) -> float:
    """Return the time of a store's clock in seconds, which is the modification time of a file written for this."""
    name = f"clock-{uuid.uuid4().hex}.tmp"
    location.filesystem.pipe_file(f"{location.path}/{name}", b"sparkdl")
    try:
        return modification_time(location, name)
    finally:
        with suppress(FileNotFoundError):
            location.filesystem.rm(f"{location.path}/{name}")


def file_names(location: Location) -> list[str]:
    """Return the names of the files and folders directly in a folder; none if it does not exist."""
    try:
        location.filesystem.invalidate_cache()
        paths: Iterable[object] = location.filesystem.ls(location.path, detail=False)
    except FileNotFoundError:
        return []
    return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths]


def _names_of_leases(location: Location, kind: str) -> list[str]:
    return [name for name in file_names(location) if name.startswith(f"{kind}-")]


class SoleLease(Lease):
    """The lease of the only holder of a folder of checkpoints; :func:`hold_alone` makes it.

    Args:
        location: location of the folder.
        url: URL of the folder.
        user: what uses the folder, such as ``"fit"``.
        setting: name of the user's setting of the folder.

    Attributes:
        url: URL of the folder.
    """

    def __init__(self, location: Location, url: str, user: str, setting: str) -> None:
        super().__init__(location, _ALONE)
        self.url, self._user, self._setting = url, user, setting

    def check(self) -> None:
        """Check without a request to the store that the lease was renewed in time.

        Raises:
            CheckpointsInUseError: if it was not.
        """
        if self.is_lost:
            raise CheckpointsInUseError(
                f"Another {self._user} may use the {self._setting} {self.url}: this one was suspended, or cut off "
                f"from it, for more than {LEASE_S:g} s, so others assume that it has ended. Wait until the other "
                f"{self._user} has ended and start again, which continues from its checkpoints, or choose another "
                f"{self._setting}."
            )

    def names(self) -> Iterator[str]:
        """Yield a name of the lease for each start of the ranks that act for the holder; see :meth:`change_name`."""
        yield self.name
        while True:
            yield self.change_name()

    def change_name(self) -> str:
        """Continue under another name, and return it; see :meth:`Lease.change_name`.

        Raises:
            CheckpointsInUseError: if the lease is lost.
            StoreError: if the folder cannot be written.
        """
        check_lease(self.url, self.name, user=self._user, setting=self._setting)
        with store_errors(f"The folder {self.url} cannot be written"):
            super().change_name()
        self.check()
        return self.name


@contextmanager
def hold_alone(
    url: str, on_wait: Callable[[str], None], *, user: str = "fit", setting: str = "checkpointDir"
) -> Iterator[SoleLease]:
    """Hold a folder of checkpoints for one user.

    Args:
        url: URL of the folder.
        on_wait: function that is called with a text if this has to wait for a lease whose holder may have ended.
        user: what uses the folder, for messages.
        setting: name of the user's setting of the folder.

    Raises:
        CheckpointsInUseError: if there is another holder, or may have been one before the end of this one.
        StoreError: if the folder cannot be written or read.
    """
    location = open_location(url)
    with store_errors(
        f"The folder {url} cannot be written",
        f"Choose a {setting} that the driver and every executor can write.",
    ):
        lease = SoleLease(location, url, user, setting)
    with lease:
        with store_errors(f"It cannot be determined whether another {user} uses {url}"):
            # Again after each wait: the other holder may have changed the name of its lease meanwhile.
            while others := [name for name in _names_of_leases(location, _ALONE) if name != lease.name]:
                for name in others:
                    _await_end(location, name, on_wait, f"the {setting} {url}", user)
        yield lease
        lease.renew_a_last_time()
        lease.check()


def check_lease(url: str, name: str, *, user: str, setting: str) -> None:
    """Check that the holder for which this process acts still holds a folder alone.

    Args:
        url: URL of the folder.
        name: name of the lease's file.
        user: what uses the folder, for messages.
        setting: name of the user's setting of the folder.

    Raises:
        CheckpointsInUseError: if another holder has taken the folder, or the lease has another name since.
        StoreError: if the folder cannot be read, or this machine does not see the holder's folder.
    """
    location = open_location(url)
    with store_errors(f"{url} cannot be read on {socket.gethostname()}"):
        location.filesystem.invalidate_cache()
        if location.filesystem.exists(f"{location.path}/{name}"):
            return
        others = _names_of_leases(location, _ALONE)
    if not others:
        raise StoreError(
            f"Nothing can be written to {url}, which {socket.gethostname()} cannot reach. Choose a {setting} that the "
            "driver and every executor reach, or set SPARKDL_STORE to such a folder."
        )
    raise CheckpointsInUseError(
        f"Another {user} has taken the {setting} {url} since this one began, or this rank was considered lost and the "
        f"ranks were restarted. Give each {user} its own folder."
    )


def _await_end(location: Location, name: str, on_wait: Callable[[str], None], folder: str, user: str) -> None:
    """Wait until a lease has expired, and remove it; raise CheckpointsInUseError if it is renewed.

    The lease of a process that lives expires as well: the process may be suspended, or may have failed to remove it.
    """
    holder = _read_holder(location, name)
    process = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    in_use = CheckpointsInUseError(
        f"Another {user}, of {process}, uses {folder}. Wait until it has ended, or choose another folder."
    )
    is_alive = _is_alive(holder)
    is_reported = False
    pause = threading.Event()
    with suppress(FileNotFoundError):  # the holder has ended and removed its lease meanwhile
        first = modification_time(location, name)
        while is_alive is not False and store_time(location) - first < LEASE_S:
            if is_alive:
                raise in_use
            if not is_reported:
                on_wait(f"Waiting whether the {user} of {process} still uses {folder}")
                is_reported = True
            pause.wait(_INTERVAL_S)
            if modification_time(location, name) != first:
                raise in_use
        location.filesystem.rm(f"{location.path}/{name}")


def _read_holder(location: Location, name: str) -> dict[str, Any]:
    try:
        content = json.loads(location.filesystem.cat_file(f"{location.path}/{name}"))
    except (OSError, ValueError):  # the lease was removed, or is being written
        return {}
    return content if isinstance(content, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether a process is alive; None if that is not known, such as for a process on another machine."""
    where, pid = holder.get("where"), holder.get("pid")
    if where is None or where != _pid_namespace() or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    return bool(holder.get("began") == _start_time(pid))


def _pid_namespace() -> str | None:
    """Return an ID of the boot and PID namespace, which processes share that see each other's PIDs; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks of its machine; None if it does not exist or is a zombie."""
    try:
        # After the last ")": the process name, in brackets, may contain brackets.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
