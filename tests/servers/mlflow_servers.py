"""Real servers of MLflow for tests: model scoring in a Python without Spark, and tracking."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
_STARTED = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
_SPARK = re.compile(r"pyspark|py4j|petastorm")
_SPARKDL = re.compile(r".*sparkdl")  # also matches the extra files of an editable install


def python_for_serving(folder: Path) -> Path:
    """Make an environment with all packages installed here but Spark's and sparkdl, and return its Python."""
    import venv

    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        left_out = _SPARK.match(path.name) or _SPARKDL.match(path.name)
        if not left_out and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    (folder / "bin" / "uvicorn").write_text(f"#!{python}\nfrom uvicorn.main import main\nmain()\n")
    (folder / "bin" / "uvicorn").chmod(0o755)
    return python


_PYENV = """#!/bin/sh
# MLflow asks pyenv for the Python of a model: here it is the one that runs the tests.
case "$1" in
    root) echo "$PYENV_ROOT" ;;
    install) mkdir -p "$PYENV_ROOT/versions" && ln -sfn '{prefix}' "$PYENV_ROOT/versions/$3" ;;
esac
"""


def environments_of_mlflow(folder: Path, manager: str) -> dict[str, str]:
    """Return the variables that make MLflow create environments of models below a folder, by virtualenv or uv.

    These environments get packages from where pip is configured to look; modules of this environment are not on their
    path.
    """
    prefix = Path(sys.base_prefix)
    if not (prefix / "bin" / "python").exists():
        pytest.skip(f"there is no bin/python below {prefix}, where MLflow looks for the Python of a model")
    if manager == "uv" and shutil.which("uv", path=_path()) is None:
        pytest.skip("uv is not installed")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "pyenv").write_text(_PYENV.format(prefix=prefix))
    (programs / "pyenv").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **inherited,
        **(_as_pip() if manager == "uv" else {}),
        "PATH": f"{programs}{os.pathsep}{_path()}",
        "PYENV_ROOT": str(folder / "pyenv"),
        "MLFLOW_ENV_ROOT": str(folder / "environments"),
        "UVICORN_PORT": "0",  # MLflow treats a port of 0 as unset
    }


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _as_pip() -> dict[str, str]:
    """Variables that make uv look for packages where pip is configured to look."""
    found: dict[str, str] = {}
    command = [sys.executable, "-m", "pip", "config", "list"]
    for line in subprocess.check_output(command, text=True, timeout=500).splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = " ".join(ast.literal_eval(value).split())
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip also takes the best version of all indexes
    for ours, theirs, joint in (
        ("find-links", "UV_FIND_LINKS", ","),
        ("index-url", "UV_DEFAULT_INDEX", " "),
        ("extra-index-url", "UV_EXTRA_INDEX_URL", " "),
        ("constraint", "UV_CONSTRAINT", " "),
        ("cert", "SSL_CERT_FILE", " "),
    ):
        if ours in found:
            variables[theirs] = found[ours].replace(" ", joint)
    return variables


class Server:
    """A process that listens on loopback.

    Attributes:
        url: URL at which it answers.
        process: leader of its process group.
    """

    def __init__(self, process: subprocess.Popen[str], *, timeout_s: float = 300) -> None:
        self.process = process
        self.url = ""
        self._lines: list[str] = []
        self._is_up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_up.wait(timeout_s) or not self.url:
            self.stop()
            raise AssertionError(f"the server did not start:\n{self.output}")

    @property
    def output(self) -> str:
        """The output of the server so far."""
        return "".join(self._lines)

    def signal(self, number: int) -> None:
        """Send a signal to the server and all processes that it has started."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Kill the server and wait for its end."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)  # SIGKILL also ends a stopped process
        self.process.wait(30)
        self._reader.join(30)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            found = _STARTED.search(line)
            if found is not None:
                self.url = found[1]
                self._is_up.set()
        self._is_up.set()


@contextmanager
def scoring_server(python: Path, model: str, folder: Path, *modules: Path) -> Iterator[Server]:
    """Run ``mlflow models serve`` in an environment, on a free port; ``modules`` are folders to import from."""
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, modules)),
        "UVICORN_PORT": "0",  # MLflow treats a port of 0 as unset
    }
    for name in ("JAVA_HOME", "SPARK_HOME"):
        environment.pop(name, None)
    command = [str(python), "-m", "mlflow", "models", "serve", "-m", model, "-p", "0"]
    with running([*command, "--env-manager", "local"], environment, folder) as server:
        yield server


@contextmanager
def tracking_server(folder: Path, *arguments: str, **variables: str) -> Iterator[Server]:
    """Run ``mlflow server`` on a SQLite store in a folder, on a free port."""
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **variables}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", "0", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", f"{folder}/artifacts", *arguments]
    with running(command, environment, folder) as server:
        yield server


@contextmanager
def running(
    command: list[str], environment: Mapping[str, str], folder: Path, *, timeout_s: float = 120
) -> Iterator[Server]:
    """Run a command that starts a server, in a folder; ``timeout_s`` limits the time until it listens."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    server = Server(process, timeout_s=timeout_s)
    try:
        yield server
    finally:
        server.stop()
