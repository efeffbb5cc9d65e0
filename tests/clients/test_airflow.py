"""The DAG of docs/deploy in Airflow, in an environment of its own: Airflow needs a hundred packages."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, make_environment, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

READ = """
import json, sys
from airflow.dag_processing.dagbag import DagBag

bag = DagBag(sys.argv[1])
dag = bag.dags["train_digits"]
task = dag.get_task("train")
raised = {}
for code in (0, 75, 1):
    open("code", "w").write(str(code))
    try:
        task.python_callable("/opt/jobs/digits.yaml")
    except Exception as error:
        raised[code] = [type(error).__module__, type(error).__name__]
seen = {
    "errors": bag.import_errors,
    "warnings": len(bag.captured_warnings),
    "schedule": dag.schedule,
    "tasks": dag.task_ids,
    "retries": task.retries,
    "seconds": [task.retry_delay.total_seconds(), task.execution_timeout.total_seconds()],
    "raised": raised,
}
json.dump(seen, open("seen.json", "w"))
"""


def test_airflow_reads_the_dag_and_its_task_is_tried_again_only_after_a_loss(tmp_path: Path) -> None:
    packages = Path(__file__).with_name("airflow.txt")
    python = make_environment(tmp_path / "environment", "--requirement", packages)
    tools = tmp_path / "tools"
    tools.mkdir()
    submit = tools / "spark-submit"
    submit.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexit $(cat {tmp_path}/code)\n')
    submit.chmod(0o755)
    (tools / "sparkdl").symlink_to(shutil.which("sparkdl", path=str(Path(sys.executable).parent)) or "")
    dags = ROOT / "docs" / "deploy" / "airflow" / "training_dag.py"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    run(python, "-c", READ, dags, cwd=tmp_path, AIRFLOW_HOME=str(tmp_path / "airflow"), PATH=path)
    assert json.loads((tmp_path / "seen.json").read_text()) == {
        "errors": {},
        "warnings": 0,
        "schedule": "@daily",
        "tasks": ["train"],
        "retries": 3,
        "seconds": [300.0, 21600.0],
        "raised": {
            "75": ["builtins", "RuntimeError"],
            "1": ["airflow.sdk.exceptions", "AirflowFailException"],
        },
    }
    assert (tmp_path / "arguments").read_text().strip().endswith("sparkdl_job.py /opt/jobs/digits.yaml")
