from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.launch.spark_job import driver_hosts
from sparkdl.rendezvous.addresses import reachable_hosts


def session_of(**settings: str) -> Any:
    conf = {name.replace("_", "."): value for name, value in settings.items()}
    return SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*, 4]", "local-cluster[2,1,1024]"])
def test_driver_of_a_local_session_listens_on_loopback(master: str) -> None:
    assert driver_hosts(session_of(spark_master=master, spark_driver_host="node-1")) == ["127.0.0.1"]


def test_driver_listens_on_the_address_of_sparks_driver(caplog: pytest.LogCaptureFixture) -> None:
    master, own = "spark://node-1:7077", reachable_hosts()[0]
    assert driver_hosts(session_of(spark_master=master, spark_driver_host=own)) == (own,)
    assert driver_hosts(session_of(spark_master=master, spark_driver_host="127.0.0.1")) == ("127.0.0.1",)
    behind_nat = session_of(
        spark_master=master, spark_driver_host="198.51.100.7", spark_driver_bindAddress=own
    )
    assert driver_hosts(behind_nat) == (own,)
    assert not caplog.records
    unknown = session_of(
        spark_master=master, spark_driver_host="198.51.100.8", spark_driver_bindAddress="0.0.0.0"
    )
    assert driver_hosts(unknown) == reachable_hosts()
    assert "spark.driver.host is '198.51.100.8', which is not an address of this machine" in caplog.text
