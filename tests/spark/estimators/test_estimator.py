"""TorchEstimator and TorchModel on a real session: local, local-cluster or Connect, as ``--spark`` says."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sparkdl.errors import (
    DataError,
    LaunchError,
    ParamError,
    RankError,
    SerializationError,
    ShardingError,
    StoreError,
    TrainingError,
)
from sparkdl.estimators import TorchEstimator, TorchModel
from tests.processes import wait_until_gone
from tests.spark.estimators.estimator_examples import (
    NUM_ROWS,
    LossThatKillsRankOne,
    LossThatSpoils,
    make_estimator,
    make_model,
    store_is_empty,
)


@pytest.fixture(scope="module")
def fitted(frame, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    estimator = make_estimator(folder)
    estimator.lock = threading.Lock()  # objects sent to Spark or to the ranks must not hold the estimator
    return estimator, estimator.fit(frame), folder


def weights_of(model: TorchModel) -> list[np.ndarray]:
    return [parameter.detach().numpy() for parameter in model.module.parameters()]


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


def test_transform_gives_null_for_null_and_takes_empty_partitions(fitted, frame):
    _, model, _ = fitted
    holes = frame.withColumn("image", F.when(F.col("id") % 2 == 0, F.col("image"))).repartition(7)
    for row in model.transform(holes).select("id", "prediction").collect():
        assert (row["prediction"] is None) == (row["id"] % 2 == 1)
    assert model.transform(frame.filter("id < 0")).count() == 0


@pytest.mark.any_spark_will_do
def test_transform_names_rows_of_another_length(fitted, frame):
    _, model, _ = fitted
    short = frame.withColumn("image", F.slice("image", 1, 3))
    with pytest.raises(Exception, match=r"'image' has arrays of 3 elements; all must have 4"):
        model.transform(short).collect()
    with pytest.raises(DataError, match="There is no column 'image'"):
        model.transform(frame.drop("image"))
    with pytest.raises(ParamError, match="already has a column 'digit'"):
        model.copy({model.predictionCol: "digit"}).transform(frame)


def with_computed_weights(module: nn.Module) -> nn.Module:
    """A module with computed weights, which torch itself cannot pickle."""
    weight_norm(module[0])
    return module


@pytest.mark.any_spark_will_do
def test_an_estimator_is_loaded_with_its_loss_and_its_optimizer(fitted, tmp_path):
    estimator, _, _ = fitted
    estimator.write().save(str(tmp_path / "estimator"))
    same = TorchEstimator.load(str(tmp_path / "estimator"))
    assert (same.uid, same.getEpochs(), same.getSeed()) == (estimator.uid, 8, 7)
    assert isinstance(same.getLoss(), nn.CrossEntropyLoss)
    assert isinstance(same.getOptimizer()(same.getModel().parameters()), torch.optim.SGD)


@pytest.mark.any_spark_will_do
def test_a_loss_that_is_no_longer_finite_ends_the_fit_and_names_epoch_and_step(frame, tmp_path):
    estimator = make_estimator(
        tmp_path,
        model=make_model(1),
        loss=nn.MSELoss(),
        labelCol="target",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e25),
    )
    with pytest.raises(RankError, match=r"The loss became (inf|nan) in epoch 1, step [23]") as caught:
        estimator.fit(frame)
    assert isinstance(caught.value.__cause__, TrainingError)
    assert store_is_empty(tmp_path)


@pytest.mark.any_spark_will_do
def test_killed_rank_ends_the_fit_long_before_any_deadline_and_leaves_nothing(frame, tmp_path):
    estimator = make_estimator(tmp_path, loss=LossThatKillsRankOne(tmp_path), epochs=500)
    with pytest.raises(RankError, match=r"SIGKILL \(out of memory\?\) in epoch \d+, step \d+") as caught:
        estimator.fit(frame)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 60  # operations wait for 300 s
    assert caught.value.rank == 1
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in (0, 1)]
    assert wait_until_gone(pids, 30) == []
    assert store_is_empty(tmp_path)


@pytest.mark.any_spark_will_do
def test_failure_to_remove_rows_is_a_warning_and_keeps_the_error_of_the_fit(
    frame, tmp_path, caplog, monkeypatch
):
    def fail(location):
        raise PermissionError(f"not allowed: {location.path}")

    monkeypatch.setattr("sparkdl.data.store.housekeeping.remove_folder", fail)
    estimator = make_estimator(tmp_path, loss=LossThatSpoils(tmp_path, "nothing", fails=True), epochs=2)
    with pytest.raises(RankError, match="the loss failed"):
        estimator.fit(frame)
    (left,) = (tmp_path / "store").iterdir()
    assert f"The rows stay in {left}; remove that folder yourself" in caplog.text


@pytest.mark.any_spark_will_do
def test_a_second_fit_on_the_same_rows_does_not_write_them_again(frame, tmp_path, capsys):
    model = with_computed_weights(make_model())
    estimator = make_estimator(tmp_path, model=model, epochs=1, keepRowsSeconds=3600, showProgress=True)
    estimator.fit(frame)
    (manifest,) = (tmp_path / "store").glob("*/_sparkdl_dataset.json")
    before = manifest.stat().st_mtime_ns
    assert "Writing the rows" in capsys.readouterr().err
    estimator.fit(frame)
    assert "Writing the rows" not in capsys.readouterr().err
    assert [path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*/*.json")] == [before]
    assert [path.name for path in (tmp_path / "store").iterdir()] == [manifest.parent.name]


BAD_DATA = {
    "a missing column": ("1", {"featuresCol": "nowhere"}, DataError, "Param featuresCol is 'nowhere', and"),
    "strings as features": ("1", {"featuresCol": "text"}, DataError, "'text' holds string"),
    "a null in a feature": (
        "if(id != 5, image, null)",
        {"featuresCol": "bad"},
        DataError,
        r"'bad' is null in 1 of 203 rows",
    ),
    "arrays of differing length": (
        "if(id != 5, image, slice(image, 1, 3))",
        {"featuresCol": "bad"},
        DataError,
        "'bad' has arrays of 3 to 4 elements",
    ),
    "more labels than classes": ("id % 5", {"labelCol": "bad"}, DataError, r"Labels must lie in \[0, 3\)"),
    "labels that are no whole numbers": (
        "digit - 0.5d",
        {"labelCol": "bad"},
        DataError,
        r"Labels must be whole numbers in \[0, 3\).*-0.5",
    ),
    "features that do not fit the model": (
        "slice(image, 1, 3)",
        {"featuresCol": "bad"},
        DataError,
        r"Column 'bad' does not fit the model Sequential: a batch of shape \(1, 3\)",
    ),
    "strings as weights": ("text", {"weightCol": "bad"}, DataError, "'bad' holds string, not numbers"),
    "arrays as weights": ("image", {"weightCol": "bad"}, DataError, "'bad' holds arrays of 4"),
    "a negative weight": (
        "if(id != 5, 1d, -2d)",
        {"weightCol": "bad"},
        DataError,
        r"Weights .* must be finite and at least 0, but column 'bad' holds -2.0 \(and 0 more",
    ),
    "a weight that is NaN": (
        "if(id != 5, 1d, double('nan'))",
        {"weightCol": "bad"},
        DataError,
        "'bad' holds nan",
    ),
    "no weight above zero": ("0", {"weightCol": "bad"}, DataError, "Every weight in column 'bad' is 0"),
    "outputs that do not fit the loss": (
        "1",
        {"loss": nn.MSELoss()},
        DataError,
        r"labels of shape \(\) per row, and the model's output has \(3,\)",
    ),
}


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_named_before_any_rank_starts(frame, tmp_path, name):
    expression, changes, error, message = BAD_DATA[name]
    with pytest.raises(error, match=message):
        make_estimator(tmp_path, **changes).fit(frame.withColumn("bad", F.expr(expression)))
    assert store_is_empty(tmp_path)


def test_fewer_rows_than_ranks_are_named(frame, tmp_path):
    with pytest.raises(ShardingError, match="1 rows cannot be shared by 2 ranks.*Lower numWorkers to 1"):
        make_estimator(tmp_path, numWorkers=2).fit(frame.limit(1))
    assert store_is_empty(tmp_path)


def test_more_ranks_than_slots_are_refused(frame, tmp_path):
    with pytest.raises(LaunchError, match="numWorkers"):
        make_estimator(tmp_path, numWorkers=50).fit(frame)
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


@pytest.mark.any_spark_will_do
def test_a_store_that_cannot_be_written_is_named(frame, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        make_estimator(tmp_path, store=str(tmp_path / "file" / "store")).fit(frame)


@pytest.mark.about_connect
def test_a_model_larger_than_a_plan_of_connect_is_fitted_and_scores(frame, tmp_path):
    big = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    big.register_buffer("table", torch.full((36 << 20,), 0.5))  # 144 MiB; a plan of Connect has at most 128
    model = make_estimator(tmp_path, model=big, epochs=1, numWorkers=1, batchSize=64).fit(frame)
    assert model.module.table.shape == (36 << 20,)
    for _ in range(2):
        assert model.transform(frame).filter("prediction is not null").count() == NUM_ROWS
    assert store_is_empty(tmp_path)
