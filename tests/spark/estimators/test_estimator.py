"""TorchEstimator and TorchModel on a real session: local, local-cluster or Connect, as ``--spark`` says."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from sparkdl.errors import DataError, LaunchError, RankError, SerializationError
from tests.processes import wait_until_gone
from tests.spark.estimators.estimator_examples import (
    NUM_ROWS,
    LossThatKillsRankOneOnce,
    make_estimator,
    make_model,
    step_that_tells,
    store_is_empty,
)


@pytest.fixture(scope="module")
def fitted(frame, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    estimator = make_estimator(folder)
    estimator.lock = threading.Lock()  # objects sent to Spark or to the ranks must not hold the estimator
    return estimator, estimator.fit(frame), folder


def test_fit_learns_and_remembers_its_epochs(fitted, frame):
    estimator, model, _ = fitted
    assert [record.epoch for record in model.history] == list(range(1, 9))
    assert all(record.rows == NUM_ROWS for record in model.history)
    assert model.history[-1].loss < model.history[0].loss / 2
    right = model.transform(frame).filter(F.col("prediction") == F.col("digit")).count()
    assert right / NUM_ROWS > 0.9
    assert model.getFeaturesCol() == estimator.getFeaturesCol()
    assert model.uid == estimator.uid  # as for all models of Spark ML


def test_fit_leaves_the_module_of_the_user_and_the_store_as_they_were(fitted):
    estimator, _, folder = fitted
    for before, after in zip(make_model().parameters(), estimator.getModel().parameters(), strict=True):
        assert torch.equal(before, after)
    assert store_is_empty(folder)


def test_transform_keeps_columns_and_the_order_of_rows(fitted, frame):
    _, model, _ = fitted
    before, after = frame.collect(), model.transform(frame).collect()
    assert [row.asDict() for row in before] == [
        {name: value for name, value in row.asDict().items() if name != "prediction"} for row in after
    ]
    images = torch.tensor([row["image"] for row in before], dtype=torch.float32)
    expected = model.module(images).argmax(dim=1).tolist()
    assert [row["prediction"] for row in after] == expected


@pytest.mark.any_spark_will_do
def test_transform_names_rows_of_another_length(fitted, frame):
    _, model, _ = fitted
    short = frame.withColumn("image", F.slice("image", 1, 3))
    with pytest.raises(Exception, match=r"'image' has arrays of 3 elements; all must have 4"):
        model.transform(short).collect()
    with pytest.raises(DataError, match="There is no column 'image'"):
        model.transform(frame.drop("image"))


@pytest.mark.any_spark_will_do
def test_a_train_step_finds_its_place_and_the_threads_of_its_slot(frame, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RANK", "7")
    # With one row more than both ranks' batches take, one of the ranks has no row in the last step.
    estimator = make_estimator(
        tmp_path,
        loss=None,
        trainStep=step_that_tells(tmp_path),
        labelCol=["digit", "id"],
        epochs=1,
        batchSize=(NUM_ROWS - 1) // 2,
    )
    estimator.fit(frame)
    assert (os.environ["RANK"], os.environ.get("WORLD_SIZE")) == ("7", None)
    calls = [json.loads(line) for file in tmp_path.glob("*.json") for line in file.read_text().splitlines()]
    on_driver = [call["place"] for call in calls if call["is_on_driver"]]
    assert on_driver
    assert all(place == ["0", "1", "0", "1"] for place in on_driver)
    on_ranks = [call for call in calls if not call["is_on_driver"]]
    assert {tuple(call["place"][:2]) for call in on_ranks} == {("0", "2"), ("1", "2")}
    assert {tuple(call["place"][2:]) for call in on_ranks} == {("0", "2"), ("1", "2")}
    assert {call["num_threads"] for call in on_ranks} == {1}
    seen = sorted(row for call in on_ranks for row in call["rows"])
    assert seen == list(range(NUM_ROWS)), "each row once"


@pytest.mark.slow_on("local", "connect")
def test_killed_rank_ends_the_fit_long_before_any_deadline_and_leaves_nothing(frame, tmp_path):
    estimator = make_estimator(tmp_path, loss=LossThatKillsRankOneOnce(tmp_path, call=20), epochs=500)
    with pytest.raises(RankError, match=r"SIGKILL \(out of memory\?\) in epoch \d+, step \d+") as caught:
        estimator.fit(frame)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 60  # operations wait for 300 s
    assert caught.value.rank == 1
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in (0, 1)]
    assert wait_until_gone(pids) == []
    assert store_is_empty(tmp_path)


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    ("expression", "changes", "message"),
    [
        ("if(id != 5, image, null)", {"featuresCol": "bad"}, "'bad' is null in 1 of 203 rows"),
        ("id % 5", {"labelCol": "bad"}, r"Labels must lie in \[0, 3\)"),
        ("1", {"loss": nn.MSELoss()}, r"labels of shape \(\) per row, and the model's output has \(3,\)"),
    ],
)
def test_bad_data_is_named_before_any_rank_starts(frame, tmp_path, expression, changes, message):
    with pytest.raises(DataError, match=message):
        make_estimator(tmp_path, **changes).fit(frame.withColumn("bad", F.expr(expression)))
    assert store_is_empty(tmp_path)


@pytest.mark.any_spark_will_do
def test_bad_weights_of_rows_are_named_before_any_rank_starts(frame, tmp_path):
    expressions = ("text as strings", "image as arrays", "if(id != 5, 1d, -2d) as negative")
    weighted = frame.selectExpr(
        "image", "digit", *expressions, "if(id != 5, 1d, double('nan')) as nan", "0 as zeros"
    )
    weighted.write.parquet(str(tmp_path / "rows"))
    rows = frame.sparkSession.read.parquet(str(tmp_path / "rows"))
    for name, message in (
        ("strings", "'strings' holds string, not numbers"),
        ("arrays", "'arrays' holds arrays, and weightCol takes one number"),
        ("negative", "at least 0, but column 'negative' holds -2.0. Fix"),
        ("nan", "'nan' holds nan"),
        ("zeros", "Every weight in column 'zeros' is 0"),
    ):
        with pytest.raises(DataError, match=message):
            make_estimator(tmp_path, weightCol=name).fit(rows)


@pytest.mark.slow_elsewhere
def test_gpus_that_are_missing_are_told_before_rows_are_written(frame, tmp_path):
    if torch.cuda.device_count():
        pytest.skip("this machine has GPUs")
    with pytest.raises(LaunchError, match="gpusPerWorker is 1, and torch .* sees no GPU on "):
        make_estimator(tmp_path, gpusPerWorker=1).fit(frame)
    assert store_is_empty(tmp_path)


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize("name", ["model", "loss", "optimizer"])
def test_param_that_cannot_be_pickled_is_named(frame, tmp_path, name):
    lock = threading.Lock()
    model = make_model()
    model.lock = lock
    values = {
        "model": model,
        "loss": lambda outputs, labels: (lock, nn.functional.cross_entropy(outputs, labels))[1],
        "optimizer": lambda parameters: (lock, torch.optim.SGD(parameters, lr=0.1))[1],
    }
    with pytest.raises(SerializationError, match=f"Param {name} cannot travel to the ranks.*lock"):
        make_estimator(tmp_path, **{name: values[name]}).fit(frame)


@pytest.mark.about_connect
def test_a_model_larger_than_a_plan_of_connect_is_fitted_and_scores(frame, tmp_path):
    big = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    big.register_buffer("table", torch.full((36 << 20,), 0.5))  # 144 MiB; a plan of Connect has at most 128
    model = make_estimator(tmp_path, model=big, epochs=1, numWorkers=1, batchSize=64).fit(frame)
    assert model.module.table.shape == (36 << 20,)
    for _ in range(2):
        assert model.transform(frame).filter("prediction is not null").count() == NUM_ROWS
    assert store_is_empty(tmp_path)
