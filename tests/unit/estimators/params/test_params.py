from __future__ import annotations

import re
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.data import Store
from sparkdl.errors import ParamError, ParamTypeError
from sparkdl.estimators import Callback, TorchEstimator, TorchRegressor
from sparkdl.estimators.fit.fit import with_param_maps
from sparkdl.estimators.fit.rows import rows_needed
from sparkdl.slow_links import DiLoCo, LocalSGD, PowerSGD, TopK
from sparkdl.training.update import make_optimizer


def make_estimator(**changes):
    params = {"model": nn.Linear(2, 1), "loss": nn.MSELoss(), "optimizer": torch.optim.SGD}
    return TorchEstimator(**{**params, **changes})


def test_rows_are_kept_as_long_as_the_store_or_keep_rows_seconds_says(tmp_path):
    hour = timedelta(hours=1)
    store = make_estimator(store=Store(tmp_path, keep_for=hour)).getStore()
    assert (store.url, store.keep_for) == (str(tmp_path), hour)
    assert make_estimator(store=str(tmp_path), keepRowsSeconds=0).getStore().keep_for == timedelta(0)
    assert make_estimator(store=str(tmp_path)).getStore().keep_for == timedelta(days=1)


def test_labels_are_a_list_or_one_for_each_label_column():
    assert make_estimator(labels=("b", "a")).getLabels() == ["b", "a"]
    assert make_estimator(labels=np.array([3.0, -1.0])).getLabels() == [3, -1]
    assert make_estimator(labels=[[True, False], None]).getLabels() == [[True, False], None]
    assert make_estimator(labels=range(3)).getLabels() == [0, 1, 2]
    several = make_estimator(labels=(None, np.array(["ab", "c"]), range(2))).getLabels()
    assert several == [None, ["ab", "c"], [0, 1]]


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        *[
            (value, value)
            for value in (5, "ab", ["a"], ["a", "a"], ["a", 1], [0.5, 1.0], [True, 1], {"a", "b"})
        ],
        ({"y": ["a", "b"]}, {"y": ["a", "b"]}),
        ([["a", "b"], []], []),
        ([None, "ab"], "ab"),
        (["ab", ["x", "y"]], "ab"),
        ([None, 3], 3),
    ],
)
def test_invalid_labels_are_refused_as_they_were_given(given, wrong):
    with pytest.raises(ParamTypeError, match=re.escape(f"{wrong!r} are not two labels or more")):
        make_estimator(labels=given)


class OwnLoss(nn.Module):
    pass


class BufferOnMeta(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4, device="meta"))


ADAM = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.01)
STEP = {"loss": None, "trainStep": max}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "Param model is not set"),
        ({"loss": None}, "Param loss is not set"),
        ({"optimizer": None}, "Param optimizer is not set"),
        ({"model": "resnet"}, "Param model is a str, not a torch.nn.Module"),
        ({"model": nn.Linear(4, 3, device="meta")}, "model: 'weight' and 1 more of the Linear is on .* meta"),
        ({"model": BufferOnMeta()}, r"model: 'mean' of the BufferOnMeta is on .*meta.*to_empty"),
        (
            {"optimizer": ADAM},
            r"instance of Adam.*: lambda parameters: torch\.optim\.Adam\(parameters, lr=0\.01\)",
        ),
        ({"optimizer": 3}, "Param optimizer is int: function that takes the model's parameters"),
        (
            {"optimizer": torch.optim.lr_scheduler.StepLR},
            "optimizer is the class StepLR: function that takes",
        ),
        ({"loss": nn.MSELoss}, r"Param loss is the class MSELoss; give an instance: nn\.MSELoss\(\)"),
        ({"loss": [OwnLoss, nn.MSELoss()]}, r"is the class OwnLoss; give an instance: OwnLoss\(\)"),
        ({"loss": [nn.MSELoss(), 3]}, "Param loss is int"),
        ({"lossWeights": [0.0]}, "Param lossWeights must be above 0"),
        ({"trainStep": max}, "Params loss and trainStep are both set"),
        ({**STEP, "lossWeights": [2.0]}, "Params lossWeights and trainStep are both set"),
        ({**STEP, "labels": [0, 1]}, "Params labels and trainStep are both set"),
        ({"epochs": 0}, "epochs must be at least 1, got 0: "),
        ({"batchSize": -1}, "batchSize must be at least 1, got -1: "),
        ({"numWorkers": 0}, "numWorkers must be at least 1, got 0: "),
        ({"gpusPerWorker": 2}, "gpusPerWorker must be at least 0 and below 2, got 2"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            "scheduler is the class StepLR: function that takes",
        ),
        ({"warmupSteps": -1}, "warmupSteps must be at least 0, got -1: "),
        ({"gradientAccumulationSteps": 0}, "gradientAccumulationSteps must be at least 1, got 0: "),
        ({"maxGradNorm": 0.0}, r"maxGradNorm must be above 0, got 0\.0"),
        ({"trackingTimeoutSeconds": -1.0}, r"trackingTimeoutSeconds must be at least 0, got -1\.0"),
        ({"keepRowsSeconds": -1.0}, r"keepRowsSeconds must be at least 0, got -1\.0"),
        ({"registeredModelAlias": "best"}, "registeredModelAlias is 'best': .*needs a registeredModelName"),
        (
            {"transport": "mpi", "wire": "bfloat16"},
            "transport='mpi' .*wire='bfloat16' needs another transport",
        ),
        ({"logCheckpoints": True}, "logCheckpoints is True: .*needs a checkpointDir"),
        ({"checkpointEverySteps": 0}, "checkpointEverySteps must be at least 1, got 0: "),
        ({"keepCheckpoints": 0}, "keepCheckpoints must be at least 1, got 0"),
        ({"maxRestarts": -1}, "maxRestarts must be at least 0, got -1"),
        ({"minWorkers": 4, "numWorkers": 3}, "minWorkers is 4 and numWorkers 3"),
        ({"minWorkers": 0}, "minWorkers is 0"),
        ({"balance": "speed", "parallelism": {"shard": 1}}, "'speed', and so is parallelism: .* Leave one"),
        ({"balance": "speed", "deterministic": True}, "'speed', and so is deterministic: .* Leave one"),
        (
            {"balance": "speed", "syncBatchNorm": True, "gpusPerWorker": 1},
            "'speed', and so is syncBatchNorm: on GPUs, .* Leave one",
        ),
        ({"balance": "speed", "batchSize": 1}, "'speed', and each rank has one row of a step"),
        (
            {"balance": "speed", "globalBatchSize": 2, "numWorkers": 2},
            "'speed', and each rank has one row of a step",
        ),
        ({"hangTimeoutSeconds": 1.5}, "hangTimeoutSeconds must be at least 2, got 1.5"),
        ({"validationFraction": 0.0}, r"validationFraction must be above 0 and below 1, got 0\.0: "),
        ({"validationFraction": 1.5}, r"validationFraction must be above 0 and below 1, got 1\.5"),
        (
            {"validationFraction": 0.5, "validationIndicatorCol": "v"},
            r"validationFraction \(0\.5\) and validationIndicatorCol \('v'\) both",
        ),
        ({"labels": [["a", "b"], None]}, "labels of 2 columns, and labelCol names 1: label"),
        ({"labels": ["a", "b"], "labelCol": ["x", "y"]}, "of 1 columns, and labelCol names 2: x, y"),
        ({"earlyStoppingPatience": 0}, "earlyStoppingPatience must be at least 1, got 0: "),
        ({"earlyStoppingMinDelta": -0.5}, r"earlyStoppingMinDelta must be at least 0, got -0\.5"),
        ({"bestMetric": "val_loss"}, "bestMetric is 'val_loss', but this fit has loss. Choose"),
        (
            {"bestMetric": "f1", "validationFraction": 0.5, "metrics": {"auc": max}},
            "but this fit has loss, auc, val_loss, val_auc. Choose one",
        ),
        (
            {"bestMetric": "auc", "metrics": {"auc": max}},
            "bestMode is not set. Set bestMode to 'min' if smaller values of 'auc'",
        ),
        ({"bestMode": "max"}, "bestMode is 'max', but bestMetric is not set"),
        ({"callbacks": Callback()}, r"callbacks must be a list of .*\.Callback; got a Callback"),
        ({"callbacks": [print]}, "callbacks holds a builtin_function"),
        ({"callbacks": [Callback]}, "holds the class Callback, not one of its instances"),
        (
            {"metrics": [max]},
            r"metrics must be a list of names, such as .*; got \[<built-in function max>\]\.$",
        ),
        ({"metrics": ["acuracy"]}, "no metric 'acuracy'.* Did you mean 'accuracy'"),
        ({"optimizer": "adamv"}, "optimizer is 'adamv'.* Did you mean 'adam'"),
        ({"loss": "cross-entropy"}, "loss is 'cross-entropy'.* Did you mean 'cross_entropy'"),
        ({"scheduler": "cosin"}, "scheduler is 'cosin'.* Did you mean 'cosine'"),
        ({"learningRate": 0.1}, "learningRate is 0.1, and the function of Param optimizer has its own"),
        ({"metrics": {"loss": max}}, "metrics has a metric named 'loss', which is reserved"),
        ({"metrics": {"val_f1": max}}, "has a metric named 'val_f1', which is reserved"),
        ({"metrics": {"f1/macro": max}}, "has a metric named 'f1/macro'. Use a name of letters"),
        ({"metrics": {"f1": 1}}, r"Metric 'f1' must be a function of .*; got a int\.$"),
        ({"metrics": {"f1": "f1"}}, "no metric 'f1'.* Did you mean 'f1_score'"),
        ({"metrics": {"bleu": "bleu"}}, r"no metric 'bleu'.* such as 'f1_score'\.$"),
    ],
)
def test_values_that_cannot_work_are_named(changes, message):
    with pytest.raises(ParamError, match=message):
        make_estimator(**changes)._check_values()


@pytest.mark.parametrize(
    ("parallelism", "rows"),
    [(None, 8), ({"shard": 2}, 8), ({"tensor": 2}, 16), ({"pipeline": 4}, 32), ("auto", 8)],
)
def test_rows_of_a_step_are_divided_among_the_ranks_that_read_them(parallelism, rows):
    estimator = make_estimator(numWorkers=4, globalBatchSize=32, parallelism=parallelism)
    estimator._check_values()
    assert estimator.getBatchSize() == rows


def test_optimizer_class_is_called_with_the_parameters():
    make_estimator(optimizer=torch.optim.Adam)._check_values()
    assert isinstance(make_optimizer(torch.optim.Adam, nn.Linear(1, 1)), torch.optim.Adam)


def test_checkpoint_folder_may_be_a_path_and_restarts_take_all_workers_by_default(tmp_path):
    estimator = make_estimator(checkpointDir=tmp_path / "here", numWorkers=3)
    assert (estimator.getCheckpointDir(), estimator.getMinWorkers()) == (str(tmp_path / "here"), 3)
    assert make_estimator().getCheckpointDir() is None


def test_decimals_become_doubles_unless_prepare_features_takes_them(tmp_path):
    columns = {"featuresCol": "x", "labelCol": "y", "weightCol": "w", "store": str(tmp_path)}
    assert rows_needed(make_estimator(**columns)).doubles == ("x", "y", "w")
    assert rows_needed(make_estimator(**columns, prepareFeatures=max)).doubles == ("y", "w")
    assert rows_needed(TorchRegressor(**columns)._params_of_fit()).doubles == ("x", "y", "w")


def test_each_of_several_param_maps_has_checkpoints_of_its_own():
    estimator = make_estimator(checkpointDir="/there/")
    several = with_param_maps(estimator, [{estimator.epochs: 1}, {estimator.checkpointDir: "/here"}])
    assert [copy.getCheckpointDir() for copy in several] == ["/there/fit-0", "/here/fit-1"]
    assert with_param_maps(estimator, [{}])[0].getCheckpointDir() == "/there/"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"compression": TopK(ratio=0.1)}, "synchronization is set, and so is compression"),
        ({"parallelism": {"shard": 2}, "numWorkers": 2}, "and so is parallelism: ranks that have parts"),
        ({"precision": "float16"}, "and so is precision: the losses of float16"),
        ({"syncBatchNorm": True}, "and so is syncBatchNorm: it takes statistics"),
        (
            {"gpusPerWorker": 1, "synchronization": DiLoCo(every=4, group="host")},
            "and so is gpusPerWorker: on GPUs gradients are averaged by NCCL",
        ),
        (
            {"gpusPerWorker": 1, "synchronization": None, "compression": PowerSGD(rank=2)},
            "Param compression is set, and so is gpusPerWorker",
        ),
    ],
)
def test_settings_that_contradict_rare_synchronizations_are_refused(params, message):
    with pytest.raises(ParamError, match=message):
        make_estimator(**{"synchronization": LocalSGD(every=8), **params})._check_settings()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"synchronization": {"kind": "DiLoCo", "evry": 3}},
            "DiLoCo has no setting 'evry'. Did you mean 'every'",
        ),
        ({"synchronization": {"kind": "LocalSGD", "every": 0}}, "every of LocalSGD is 0"),
        ({"compression": LocalSGD(every=2)}, "a PowerSGD or TopK of sparkdl.torch, or a dict such as"),
    ],
)
def test_settings_of_slow_links_are_refused_when_they_are_set(params, message):
    with pytest.raises((ParamError, ParamTypeError), match=message):
        make_estimator(**params)


def test_settings_of_slow_links_are_given_as_objects_or_as_dicts():
    given = make_estimator(synchronization={"kind": "DiLoCo", "every": 32, "overlap": True})
    assert given.getSynchronization() == DiLoCo(every=32, overlap=True)
    assert make_estimator(compression=PowerSGD(rank=4)).getCompression() == PowerSGD(rank=4)
    assert make_estimator().getSynchronization() is make_estimator().getCompression() is None
