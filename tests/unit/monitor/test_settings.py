"""The settings of a monitor are checked where they are made, and survive a round trip through JSON."""

from __future__ import annotations

import json

import pytest

from sparkdl.errors import ParamError
from sparkdl.estimators import TorchEstimator
from sparkdl.monitor import Monitor


def test_settings_survive_a_round_trip_through_json() -> None:
    monitor = Monitor(seconds=2, tensorboard="/tmp/board", port=0, trace_steps=(1, 2))
    kept = json.loads(json.dumps(monitor.as_dict()))
    assert kept == {"seconds": 2, "tensorboard": "/tmp/board", "port": 0, "trace_steps": [1, 2]}
    assert Monitor.from_dict(kept) == monitor
    assert Monitor.from_dict({}) == Monitor()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": 0}, "seconds of a Monitor is 0; it has to be a number from 0.1 to 3600"),
        ({"seconds": float("inf")}, "seconds of a Monitor is inf"),
        ({"seconds": None}, "seconds of a Monitor is None"),
        ({"seconds": True}, "seconds of a Monitor is True"),
        ({"port": 70000}, "port of a Monitor is 70000; it has to be a port: 0 to 65535"),
        ({"port": "9090"}, "port of a Monitor is '9090'"),
        ({"peak_tflops": 0}, "peak_tflops of a Monitor is 0; it has to be a number above 0"),
        ({"tensorboard": ""}, "tensorboard of a Monitor is ''; it has to be a text"),
        ({"trace_steps": [5, 3]}, "trace_steps of a Monitor is (5, 3); it has to be two numbers of steps"),
        ({"trace_steps": (0, 3)}, "trace_steps of a Monitor is (0, 3)"),
        ({"trace_steps": None}, "trace_steps of a Monitor is None"),
        ({"second": 5}, "Monitor has no setting 'second'. Did you mean 'seconds'?"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ParamError) as caught:
        Monitor.from_dict(given)
    assert message in str(caught.value)


def test_an_estimator_takes_a_monitor_or_a_dict_of_its_settings() -> None:
    estimator = TorchEstimator(monitor=Monitor(seconds=3, port=0))
    assert estimator.getMonitor() == Monitor(seconds=3, port=0)
    assert estimator.setMonitor({"seconds": 7}).getMonitor() == Monitor(seconds=7)
    assert TorchEstimator().getMonitor() is None
    with pytest.raises(ParamError, match="second"):
        TorchEstimator(monitor={"second": 7})
    with pytest.raises(ParamError, match="Monitor"):
        TorchEstimator(monitor="yes")
