"""Models on the meta device, and folders with ambiguous weight files."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from sparkdl.errors import StoreError
from sparkdl.parallel import load_weights, on_meta

DEADLINE_S = 60


def test_meta_device_applies_only_to_the_thread_and_block_that_asked_for_it() -> None:
    devices: dict[str, str] = {}
    is_first_inside, is_second_inside, has_first_left = (threading.Event() for _ in range(3))

    def make(name: str) -> None:
        devices[name] = nn.Linear(2, 2).weight.device.type

    def first() -> None:
        with on_meta():
            is_first_inside.set()
            is_second_inside.wait(DEADLINE_S)
            make("first")
        make("after the first")
        has_first_left.set()

    def second() -> None:
        is_first_inside.wait(DEADLINE_S)
        make("beside the first")
        with on_meta():
            is_second_inside.set()
            has_first_left.wait(DEADLINE_S)
            with on_meta():
                pass
            make("second")

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    make("after all")
    assert {name for name, device in devices.items() if device == "meta"} == {"first", "second"}
    assert devices.keys() == {"first", "after the first", "beside the first", "second", "after all"}


def test_index_beside_a_single_file_of_weights_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    parts = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    for name, tensor in parts.items():
        safetensors.torch.save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in parts}}))
    load_weights(model, str(tmp_path))
    safetensors.torch.save_file(
        {name: 2 * tensor for name, tensor in parts.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(StoreError, match="Remove the weights"):
        load_weights(model, str(tmp_path))
    assert torch.equal(model.bias.detach(), parts["bias"])
    index.write_text(json.dumps({"weight_map": dict.fromkeys(parts, "model.safetensors")}))
    load_weights(model, str(tmp_path))
    assert torch.equal(model.bias.detach(), 2 * parts["bias"])


@pytest.mark.parametrize("index", ["[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1, "b": "c"}}', "{"])
def test_invalid_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StoreError, match=f"in {re.escape(str(tmp_path))} cannot be read"):
        load_weights(nn.Linear(2, 2), str(tmp_path))
