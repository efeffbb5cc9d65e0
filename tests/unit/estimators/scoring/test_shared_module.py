"""One copy of a model for several tasks; the CPU stands in for a GPU."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparkdl.errors import SparkdlError
from sparkdl.estimators.scoring import udf
from sparkdl.estimators.scoring.shared_module import SharedModule
from sparkdl.model.architecture import split_module
from sparkdl.model.weights_file import weights_as_bytes, write_weights
from tests.unit.estimators.scoring.test_packed_features import MODEL


class WithPlace(nn.Module):
    """Returns its outputs by name, and where its weights are: the process and the address."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return {
            "y": self.layer(x) * scale,
            "place": torch.tensor([os.getpid(), self.layer.weight.data_ptr()]),
        }


@pytest.fixture
def folder(monkeypatch):
    """Temporary files of processes, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_all_tasks_use_one_copy_in_one_process_that_comes_back_and_ends(folder, monkeypatch) -> None:
    monkeypatch.setattr(udf, "_device", lambda: "cpu:0")
    monkeypatch.setattr("pyspark.SparkFiles.getRootDirectory", lambda: folder)
    columns = {name: np.arange(3.0) for name in MODEL.signature.inputs.names}
    own = udf.load_predictor(replace(MODEL, key=uuid.uuid4().hex)).predict(columns)
    predictor = udf.load_predictor(replace(MODEL, key=uuid.uuid4().hex, shares_gpu=True))
    assert isinstance(predictor._module, SharedModule)
    for name, values in predictor.predict(columns).items():
        np.testing.assert_allclose(values, own[name])
    del predictor
    udf._loaded.clear()

    module = WithPlace().eval()
    structure, tensors = split_module(module)
    with open(f"{folder}/weights", "wb") as file:
        write_weights(tensors, file)
    key = uuid.uuid4().hex

    def task(weights: bytes | str) -> SharedModule:
        return SharedModule(key, structure, weights, device="cpu:0", owner=folder, idle_s=0.5)

    x, scale = torch.rand(5, 3), torch.tensor(2.0)
    tasks = [task(weights_as_bytes(tensors)), task(f"{folder}/weights")]
    made = [one(x, scale=scale) for one in tasks]
    (place,) = {tuple(each["place"].tolist()) for each in made}
    process = place[0]
    assert process != os.getpid()
    for each in made:
        torch.testing.assert_close(each["y"], module(x, scale=scale)["y"])
    with pytest.raises(ValueError, match="negative"):
        tasks[0](-x, scale=scale)

    os.kill(process, signal.SIGKILL)
    again = [one(x, scale=scale)["place"].tolist() for one in tasks]
    assert again[0] == again[1]
    assert again[0][0] != process
    tasks.clear()
    gc.collect()
    deadline = time.monotonic() + 60
    while is_running(again[0][0]) and time.monotonic() < deadline:
        with suppress(ChildProcessError):  # Python may have waited for it
            os.waitpid(again[0][0], os.WNOHANG)
    assert not is_running(again[0][0])


@pytest.mark.slow  # starts a process in which torch is imported
def test_a_device_that_cannot_be_used_is_an_error_with_its_reason(folder) -> None:
    structure, tensors = split_module(nn.Linear(3, 2))
    module = SharedModule("key", structure, weights_as_bytes(tensors), device="cuda:7", owner="x")
    with pytest.raises(SparkdlError, match="shares a model on cuda:7 ended with 1: .*"):
        module(torch.rand(1, 3))
