"""One copy of a model for several tasks; the CPU stands in for a GPU."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparkdl.errors import ProcessesLostError, SparkdlError
from sparkdl.estimators.scoring import shared_module, udf
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
        monkeypatch.setattr(shared_module, "_started", {})
        yield folder
        for process in shared_module._started.values():
            process.kill()
            process.wait()


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
    (place,) = {tuple(outputs["place"].tolist()) for outputs in made}
    process = place[0]
    assert process != os.getpid()
    for outputs in made:
        torch.testing.assert_close(outputs["y"], module(x, scale=scale)["y"])
    with pytest.raises(ValueError, match="negative"):
        tasks[0](-x, scale=scale)

    os.kill(process, signal.SIGKILL)
    again = [one(x, scale=scale)["place"].tolist() for one in tasks]
    assert again[0] == again[1]
    assert again[0][0] != process
    ((place, process),) = (entry for entry in shared_module._started.items() if entry[1].pid == again[0][0])
    tasks.clear()
    gc.collect()
    assert process.wait(60) == 0
    assert not place.exists()
    udf._loaded.clear()


class Behaving(nn.Module):
    """Keeps its input on itself, as some modules do, and behaves as it is told."""

    def forward(self, x: Tensor, does: str = "") -> Tensor:
        self.x = x
        if does == "print":
            print("from forward", flush=True)
        elif does == "keep":
            time.sleep(0.1)  # time for another task's call
        elif does == "hang":
            time.sleep(600)
        elif does == "raise":
            raise EOFError("of the module")
        elif does == "break":
            torch.zeros = None  # as if nothing could be computed any more
            raise RuntimeError("device-side assert")
        elif does == "end":
            os._exit(7)
        return torch.tensor(os.getpid()) if does == "pid" else self.x


def behaving(folder: str, key: str = "one") -> SharedModule:
    structure, tensors = split_module(Behaving())
    return SharedModule(key, structure, weights_as_bytes(tensors), device="cpu:0", owner=folder, idle_s=0.5)


def test_what_a_module_does_harms_only_its_own_rows(folder, monkeypatch) -> None:
    one, other = behaving(folder), behaving(folder)
    inputs = [torch.full((2,), float(number)) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda task, x: task(x, "keep"), [one, other], inputs)
        assert [output.tolist() for output in made] == [x.tolist() for x in inputs]
    x = inputs[1]
    assert one(x, "print").tolist() == x.tolist()
    (log,) = Path(folder).glob("*/log")
    assert "from forward" in log.read_text()
    with pytest.raises(EOFError, match="of the module"):
        one(x, "raise")
    process = int(one(x, "pid"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        one(x, "break")
    assert int(one(x, "pid")) != process

    monkeypatch.setattr(shared_module, "_ANSWER_S", 1)
    with pytest.raises(ProcessesLostError, match=rf"did not answer in time.*{log} ends with: Process \d+"):
        behaving(folder)(x, "hang")
    monkeypatch.setattr(shared_module, "_MOST_ATTEMPTS", 1)
    with pytest.raises(ProcessesLostError, match=rf"ended 1 times, the last time with 7.*{log} ends with"):
        behaving(folder, "another")(x, "end")


def test_a_process_that_does_not_get_ready_is_ended(folder, monkeypatch) -> None:
    monkeypatch.setattr(shared_module, "_START_S", 0.01)
    with pytest.raises(SparkdlError, match=r"was not ready within 0.01 s. Its log"):
        behaving(folder)(torch.rand(1))
    (process,) = shared_module._started.values()
    assert process.poll() is not None


def test_another_folder_than_a_private_one_of_the_user_is_refused(folder, monkeypatch) -> None:
    (Path(folder) / "elsewhere").mkdir(mode=0o700)
    place = behaving(folder)._folder
    place.symlink_to(Path(folder) / "elsewhere")
    with pytest.raises(SparkdlError, match=f"{re.escape(str(place))} is not a private folder"):
        behaving(folder)(torch.rand(1))
    monkeypatch.setattr(tempfile, "tempdir", f"{folder}/{'x' * 90}")
    with pytest.raises(SparkdlError, match="spark.executorEnv.TMPDIR=/tmp"):
        behaving(folder)


@pytest.mark.slow  # starts a process in which torch is imported
def test_a_device_that_cannot_be_used_is_an_error_with_its_reason(folder) -> None:
    structure, tensors = split_module(nn.Linear(3, 2))
    module = SharedModule("key", structure, weights_as_bytes(tensors), device="cuda:7", owner="x")
    with pytest.raises(SparkdlError, match=r"(?s)shares a model on cuda:7 ended with 1. Its log .*CUDA"):
        module(torch.rand(1, 3))
