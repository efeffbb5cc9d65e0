from __future__ import annotations

import json
import pickle
import wave
from collections import OrderedDict
from email.message import Message
from typing import Any

import cloudpickle
import pytest
from torch import nn

from sparkdl.model.saved_model import modules_in_pickle


def uses_modules(text: str) -> Any:
    return json.loads(text), wave.Error


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_modules_of_classes_are_found_and_other_words_are_not(protocol: int) -> None:
    objects = [OrderedDict(email="wave"), Message(), Message(), "subimport", "json"]
    found = modules_in_pickle(pickle.dumps(objects, protocol=protocol))
    assert {"collections", "email.message"} <= found
    assert not found & {"json", "wave", "subimport"}


def test_a_frame_may_begin_between_any_two_words() -> None:
    for padding in range((64 << 10) - 200, (64 << 10) + 20):
        found = modules_in_pickle(pickle.dumps(["x" * padding, OrderedDict(), Message()], protocol=4))
        assert {"collections", "email.message"} <= found


def test_modules_that_a_function_written_out_refers_to_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # As functions of a notebook are.
    monkeypatch.setattr(uses_modules, "__module__", "__main__")
    assert {"json", "wave"} <= modules_in_pickle(cloudpickle.dumps([uses_modules, uses_modules]))


def test_modules_of_a_network_are_found() -> None:
    found = modules_in_pickle(cloudpickle.dumps(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert {"torch.nn.modules.container", "torch.nn.modules.linear", "torch.nn.modules.activation"} <= found
