"""A fit tracked by a real server that is stopped while the ranks train."""

from __future__ import annotations

import os
import signal

import mlflow
import pytest
import torch.distributed as dist
from torch import nn

import sparkdl.mlflow
from tests.servers.mlflow_servers import tracking_server
from tests.spark.estimators.estimator_examples import make_estimator


class LossThatStopsAServer(nn.Module):
    """A loss that stops a process group in the 5th step of rank 0."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group, self.calls = group, 0

    def forward(self, outputs, labels):
        self.calls += 1
        if dist.is_initialized() and self.calls == 5 and dist.get_rank() == 0:
            os.killpg(self.group, signal.SIGSTOP)
        return nn.functional.cross_entropy(outputs, labels)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_server_that_stops_during_a_fit_delays_it_by_the_timeout_and_gets_the_run_later(frame, tracked):
    (tracked / "server").mkdir()
    with tracking_server(tracked / "server") as server:
        mlflow.set_tracking_uri(server.url)
        loss = LossThatStopsAServer(server.process.pid)
        estimator = make_estimator(tracked, tracking="on", epochs=3, loss=loss, trackingTimeoutSeconds=3)
        model = estimator.fit(frame)
        assert len(model.history) == 3
        assert model.summary.model_uri is None
        server.signal(signal.SIGCONT)
        (sent,) = sparkdl.mlflow.send_kept(tracked / "store")
        history = mlflow.MlflowClient().get_metric_history(sent.run_id, "loss")
        assert [(metric.step, metric.value) for metric in history] == [
            (record.epoch, record.loss) for record in model.history
        ]
        assert mlflow.get_run(sent.run_id).info.status == "FINISHED"
        rows = frame.limit(5).toPandas()
        assert len(mlflow.pyfunc.load_model(sent.model_uri).predict(rows[["image"]])) == 5
