"""Ranks of another host join a run by hand."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.elastic_scripts import WITH_A_STATE, invitation, running, sizes
from tests.collective.eventually import eventually
from tests.hosts.network import hosts_with_ranks
from tests.launchers import write_script


@pytest.mark.slow  # ranks join from another terminal daily
def test_ranks_of_another_host_join_a_run_and_leave_it(tmp_path: Path) -> None:
    script = str(write_script(tmp_path, WITH_A_STATE.replace("BACKEND", '"sparkdl"')))
    words = ("-n1", "--max", "2", script, str(tmp_path))
    with (
        hosts_with_ranks(1, 1) as network,
        running(tmp_path, *words, place=network.command(0), SPARKDL_LISTEN="eth0") as process,
    ):
        words = ("--join", str(invitation(tmp_path)), "-n1")
        with running(tmp_path, *words, name="join", place=network.command(1)) as joined:
            assert eventually(lambda: sizes(tmp_path)[-1:] == [2], timeout_s=120)
            joined.send_signal(signal.SIGTERM)
            assert eventually(lambda: sizes(tmp_path)[-1:] == [1], timeout_s=60)
            assert joined.wait(60) == 0
        (tmp_path / "stop").touch()
        assert process.wait(120) == 0
