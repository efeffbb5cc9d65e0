"""Spark ML's contract for the Params of every public class, as far as it needs no session."""

from __future__ import annotations

import inspect
import pickle
import re
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdl.data import Store
from sparkdl.errors import DataError, ParamError, ParamTypeError, SavedModelError
from sparkdl.estimators import Callback, TorchClassifier, TorchEstimator, TorchModel
from sparkdl.estimators.params.base import OneOf
from sparkdl.estimators.torch_estimator import FittingEstimator
from sparkdl.monitor import Monitor
from sparkdl.parallel import Parallelism
from sparkdl.slow_links import COMPRESSIONS, SYNCHRONIZATIONS, as_dict
from tests.unit.estimators.public_classes import ESTIMATORS, MODELS

CLASSES = {**ESTIMATORS, **MODELS}

OTHER_VALUES = {
    "classWeights": [2.0, 1.0],
    "thresholds": [0.3, 0.7],
    "model": nn.Linear(2, 5),
    "loss": nn.MSELoss(),
    "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.5),
    "scheduler": lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 2 * steps),
    "store": "/some/store",
    "parallelism": {"shard": 2, "recompute": True},
    "synchronization": {"kind": "DiLoCo", "every": 7},
    "compression": {"kind": "TopK", "ratio": 0.5},
    "monitor": {"seconds": 2.5, "port": 0},
    "corpusWeights": {"books": 2.0},
    "passFeaturesBy": "name",
    "labels": ["yes", "no"],
    "lossWeights": [2.0, 0.5],
    "hiddenSizes": [7],
    "imageSize": [7, 9],
    "imageShape": [7, 9],
    "stageWidths": [7],
    "augmentation": ["flip"],
    "metrics": {"error": nn.L1Loss()},
    "callbacks": [Callback()],
}
"""A value other than the default for each Param for which none can be derived from its default or converter."""

OBJECTS = {"model", "loss", "optimizer", "scheduler", "metrics", "callbacks"}
"""Params whose values are objects; a copy of such a value does not compare equal."""


def other_value(instance, param):
    if param.name in OTHER_VALUES:
        return OTHER_VALUES[param.name]
    default = instance.getOrDefault(param) if instance.hasDefault(param) else None
    if isinstance(param.typeConverter, OneOf):
        return next(choice for choice in param.typeConverter.choices if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    for value in ("other", 5, 2.5, ["other"]):
        try:
            return param.typeConverter(value)
        except (TypeError, ValueError):
            continue
    raise AssertionError(f"OTHER_VALUES lacks a value for {param.name}")


def default_of(instance, name):
    return instance._defaultParamMap[instance.getParam(name)]


def accessor(instance, kind, param):
    return getattr(instance, f"{kind}{param.name[0].upper()}{param.name[1:]}")


def set_value(instance, param, value):
    """Set a Param by its setter, or in a model without that setter as pyspark does; return the instance."""
    if hasattr(type(instance), f"set{param.name[0].upper()}{param.name[1:]}"):
        return accessor(instance, "set", param)(value)
    assert isinstance(instance, TorchModel), param.name
    return instance._set(**{param.name: value})


def shown(value):
    """The value as it was set: getters return a Store for a URL, settings for a dict, and a tuple for a list."""
    if isinstance(value, Store):
        return value.url
    if isinstance(value, Parallelism):
        return {"shard": value.shard, "recompute": value.recompute}
    if isinstance(value, (*SYNCHRONIZATIONS, *COMPRESSIONS)):
        return as_dict(value)
    if isinstance(value, Monitor):
        return value.as_dict()
    return list(value) if isinstance(value, tuple) else value


@pytest.fixture(params=CLASSES)
def instance(request):
    return CLASSES[request.param]()


@pytest.fixture(params=ESTIMATORS)
def estimator(request):
    return ESTIMATORS[request.param]()


def test_every_param_has_a_chaining_setter_and_a_getter(instance):
    for param in instance.params:
        value = other_value(instance, param)
        assert set_value(instance, param, value) is instance, param.name
        assert shown(accessor(instance, "get", param)()) == value, param.name
        assert instance.isSet(param), param.name


@pytest.mark.parametrize("name", MODELS)
def test_model_has_no_params_that_its_signature_replaces(name):
    assert not {"passFeaturesBy", "paddingValue"} & {param.name for param in MODELS[name]().params}


def test_getters_and_setters_and_params_are_documented(instance):
    for param in instance.params:
        assert len(param.doc) > 10, param.name
        for kind in ("get", "set"):
            if kind == "get" or isinstance(instance, FittingEstimator):
                assert accessor(instance, kind, param).__doc__, f"{kind} {param.name}"


def test_explain_params_contains_name_doc_default_and_value_of_each_param(instance):
    for param in instance.params:
        set_value(instance, param, other_value(instance, param))
    explained = instance.explainParams()
    for param in instance.params:
        value = instance.getOrDefault(param)
        default = f"default: {instance._defaultParamMap[param]}, " if instance.hasDefault(param) else ""
        more = f". {param.more}" if getattr(param, "more", "") else ""
        assert f"{param.name}: {param.doc}{more} ({default}current: {value})" in explained


def test_the_constructor_takes_every_param_by_keyword_only(estimator):
    arguments = inspect.signature(type(estimator)).parameters
    assert set(arguments) == {param.name for param in estimator.params}
    assert {argument.kind for argument in arguments.values()} == {inspect.Parameter.KEYWORD_ONLY}
    values = {param.name: other_value(estimator, param) for param in estimator.params}
    made = type(estimator)(**values)
    assert {param.name: made.getOrDefault(param) for param in made.params} == values
    with pytest.raises(TypeError, match="forces keyword arguments"):
        type(estimator)("features")


def test_the_class_documents_every_argument_with_its_default(estimator):
    documentation = inspect.getdoc(type(estimator))
    documented = documentation[documentation.index("Args:") :]
    entries = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", documented, flags=re.MULTILINE))
    assert set(entries) == {param.name for param in estimator.params}
    for param in estimator.params:
        if estimator.hasDefault(param):
            default = estimator._defaultParamMap[param]
            text = f"{default:g}" if isinstance(default, float) else str(default)
            assert text in entries[param.name], f"{param.name} does not say its default, {text}"


def test_set_params_refuses_unknown_params_with_suggestions(instance):
    with pytest.raises(ParamError, match="has no Param 'batchsize'. Did you mean batchSize?"):
        instance.setParams(batchsize=3)
    with pytest.raises(ParamError, match="has no Param 'zzz'. The Params are: .*batchSize, .*weightCol"):
        instance.setParams(zzz=3)
    for others in ("row_weights", "sample_weight"):
        with pytest.raises(ParamError, match=f"has no Param '{others}'. Did you mean weightCol\\?$"):
            instance.setParams(**{others: 3})


def test_constructor_refuses_unknown_params_with_suggestions(estimator):
    others = {"row_weights": "weightCol", "num_epochs": "epochs", "batchsize": "batchSize"}
    for other, meant in others.items():
        with pytest.raises(ParamTypeError, match=f"has no Param '{other}'. Did you mean {meant}\\?$"):
            type(estimator)(**{other: 3})


def test_setting_none_clears_a_param(instance):
    for param in instance.params:
        set_value(instance, param, other_value(instance, param))
        set_value(instance, param, None)
        assert not instance.isSet(param), param.name
        if instance.hasDefault(param):
            assert instance.getOrDefault(param) != other_value(instance, param), param.name
    assert instance.setParams(epochs=7).setParams(epochs=None).getEpochs() == 7


WRONG_TYPES = {
    "a text for a whole number": ("batchSize", "x", "Param batchSize takes a whole number, got 'x'"),
    "a fraction for a whole number": ("epochs", 1.5, "epochs takes a whole number, got 1.5"),
    "a boolean for a whole number": ("seed", True, "seed takes a whole number, got True"),
    "a list for a number": ("maxGradNorm", [1.0], r"maxGradNorm takes a number, got \[1.0\]"),
    "a number for a boolean": ("shuffle", 1, "shuffle takes True or False, got 1"),
    "a number for a name": (
        "featuresCol",
        3,
        "featuresCol cannot be 3: .*neither a column's name nor a list",
    ),
    "a column twice": ("featuresCol", ["a", "b", "a"], r"featuresCol cannot be \[.*names 'a' more than once"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_value_of_a_wrong_type_is_refused_by_every_way_to_set_a_param(estimator, name):
    param, value, message = WRONG_TYPES[name]
    before = estimator.extractParamMap()
    ways = [
        lambda: type(estimator)(**{param: value}),
        lambda: estimator.setParams(**{param: value}),
        lambda: accessor(estimator, "set", estimator.getParam(param))(value),
        lambda: estimator.set(estimator.getParam(param), value),
        lambda: estimator.copy({estimator.getParam(param): value}),
        lambda: estimator.fitMultiple(FRAME, [{estimator.getParam(param): value}]),
    ]
    for way in ways:
        with pytest.raises(ParamTypeError, match=message) as caught:
            way()
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)
    assert estimator.extractParamMap() == before


def test_text_that_is_none_of_the_choices_is_refused_with_the_choices(instance):
    for param in instance.params:
        if isinstance(param.typeConverter, OneOf):
            choices = ", ".join(map(repr, param.typeConverter.choices))
            with pytest.raises(
                ParamTypeError, match=f"{param.name} cannot be 'zzz': 'zzz' is none of {choices}"
            ):
                instance.set(param, "zzz")


@given(value=st.integers(1, 2**15 - 1))
@settings(max_examples=30, deadline=None)
def test_numbers_of_numpy_are_numbers(value):
    for of_numpy in (np.int16, np.int32, np.int64, np.uint16, np.float32, np.float64):
        got = TorchEstimator(batchSize=of_numpy(value)).getBatchSize()
        assert (got, type(got)) == (value, int)
    assert TorchEstimator(maxGradNorm=np.float32(0.5), shuffle=np.bool_(False)).getMaxGradNorm() == 0.5


def test_a_copy_has_values_of_its_own_and_shares_the_module(instance):
    copy = instance.copy({instance.getParam("batchSize"): 77})
    assert type(copy) is type(instance)
    assert copy.uid == instance.uid
    assert (copy.getBatchSize(), instance.getBatchSize()) == (77, default_of(instance, "batchSize"))
    copy.setParams(epochs=99)
    instance.setParams(seed=123)
    assert (instance.getEpochs(), copy.getSeed()) == (default_of(instance, "epochs"), 0)
    if instance.hasParam("model"):
        assert copy.getModel() is instance.getModel()
    for name in ("module", "summary"):
        assert getattr(copy, name, None) is getattr(instance, name, None)


def test_extract_param_map_lets_extra_values_win(instance):
    param = instance.getParam("epochs")
    assert (instance.isSet(param), instance.isDefined(param)) == (False, True)
    assert instance.extractParamMap()[param] == default_of(instance, "epochs")
    instance.setParams(epochs=3)
    assert instance.extractParamMap()[param] == 3
    assert instance.extractParamMap({param: 4})[param] == 4
    assert instance.getEpochs() == 3


def test_every_param_survives_saving(instance, tmp_path):
    values = {param.name: other_value(instance, param) for param in instance.params}
    instance.setParams(**values)
    instance.save(str(tmp_path / "saved"))
    loaded = type(instance).load(str(tmp_path / "saved"))
    assert loaded.uid == instance.uid
    for param in instance.params:
        before, after = instance.getOrDefault(param), loaded.getOrDefault(param)
        assert type(before) is type(after), param.name
        if param.name not in OBJECTS:
            assert before == after, param.name
    assert {param.name for param in loaded.params if loaded.isSet(param)} == set(values)


def test_a_saved_estimator_without_its_functions_is_said_to_be_damaged(estimator, tmp_path):
    estimator.save(str(tmp_path / "saved"))
    (tmp_path / "saved" / "functions.pkl").unlink()
    with pytest.raises(SavedModelError, match=r"cannot be read from functions.pkl: FileNotFoundError"):
        type(estimator).load(str(tmp_path / "saved"))


class Derived(TorchEstimator):
    """A user's subclass."""

    def setLearningAim(self, value):
        return self.setEpochs(value)


def test_subclass_of_the_user_is_kept_by_copy_save_and_load(tmp_path):
    derived = Derived(model=nn.Linear(2, 1)).setLearningAim(4)
    assert isinstance(derived.copy(), Derived)
    derived.save(str(tmp_path / "saved"))
    for asked_for in (Derived, TorchEstimator):
        loaded = asked_for.load(str(tmp_path / "saved"))
        assert (type(loaded), loaded.getEpochs()) == (Derived, 4)
    with pytest.raises(SavedModelError, match="holds a .*Derived, not a .*TorchClassifier"):
        TorchClassifier.load(str(tmp_path / "saved"))


CONTEXT = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False)))
FRAME = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=CONTEXT), schema=None, isStreaming=False)
"""The attributes of a DataFrame that the checks before a fit read."""


def test_fit_refuses_anything_but_a_spark_dataframe(estimator):
    for fit in (estimator.fit, lambda rows: estimator.fitMultiple(rows, [{}])):
        with pytest.raises(DataError, match=r"takes a Spark DataFrame, got builtins.dict.*createDataFrame"):
            fit({"features": [1.0]})


BAD_MAPS = {
    "a name instead of a Param": (lambda e, o: {"epochs": 3}, "keys of a Param map are Params.*got 'epochs'"),
    "a Param of another estimator": (lambda e, o: {o.epochs: 3}, "sets epochs of .* this is .*no effect"),
    "a value out of range": (lambda e, o: {e.epochs: 0}, "epochs must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_param_map_that_cannot_work_is_named_before_anything_starts(estimator, name):
    make, message = BAD_MAPS[name]
    bad = make(estimator, type(estimator)())
    with pytest.raises(ParamError, match=message):
        estimator.fit(FRAME, bad)
    for fit in (estimator.fit, estimator.fitMultiple):
        with pytest.raises(ParamError, match=f"In the Param map with index 1: .*{message}"):
            fit(FRAME, [{estimator.epochs: 2}, bad])


def test_fit_multiple_refuses_anything_but_a_list_of_param_maps(estimator):
    for maps in ({estimator.epochs: 2}, "epochs", [3]):
        with pytest.raises(ParamTypeError, match="fitMultiple takes a list of Param maps"):
            estimator.fitMultiple(FRAME, maps)


def test_a_misspelt_argument_is_refused_even_without_a_value(estimator):
    with pytest.raises(ParamTypeError, match="has no Param 'checkpoint_dir'. Did you mean checkpointDir"):
        type(estimator)(checkpoint_dir=None)


def test_empty_list_of_param_maps_gives_no_models(estimator):
    assert list(estimator.fitMultiple(FRAME, [])) == []
    assert estimator.fit(FRAME, []) == []


def test_pickled_instance_keeps_its_uid_and_params(instance):
    loaded = pickle.loads(cloudpickle.dumps(instance.setParams(epochs=9)))
    assert (loaded.uid, loaded.getEpochs()) == (instance.uid, 9)
