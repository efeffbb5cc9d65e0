"""Elastic fits: ranks and executors are lost, others join, and the fit makes the updates of an undisturbed one."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.errors import ParamError
from tests.spark.estimators.estimator_examples import (
    LossThatKillsRankOneOnce,
    make_estimator,
    store_is_empty,
)

BATCHES = {"batchSize": None, "globalBatchSize": 32, "epochs": 6}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def slowly(arrays):
    time.sleep(0.1)  # so that a rank can come while others train
    return arrays


@pytest.fixture(scope="module")
def undisturbed(frame, tmp_path_factory):
    return make_estimator(tmp_path_factory.mktemp("fit"), model=make_model(), **BATCHES).fit(frame)


def assert_same_fit(model, other) -> None:
    for mine, theirs in zip(model.module.parameters(), other.module.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach().numpy(), theirs.detach().numpy(), atol=1e-4)
    assert [record.rows for record in model.history] == [record.rows for record in other.history]


def messages(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.slow_elsewhere
def test_a_fit_that_loses_a_rank_continues_with_the_others(frame, undisturbed, tmp_path, caplog):
    estimator = make_estimator(
        tmp_path, model=make_model(), loss=LossThatKillsRankOneOnce(tmp_path), elastic=True, **BATCHES
    )
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        model = estimator.fit(frame)
    assert (tmp_path / "killed").exists()
    assert "Member 1 was lost: its process was ended by SIGKILL" in messages(caplog)
    assert "The run continues with 1 rank, without member 1." in messages(caplog)
    assert_same_fit(model, undisturbed)
    assert store_is_empty(tmp_path)


@pytest.mark.about_executors
def test_a_fit_that_loses_an_executor_continues_with_the_others(spark, frame, undisturbed, tmp_path, caplog):
    driver = f"spark://CoarseGrainedScheduler@127.0.0.1:{spark.conf.get('spark.driver.port')}"
    loss = LossThatKillsRankOneOnce(tmp_path, executor_of=driver)
    estimator = make_estimator(tmp_path, model=make_model(), loss=loss, elastic=True, **BATCHES)
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        model = estimator.fit(frame)
    assert (tmp_path / "killed").exists()
    # On a busy machine the rank may outlive its executor for a moment, and meet the other one once more or end the fit.
    assert "The run continues with " in messages(caplog) or " was lost: its executor" in messages(caplog)
    assert_same_fit(model, undisturbed)
    assert store_is_empty(tmp_path)


@pytest.mark.any_spark_will_do
def test_ranks_join_a_fit_where_slots_are_free(frame, tmp_path, caplog):
    estimator = make_estimator(
        tmp_path,
        model=make_model(),
        numWorkers=1,
        maxWorkers=2,
        elastic=True,
        augment=slowly,
        **BATCHES,
    )
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        model = estimator.fit(frame)
    assert "The run continues with 2 ranks, with member 1 in addition." in messages(caplog)
    assert len(model.history[-1].rank_seconds) == 2
    alone = make_estimator(tmp_path, model=make_model(), numWorkers=1, **BATCHES).fit(frame)
    assert_same_fit(model, alone)


@pytest.mark.slow  # tests/training/test_elastic.py replaces replicas daily
@pytest.mark.any_spark_will_do
def test_a_replica_of_a_divided_model_is_started_again_as_a_whole(frame, undisturbed, tmp_path, caplog):
    loss = LossThatKillsRankOneOnce(tmp_path)
    estimator = make_estimator(
        tmp_path, model=make_model(), loss=loss, elastic=True, parallelism={"shard": 2}, **BATCHES
    )
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        model = estimator.fit(frame)
    assert "Member 0 was lost: its process was ended by SIGKILL" in messages(caplog)
    assert "All ranks were lost. 2 new ones begin with the last checkpoint" in messages(caplog)
    assert_same_fit(model, undisturbed)


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"elastic": True, "maxWorkers": 1}, "maxWorkers is 1 and numWorkers 2"),
        ({"elastic": True, "minWorkers": 3}, "minWorkers is 3 and numWorkers 2"),
        ({"maxWorkers": 4}, "the fit is not elastic"),
        ({"elastic": True, "transport": "mpi"}, "no rank can leave or join an MPI world"),
        ({"elastic": True, "parallelism": {"shard": -1}}, "all ranks share one copy of the model"),
        ({"elastic": True, "parallelism": {"tensor": 2, "data": 1}}, "Leave data out"),
        (
            {"elastic": True, "parallelism": {"shard": 2}, "maxWorkers": 3},
            "maxWorkers is 3, and each replica",
        ),
        ({"elastic": True, "precision": "float8"}, "which float8 cannot be"),
        ({"replaceStragglers": True, "stragglerFactor": 2.0}, "and elastic=True"),
        ({"stragglerFactor": 2.0, "parallelism": {"shard": 2}}, "wait for each other within a step"),
        ({"globalBatchSize": 33}, "globalBatchSize is 33, which numWorkers, 2, does not divide"),
        ({"globalBatchSize": 32, "batchSize": 16}, "batchSize and globalBatchSize are both set"),
    ],
)
def test_what_cannot_be_elastic_is_refused_before_rows_are_written(frame, tmp_path, params, reason):
    with pytest.raises(ParamError, match=reason):
        make_estimator(
            tmp_path, **{**({"batchSize": None} if "batchSize" not in params else {}), **params}
        ).fit(frame)
    assert not (tmp_path / "store").exists()
