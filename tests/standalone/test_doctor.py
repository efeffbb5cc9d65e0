"""``sparkdl doctor --master`` on a real cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.sparkdl_command import sparkdl
from tests.standalone.cluster import StandaloneCluster


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_healthy_cluster_is_examined_with_the_settings_that_are_given(
    cluster: StandaloneCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    done = sparkdl(
        *("doctor", "--master", cluster.url, "--timeout", "120", "--json", "report.json"),
        *("--conf", "spark.cores.max=1"),  # of the two cores of the cluster
        cwd=tmp_path,
        timeout_s=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_healthy"] is True
    found = {(finding["check"], finding["where"]): finding["found"] for finding in report["findings"]}
    checks = [check for check, _ in found]
    assert checks.count("Python") == checks.count("packages") == 2, "this machine and an executor"
    assert any(said.startswith("1 slot, Spark") for (check, _), said in found.items() if check == "slots")
    assert any(said == "1 ran on 1 host" for (check, _), said in found.items() if check == "ranks")
