"""Counted operations are those of the formulas; products of matrices say what a CPU can do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.monitor.flops import FlopCount, peak_flops

ROWS = 32


def counted(module: nn.Module, inputs: torch.Tensor) -> int:
    count = FlopCount()
    count.begin()
    module(inputs).sum().backward()
    return count.end()


def test_a_linear_layer_takes_two_operations_per_weight_and_row_in_each_pass() -> None:
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    first, second = 2 * ROWS * 8 * 16, 2 * ROWS * 16 * 4
    # The first layer has no gradient of its input.
    assert counted(network, torch.ones(ROWS, 8)) == 2 * first + 3 * second


def test_attention_on_cpu_counts() -> None:
    heads, length, width = 4, 16, 8

    class Attention(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(inputs, inputs, inputs)

    inputs = torch.ones(ROWS, heads, length, width, requires_grad=True)
    product = 2 * ROWS * heads * length * length * width
    assert counted(Attention(), inputs) >= 6 * product


def test_a_compiled_module_counts_like_a_module_that_is_not() -> None:
    network = nn.Linear(8, 16)
    expected = counted(network, torch.ones(ROWS, 8))
    assert counted(torch.compile(network, backend="eager"), torch.ones(ROWS, 8)) == expected


def test_lazy_layers_are_initialized_as_without_counting() -> None:
    results = []
    for counts in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2))
        count = FlopCount()
        if counts:
            count.begin()
        network(torch.ones(ROWS, 2, 8)).sum().backward()
        assert (count.end() > 0) == counts
        assert all(type(parameter) is nn.Parameter for parameter in network.parameters())
        results.append(list(network.parameters()))
    assert all(torch.equal(plain, watched) for plain, watched in zip(*results, strict=True))


def test_counting_changes_no_bit() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    inputs = torch.randn(ROWS, 5, 32)
    results = []
    for counts in (False, True):
        layer.zero_grad()
        torch.manual_seed(1)
        count = FlopCount()
        if counts:
            count.begin()
        layer(inputs).square().sum().backward()
        assert (count.end() > 0) == counts
        results.append(
            [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
        )
    assert all(torch.equal(plain, watched) for plain, watched in zip(*results, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_peak_of_a_cpu_is_measured(precision: str) -> None:
    peak = peak_flops(torch.device("cpu"), precision)
    assert peak is not None
    assert peak > 0


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "float32", 19.5e12),
        ("NVIDIA L40S", "float16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40", "bfloat16", None),  # is no L4
        ("Tesla T4", "float16", 65e12),
        ("NVIDIA H200", "float8", 1978e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA H100 NVL", "bfloat16", None),
        ("Some other GPU", "bfloat16", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(
    name: str, precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), precision) == peak
