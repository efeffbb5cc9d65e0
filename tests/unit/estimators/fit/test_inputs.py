"""Checks before a fit starts, and the parts of its Params that go to the ranks, on rows in a folder."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from sparkdl.data import scan_dataset
from sparkdl.errors import DataError, ParamError, ShardingError
from sparkdl.estimators import Callback
from sparkdl.estimators.fit.checkpoints import with_checkpoints
from sparkdl.estimators.fit.inputs import check_picklable, prepare_fit
from sparkdl.training.callbacks import Patience
from sparkdl.training.spec import Goal
from tests.training.scenes.training_scenes import make_model, write_dataset
from tests.unit.estimators import fit_examples


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("rows"), 37)


def make_estimator(**changes):
    return fit_examples.make_estimator(
        **{"model": make_model(), "featuresCol": "x", "labelCol": "y", **changes}
    )


def make_scheduler(optimizer, num_steps):
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=num_steps)


@pytest.fixture
def noted():
    """Params with a scheduler, and the numbers of steps that it is given."""
    told = []

    def scheduler(optimizer, num_steps):
        told.append(num_steps)
        return make_scheduler(optimizer, num_steps)

    return {"scheduler": scheduler, "batchSize": 4}, told


def is_right(outputs, labels):
    return outputs.argmax(dim=1) == labels


CALLBACK = Callback()
SETTINGS = {
    "weightCol": ("w", "weight", "w"),
    "batchSize": (5, "batch_size", 5),
    "epochs": (7, "epochs", 7),
    "seed": (9, "seed", 9),
    "shuffle": (False, "shuffle", False),
    "cache": ("disk", "cache", "disk"),
    "gpusPerWorker": (1, "device", "cuda"),
    "scheduler": (make_scheduler, "scheduler", make_scheduler),
    "schedulerInterval": ("step", "scheduler_interval", "step"),
    "learningRateScaling": ("sqrt", "learning_rate_scaling", "sqrt"),
    "warmupSteps": (3, "warmup_steps", 3),
    "gradientAccumulationSteps": (4, "accumulated_batches", 4),
    "maxGradNorm": (0.5, "max_grad_norm", 0.5),
    "syncBatchNorm": (True, "sync_batch_norm", True),
    "compareReplicas": (False, "compare_replicas", False),
    "deterministic": (True, "deterministic", True),
    "compileModel": (True, "compile", True),
    "precision": ("bfloat16", "precision", "bfloat16"),
    "earlyStoppingPatience": (3, "patience", Patience(epochs=3)),
    "bestMetric": ("loss", "best", Goal(metric="loss", mode="min")),
    "callbacks": ([CALLBACK], "callbacks", (CALLBACK,)),
    "metrics": ({"right": is_right}, "metrics", {"right": is_right}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_param_reaches_its_field_of_the_spec_and_no_other(dataset, name):
    value, field, expected = SETTINGS[name]
    estimator = make_estimator()
    plain = prepare_fit(estimator, dataset).spec
    changed = prepare_fit(estimator.copy({estimator.getParam(name): value}), dataset).spec
    differing = {
        entry.name
        for entry in dataclasses.fields(plain)
        if getattr(plain, entry.name) is not getattr(changed, entry.name)
        and getattr(plain, entry.name) != getattr(changed, entry.name)
    }
    assert differing == {field}
    assert getattr(changed, field) == expected


def test_without_a_checkpoint_the_rows_are_planned_for_all_workers(dataset, tmp_path):
    """A restart on fewer ranks without a checkpoint then uses the same rows in each update."""
    estimator = make_estimator(numWorkers=3, minWorkers=1)
    spec = with_checkpoints(prepare_fit(estimator, dataset).spec, estimator, str(tmp_path))
    assert spec.checkpoints.num_ranks == 3


def test_scheduler_gets_the_number_of_its_steps(dataset, noted):
    params, told = noted
    settings = {**params, "epochs": 3, "numWorkers": 2}
    prepare_fit(make_estimator(**settings), dataset)
    prepare_fit(make_estimator(**settings, schedulerInterval="step"), dataset)
    prepare_fit(make_estimator(**settings, schedulerInterval="step", gradientAccumulationSteps=2), dataset)
    assert told == [3, 15, 9]  # 19 rows on the rank with more rows: 5 batches per epoch


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 3, sparse=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.table(x.abs().long()).mean(dim=1))


def with_hook(register):
    model = make_model()
    getattr(next(model.parameters()), register)(lambda _: None)
    return model


REFUSED = {
    "a hook on a gradient": (
        {"model": with_hook("register_hook")},
        "gradient of .* has a hook, .* on_fit_start",
    ),
    "a hook on an accumulated gradient": (
        {"model": with_hook("register_post_accumulate_grad_hook")},
        "gradient of .* has a hook, .* on_fit_start",
    ),
    "a plateau per step": (
        {"scheduler": lambda optimizer, _: ReduceLROnPlateau(optimizer), "schedulerInterval": "step"},
        "ReduceLROnPlateau, .* Set schedulerInterval to 'epoch'",
    ),
    "a plateau to maximize a loss": (
        {"scheduler": lambda optimizer, _: ReduceLROnPlateau(optimizer, "max"), "validationFraction": 0.5},
        r"mode='max'\), and val_loss, which it follows, .* Set bestMetric",
    ),
    "an optimizer that wants a closure": (
        {"optimizer": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1)},
        "Param optimizer makes LBFGS, .*closure",
    ),
    "float8 without a GPU": ({"precision": "float8"}, "precision is 'float8', which CPUs do not have"),
    "weights of another precision": (
        {"model": make_model().double(), "precision": "bfloat16"},
        "precision is bfloat16, .* weights of float32; the model has float64",
    ),
    "sparse gradients on several workers": (
        {"model": Embedded(), "numWorkers": 2},
        "Param model has sparse gradients.*sparse=False",
    ),
    "sparse gradients that are to be clipped": (
        {"model": Embedded(), "maxGradNorm": 1.0},
        "Param model has sparse gradients.*sparse=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_settings_are_refused_before_ranks_start(dataset, name):
    changes, message = REFUSED[name]
    with pytest.raises(ParamError, match=message):
        prepare_fit(make_estimator(**changes), dataset)


def test_sparse_gradients_of_one_worker_are_fine(dataset):
    assert prepare_fit(make_estimator(model=Embedded()), dataset).spec.model is not None


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = weight_norm(nn.LSTM(4, 3, batch_first=True), "weight_hh_l0")

    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0][:, 0]


def test_module_with_computed_weights_is_tried_unchanged(dataset):
    model = Recurrent()
    estimator = make_estimator(model=model, metrics={"right": is_right})
    check_picklable(estimator)
    assert prepare_fit(estimator, dataset).spec.model is model
    assert torch.equal(copy.deepcopy(model)(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_validation_rows_are_excluded_from_training_and_from_the_schedule(dataset, noted):
    params, told = noted
    settings = {**params, "schedulerInterval": "step", "seed": 5}
    spec = prepare_fit(make_estimator(**settings, validationFraction=0.5), dataset).spec
    assert (sum(spec.training_rows.counts), sum(spec.validation_rows.counts)) == (18, 19)
    assert spec.validation_rows == spec.training_rows.rest()
    other = prepare_fit(make_estimator(**{**settings, "seed": 6}, validationFraction=0.5), dataset).spec
    assert other.validation_rows != spec.validation_rows
    marked = prepare_fit(make_estimator(**settings, validationIndicatorCol="validates"), dataset).spec
    assert marked.columns() == ("x", "y")
    assert sum(marked.training_rows.counts) + sum(marked.validation_rows.counts) == 37
    whole = prepare_fit(make_estimator(**settings), dataset).spec
    assert (whole.training_rows, whole.validation_rows) == (None, None)
    assert told == [5, 5, -(-sum(marked.training_rows.counts) // 4), 10]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"validationFraction": 0.01}, ParamError, "0.01, which leaves none of 37 .*validate on. Raise it"),
        ({"validationFraction": 0.99}, ParamError, "0.99, which leaves none of 37 .*train on. Lower it"),
        (
            {"validationFraction": 0.9, "numWorkers": 5},
            ShardingError,
            "4 rows beside 33 to validate .* by 5 ranks: .* Lower numWorkers to 4",
        ),
        ({"validationIndicatorCol": "y"}, DataError, "'y' holds int64, .*booleans"),
        ({"validationIndicatorCol": "never"}, DataError, "'never' .* is false in each of"),
        ({"validationIndicatorCol": "always"}, DataError, "'always' .* is true in each of the 37 rows"),
    ],
)
def test_a_split_that_cannot_work_is_refused(dataset, settings, error, message):
    with pytest.raises(error, match=message):
        fit_examples.prepare(make_estimator(**settings), dataset)


@pytest.mark.parametrize(
    ("settings", "watched"),
    [
        ({}, Goal(metric="loss")),
        ({"validationFraction": 0.5}, Goal(metric="val_loss")),
        (
            {"validationFraction": 0.5, "bestMetric": "val_right", "bestMode": "max"},
            Goal(metric="val_right", mode="max"),
        ),
    ],
)
def test_early_stopping_watches_the_best_metric_or_else_the_loss(dataset, settings, watched):
    estimator = make_estimator(earlyStoppingPatience=2, metrics={"right": is_right}, **settings)
    assert prepare_fit(estimator, dataset).spec.watched == watched


class WantsRows(Metric):
    """A metric that needs a number of rows, as R2Score needs two; it must be distinguished from a broken metric."""

    def __init__(self, least, error=ValueError, *, at_once=0):
        super().__init__()
        self.least, self.error, self.at_once = least, error, at_once
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs, labels):
        self.rows += len(labels)
        if len(labels) < self.at_once:
            raise self.error(f"a batch of {len(labels)} rows is too small")

    def compute(self):
        if self.rows < self.least:
            raise self.error(f"{int(self.rows)} rows are too few")
        return self.rows


def as_seventh(outputs, labels):
    return outputs[:, 7]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (partial(WantsRows, 9999, KeyError), "16 rows. Metric 'm' failed: KeyError: '16 rows"),
        (partial(WantsRows, 0, KeyError, at_once=5), "Metric 'm' failed: KeyError: 'a batch of 4 rows"),
        (partial(MulticlassAccuracy, 3, average=None), "Metric 'm' is not one number but .3,.. Choose"),
        (as_seventh, "Metric 'm' failed: IndexError"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused(dataset, metric, message):
    with pytest.raises(ParamError, match=f"Param metrics .* on the first .*{message}"):
        prepare_fit(make_estimator(metrics={"m": metric}, batchSize=4), dataset)


def test_metric_that_needs_more_rows_is_tried_on_more_rows(dataset, caplog, recwarn):
    metrics = {
        "few": partial(WantsRows, 2, RuntimeError),
        "auroc": MulticlassAUROC(3),
        "all": WantsRows(37),
        "batch": WantsRows(0, KeyError, at_once=32),
        "scikit-learn": lambda outputs, labels: log_loss(labels, outputs.softmax(dim=1)),
    }
    prepare_fit(make_estimator(metrics=metrics), dataset)
    assert not caplog.records
    assert not [warning for warning in recwarn if "samples in targets" in str(warning.message)]


def test_value_error_of_a_metric_is_a_warning_unless_all_rows_were_tried(dataset, caplog):
    metrics = {"m": partial(WantsRows, 100)}
    prepare_fit(make_estimator(metrics=metrics, batchSize=4), dataset)
    (warning,) = caplog.messages
    assert warning.startswith("After the first 16 of 37 rows: Metric 'm' failed: ValueError")
    with pytest.raises(ParamError, match="first 37 rows. Metric 'm' failed: ValueError"):
        prepare_fit(make_estimator(metrics=metrics), dataset)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (1e-46, "'weight' is 0, or too small for float32"),
        (1e39, "'weight' holds 1e.39 .*, too large for float32"),
    ],
)
def test_weights_that_float32_does_not_hold_are_refused(tmp_path, factor, message):
    table = pa.table({"x": [[1.0] * 4] * 3, "y": [0, 1, 2], "weight": [factor] * 3})
    pq.write_table(table, tmp_path / "part-0.parquet")
    with pytest.raises(DataError, match=message):
        prepare_fit(make_estimator(weightCol="weight"), scan_dataset(str(tmp_path)))
