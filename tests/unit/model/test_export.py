"""Modules that are written as ONNX and as programs of torch.export."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparkdl.data import Column
from sparkdl.errors import ParamError, SerializationError
from sparkdl.model.export import METADATA, export_model, format_of
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.program import program_of, read_program
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature

needs_onnx = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs the extra onnx")
FORMATS = [pytest.param("onnx", marks=needs_onnx), "export"]


class Texts(nn.Module):
    """A network of texts of any length, with several named inputs and outputs, as one of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, *, input_ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        states = self.words(input_ids) * mask.unsqueeze(-1)
        mean = states.sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return {"logits": self.last(mean), "embedding": mean, "states": states}


def prepare(columns):
    rows = columns["text"]
    width = max(map(len, rows))
    ids = np.array([[ord(letter) % 20 for letter in row.ljust(width)] for row in rows])
    mask = np.array([[float(place < len(row)) for place in range(width)] for row in rows], np.float32)
    return {"input_ids": ids, "mask": mask}


def text_model():
    inputs = ModelInputs(
        columns=(Column(name="text", dtype="object", kind="string"),),
        inputs=(ModelInput(name="input_ids", dtype="int64"), ModelInput(name="mask", dtype="float32")),
        given_by="name",
        prepare=prepare,
    )
    outputs = (
        ModelOutput(name="logits", kind="class", num_classes=3, classes=("a", "b", "c")),
        ModelOutput(name="embedding", kind="value", shape=(8,)),
    )
    return SavedModel(Texts().eval(), ModelSignature(inputs=inputs, outputs=outputs))


def model_of_numbers(module):
    inputs = ModelInputs(
        columns=(Column(name="x", dtype="float64", shape=(4,)),),
        inputs=(ModelInput(name="x", dtype="float32"),),
    )
    return SavedModel(module, ModelSignature(inputs=inputs, outputs=(ModelOutput(name="y", kind="value"),)))


def export_rows(module, num_rows, path, format_):
    model = model_of_numbers(module)
    export_model(model, model.signature.inputs.example_batches({"x": np.ones((num_rows, 4))}), path, format_)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_file_takes_any_number_of_texts_of_any_length_and_names_its_outputs(tmp_path, format_):
    model, path = text_model(), tmp_path / "net"
    texts = {"text": np.array(["one", "three", "x"], object)}
    export_model(model, model.signature.inputs.example_batches(texts), path, format_)
    made = prepare({"text": ["a longer text", "short", "", "more", "texts"][:2]})
    with torch.no_grad():
        expected = model.module(**{name: torch.from_numpy(array) for name, array in made.items()})
    if format_ == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        logits, embedding = session.run(["logits", "embedding"], made)
        described = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
        assert [(output["name"], output["classes"]) for output in described] == [
            ("logits", ["a", "b", "c"]),
            ("embedding", None),
        ]
    else:
        with torch.no_grad():
            logits, embedding = read_program(path.read_bytes(), "net")(*map(torch.from_numpy, made.values()))
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(embedding, expected["embedding"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format_", FORMATS)
def test_one_example_row_is_enough_and_dropout_stays_off(tmp_path, format_):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))  # in train() mode
    export_rows(module, 1, tmp_path / "net", format_)
    assert module.training


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] if float(x.sum()) > 0 else -x[:, :1]


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x[:, :1])


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * (2 if len(x) > 1 else 1)


@pytest.mark.parametrize("format_", FORMATS)
def test_what_cannot_be_exported_or_differs_is_refused(tmp_path, format_):
    for module, words in (
        (Choosing(), "cannot be exported.*traceable"),
        (Drawing(), "does not compute what"),
        (Counting(), "net (cannot compute 1 of the example rows|does not compute what)"),
    ):
        with pytest.raises(SerializationError, match=words):
            export_rows(module, 2, tmp_path / "net", format_)


def test_formats_are_those_of_the_name_unless_one_is_chosen():
    assert [format_of("net.onnx", None), format_of("net.pt2", None), format_of("net", "onnx")] == [
        "onnx",
        "export",
        "onnx",
    ]
    for path, chosen in (("net", None), ("net.pt2", "pt2")):
        with pytest.raises(ParamError, match="onnx"):
            format_of(path, chosen)


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ParamError, match="pip install onnx onnxscript onnxruntime, .*extra 'onnx'"):
        export_rows(nn.Linear(4, 2), 2, tmp_path / "net", "onnx")


def test_torchscript_is_refused_with_what_to_export(tmp_path):
    program = program_of(torch.jit.script(nn.Linear(4, 2)))
    with pytest.raises(ParamError, match="TorchScript cannot be exported.*Make a model of the module"):
        export_rows(program, 2, tmp_path / "net.pt2", "export")
