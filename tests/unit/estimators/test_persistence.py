"""Saving and loading without a Spark session, on a local disk and on another filesystem."""

from __future__ import annotations

import json

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


def test_only_overwrite_replaces_a_model_and_it_leaves_no_other_files(place):
    make_model().save(place)
    with pytest.raises(SavedModelError, match=r"exists already. Use write\(\).overwrite\(\)"):
        make_model().save(place)
    newer = make_model()
    newer.write().overwrite().save(place)
    assert TorchModel.load(place).uid == newer.uid
    assert names_beside(place) == ["model"]


def stop_in_move(monkeypatch, filesystem, *, number, where):
    """Raise KeyboardInterrupt in the given move, at one of the stages of a move by copying and removing."""
    original = type(filesystem).mv
    moves = []

    def move(self, source, target, **options):
        moves.append(source)
        if len(moves) != number:
            return original(self, source, target, **options)
        file = self.find(source)[0]
        if where == "half copied":
            self.makedirs((target + file[len(source) :]).rpartition("/")[0], exist_ok=True)
            self.copy(file, target + file[len(source) :])
        elif where == "moved":
            original(self, source, target, **options)
        else:
            self.copy(f"{source}/", f"{target}/", recursive=True)
        if where == "half removed":
            self.rm(file)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(filesystem), "mv", move)


def names_beside(place):
    filesystem, path = fsspec.core.url_to_fs(place)
    entries = filesystem.ls(path.rpartition("/")[0], detail=False)
    return [entry.rstrip("/").rpartition("/")[2] for entry in entries]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("where", ["half copied", "copied", "half removed", "moved"])
def test_interrupted_overwrite_keeps_the_existing_model(place, monkeypatch, number, where):
    model = make_model()
    model.save(place)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in_move(patch, fsspec.core.url_to_fs(place)[0], number=number, where=where)
        make_model().write().overwrite().save(place)
    assert TorchModel.load(place).uid == model.uid
    assert names_beside(place) == ["model"]


@pytest.mark.parametrize("where", ["half copied", "copied", "half removed", "moved"])
def test_an_interrupted_first_save_leaves_nothing(place, monkeypatch, where):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in_move(patch, fsspec.core.url_to_fs(place)[0], number=1, where=where)
        make_model().save(place)
    assert names_beside(place) == []


def test_an_old_model_that_cannot_be_removed_costs_a_warning(place, monkeypatch, caplog):
    make_model().save(place)
    newer = make_model()

    def refuse(self, path, **options):
        raise PermissionError(f"{path} is held")

    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.core.url_to_fs(place)[0]), "rm", refuse)
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.mv", rename_in_memory)
        newer.write().overwrite().save(place)
    assert TorchModel.load(place).uid == newer.uid
    assert "what was there before stays in" in caplog.text


def rename_in_memory(self, source, target, **options):
    """A mv for the memory filesystem that does not call ``rm``, which the test refuses."""
    self.copy(f"{source}/", f"{target}/", recursive=True)
    for name in [name for name in self.store if name.startswith(f"{source}/")]:
        del self.store[name]
    self.pseudo_dirs[:] = [name for name in self.pseudo_dirs if not name.startswith(source)]


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
    with pytest.raises(SavedModelError, match="There is no readable TorchModel"):
        TorchModel.load(str(tmp_path / "empty"))
    make_model().save(str(tmp_path / "model"))
    with pytest.raises(SavedModelError, match=r"holds a .*TorchModel, not a .*TorchEstimator"):
        TorchEstimator.load(str(tmp_path / "model"))
    (tmp_path / "model" / "module" / "weights.safetensors").unlink()
    with pytest.raises(SavedModelError, match=r"model cannot be loaded. .*weights.safetensors is missing"):
        TorchModel.load(str(tmp_path / "model"))


def test_a_param_of_a_newer_version_is_named(tmp_path):
    make_model().save(str(tmp_path / "model"))
    path = tmp_path / "model" / "metadata" / "part-00000"
    metadata = json.loads(path.read_text())
    metadata["paramMap"]["warmUp"] = 3
    path.write_text(json.dumps(metadata))
    with pytest.raises(SavedModelError, match=r"warmUp.*Install a newer sparkdl"):
        TorchModel.load(str(tmp_path / "model"))
