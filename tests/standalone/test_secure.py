"""Jobs and Runner on clusters with authentication and either kind of Spark's encryption."""

from __future__ import annotations

import json
import re
import secrets
import socket
import ssl
from collections.abc import Iterator

import pytest

from tests.standalone.cluster import StandaloneCluster
from tests.standalone.keystores import Keystores, make_keystores
from tests.standalone.submitting import SCRIPT, run, submit_command, write_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = '''\
"""Sums over the ranks of a Runner, on a session that is what spark-submit made it."""

import json

from pyspark.sql import SparkSession

from sparkdl import Runner


def train(scale, *, power):
    import torch
    import torch.distributed as dist

    tensor = torch.full((3,), scale**power * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    print("this line comes over sparkdl's own connection")
    return tensor.tolist()


if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    settings = session.sparkContext.getConf()
    names = ("authenticate", "network.crypto.enabled", "ssl.rpc.enabled")
    found = {name: settings.get(f"spark.{name}", "") for name in names}
    values = Runner(num_workers=2).run_all(train, 3.0, power=2)
    print("RESULT", json.dumps({"values": values, **found}))
    session.stop()
'''


def authenticated(**settings: str) -> dict[str, str]:
    return {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(16),
        "spark.io.encryption.enabled": "true",
        **settings,
    }


@pytest.fixture(scope="module")
def keystores(tmp_path_factory) -> Keystores:
    return make_keystores(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module", params=["crypto", "tls"])
def secure(request, keystores, tmp_path_factory) -> Iterator[StandaloneCluster]:
    """A cluster with authentication whose connections Spark encrypts with its own AES or with TLS."""
    by = {"crypto": {"spark.network.crypto.enabled": "true"}, "tls": keystores.settings}[request.param]
    with StandaloneCluster(tmp_path_factory.mktemp(request.param), settings=authenticated(**by)) as started:
        yield started


def version_of_tls(url: str, keystores: Keystores) -> str | None:
    """The version of TLS that a master speaks with the certificate of the keystores."""
    host, _, port = url.removeprefix("spark://").rpartition(":")
    trusting = ssl.create_default_context(cafile=str(keystores.certificate))
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        trusting.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        return wrapped.version()


def test_jobs_and_runner_run_where_authentication_and_encryption_are_on(secure, keystores, rows, tmp_path):
    if "spark.ssl.enabled" in secure.settings:
        assert version_of_tls(secure.url, keystores) == "TLSv1.3"
    done = run(submit_command(secure, [SCRIPT, write_job(tmp_path, rows)]), tmp_path)
    assert done.code == 0, done.said
    assert json.loads((tmp_path / "out" / "result.json").read_text())["epochs"] == 5

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run(submit_command(secure, [program]), tmp_path)
    assert done.code == 0, done.said
    (line,) = [line for line in done.said.splitlines() if line.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    assert found["values"] == [[27.0] * 3] * 2
    assert found["authenticate"] == "true"
    assert "true" in (found["network.crypto.enabled"], found["ssl.rpc.enabled"])
    assert re.search(r"\[(rank 1|ranks 0, 1)\] this line comes over sparkdl's own connection", done.said)
    assert secure.settings["spark.authenticate.secret"] not in done.said + secure.executor_logs()


def test_an_application_without_the_secret_is_not_taken(rows, tmp_path):
    with StandaloneCluster(tmp_path / "cluster", num_workers=1, settings=authenticated()) as cluster:
        command = submit_command(
            cluster, [SCRIPT, write_job(tmp_path, rows)], {"spark.authenticate.secret": "wrong"}
        )
        done = run(command, tmp_path)
    assert done.code == 75, done.said
    assert "its secret (spark.authenticate) differs from the one here" in done.said
