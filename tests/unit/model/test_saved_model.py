from __future__ import annotations

import copy
import json
import pickle
import pickletools
import subprocess
import sys
import wave
from collections import OrderedDict
from email.message import Message
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sparkdl.errors import SavedModelError, SerializationError
from sparkdl.estimators.fit.probe import trial_copy
from sparkdl.model.architecture import split_module
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import FORMAT, SavedModel, load_model, modules_in_pickle, save_model
from sparkdl.model.signature import ModelSignature
from tests.training.signatures import make_signature


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)
        self.plain = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) * self.scale + self.plain


def signature(prediction_shape: tuple[int, ...] = (4,)) -> ModelSignature:
    return make_signature((4,), prediction_shape=prediction_shape)


def reloaded(module, folder):
    """The module as it is loaded after it was saved."""
    save_model(SavedModel(module, signature()), folder)
    return load_model(folder).module


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    module = Tied().eval()
    save_model(SavedModel(module, signature()), tmp_path / "model")
    return module, tmp_path / "model"


def test_a_loaded_model_predicts_the_same_bits(saved):
    module, path = saved
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    loaded = load_model(path)
    assert loaded.signature == signature()
    # In the same batches: for other shapes a BLAS uses other kernels, which add in another order.
    batches = torch.from_numpy(rows).split(2)
    expected = torch.cat([module(batch) for batch in batches]).detach().numpy().astype(np.float64)
    np.testing.assert_array_equal(Predictor(loaded, batch_size=2).predict({"x": rows})["y"], expected)


def test_tied_weights_stay_tied_and_non_persistent_buffers_survive(saved):
    loaded = load_model(saved[1]).module
    assert loaded.second.weight is loaded.first.weight
    assert "scale" not in loaded.state_dict()
    assert torch.equal(loaded.scale, torch.full((4,), 3.0))
    assert torch.equal(loaded.plain, torch.arange(4.0))


def test_the_architecture_holds_no_weights():
    module = nn.Linear(64, 64)
    structure, tensors = split_module(module)
    assert len(structure) < module.weight.numel()
    assert "torch._utils" not in " ".join(str(argument) for _, argument, _ in pickletools.genops(structure))
    assert set(tensors) == {"weight", "bias"}


def test_frozen_parameters_stay_frozen(tmp_path):
    module = nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    loaded = reloaded(module, tmp_path / "model")
    assert not loaded.weight.requires_grad
    assert loaded.bias.requires_grad


def test_parameters_keep_their_attributes(tmp_path):
    module = nn.Linear(4, 4)
    module.weight.lr_scale = 0.5
    assert reloaded(module, tmp_path / "model").weight.lr_scale == 0.5


class Recurrent(nn.Module):
    """A module with a list of weights, in which torch replaces a parametrized weight by its last computed value."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def changing(kind):
    """Layers that compute a weight from others; after a call, so that a kept weight has a graph."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    if "LSTM" in str(kind):
        layer = Recurrent()
        if kind == "fresh LSTM":
            return nn.Sequential(nn.Linear(4, 4), layer).eval()
    elif kind == "parametrized twice":
        layer = parametrizations.spectral_norm(parametrizations.weight_norm(layer), "bias", dim=0)
    else:
        layer = kind(layer)
    module = nn.Sequential(nn.Linear(4, 4), layer)
    module(torch.ones(3, 4)).sum()
    return module.eval()


KINDS = [
    "fresh LSTM",
    "LSTM",
    "parametrized twice",
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    torch.nn.utils.weight_norm,
    torch.nn.utils.spectral_norm,
]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_whose_weights_are_computed_from_others_is_saved_and_copied(tmp_path, kind):
    module, rows = changing(kind), torch.randn(3, 4)
    loaded = reloaded(module, tmp_path / "model")
    copies = [loaded, *(trial_copy(module, module, copied_bytes)[0] for copied_bytes in (0, 1 << 20))]
    for copied in copies:
        assert torch.equal(copied(rows), module(rows))
        assert list(copied.state_dict()) == list(module.state_dict())
    # The loaded model can be trained, saved and changed like the saved one.
    with torch.no_grad():
        next(iter(loaded[1].parameters())).mul_(2)
    loaded.train()(rows).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())
    assert torch.equal(reloaded(loaded.eval(), tmp_path / "again")(rows), loaded(rows))


def test_a_module_that_was_packed_can_still_be_copied():
    module = changing("fresh LSTM")
    split_module(module)
    assert torch.equal(copy.deepcopy(module)(torch.ones(3, 4)), module(torch.ones(3, 4)))


def test_parametrizations_can_be_removed_from_a_loaded_module(tmp_path):
    module = changing(parametrizations.weight_norm)
    loaded = reloaded(module, tmp_path / "model")
    assert type(parametrize.remove_parametrizations(loaded[1], "weight")) is nn.Linear
    assert torch.equal(loaded[1].weight, module[1].weight)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("part", ["", " in its part '0'"])
def test_torchscript_is_refused_with_what_to_give_instead(tmp_path, part):
    module = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(SerializationError, match=f"is TorchScript{part}, .* Give the module that torch.jit"):
        save_model(SavedModel(nn.Sequential(module) if part else module, signature()), tmp_path / "model")


def test_a_module_that_cannot_be_pickled_is_named(tmp_path):
    module = nn.Linear(4, 4)
    module.lock = __import__("threading").Lock()
    with pytest.raises(SerializationError, match=r"Linear cannot be pickled.*lock"):
        save_model(SavedModel(module, signature()), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(saved):
    with pytest.raises(SavedModelError, match="exists already"):
        save_model(SavedModel(nn.Linear(4, 4), signature()), saved[1])


@pytest.mark.parametrize("name", ["weights.safetensors", "architecture.pkl"])
def test_a_damaged_file_is_named(saved, name):
    path = saved[1] / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SavedModelError, match=rf"{name} is damaged.*checksum"):
        load_model(saved[1])
    path.write_bytes(content[:-1])
    with pytest.raises(SavedModelError, match=rf"{name} is damaged.*bytes instead of"):
        load_model(saved[1])
    path.unlink()
    with pytest.raises(SavedModelError, match=rf"incomplete: {name} is missing"):
        load_model(saved[1])


def test_a_missing_or_damaged_manifest_is_named(saved, tmp_path):
    with pytest.raises(SavedModelError, match=r"holds no saved model: sparkdl_model.json is missing"):
        load_model(tmp_path / "nowhere")
    manifest = saved[1] / "sparkdl_model.json"
    unsigned = {"format": 1}
    for text in (
        "{",
        "[]",
        "{}",
        json.dumps(unsigned),
        json.dumps({**unsigned, "signature": {"features": 1}}),
    ):
        manifest.write_text(text)
        with pytest.raises(SavedModelError, match="is damaged"):
            load_model(saved[1])


def change_manifest(folder, change):
    """Replace the manifest of a saved model by what a function makes of its content."""
    path = folder / "sparkdl_model.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_a_model_of_a_newer_format_says_what_to_do(saved):
    newer = {"format": FORMAT + 1, "sparkdl_version": "9.1"}
    change_manifest(saved[1], lambda manifest: {**manifest, **newer})
    with pytest.raises(SavedModelError, match=r"by sparkdl 9\.1.*Install a newer sparkdl"):
        load_model(saved[1])


def with_signature(manifest, **changes):
    return {**manifest, "signature": {**manifest["signature"], **changes}}


def test_unknown_value_of_given_by_is_refused(saved):
    change_manifest(saved[1], lambda manifest: with_signature(manifest, given_by="colour"))
    with pytest.raises(SavedModelError, match=r"given_by is 'colour', and none of position, name, matrix"):
        load_model(saved[1])


SERVING = """
import sys
import pandas as pd
from sparkdl.model.served_model import PyfuncModel
from sparkdl.model.saved_model import load_model

model = PyfuncModel(load_model(sys.argv[1]))
print(model.predict(pd.DataFrame({"x": [[1.0, 2.0, 3.0, 4.0]]})).shape)
heavy = ("pyspark", "petastorm", "mlflow", "sparkdl._native", "sparkdl.data.feed.feed", "sparkdl.collective")
print([name for name in heavy if name in sys.modules])
"""


def test_serving_imports_neither_spark_nor_petastorm_nor_the_native_core(tmp_path):
    save_model(SavedModel(nn.Linear(4, 2), signature(prediction_shape=(2,))), tmp_path / "model")
    command = [sys.executable, "-c", SERVING, str(tmp_path / "model")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(1, 1)", "[]"]


def uses_modules(text: str) -> Any:
    return json.loads(text), wave.Error


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_only_modules_of_classes_are_found_in_a_pickle(protocol: int) -> None:
    objects = [OrderedDict(email="wave"), Message(), Message(), "subimport", "json"]
    found = modules_in_pickle(pickle.dumps(objects, protocol=protocol))
    assert {"collections", "email.message"} <= found
    assert not found & {"json", "wave", "subimport"}


def test_modules_are_found_across_the_frames_of_a_pickle() -> None:
    for padding in range((64 << 10) - 200, (64 << 10) + 20):
        found = modules_in_pickle(pickle.dumps(["x" * padding, OrderedDict(), Message()], protocol=4))
        assert {"collections", "email.message"} <= found


def test_modules_used_by_a_function_pickled_by_value_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Functions of a notebook are pickled by value, too.
    monkeypatch.setattr(uses_modules, "__module__", "__main__")
    assert {"json", "wave"} <= modules_in_pickle(cloudpickle.dumps([uses_modules, uses_modules]))


def test_modules_of_a_network_are_found() -> None:
    found = modules_in_pickle(cloudpickle.dumps(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert {"torch.nn.modules.container", "torch.nn.modules.linear", "torch.nn.modules.activation"} <= found


def test_example_inputs_are_saved_with_the_model(tmp_path):
    inputs = signature().inputs
    rows = {column.name: np.ones((2, *column.shape), column.dtype) for column in inputs.columns}
    examples = inputs.example_batches(rows)
    save_model(SavedModel(nn.Linear(4, 4), signature(), examples), tmp_path / "model")
    (loaded,) = load_model(tmp_path / "model").examples
    assert loaded.keys() == examples[0].keys()
    for name, tensor in examples[0].items():
        torch.testing.assert_close(loaded[name], tensor)
    file = tmp_path / "model" / "examples.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SavedModelError, match="examples.safetensors is damaged"):
        load_model(tmp_path / "model")
    file.unlink()  # by somebody who gives the model to others
    assert load_model(tmp_path / "model").examples == ()
