"""The templates of docs/deploy fit the schemas of what reads them, and what they say of sparkdl is true."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparkdl.jobs import command
from sparkdl.jobs.job import read_job

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deploy"
SCRIPTS = [path for path in FOLDER.rglob("*") if path.suffix in (".sh", ".sbatch")]


def manifests(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return list(yaml.safe_load_all((FOLDER / "kubernetes" / name).read_text()))


@pytest.mark.parametrize("name", ["training.yaml", "executor-pod.yaml"])
def test_manifests_fit_the_schemas_of_kubernetes(name: str) -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in manifests(name):
        validation.validate(manifest, validation.latest_version(), strict=True)


def test_policy_opens_the_ports_of_the_settings_and_of_the_pods() -> None:
    kinds = {manifest["kind"]: manifest for manifest in manifests("training.yaml")}
    settings = dict(
        line.split()
        for line in (FOLDER / "kubernetes" / "spark.conf").read_text().splitlines()
        if not line.startswith("#")
    )
    (rule,) = kinds["NetworkPolicy"]["spec"]["ingress"]
    opened = [range(ports["port"], ports["endPort"] + 1) for ports in rule["ports"]]
    for name in ("spark.driver.port", "spark.driver.blockManager.port", "spark.blockManager.port"):
        assert int(settings[name]) in opened[0]
    for pod in (kinds["Job"]["spec"]["template"], *manifests("executor-pod.yaml")):
        (sysctl,) = pod["spec"]["securityContext"]["sysctls"]
        assert sysctl["value"] == f"{opened[1].start} {opened[1].stop - 1}"
        assert pod["metadata"]["labels"]["app"] == "sparkdl"


def test_job_of_kubernetes_is_repeated_by_the_exit_codes_of_jobs() -> None:
    kinds = {manifest["kind"]: manifest for manifest in manifests("training.yaml")}
    rules = kinds["Job"]["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes == {"FailJob": [command.FAILED, command.WRONG_USAGE], "Count": [command.TRY_AGAIN]}
    assert read_job(FOLDER / "kubernetes" / "job.yaml").estimator == "TorchClassifier"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_can_be_parsed(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_image_installs_extras_of_the_package() -> None:
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", (FOLDER / "Dockerfile").read_text())
    project = (FOLDER.parents[1] / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))


class AirflowFailException(Exception):  # noqa: N818 - Airflow's name
    pass


@pytest.mark.parametrize(("code", "error"), [(0, None), (75, RuntimeError), (1, AirflowFailException)])
def test_airflow_tries_a_job_again_only_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception] | None
) -> None:
    """Airflow is a stand-in: a task is called at once; ``tests/clients`` has the real one."""
    for name, content in {
        "airflow": {},
        "airflow.sdk": {"dag": lambda **_: lambda build: build, "task": lambda **_: lambda call: call},
        "airflow.sdk.exceptions": {"AirflowFailException": AirflowFailException},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "spark-submit").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexit {code}\n')
    (tmp_path / "spark-submit").chmod(0o755)
    (tmp_path / "sparkdl").symlink_to(shutil.which("sparkdl", path=str(Path(sys.executable).parent)) or "")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    path = str(FOLDER / "airflow" / "training_dag.py")
    if error is None:
        runpy.run_path(path)
    else:
        with pytest.raises(error):
            runpy.run_path(path)
    assert (tmp_path / "arguments").read_text().strip().endswith("sparkdl_job.py /opt/jobs/digits.yaml")


def test_spark_submit_of_yarn_gets_the_archive_and_the_job(tmp_path: Path) -> None:
    tools = tmp_path / "environment" / "bin"
    tools.mkdir(parents=True)
    (tmp_path / "environment.tar.gz").touch()
    for program, line in {
        tools / "sparkdl": "echo job.py",
        tmp_path / "spark-submit": 'echo "$@"; exit 75',
    }.items():
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", FOLDER / "yarn" / "submit.sh", "job.yaml", "epochs=3"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 75
    assert "--archives environment.tar.gz#environment" in done.stdout
    assert done.stdout.strip().endswith("job.py job.yaml epochs=3")
