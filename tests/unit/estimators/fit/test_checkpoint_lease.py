"""Concurrent fits do not share a checkpointDir."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest

from sparkdl.data.store import housekeeping
from sparkdl.data.store.housekeeping import LEASE_S
from sparkdl.errors import CheckpointError, CheckpointsInUseError, StoreError
from sparkdl.estimators.fit import checkpoint_lease
from sparkdl.estimators.fit.checkpoint_lease import held_alone

ELSEWHERE = json.dumps({"host": "there", "pid": 7, "where": "another machine", "began": "1"})

KILLED = """
import os, signal, sys
from sparkdl.estimators.fit.checkpoint_lease import held_alone
with held_alone(sys.argv[1], print):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def refuse(text):
    raise AssertionError(text)


def own_lease(folder):
    """The path of a lease of this process, and what it says."""
    with held_alone(str(folder), refuse):
        (lease,) = folder.iterdir()
        return lease, json.loads(lease.read_text())


def lease_from_elsewhere(folder, content=ELSEWHERE, age_s=0.0):
    lease = folder / "_fit-other"
    lease.write_text(content)
    os.utime(lease, (time.time() - age_s,) * 2)
    return lease


def test_a_second_fit_of_the_same_process_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "checkpoints"
    with held_alone(str(folder), refuse):
        for _ in range(2):
            with (
                pytest.raises(
                    CheckpointsInUseError, match=f"process {os.getpid()} on .*checkpoints"
                ) as caught,
                held_alone(str(folder), refuse),
            ):
                raise AssertionError("held by two")
    assert isinstance(caught.value, CheckpointError)
    with held_alone(str(folder), refuse):
        pass
    assert list(folder.iterdir()) == []


def test_lease_of_a_fit_killed_on_this_host_is_released_at_once(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=500)
    assert killed.returncode == -signal.SIGKILL
    (lease,) = tmp_path.iterdir()
    with held_alone(str(tmp_path), refuse):
        assert not lease.exists()


def test_lease_of_an_ended_process_whose_number_is_in_use_again_is_released(tmp_path):
    lease, content = own_lease(tmp_path)
    lease.write_text(json.dumps({**content, "began": "1"}))
    with held_alone(str(tmp_path), refuse):
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
        held_alone(str(tmp_path), renew),
    ):
        raise AssertionError("held by two")
    (waiting,) = told
    assert waiting.startswith("Waiting ")
    assert f"of {called} still uses {tmp_path}" in waiting
    assert list(tmp_path.iterdir()) == [lease]


@pytest.mark.parametrize("content", [ELSEWHERE, "", "[]"])
def test_lease_not_renewed_on_another_host_expires(tmp_path, content):
    lease = lease_from_elsewhere(tmp_path, content, age_s=LEASE_S + 1)
    with held_alone(str(tmp_path), refuse):
        assert not lease.exists()


def test_lease_removed_on_another_host_while_waiting_frees_the_folder(tmp_path):
    lease = lease_from_elsewhere(tmp_path)
    with held_alone(str(tmp_path), lambda text: lease.unlink()):
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("is_late", [True, False])
def test_deleted_lease_is_an_error_only_if_it_had_expired(tmp_path, monkeypatch, is_late):
    refused = pytest.raises(CheckpointsInUseError, match="suspended, or cut off from it")
    with refused if is_late else nullcontext(), held_alone(str(tmp_path), refuse) as check:
        (lease,) = tmp_path.iterdir()
        lease.unlink()
        if is_late:
            monkeypatch.setattr(housekeeping, "LEASE_S", 0.0)
        check()  # the last check was before the lease expired
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_late", [True, False])
def test_expired_lease_is_an_error_if_another_fit_holds_one(tmp_path, monkeypatch, is_late):
    refused = pytest.raises(CheckpointsInUseError, match="assume that it has ended")
    with refused if is_late else nullcontext(), held_alone(str(tmp_path), refuse):
        other = lease_from_elsewhere(tmp_path)
        if is_late:
            monkeypatch.setattr(housekeeping, "LEASE_S", 0.0)
    assert list(tmp_path.iterdir()) == [other]


def test_expired_lease_is_no_error_if_no_other_fit_took_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(housekeeping, "LEASE_S", 0.0)
    with held_alone(str(tmp_path), refuse):
        (tmp_path / "_fitting").touch()


def test_checkpoint_folder_that_cannot_be_read_is_a_store_error(tmp_path, monkeypatch):
    def fail(location):
        raise PermissionError("denied")

    lease_from_elsewhere(tmp_path)
    monkeypatch.setattr(checkpoint_lease, "store_time", fail)
    with (
        pytest.raises(StoreError, match="whether another fit uses .*: .*denied"),
        held_alone(str(tmp_path), refuse),
    ):
        raise AssertionError("held")
