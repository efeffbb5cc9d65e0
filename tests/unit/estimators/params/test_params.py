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
from sparkdl.training.update import make_optimizer


def make_estimator(**changes):
    params = {"model": nn.Linear(2, 1), "loss": nn.MSELoss(), "optimizer": torch.optim.SGD, "epochs": 3}
    params["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return TorchEstimator(**{**params, **changes})


def test_params_have_defaults_getters_setters_and_an_explanation():
    estimator = make_estimator()
    assert (estimator.getEpochs(), estimator.getBatchSize(), estimator.getNumWorkers()) == (3, 32, 1)
    assert (estimator.getFeaturesCol(), estimator.getLabelCol(), estimator.getPredictionCol()) == (
        "features",
        "label",
        "prediction",
    )
    assert estimator.setEpochs(5).setFeaturesCol("x").setSeed(9) is estimator
    assert (estimator.getEpochs(), estimator.getFeaturesCol(), estimator.getSeed()) == (5, "x", 9)
    explained = "epochs: number of passes over the training rows (> 0) (default: 1, current: 5)"
    assert explained in estimator.explainParams()
    for param in estimator.params:
        name = param.name[0].upper() + param.name[1:]
        assert hasattr(estimator, f"get{name}"), name
        assert hasattr(estimator, f"set{name}"), name


def test_a_copy_has_params_of_its_own():
    estimator = make_estimator()
    copy = estimator.copy({estimator.epochs: 7})
    assert (estimator.getEpochs(), copy.getEpochs()) == (3, 7)
    assert copy.getModel() is estimator.getModel()


def test_a_store_may_be_an_object_or_a_url(tmp_path):
    assert make_estimator(store=Store(tmp_path)).getStore().url == str(tmp_path)
    assert make_estimator(store=str(tmp_path)).getStore().url == str(tmp_path)


def test_rows_are_kept_as_long_as_the_store_or_keep_rows_seconds_says(tmp_path):
    hour = timedelta(hours=1)
    assert make_estimator(store=Store(tmp_path, keep_for=hour)).getStore().keep_for == hour
    assert make_estimator(store=str(tmp_path), keepRowsSeconds=0).getStore().keep_for == timedelta(0)
    assert make_estimator(store=str(tmp_path)).getStore().keep_for == timedelta(days=1)
    with pytest.raises(ParamError, match=r"keepRowsSeconds must be at least 0, got -1\.0"):
        make_estimator(keepRowsSeconds=-1.0).check_values()


def test_the_constructor_takes_keywords_only_and_knows_its_params():
    with pytest.raises(TypeError, match="forces keyword arguments"):
        TorchEstimator(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="batchsize"):
        TorchEstimator(batchsize=3)
    with pytest.raises(TypeError, match="'fast' is none of 'auto', 'native'"):
        make_estimator(transport="fast")
    with pytest.raises(TypeError, match="'float8' is none of 'float32', 'bfloat16', 'float16'"):
        make_estimator(wire="float8")
    with pytest.raises(TypeError, match="'yes' is none of 'off', 'memory', 'disk'"):
        make_estimator(cache="yes")
    with pytest.raises(TypeError, match="'most' is none of 'min', 'max'"):
        make_estimator(bestMode="most")
    with pytest.raises(TypeError, match="'fp8' is none of 'float32', 'bfloat16', 'float16'"):
        make_estimator(precision="fp8")


def test_labels_are_a_list_or_one_for_each_label_column():
    assert make_estimator(labels=("b", "a")).getLabels() == ["b", "a"]
    assert make_estimator(labels=np.array([3.0, -1.0])).getLabels() == [3, -1]
    assert make_estimator(labels=[[True, False], None]).getLabels() == [[True, False], None]
    assert make_estimator(labels=range(3)).getLabels() == [0, 1, 2]
    assert make_estimator(labels=(None, np.array(["ab", "c"]), range(2))).getLabels() == [
        None,
        ["ab", "c"],
        [0, 1],
    ]


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        *[(each, each) for each in (5, "ab", ["a"], ["a", "a"], ["a", 1], [0.5, 1.0], [True, 1], {"a", "b"})],
        ({"y": ["a", "b"]}, {"y": ["a", "b"]}),
        ([["a", "b"], []], []),
        ([None, "ab"], "ab"),
        (["ab", ["x", "y"]], "ab"),
        ([None, 3], 3),
    ],
)
def test_invalid_labels_are_refused_as_they_were_given(given, wrong):
    message = f"{wrong!r} are not two labels or more, each once, that are all strings"
    with pytest.raises(ParamTypeError, match=re.escape(message)):
        make_estimator(labels=given)


class OwnLoss(nn.Module):
    pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "Param model is not set"),
        ({"loss": None}, "Param loss is not set"),
        ({"optimizer": None}, "Param optimizer is not set"),
        ({"model": "resnet"}, "Param model is a str, not a torch.nn.Module"),
        (
            {"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.01)},
            r"is an instance of Adam.*each rank.*: lambda parameters: torch\.optim\.Adam\(parameters, lr=0\.01\)",
        ),
        ({"optimizer": 3}, "Param optimizer is int: function that takes the model's parameters"),
        (
            {"optimizer": torch.optim.lr_scheduler.StepLR},
            "Param optimizer is the class StepLR: function that takes the model's parameters",
        ),
        ({"loss": nn.MSELoss}, r"Param loss is the class MSELoss; give an instance: nn\.MSELoss\(\)"),
        ({"loss": [OwnLoss, nn.MSELoss()]}, r"is the class OwnLoss; give an instance: OwnLoss\(\)"),
        ({"epochs": 0}, "Param epochs must be at least 1, got 0: "),
        ({"batchSize": -1}, "Param batchSize must be at least 1, got -1: "),
        ({"numWorkers": 0}, "Param numWorkers must be at least 1, got 0: "),
        ({"gpusPerWorker": 2}, "Param gpusPerWorker must be 0 or 1, got 2"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            "Param scheduler is the class StepLR: function that takes",
        ),
        ({"warmupSteps": -1}, "Param warmupSteps must be at least 0, got -1: "),
        ({"gradientAccumulationSteps": 0}, "Param gradientAccumulationSteps must be at least 1, got 0: "),
        ({"maxGradNorm": 0.0}, r"Param maxGradNorm must be above 0, got 0\.0"),
        ({"trackingTimeoutSeconds": -1.0}, r"Param trackingTimeoutSeconds must be at least 0, got -1\.0"),
        (
            {"registeredModelAlias": "best"},
            "Param registeredModelAlias is 'best': .*needs a registeredModelName",
        ),
        (
            {"transport": "mpi", "wire": "bfloat16"},
            "transport='mpi' sends float32 as it is; wire='bfloat16' needs another transport",
        ),
        ({"logCheckpoints": True}, "Param logCheckpoints is True: .*needs a checkpointDir"),
        (
            {"validationFraction": 0.0},
            r"validationFraction must be above 0 and below 1, got 0\.0: fraction of the rows",
        ),
        ({"validationFraction": 1.5}, r"Param validationFraction must be above 0 and below 1, got 1\.5"),
        (
            {"validationFraction": 0.5, "validationIndicatorCol": "v"},
            r"validationFraction \(0\.5\) and validationIndicatorCol \('v'\) both say which rows",
        ),
        (
            {"labels": [["a", "b"], None]},
            "labels has the labels of 2 columns, and labelCol names 1: label. Give a list for each",
        ),
        ({"labels": ["a", "b"], "labelCol": ["x", "y"]}, "of 1 columns, and labelCol names 2: x, y"),
        ({"labels": [0, 1], "loss": None, "trainStep": max}, "Params labels and trainStep are both set"),
        ({"metrics": [max]}, "Param metrics must be a dict, .*; got a list"),
        (
            {"earlyStoppingPatience": 0},
            "Param earlyStoppingPatience must be at least 1, got 0: number of consecutive epochs",
        ),
        ({"earlyStoppingMinDelta": -0.5}, r"Param earlyStoppingMinDelta must be at least 0, got -0\.5"),
        ({"bestMetric": "val_loss"}, "Param bestMetric is 'val_loss', but this fit has loss. Choose"),
        (
            {"bestMetric": "f1", "validationFraction": 0.5, "metrics": {"auc": max}},
            "but this fit has loss, auc, val_loss, val_auc. Choose one",
        ),
        ({"bestMetric": "auc", "metrics": {"auc": max}}, "bestMode is not set: whether 'auc' is better"),
        ({"bestMode": "max"}, "Param bestMode is 'max', but bestMetric is not set"),
        ({"callbacks": Callback()}, "Param callbacks must be a list of .*; got a Callback"),
        ({"callbacks": [print]}, "Param callbacks holds a builtin_function"),
        ({"callbacks": [Callback]}, "holds the class Callback, not one of its instances"),
        ({"metrics": {"loss": max}}, "Param metrics has the name 'loss', which is reserved"),
        ({"metrics": {"val_f1": max}}, "has the name 'val_f1', which is reserved"),
        ({"metrics": {"f1/macro": max}}, "has the name 'f1/macro'. Choose one of letters"),
        ({"metrics": {"f1": "f1"}}, "Metric 'f1' must be a function of .*; got a str"),
    ],
)
def test_values_that_cannot_work_are_named(changes, message):
    with pytest.raises(ParamError, match=message):
        make_estimator(**changes).check_values()


def test_optimizer_class_is_called_with_the_parameters():
    make_estimator(optimizer=torch.optim.Adam).check_values()
    assert isinstance(make_optimizer(torch.optim.Adam, nn.Linear(1, 1)), torch.optim.Adam)


def test_params_of_checkpoints_and_restarts_are_checked(tmp_path):
    estimator = make_estimator(checkpointDir=tmp_path / "here", numWorkers=3)
    assert (estimator.getCheckpointDir(), estimator.getMinWorkers()) == (str(tmp_path / "here"), 3)
    assert make_estimator().getCheckpointDir() is None
    for changes, said in (
        ({"checkpointEverySteps": 0}, "checkpointEverySteps must be at least 1, got 0: "),
        ({"keepCheckpoints": 0}, "keepCheckpoints must be at least 1, got 0"),
        ({"maxRestarts": -1}, "maxRestarts must be at least 0, got -1"),
        ({"minWorkers": 4, "numWorkers": 3}, "minWorkers is 4 and numWorkers 3"),
        ({"minWorkers": 0}, "minWorkers is 0"),
        ({"hangTimeoutSeconds": 1.5}, "hangTimeoutSeconds must be at least 2, got 1.5"),
    ):
        with pytest.raises(ParamError, match=said):
            make_estimator(**changes).check_values()


def test_decimals_become_doubles_unless_prepare_features_takes_them(tmp_path):
    columns = {"featuresCol": "x", "labelCol": "y", "weightCol": "w", "store": str(tmp_path)}
    assert rows_needed(make_estimator(**columns)).doubles == ("x", "y", "w")
    assert rows_needed(make_estimator(**columns, prepareFeatures=max)).doubles == ("y", "w")
    assert rows_needed(TorchRegressor(**columns).params_of_fit()).doubles == ("x", "y", "w")


def test_each_of_several_param_maps_has_checkpoints_of_its_own():
    estimator = make_estimator(checkpointDir="/there/")
    several = with_param_maps(estimator, [{estimator.epochs: 1}, {estimator.checkpointDir: "/here"}])
    assert [copy.getCheckpointDir() for copy in several] == ["/there/fit-0", "/here/fit-1"]
    assert with_param_maps(estimator, [{}])[0].getCheckpointDir() == "/there/"
