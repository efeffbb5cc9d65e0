"""Networks in files of TorchScript and torch.export."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from sparkdl.data import Column
from sparkdl.errors import ParamError
from sparkdl.model.architecture import join_module, split_module
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.predictor import Predictor
from sparkdl.model.program import program_of, read_program
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature

ANY_ROWS = ({0: torch.export.Dim.AUTO},)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).eval()


@pytest.fixture(scope="module", params=["script", "export"])
def program(request, network):
    if request.param == "script":
        return program_of(torch.jit.script(network))
    return program_of(torch.export.export(network, (torch.zeros(2, 4),), dynamic_shapes=ANY_ROWS))


def test_a_program_travels_as_bytes_and_computes_what_the_network_does(program, network):
    rows = torch.randn(5, 4)
    structure, tensors = split_module(program)
    assert len(structure) < 1000
    assert [tensor.dtype for tensor in tensors.values()] == [torch.uint8]
    for made in (
        program,
        join_module(structure, tensors),
        copy.deepcopy(program),
        pickle.loads(pickle.dumps(program)),
    ):
        for num_rows in (1, 5):
            torch.testing.assert_close(made.eval()(rows[:num_rows]), network(rows[:num_rows]))
    assert program.number_dtype == torch.float32
    assert program.to("cpu") is program
    with pytest.raises(TypeError, match="float64"):
        copy.deepcopy(program).double()


def test_files_of_something_else_are_refused_with_what_to_give(network):
    weights, static = io.BytesIO(), io.BytesIO()
    torch.save(network.state_dict(), weights)
    torch.export.save(torch.export.export(network, (torch.zeros(2, 4),)), static)
    for content, words in (
        (b"something else", "net.pt is not the file of a network. It takes"),
        (weights.getvalue(), "module.load_state_dict"),
        (static.getvalue(), "takes exactly 2 rows in its input 'input'.*Dim.AUTO"),
    ):
        with pytest.raises(ParamError, match=words):
            read_program(content, "net.pt")


def test_a_program_for_at_most_some_rows_gets_no_more_at_once(network):
    few = ({0: torch.export.Dim("rows", max=4)},)
    program = program_of(torch.export.export(network, (torch.zeros(2, 4),), dynamic_shapes=few))
    assert program.max_rows == 4
    rows = torch.randn(9, 4)
    inputs = ModelInputs(
        columns=(Column(name="x", dtype="float64", shape=(4,)),),
        inputs=(ModelInput(name="x", dtype="float32"),),
    )
    signature = ModelSignature(
        inputs=inputs, outputs=(ModelOutput(name="y", kind="value", shape=(3,)),), max_batch_size=4
    )
    assert ModelSignature.from_json(signature.to_json()) == signature
    for batch_size in (None, 64):
        made = Predictor(SavedModel(program, signature), batch_size=batch_size).predict({"x": rows.numpy()})
        torch.testing.assert_close(torch.from_numpy(made["y"]).float(), network(rows).detach())
