"""Saving and loading without a Spark session, on a local disk and on another filesystem."""

from __future__ import annotations

import json
import os

import fsspec
import pytest
import torch
from torch import nn

from sparkdl.errors import SavedModelError, SerializationError
from sparkdl.estimators import Callback, TorchEstimator, TorchModel
from tests.unit.estimators.public_classes import MODELS


def make_model():
    return MODELS["TorchModel"]().setFeaturesCol("x").setPredictionCol("p")


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path):
    if request.param == "disk":
        yield str(tmp_path / "deep" / "model")
        return
    url = f"memory://sparkdl-test-{tmp_path.name}/model"
    yield url
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.rm(path.rpartition("/")[0], recursive=True)


def test_saved_model_loads_unchanged(place):
    model = make_model()
    model.save(place)
    loaded = TorchModel.load(place)
    assert (loaded.uid, loaded.getFeaturesCol(), loaded.getPredictionCol()) == (model.uid, "x", "p")
    assert loaded.summary == model.summary
    assert loaded.saved.signature == model.saved.signature
    assert torch.equal(loaded.module.weight, model.module.weight)


def test_torch_model_loads_the_models_of_all_estimators(place):
    for name, make in MODELS.items():
        model = make()
        model.write().overwrite().save(place)
        loaded = TorchModel.load(place)
        assert (type(loaded), loaded.uid) == (type(model), model.uid), name


def test_only_overwrite_replaces_a_model_and_it_leaves_no_other_files(place):
    make_model().save(place)
    with pytest.raises(SavedModelError, match=r"exists already. Use write\(\).overwrite\(\)"):
        make_model().save(place)
    newer = make_model()
    newer.write().overwrite().save(place)
    assert TorchModel.load(place).uid == newer.uid
    assert names_beside(place) == ["model"]


def stop_in_step(monkeypatch, filesystem, *, number, is_done):
    """Raise KeyboardInterrupt before or after a step that changes the filesystem, and return the list of the steps."""
    steps = []

    def stopping(original, is_step=lambda *_: True):
        def call(*args, **options):
            if not is_step(*args):
                return original(*args, **options)
            steps.append(args)
            if len(steps) == number and not is_done:
                raise KeyboardInterrupt
            answer = original(*args, **options)
            if len(steps) == number:
                raise KeyboardInterrupt
            return answer

        return call

    kind = type(filesystem)
    monkeypatch.setattr(kind, "open", stopping(kind.open, lambda _, path, mode="rb", **__: mode == "wb"))
    monkeypatch.setattr(kind, "rm_file", stopping(kind.rm_file))
    monkeypatch.setattr("os.replace", stopping(os.replace))
    return steps


def names_beside(place):
    filesystem, path = fsspec.core.url_to_fs(place)
    entries = filesystem.ls(path.rpartition("/")[0], detail=False)
    return [entry.rstrip("/").rpartition("/")[2] for entry in entries]


def test_overwrite_interrupted_at_any_step_leaves_the_old_model_or_all_of_the_new_one(place, monkeypatch):
    filesystem, path = fsspec.core.url_to_fs(place)
    model, number = make_model(), 0
    model.save(place)
    while True:
        number += 1
        newer, is_done = make_model(), number % 2 == 0
        with monkeypatch.context() as patch:
            steps = stop_in_step(patch, filesystem, number=number, is_done=is_done)
            try:
                newer.write().overwrite().save(place)
                break
            except KeyboardInterrupt:
                pass
        try:
            assert TorchModel.load(place).uid in (model.uid, newer.uid)
        except SavedModelError:
            (aside,) = asides(filesystem, path)
            assert TorchModel.load(f"{place}/{aside}").uid == newer.uid
        model.write().overwrite().save(place)
        assert names_beside(place) == ["model"]
    assert len(steps) < number
    assert number > 6
    assert TorchModel.load(place).uid == newer.uid
    assert asides(filesystem, path) == set()


def asides(filesystem, path):
    return {name[len(path) + 1 :].split("/")[0] for name in filesystem.find(path) if ".new/" in name}


def test_interrupted_first_save_leaves_nothing(place, monkeypatch):
    filesystem = fsspec.core.url_to_fs(place)[0]
    for number in range(1, 6):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop_in_step(patch, filesystem, number=number, is_done=False)
            make_model().save(place)
        assert not filesystem.exists(fsspec.core.url_to_fs(place)[1])


def test_file_that_arrives_shortened_is_noticed_before_the_old_model_is_touched(place, monkeypatch):
    model = make_model()
    model.save(place)
    kind = type(fsspec.core.url_to_fs(place)[0])
    original = kind.info

    def shortened(self, path, **options):
        info = original(self, path, **options)
        return {**info, "size": info["size"] - 1} if path.endswith("weights.safetensors") else info

    with (
        monkeypatch.context() as patch,
        pytest.raises(SavedModelError, match=r"weights.safetensors has \d+ bytes"),
    ):
        patch.setattr(kind, "info", shortened)
        make_model().write().overwrite().save(place)
    assert TorchModel.load(place).uid == model.uid


def test_an_old_model_that_cannot_be_removed_costs_a_warning(place, monkeypatch, caplog):
    make_model().save(place)
    newer = make_model()

    def refuse(self, path, **options):
        raise PermissionError(f"{path} is held")

    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.core.url_to_fs(place)[0]), "rm", refuse)
        newer.write().overwrite().save(place)
    assert TorchModel.load(place).uid == newer.uid
    assert "is no longer needed, and could not be removed" in caplog.text


class CallbackOfTwo(Callback):
    def __init__(self, number):
        self.number = number


def test_an_estimator_comes_back_with_lambdas_and_weights(place):
    estimator = TorchEstimator(
        model=nn.Linear(2, 3),
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 2 * steps),
        precision="bfloat16",
        metrics={"error": lambda outputs, labels: outputs - labels},
        validationFraction=0.25,
        callbacks=[CallbackOfTwo(2)],
        epochs=4,
    )
    estimator.save(place)
    loaded = TorchEstimator.load(place)
    assert (loaded.uid, loaded.getEpochs()) == (estimator.uid, 4)
    assert torch.equal(loaded.getModel().weight, estimator.getModel().weight)
    assert loaded.getLoss().weight.tolist() == [1.0, 2.0, 3.0]
    optimizer = loaded.getOptimizer()(loaded.getModel().parameters())
    assert optimizer.defaults["lr"] == 0.25
    assert loaded.getScheduler()(optimizer, 30).step_size == 60
    assert (loaded.getPrecision(), loaded.getValidationFraction()) == ("bfloat16", 0.25)
    assert [callback.number for callback in loaded.getCallbacks()] == [2]
    assert loaded.getMetrics()["error"](3, 1) == 2


def test_failed_save_keeps_the_existing_model(tmp_path):
    path = str(tmp_path / "model")
    model = make_model()
    model.save(path)
    broken = make_model()
    broken.module.lock = __import__("threading").Lock()
    with pytest.raises(SerializationError, match="lock"):
        broken.write().overwrite().save(path)
    assert TorchModel.load(path).uid == model.uid


def test_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(SavedModelError, match="nowhere does not exist"):
        TorchModel.load(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SavedModelError, match="metadata of a TorchModel in .* cannot be read"):
        TorchModel.load(str(tmp_path / "empty"))
    make_model().save(str(tmp_path / "model"))
    with pytest.raises(SavedModelError, match=r"holds a .*TorchModel, not a .*TorchEstimator"):
        TorchEstimator.load(str(tmp_path / "model"))
    (tmp_path / "model" / "module" / "weights.safetensors").unlink()
    with pytest.raises(SavedModelError, match=r"model cannot be loaded. .*weights.safetensors is missing"):
        TorchModel.load(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("intact", "damaged"),
    [
        ('"uid"', '"uie"'),
        ('"defaultParamMap"', '"defaultParamMaq"'),
        ('"sparkVersion": "', '"sparkVersion": "x'),
        ('"batchSize": ', '"batchSizf": '),
        ('"equal"', '"equam"'),
        ('"epoch": ', '"epocj": '),
    ],
)
def test_damaged_metadata_is_an_error_with_the_path_of_the_model(tmp_path, intact, damaged):
    path = tmp_path / "model"
    make_model().save(str(path))
    metadata = path / "metadata" / "part-00000"
    text = metadata.read_text()
    assert intact in text
    metadata.write_text(text.replace(intact, damaged))
    with pytest.raises(SavedModelError, match=rf"^{path} cannot be loaded\. "):
        TorchModel.load(str(path))


@pytest.mark.parametrize("file", ["part-00000", "part-00000-56d13b3a-8c06-4187-9eb9-189e16aff010-c000.txt"])
@pytest.mark.parametrize(
    ("found", "call"),
    [
        ("pyspark.ml.pipeline.PipelineModel", "from pyspark.ml.pipeline import PipelineModel"),
        ("org.apache.spark.ml.PipelineModel", "from pyspark.ml import PipelineModel"),
        ("pyspark.ml.tuning.CrossValidatorModel", "from pyspark.ml.tuning import CrossValidatorModel"),
        (
            "org.apache.spark.ml.tuning.CrossValidatorModel",
            "from pyspark.ml.tuning import CrossValidatorModel",
        ),
    ],
)
def test_model_of_spark_is_named_with_the_call_that_loads_it(tmp_path, file, found, call):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / file).write_text(json.dumps({"class": found, "uid": "a_1", "paramMap": {}}))
    kind = found.rpartition(".")[2]
    with pytest.raises(SavedModelError, match=rf"holds a {found}, not a .*{call}; {kind}\.load\(path\)"):
        TorchModel.load(str(tmp_path))


def test_a_param_of_a_newer_version_is_named(tmp_path):
    make_model().save(str(tmp_path / "model"))
    path = tmp_path / "model" / "metadata" / "part-00000"
    metadata = json.loads(path.read_text())
    metadata["paramMap"]["warmUp"] = 3
    path.write_text(json.dumps(metadata))
    with pytest.raises(SavedModelError, match=r"warmUp.*Install a newer sparkdl"):
        TorchModel.load(str(tmp_path / "model"))
