"""A DAG of Airflow 3.2 or later that trains every night, and runs a job again only if ranks or a cluster were lost."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException

JOB = "/opt/jobs/digits.yaml"
RUN_AGAIN = 75
"""Exit code of a job whose ranks, executors or cluster were lost."""


@dag(schedule="@daily", start_date=datetime(2026, 1, 1), catchup=False)
def train_digits() -> None:
    """Train the model of a job file."""

    @task(retries=3, retry_delay=timedelta(minutes=5), execution_timeout=timedelta(hours=6))
    def train(job: str) -> None:
        script = subprocess.run(
            ["sparkdl", "job-script"], check=True, capture_output=True, text=True
        ).stdout.strip()
        code = subprocess.run(["spark-submit", "--master", "yarn", script, job], check=False).returncode
        if code == RUN_AGAIN:
            raise RuntimeError("ranks or executors were lost; with a checkpointDir the job continues")
        if code != 0:
            raise AirflowFailException(f"the job ended with {code}: data, model, code or job file are wrong")

    train(JOB)


train_digits()
