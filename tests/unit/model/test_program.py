"""Networks in files of TorchScript and torch.export."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.model.architecture import join_module, split_module
from sparkdl.model.program import program_of, read_program

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
