"""A Spark standalone cluster on loopback from pip's pyspark: a master and workers, each in its own process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import pyspark

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
START_TIMEOUT_S = 120.0

_LOG4J = """\
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n
"""


class StandaloneCluster:
    """A master and workers with one slot each, running until the end of the block.

    Args:
        folder: folder for their files.
        num_workers: number of workers.
        settings: settings of Spark for master, workers and applications.
        executors_have_sparkdl: whether executors can import sparkdl without shipping it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_workers: int = 2,
        settings: Mapping[str, str] | None = None,
        executors_have_sparkdl: bool = True,
    ) -> None:
        self.folder = folder
        self.settings = dict(settings or {})
        self._num_workers = num_workers
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("PYTHONPATH", "PYSPARK_PYTHON")
            },
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            **({"PYTHONPATH": str(ROOT)} if executors_have_sparkdl else {}),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""

    def __enter__(self) -> StandaloneCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "log4j2.properties").write_text(_LOG4J)
        lines = [f"{name} {value}\n" for name, value in self.settings.items()]
        (self.folder / "spark-defaults.conf").write_text("".join(lines))
        try:
            self._start("master", "master.Master")
            self.url = self._wait_for("master", r"Starting Spark master at (spark://\S+)")
            for index in range(self._num_workers):
                self._start_worker(index)
            for index in range(self._num_workers):
                self._wait_for(f"worker-{index}", r"(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise
        return self

    def add_worker(self) -> None:
        """Add a worker with one slot, and wait until the master knows it."""
        index, self._num_workers = self._num_workers, self._num_workers + 1
        self._start_worker(index)
        self._wait_for(f"worker-{index}", r"(Successfully registered with master)")

    def _start_worker(self, index: int) -> None:
        name = f"worker-{index}"
        place = ("--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / name), self.url)
        self._start(name, "worker.Worker", *place)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes and their descendants."""
        for name in list(self._processes):
            self.kill(name)

    def kill(self, name: str) -> None:
        """Kill one process, ``master`` or ``worker-0``, with its executors, like a machine that loses its power."""
        process = self._processes.pop(name)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def log(self, name: str) -> str:
        """The log of a process."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def executor_logs(self) -> str:
        """The stderr of all executors."""
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("worker-*/*/*/stderr"))

    def _start(self, name: str, role: str, *arguments: str) -> None:
        command = [
            str(SPARK_HOME / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{role}",
            *("--host", "127.0.0.1", "--port", "0", "--webui-port", "0"),
            *("--properties-file", str(self.folder / "spark-defaults.conf")),
            *arguments,
        ]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )

    def _wait_for(self, name: str, pattern: str) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        pause = threading.Event()
        while (found := re.search(pattern, self.log(name))) is None:
            ended = self._processes[name].poll() is not None
            assert not ended, f"{name} has ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{name} does not start:\n{self.log(name)}"
            pause.wait(0.05)
        return found[1]
