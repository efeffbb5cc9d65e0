"""Trials of Ray Tune that end early, in an environment of its own: Ray is large."""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
import psutil
import pytest

from tests.collective.eventually import eventually
from tests.docs.snippets import PAGES, examples_of
from tests.launchers import TOOLS, run
from tests.packaging.building import make_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

CHECK = """
    for result in tuner.fit():
        print("ended after", result.metrics["training_iteration"], result.error)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment = tmp_path_factory.mktemp("ray") / "environment"
    packages = Path(__file__).with_name("ray_tune.txt")
    return make_environment(environment, "--requirement", packages, has_pth_files=True)


def test_trials_of_the_docs_that_a_scheduler_stops_end_without_errors_and_leave_no_ranks(
    python: Path, tmp_path: Path
) -> None:
    (example,) = [text for page in PAGES for _, text in examples_of(page) if "from ray import tune" in text]
    # The scheduler stops each trial after max_t epochs, or one of them earlier.
    changed = example.replace("num_samples=8", "num_samples=2").replace("max_t=20", "max_t=3")
    source = re.sub(r"\n    print\(tuner.fit\(\).*\n", CHECK, changed)
    assert source.count("max_t=3") == source.count("num_samples=2") == source.count(CHECK) == 1
    (tmp_path / "script.py").write_text(source)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    variables = {
        "HOME": str(tmp_path),
        "MLFLOW_TRACKING_URI": uri,
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        "PYSPARK_PYTHON": str(python),
        "SPARKDL_STORE": str(tmp_path / "store"),
    }
    client = mlflow.MlflowClient(uri)
    assert client.search_runs(["0"]) == [], "the database has its tables before two trials would make them"
    with TemporaryDirectory(prefix="ray") as sockets:  # their paths have to be short
        done = run([python, "script.py"], cwd=tmp_path, variables={**variables, "RAY_TMPDIR": sockets})
    assert done.returncode == 0, done.stderr
    ended = re.findall(r"ended after (\d+) (.*)", done.stdout)
    assert [(int(epochs) <= 3, error) for epochs, error in ended] == [(True, "None")] * 2, done.stdout
    assert eventually(
        lambda: not any(_is_of(process, uri) for process in psutil.process_iter()), timeout_s=60
    ), "the ranks and sessions of the trials have ended"
    # Ray kills the process of a trial without waiting for its fit, so that a run may stay open.
    statuses = [run.info.status for run in client.search_runs(["0"])]
    assert len(statuses) == 2
    assert {*statuses} <= {"KILLED", "RUNNING"}


def _is_of(process: psutil.Process, uri: str) -> bool:
    try:
        return process.environ().get("MLFLOW_TRACKING_URI") == uri and process.status() != "zombie"
    except psutil.Error:
        return False
