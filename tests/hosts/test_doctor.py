"""The doctor's findings about hosts on a network, and about a host with little shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.bench.namespaces import Namespace, why_impossible
from sparkdl.collective import new_secret
from sparkdl.doctor.finding import GOOD, NOTE
from sparkdl.doctor.network import judge_network, survey_network
from tests.hosts.network import hosts_with_ranks
from tests.launchers import ROOT, environment
from tests.run_ranks import run_ranks

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment


def survey(environment: RankEnvironment, secret: bytes) -> dict[str, Any]:
    context: Any = environment  # it has the attributes of a rank's context that a survey uses
    return survey_network(context, secret, seconds=0.2, timeout_s=20.0)


def test_interfaces_that_reach_each_other_and_the_rate_of_the_link_are_found() -> None:
    with hosts_with_ranks(2, 1, gigabits_per_s=0.2, decoy=True) as network:
        surveys = run_ranks(3, survey, new_secret(), place=network)
    findings = judge_network(surveys, {0: "node-1", 1: "node-2"})
    there, back = (finding for finding in findings if finding.check == "interfaces")
    assert (there.where, there.status) == ("node-1 to node-2", GOOD)
    assert there.found == "reaches eth0 10.77.0.2; not decoy0 172.17.0.1"
    assert back.found == "reaches eth0 10.77.0.1; not decoy0 172.17.0.1"
    across, inside = (finding for finding in findings if finding.check == "transfer")
    ((_, _, by, bytes_per_s, _),) = surveys[2]["rates"]
    assert by == "TCP"
    # The token bucket lets a burst through; a busy machine may be slower than the link.
    assert 0.05 * 25e6 < bytes_per_s < 1.5 * 25e6
    assert (across.where, across.status) == ("node-1 to node-2", NOTE)
    assert "look at which interface" in across.advice.lower()
    assert inside.where == "node-1"


def test_doctor_reports_small_shared_memory_and_missing_java_with_remedies(tmp_path: Path) -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    report = tmp_path / "report.json"
    with Namespace() as host:
        host.run(["mount", "-o", "remount,size=64k", "/dev/shm"])
        host.run(["ip", "link", "set", "lo", "up"])
        command = [sys.executable, "-m", "sparkdl.cli", "doctor", "--json", str(report)]
        done = subprocess.run(
            [*host.command(), *command],
            cwd=ROOT,
            env=environment(JAVA_HOME=str(tmp_path / "nowhere")),
            capture_output=True,
            text=True,
            check=False,
        )
    told = json.loads(report.read_text())
    (shared,) = [finding for finding in told["findings"] if finding["check"] == "shared memory"]
    assert shared["status"] == NOTE
    assert "64.0 KiB free of 64.0 KiB; 2 ranks need" in shared["found"]
    assert "--shm-size" in shared["advice"]
    assert "note  shared memory" in done.stdout
    (ranks,) = [finding for finding in told["findings"] if finding["check"] == "ranks"]
    assert ranks["status"] == GOOD, "they use TCP"
    assert not told["is_healthy"]
    assert "\nFAIL  Java           this machine" in done.stdout
    assert done.returncode == 1
