"""Leases: renewed, lost, of one holder alone, and in stores that do not answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from sparkdl.data.files import lease as lease_module
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.files.lease import LEASE_S, Lease, check_lease, hold_alone, modification_time
from sparkdl.errors import CheckpointError, CheckpointsInUseError, StoreError
from tests.collective.eventually import eventually

ELSEWHERE = json.dumps({"host": "there", "pid": 7, "where": "another machine", "began": "1"})

KIND = "_use"

KILLED = """
import os, signal, sys
from sparkdl.data.files.lease import hold_alone
with hold_alone(sys.argv[1], print):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def refuse(text):
    raise AssertionError(text)


def own_lease(folder):
    """The path of a lease of this process, and what it says."""
    with hold_alone(str(folder), refuse):
        (lease,) = folder.iterdir()
        return lease, json.loads(lease.read_text())


def lease_from_elsewhere(folder, content=ELSEWHERE, age_s=0.0):
    lease = folder / "_alone-other"
    lease.write_text(content)
    os.utime(lease, (time.time() - age_s,) * 2)
    return lease


def test_a_second_fit_of_the_same_process_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "checkpoints"
    with hold_alone(str(folder), refuse):
        for _ in range(2):
            with (
                pytest.raises(
                    CheckpointsInUseError, match=f"process {os.getpid()} on .*checkpoints"
                ) as caught,
                hold_alone(str(folder), refuse),
            ):
                raise AssertionError("held by two")
    assert isinstance(caught.value, CheckpointError)
    with hold_alone(str(folder), refuse):
        pass
    assert list(folder.iterdir()) == []


def test_lease_of_a_fit_killed_on_this_host_is_released_at_once(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=500)
    assert killed.returncode == -signal.SIGKILL
    (lease,) = tmp_path.iterdir()
    with hold_alone(str(tmp_path), refuse):
        assert not lease.exists()


def test_lease_of_an_ended_process_whose_number_is_in_use_again_is_released(tmp_path):
    lease, content = own_lease(tmp_path)
    lease.write_text(json.dumps({**content, "began": "1"}))
    with hold_alone(str(tmp_path), refuse):
        assert not lease.exists()


@pytest.mark.parametrize("holder", ["on another host", "unknown", "without a number on this host"])
def test_lease_renewed_by_a_process_that_is_not_seen_refuses_a_second_fit_after_waiting(tmp_path, holder):
    place = {"where": own_lease(tmp_path)[1]["where"]} if "this host" in holder else {}
    content, called = json.dumps(place), "process unknown on an unknown host"
    if holder == "on another host":
        content, called = ELSEWHERE, "process 7 on there"
    lease, told = lease_from_elsewhere(tmp_path, content), []

    def renew(text):
        told.append(text)
        os.utime(lease, (time.time() + 1,) * 2)

    with (
        pytest.raises(CheckpointsInUseError, match=f"of {called}, uses"),
        hold_alone(str(tmp_path), renew),
    ):
        raise AssertionError("held by two")
    (waiting,) = told
    assert waiting.startswith("Waiting ")
    assert f"of {called} still uses the checkpointDir {tmp_path}" in waiting
    assert list(tmp_path.iterdir()) == [lease]


@pytest.mark.parametrize("content", [ELSEWHERE, "", "[]"])
def test_lease_not_renewed_on_another_host_expires(tmp_path, content):
    lease = lease_from_elsewhere(tmp_path, content, age_s=LEASE_S + 1)
    with hold_alone(str(tmp_path), refuse):
        assert not lease.exists()


def test_lease_that_a_living_process_on_this_host_no_longer_renews_expires(tmp_path):
    lease, content = own_lease(tmp_path)
    lease.write_text(json.dumps(content))
    with pytest.raises(CheckpointsInUseError), hold_alone(str(tmp_path), refuse):
        raise AssertionError("held by two")
    os.utime(lease, (time.time() - LEASE_S - 1,) * 2)
    with hold_alone(str(tmp_path), refuse):
        assert not lease.exists()


def test_lease_whose_name_changes_while_another_waits_for_it_still_refuses(tmp_path):
    lease = lease_from_elsewhere(tmp_path)

    def change_name(text):
        if lease.exists():
            lease.rename(tmp_path / "_alone-renamed")
        else:
            os.utime(tmp_path / "_alone-renamed", (time.time() + 1,) * 2)

    with pytest.raises(CheckpointsInUseError), hold_alone(str(tmp_path), change_name):
        raise AssertionError("held by two")


def test_holder_that_was_suspended_notices_at_the_next_start_that_another_has_the_folder(
    tmp_path, monkeypatch
):
    with (
        pytest.raises(CheckpointsInUseError, match="suspended, or cut off from it"),
        hold_alone(str(tmp_path), refuse) as sole,
    ):
        names = sole.names()
        assert next(names) == sole.name
        lease_from_elsewhere(tmp_path)
        monkeypatch.setattr(lease_module, "LEASE_S", 0.0)
        next(names)
        raise AssertionError("held by two")


def test_lease_removed_on_another_host_while_waiting_frees_the_folder(tmp_path):
    lease = lease_from_elsewhere(tmp_path)
    with hold_alone(str(tmp_path), lambda text: lease.unlink()):
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("is_late", [True, False])
def test_deleted_lease_is_an_error_only_if_it_had_expired(tmp_path, monkeypatch, is_late):
    refused = pytest.raises(CheckpointsInUseError, match="suspended, or cut off from it")
    with refused if is_late else nullcontext(), hold_alone(str(tmp_path), refuse) as sole:
        (lease,) = tmp_path.iterdir()
        lease.unlink()
        if is_late:
            monkeypatch.setattr(lease_module, "LEASE_S", 0.0)
        sole.check()  # the last check was before the lease expired
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_late", [True, False])
def test_expired_lease_is_an_error_if_another_fit_holds_one(tmp_path, monkeypatch, is_late):
    refused = pytest.raises(CheckpointsInUseError, match="assume that it has ended")
    with refused if is_late else nullcontext(), hold_alone(str(tmp_path), refuse):
        other = lease_from_elsewhere(tmp_path)
        if is_late:
            monkeypatch.setattr(lease_module, "LEASE_S", 0.0)
    assert list(tmp_path.iterdir()) == [other]


def test_expired_lease_is_no_error_if_no_other_fit_took_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "LEASE_S", 0.0)
    with hold_alone(str(tmp_path), refuse):
        (tmp_path / "_alonely").touch()


def test_checkpoint_folder_that_cannot_be_read_is_a_store_error(tmp_path, monkeypatch):
    def fail(location):
        raise PermissionError("denied")

    lease_from_elsewhere(tmp_path)
    monkeypatch.setattr(lease_module, "store_time", fail)
    with (
        pytest.raises(StoreError, match="whether another fit uses .*: .*denied"),
        hold_alone(str(tmp_path), refuse),
    ):
        raise AssertionError("held")


@pytest.mark.parametrize("is_late", [True, False])
def test_renewals_find_out_that_a_lease_is_lost(tmp_path, monkeypatch, is_late):
    def modified_then_gone(location, name):
        when = modification_time(location, name)
        if name.startswith(KIND):
            (tmp_path / name).unlink()
        return when

    monkeypatch.setattr(lease_module, "RENEWAL_S", 0.001)
    monkeypatch.setattr(lease_module, "modification_time", modified_then_gone)
    if is_late:
        monkeypatch.setattr(lease_module, "LEASE_S", 0.0)
    before = set(threading.enumerate())
    lease = Lease(open_location(str(tmp_path)), KIND)
    assert eventually(lambda: set(threading.enumerate()) <= before, timeout_s=60)
    assert lease.is_lost is is_late


def test_a_folder_that_was_removed_does_not_come_back(tmp_path):
    lease = Lease(open_location(str(tmp_path / "folder")), KIND)
    (tmp_path / "folder" / lease.name).unlink()
    (tmp_path / "folder").rmdir()
    lease.renew_a_last_time()
    assert not lease.is_lost
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "rm"])
def test_store_that_does_not_answer_does_not_delay_the_end_of_a_lease(tmp_path, monkeypatch, call):
    location, before = open_location(str(tmp_path)), set(threading.enumerate())
    called, answer = threading.Event(), threading.Event()

    def hang(*args, **options):
        called.set()
        assert answer.wait(60)

    monkeypatch.setattr(lease_module, "STORE_TIMEOUT_S", 0.01)
    if call == "open":
        monkeypatch.setattr(lease_module, "RENEWAL_S", 0.001)
    lease = Lease(location, KIND)
    monkeypatch.setattr(location.filesystem, call, hang)
    began = time.monotonic()
    if call == "open":
        assert called.wait(60)
    lease.close()
    assert not answer.is_set()
    assert time.monotonic() - began < 60
    answer.set()
    assert eventually(lambda: set(threading.enumerate()) <= before, timeout_s=60)


def test_process_that_acts_for_a_holder_notices_that_it_was_replaced(tmp_path):
    def check(name):
        check_lease(str(tmp_path), name, user="run", setting="checkpoint_dir")

    with hold_alone(str(tmp_path), refuse, user="run", setting="checkpoint_dir") as sole:
        first = sole.name
        check(first)
        second = sole.change_name()
        check(second)
        with pytest.raises(
            CheckpointsInUseError, match="Another run has taken the checkpoint_dir .*restarted"
        ):
            check(first)
        assert [path.name for path in tmp_path.iterdir()] == [second]
        (tmp_path / second).rename(tmp_path / "_alone-other")
        with pytest.raises(CheckpointsInUseError):
            sole.change_name()
        (tmp_path / "_alone-other").unlink()
        with pytest.raises(StoreError, match="cannot reach. Choose a checkpoint_dir .* SPARKDL_STORE"):
            check(second)
