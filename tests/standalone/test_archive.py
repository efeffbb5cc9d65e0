"""sparkdl shipped to executors that do not have it, as a packed virtual environment.

The environment contains the wheel. torch and the other libraries, a gigabyte, are not copied into it but borrowed from
the environment of the tests; so this tests the archive's way to the executors, and that sparkdl comes from it.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.building import build_sdist, build_wheel
from tests.packaging.building import run as build
from tests.standalone.cluster import StandaloneCluster
from tests.standalone.submitting import run, submit_command, write_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment that contains sparkdl's wheel."""
    wheel = build_wheel(build_sdist(tmp_path_factory.mktemp("sdist")), tmp_path_factory.mktemp("wheel"))
    made = tmp_path_factory.mktemp("made") / "environment"
    build(sys.executable, "-m", "venv", "--without-pip", made)
    python = made / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-index")
    build(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    site = Path(build(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # As code: venv-pack would take a plain path for an editable package, which it refuses to pack.
    (site / "lent.pth").write_text(f"import sys; sys.path.extend({sorted(lent)!r})\n")
    return made


@pytest.fixture(scope="module")
def bare_cluster(tmp_path_factory):
    """A cluster whose executors have no sparkdl."""
    with StandaloneCluster(tmp_path_factory.mktemp("bare"), executors_have_sparkdl=False) as started:
        yield started


def test_a_job_runs_from_a_packed_virtual_environment(bare_cluster, environment, rows, tmp_path):
    archive = tmp_path / "environment.tar.gz"
    build(Path(sys.executable).parent / "venv-pack", "-q", "-p", environment, "-o", archive)
    python = environment / "bin" / "python"
    script = build(python, "-m", "sparkdl.cli", "job-script", cwd=tmp_path).strip()
    assert Path(script).is_relative_to(environment)
    command = submit_command(
        bare_cluster,
        [script, write_job(tmp_path, rows)],
        {"spark.pyspark.python": "./environment/bin/python", "spark.pyspark.driver.python": str(python)},
        *("--archives", f"{archive}#environment"),
    )
    # The environment of the program has no other settings.
    pythons = {"PYSPARK_PYTHON": "./environment/bin/python", "PYSPARK_DRIVER_PYTHON": str(python)}
    done = run(command, tmp_path, PYTHONPATH="", **pythons)
    assert done.code == 0, done.said
    assert (tmp_path / "out" / "result.json").exists()
    for rank in range(2):
        where = (tmp_path / f"rank-{rank}").read_text().split()[1]
        assert Path(where).is_relative_to(bare_cluster.folder), where
        assert "/environment/lib/" in where
