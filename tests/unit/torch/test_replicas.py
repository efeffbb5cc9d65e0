from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.torch.replicas import LiveParameters, digest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_digest_changes_with_any_element_and_does_not_depend_on_where_the_tensor_lies(dtype, size):
    values = torch.arange(1, size + 2).remainder(50).to(dtype)
    whole = int(digest(values[1:].clone()))
    assert int(digest(values[1:])) == whole  # at an address at which no word of 8 bytes begins
    for place in {0, size // 2, size - 1}:
        changed = values[1:].clone()
        changed[place] = 60
        assert int(digest(changed)) != whole


def test_a_digest_changes_with_the_order_of_rows_and_of_elements():
    values = torch.randn(300, 40)
    for other in (values.flip(0), values[:8].flip(1), values.T):
        assert int(digest(other)) != int(digest(values[: len(other)] if len(other) == 8 else values))
    assert int(digest(values.T.contiguous().T)) == int(digest(values))


def test_changes_of_a_module_are_seen_once():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    live = LiveParameters(module)

    def parametrize() -> None:
        nn.utils.parametrizations.weight_norm(module[0])

    def replace_a_parameter() -> None:
        module[1].weight = nn.Parameter(torch.ones(2))

    def swap_layers() -> None:
        module[0], module[1] = module[1], module[0]

    def add_a_layer() -> None:
        module.append(nn.Linear(2, 2))

    for change in (
        lambda: module[0].bias.requires_grad_(False),
        parametrize,
        replace_a_parameter,
        swap_layers,
        add_a_layer,
        lambda: module[0].requires_grad_(False),
    ):
        assert not live.look()
        change()
        assert live.look()
        assert [*map(id, live.parameters)] == [*map(id, module.parameters())]
    module(torch.ones(3, 2))
    module[0].running_mean = torch.ones(2)
    assert not live.look()
    assert any(buffer is module[0].running_mean for buffer in live.buffers())
