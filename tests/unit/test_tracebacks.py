"""What a rank says of an exception of the user's code, and what the driver adds."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch

import sparkdl
from sparkdl.launch.failures import rank_error
from sparkdl.launch.wire.outcome import Failure
from sparkdl.tracebacks import describe_exception


class Broken(torch.nn.Module):
    def forward(self, inputs):
        return torch.nn.functional.linear(inputs, torch.ones(2, 3))


def described(call, **options):
    with pytest.raises((RuntimeError, ValueError, ZeroDivisionError)) as caught:
        call()
    return describe_exception(caught.value, **{"max_chars": 10_000, **options})


def test_the_line_of_the_user_comes_first_and_frames_of_torch_are_folded():
    network = torch.nn.Sequential(Broken())
    lines = described(lambda: network(torch.ones(1, 4))).splitlines()
    source = "return torch.nn.functional.linear(inputs, torch.ones(2, 3))"
    assert lines[0].endswith(
        f"test_tracebacks.py, line {Broken.forward.__code__.co_firstlineno + 1}, in forward: {source}"
    )
    assert lines[1:3] == ["", "Traceback (most recent call last):"]
    assert any("frames of torch" in line for line in lines)
    assert not any("site-packages/torch/nn/modules" in line for line in lines)
    assert lines[-1].startswith("RuntimeError: mat1 and mat2")


def test_a_package_whose_name_begins_with_that_of_sparkdl_is_the_users():
    name = f"{Path(sparkdl.__file__).parent}_models/network.py"
    space: dict = {}
    exec(compile("def step():\n    return 1 / 0\n", name, "exec"), space)
    assert described(space["step"]).startswith(f"{name}, line 2, in step")


def fail():
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("not there") from error


def test_causes_are_described_too_and_a_long_text_keeps_its_first_line_and_its_end():
    text = described(fail)
    assert "KeyError: 'missing'" in text
    assert "direct cause" in text
    cut = described(fail, max_chars=200)
    assert len(cut) <= 200
    assert cut.splitlines()[0] == text.splitlines()[0]
    assert cut.endswith("ValueError: not there\n")


def test_the_driver_adds_lines_that_only_it_has_such_as_those_of_a_cell(monkeypatch):
    name = "/tmp/ipykernel_1/2.py"
    space: dict = {}
    exec(compile("def step():\n    return 1 / 0\n", name, "exec"), space)
    text = described(space["step"])
    assert "1 / 0" not in text
    monkeypatch.setitem(linecache.cache, name, (1, None, ["def step():\n", "    return 1 / 0\n"], name))
    error = rank_error(
        Failure(rank=1, host="a", error="ZeroDivisionError: division by zero", traceback=text), False
    )
    message = str(error).splitlines()
    assert message[0] == "Rank 1 on a failed and all ranks were ended: ZeroDivisionError: division by zero"
    assert message[2] == f"{name}, line 2, in step: return 1 / 0"
    assert message[message.index(f'  File "{name}", line 2, in step') + 1] == "    return 1 / 0"
