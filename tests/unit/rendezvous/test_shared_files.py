from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.collective import RendezvousClient, open_communicator
from sparkdl.rendezvous.hosts import FOLDER, folder_identity, nameless_file
from tests.collective.eventually import eventually
from tests.run_ranks import run_ranks

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment


class Deadly(RendezvousClient):
    """A rendezvous that kills its process once all ranks have exchanged their values of one key."""

    deadly_key: str

    def exchange(self, key: str, **arguments: Any) -> list[bytes] | frozenset[int]:
        values = super().exchange(key, **arguments)
        if key == self.deadly_key:
            os.kill(os.getpid(), signal.SIGKILL)
        return values


def open_and_die(environment: RankEnvironment, key: str) -> str:
    rendezvous: Any = environment.rendezvous.view("deadly")
    rendezvous.__class__, rendezvous.deadly_key = Deadly, key
    open_communicator(
        rendezvous=rendezvous,
        rank=environment.rank,
        world_size=environment.world_size,
        secret=environment.secret,
        timeout_s=20.0,
    )
    return "was not killed"


def names() -> set[str]:
    return {path.name for path in FOLDER.glob("sparkdl-*")}


@pytest.mark.parametrize(
    "key", ["hosts/offers", "hosts/sightings", "segment/made", "segment/opened", "connections/addresses"]
)
def test_ranks_killed_while_they_open_a_communicator_leave_no_files(key: str) -> None:
    before = names()
    assert run_ranks(2, open_and_die, key, may_die=[0, 1]) == [None, None]
    left = names() - before
    assert eventually(lambda: not left & names()), "but for what other processes have there for a moment"


def test_nameless_file_is_readable_only_by_its_user() -> None:
    fd = nameless_file()
    try:
        found = os.fstat(fd)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_nlink == 0
        assert os.pwrite(fd, b"x", 100) == 1
    finally:
        os.close(fd)


def test_file_is_unlinked_where_the_file_system_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sparkdl.rendezvous.hosts.FOLDER", tmp_path)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # the effect of O_TMPFILE on a kernel without it
    fd = nameless_file()
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_has_no_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sparkdl.rendezvous.hosts.FOLDER", tmp_path / "missing")
    assert folder_identity() is None
    monkeypatch.setattr("sparkdl.rendezvous.hosts.FOLDER", tmp_path)
    assert folder_identity() is not None
