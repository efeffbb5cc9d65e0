"""The Spark session of ``sparkdl train`` gets secrets without showing them to other users of the machine."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from pathlib import Path
from sparkdl.jobs.job import SparkChoice
from sparkdl.jobs.run_job import own_session

settings = {"spark.hadoop.fs.s3a.secret.key": "hunter2", "spark.sql.shuffle.partitions": "3"}
settings["spark.driver.extraJavaOptions"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
with own_session(SparkChoice(master="local[1]", config=settings), name="test", num_ranks=1) as session:
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    java = [line for line in lines if line.startswith(b"/") and b"shuffle.partitions=3\\0" in line]
    print("arguments", len(java), sum(b"hunter2" in line for line in java))
    hadoop = session.sparkContext._jsc.hadoopConfiguration()
    print("settings", hadoop.get("fs.s3a.secret.key"), session.conf.get("spark.sql.shuffle.partitions"))
"""


def test_secrets_of_a_session_are_not_among_the_arguments_of_its_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["arguments 1 0", "settings hunter2 3"]
