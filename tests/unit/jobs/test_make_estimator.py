from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from sparkdl.errors import JobFileError
from sparkdl.estimators import (
    ImageClassifier,
    TextClassifier,
    TorchClassifier,
    TorchEstimator,
    TorchRegressor,
)
from sparkdl.jobs.imports import code_files, importable
from sparkdl.jobs.make_estimator import make_estimator
from sparkdl.monitor import Monitor
from sparkdl.parallel import Parallelism
from tests.unit.jobs.job_files import JOB, read

READY_MADE = "data: {table: rows}\nmodel: TorchClassifier\nparams: {epochs: 3}\noutput: out\n"


def make(folder, *arguments, text=JOB):
    job = read(folder, *arguments, text=text)
    with importable(code_files(job)):
        return make_estimator(job)


def test_estimator_has_the_settings_of_the_job(tmp_path):
    estimator = make(tmp_path, "model.arguments.hidden=5", "loss=my_nets:half_loss")
    assert type(estimator) is TorchEstimator
    assert estimator.getModel()[0].out_features == 5
    assert isinstance(estimator.getOptimizer(), functools.partial)
    assert estimator.getOptimizer()(estimator.getModel().parameters()).defaults["lr"] == 0.5
    assert estimator.getLoss().__name__ == "half_loss"
    assert (estimator.getCache(), estimator.getEpochs(), estimator.getValidationFraction()) == ("off", 2, 0.2)


def test_tracking_and_registry_stand_for_params(tmp_path):
    estimator = make(
        tmp_path,
        "tracking={mode: on, experiment: digits, runName: nightly}",
        "registry={name: main.models.digits, alias: champion}",
    )
    assert (estimator.getTracking(), estimator.getExperiment(), estimator.getRunName()) == (
        "on",
        "digits",
        "nightly",
    )
    assert estimator.getRegisteredModelName() == "main.models.digits"
    assert estimator.getRegisteredModelAlias() == "champion"


@pytest.mark.parametrize("made", [TorchClassifier, TorchRegressor, ImageClassifier, TextClassifier])
def test_ready_made_estimators_are_named(tmp_path, made):
    assert type(make(tmp_path, f"model={made.__name__}", text=READY_MADE)) is made


def test_a_class_stands_for_an_instance_and_arguments_of_a_function_are_bound(tmp_path):
    estimator = make(
        tmp_path,
        "loss={import: torch.nn:CrossEntropyLoss, arguments: {label_smoothing: 0.1}}",
        "params.metrics={half: {import: my_nets:half_loss, arguments: {weight: 2.0}}}",
        "scheduler={import: torch.optim.lr_scheduler:StepLR, arguments: {gamma: 0.1}}",
    )
    assert isinstance(estimator.getLoss(), nn.CrossEntropyLoss)
    assert estimator.getLoss().label_smoothing == 0.1
    assert estimator.getMetrics()["half"].keywords == {"weight": 2.0}
    assert estimator.getScheduler().func is torch.optim.lr_scheduler.StepLR


def test_the_layout_is_named_or_left_to_the_planner(tmp_path):
    assert make(tmp_path, "numWorkers=2", "parallelism=auto").getParallelism() == "auto"
    named = make(tmp_path, "numWorkers=2", "parallelism={shard: 2}")
    assert named.getParallelism() == Parallelism(shard=2)


def test_existing_network_is_used_unchanged(tmp_path):
    estimator = make(tmp_path, "model=my_nets:net")
    assert isinstance(estimator.getModel(), nn.Linear)


def test_first_weights_depend_on_the_seed(tmp_path):
    def weights(seed):
        torch.rand(3)  # another draw before the network is made
        return make(tmp_path, f"seed={seed}").getModel()[0].weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("epocs=3", "params.epocs: TorchEstimator has no Param 'epocs'. Did you mean epochs?"),
        ("epochs=three", "params.epochs: Param epochs takes a whole number, got 'three'"),
        ("cache=of", "params.cache: Param cache cannot be 'of'"),
        ("batchSize=0", "params: Param batchSize must be at least 1, got 0"),
        ("data.validation=2", "params: Param validationFraction must be above 0 and below 1, got 2.0"),
        ("bestMetric=f1", "params: Param bestMetric is 'f1', but this fit has loss, val_loss."),
        ("labelCol={a: b}", "params.labelCol: Param labelCol cannot be {'a': 'b'}: "),
        ("loss=CrossEntropyLoss", "loss is 'CrossEntropyLoss'. By name there are binary_cross_entropy, "),
        ("callbacks=[Mine]", "params.callbacks[0].import: takes MODULE:NAME, as torch.nn:CrossEntropyLoss"),
        (
            "loss=torch.nn:CrosEntropyLoss",
            "params.loss.import: torch.nn has no 'CrosEntropyLoss'. Did you mean Cross",
        ),
        (
            "loss=my_netz:loss",
            "params.loss.import: there is no module 'my_netz'. Put its file beside the job's",
        ),
        (
            "loss={import: 'my_nets:net', arguments: {a: 1}}",
            "params.loss.arguments: the imported object is of the type",
        ),
        (
            "loss={import: 'a:b', argument: {a: 1}}",
            "params.loss has no key 'argument'. Did you mean arguments?",
        ),
        ("model.arguments.hiden=3", "model.arguments.hiden: make_net(hidden=16, hiden=3) raised TypeError"),
        (
            "model={import: 'my_nets:make_nothing'}",
            "model: this must make a torch.nn.Module, and makes a NoneType.",
        ),
    ],
)
def test_invalid_argument_is_named_as_it_was_written(tmp_path, argument, message):
    with pytest.raises(JobFileError) as caught:
        make(tmp_path, argument)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"the argument {argument!r}: ")


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("  epochs: 2", "  epochs: 0", ":16: params: Param epochs must be at least 1, got 0"),
        (
            "  epochs: 2",
            "  epochs: many",
            ":16: params.epochs: Param epochs takes a whole number, got 'many'",
        ),
        ("  loss: torch.nn:CrossEntropyLoss", "  weightCol: w", ":8: params: Param loss is not set"),
        (
            "    arguments: {lr: 5e-1}",
            "    arguments: {lr: -1}",
            ":9: params: Param optimizer failed when called with",
        ),
        (
            "    hidden: 16",
            "    hidden: -1",
            ":6: model.arguments: make_net(hidden=-1) raised RuntimeError: ",
        ),
    ],
)
def test_invalid_line_is_named_with_file_and_line(tmp_path, line, instead, message):
    assert f"{line}\n" in JOB
    with pytest.raises(JobFileError) as caught:
        make(tmp_path, text=JOB.replace(f"{line}\n", f"{instead}\n"))
    assert str(caught.value).startswith(f"{tmp_path / 'job.yaml'}{message}")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def make_net(hidden):\n    return hidden / 0\n", r"ZeroDivisionError: .*my_nets.py, line 2"),
        ("import not_installed_here\n", "cannot be imported: No module named 'not_"),
    ],
)
def test_an_error_in_the_code_of_a_model_is_named_with_its_line_or_import(tmp_path, code, message):
    job = read(tmp_path)
    (tmp_path / "my_nets.py").write_text(code)
    with importable(code_files(job)), pytest.raises(JobFileError, match=message):
        make_estimator(job)


def test_a_job_is_monitored_as_its_params_say(tmp_path):
    estimator = make(
        tmp_path, "params.monitor={seconds: 2, port: 9400, trace: steps.json, trace_steps: [5, 6]}"
    )
    expected = Monitor(seconds=2, port=9400, trace="steps.json", trace_steps=(5, 6))
    assert estimator.getMonitor() == expected
    with pytest.raises(JobFileError, match=r"params\.monitor: .*second"):
        make(tmp_path, "params.monitor={second: 2}")
