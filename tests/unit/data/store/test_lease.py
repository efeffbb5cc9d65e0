"""Lost leases, and stores that do not answer."""

from __future__ import annotations

import threading
import time

import pytest

from sparkdl.data.files.filesystems import open_location
from sparkdl.data.store import housekeeping
from sparkdl.data.store.housekeeping import Lease, modified
from tests.collective.eventually import eventually

NAME = "_fit-one"


@pytest.mark.parametrize("is_late", [True, False])
def test_renewals_find_out_that_a_lease_is_lost(tmp_path, monkeypatch, is_late):
    def modified_then_gone(location, name):
        when = modified(location, name)
        if name == NAME:
            (tmp_path / NAME).unlink()
        return when

    monkeypatch.setattr(housekeeping, "RENEWAL_S", 0.001)
    monkeypatch.setattr(housekeeping, "modified", modified_then_gone)
    if is_late:
        monkeypatch.setattr(housekeeping, "LEASE_S", 0.0)
    before = set(threading.enumerate())
    lease = Lease(open_location(str(tmp_path)), NAME)
    assert eventually(lambda: set(threading.enumerate()) <= before, timeout_s=60)
    assert lease.is_lost is is_late


def test_a_folder_that_was_removed_does_not_come_back(tmp_path):
    lease = Lease(open_location(str(tmp_path / "folder")), NAME)
    (tmp_path / "folder" / NAME).unlink()
    (tmp_path / "folder").rmdir()
    lease.stop()
    lease.renew_if_held()
    assert not lease.is_lost
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "rm"])
def test_store_that_does_not_answer_does_not_delay_the_end_of_a_lease(tmp_path, monkeypatch, call):
    location, before = open_location(str(tmp_path)), set(threading.enumerate())
    called, answer = threading.Event(), threading.Event()

    def hang(*args, **options):
        called.set()
        assert answer.wait(60)

    monkeypatch.setattr(housekeeping, "STORE_TIMEOUT_S", 0.01)
    if call == "open":
        monkeypatch.setattr(housekeeping, "RENEWAL_S", 0.001)
    lease = Lease(location, NAME)
    monkeypatch.setattr(location.filesystem, call, hang)
    began = time.monotonic()
    if call == "open":
        assert called.wait(60)
    lease.end()
    assert not answer.is_set()
    assert time.monotonic() - began < 60
    answer.set()
    assert eventually(lambda: set(threading.enumerate()) <= before, timeout_s=60)
