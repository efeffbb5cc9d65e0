"""What the monitor and the planner measure of a GPU."""

from __future__ import annotations

import pytest
import torch

from sparkdl.monitor.flops import peak_flops
from sparkdl.monitor.memory import get_gpu_memory_stats, gpu_load
from sparkdl.planner import DecoderShape
from sparkdl.planner.measure import measure_device
from sparkdl.planner.shape import RECIPES
from tests.gpu.gpu_scenes import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_memory_and_load_of_the_gpu_in_use_are_found() -> None:
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    (gpu,) = [gpu for gpu in get_gpu_memory_stats().gpus if gpu.number == held.device.index]
    assert gpu.name == torch.cuda.get_device_name(held.device)
    assert held.nbytes <= gpu.allocated_bytes <= gpu.reserved_bytes <= gpu.total_bytes - gpu.free_bytes
    assert gpu.peak_bytes >= gpu.allocated_bytes
    load = gpu_load()
    assert load is None or 0 <= load <= 1  # None without nvidia-ml-py


def test_products_stay_below_the_peak_of_the_data_sheet() -> None:
    shape = DecoderShape(vocabulary=4096, width=1024, layers=2, heads=8, sequence=1024)
    device = measure_device(shape, RECIPES["bfloat16"], ranks=1, rows=4)
    assert not device.is_cpu
    assert device.memory_bytes > 1 << 30
    assert min(device.rate, device.attention_rate, device.bandwidth, device.moved_rate) > 1e9
    peak = peak_flops(torch.device("cuda", 0), "bfloat16")
    assert peak is None or device.rate <= peak  # None for a GPU without a data sheet
