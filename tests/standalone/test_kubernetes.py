"""A job on Spark in client mode on Kubernetes, by the files of docs/deploy; its pods are local processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.standalone.cluster import ROOT, SPARK_HOME
from tests.standalone.kubernetes_server import DRIVER_POD, KubernetesServer
from tests.standalone.submitting import SCRIPT, run, write_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FOLDER = ROOT / "docs" / "deploy" / "kubernetes"
HERE = {
    # In place of addresses, images and sizes of a cluster.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.port": "0",
    "spark.driver.blockManager.port": "0",
    "spark.blockManager.port": "0",
    "spark.jars.packages": "",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.kubernetes.executor.podTemplateFile": str(FOLDER / "executor-pod.yaml"),
    "spark.kubernetes.driver.pod.name": DRIVER_POD,
}


def write_settings(file: Path, master: str) -> None:
    """Write the settings of docs/deploy for this machine."""
    lines = [line for line in (FOLDER / "spark.conf").read_text().splitlines() if not line.startswith("#")]
    settings = {**dict(line.split() for line in lines), **HERE, "spark.master": master}
    file.write_text("".join(f"{name} {value}\n" for name, value in settings.items() if value))


def test_job_trains_in_pods_of_the_template_and_deletes_them(rows: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, rows)
    with KubernetesServer(tmp_path / "pods") as kubernetes:
        write_settings(tmp_path / "spark.conf", kubernetes.url)
        submit = str(SPARK_HOME / "bin" / "spark-submit")
        done = run(
            [submit, "--properties-file", str(tmp_path / "spark.conf"), str(SCRIPT), str(job)], tmp_path
        )
        assert done.code == 0, f"{done.said}\n{kubernetes.logs()}"
        assert kubernetes.names("pods") == [DRIVER_POD], "the executors' pods are deleted"
        _, *pods = kubernetes.created["pods"]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["ranks"] == 2
    assert len(list(tmp_path.glob("rank-*"))) == 2
    assert len(pods) == 2
    for pod in pods:
        assert pod["metadata"]["labels"]["app"] == "sparkdl", "the NetworkPolicy selects it"
        assert pod["metadata"]["ownerReferences"][0]["name"] == DRIVER_POD
        assert pod["spec"]["securityContext"]["sysctls"][0]["name"] == "net.ipv4.ip_local_port_range"
        (container,) = pod["spec"]["containers"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert container["envFrom"] == [{"secretRef": {"name": "storage"}}]
        assert container["resources"]["limits"]["memory"] == f"{512 + 8 * 1024}Mi", "heap and memoryOverhead"
        assert container["image"] == "REGISTRY/sparkdl:0.1.0"
