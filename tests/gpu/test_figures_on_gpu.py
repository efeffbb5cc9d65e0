"""What the monitor and the planner measure of a GPU, and of the link between two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparkdl.cli import main
from sparkdl.monitor.flops import peak_flops
from sparkdl.monitor.memory import get_gpu_memory_stats, gpu_load
from sparkdl.planner import DecoderShape
from sparkdl.planner.measure import measure_device, measure_link
from sparkdl.planner.shape import RECIPES
from tests.gpu.gpu_scenes import NUM_GPUS, needs_gpu, needs_two_gpus

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


@pytest.mark.timeout(300)
def test_the_plan_has_the_link_between_the_gpus_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.json"
    sizes = "width=1024,layers=2,heads=8,vocabulary=4096"
    options = ["--sequence", "1024", "--batch", "8", "--devices-per-host", "2", "--measure"]
    assert main(["plan", sizes, *options, "--json", str(report)]) == 0
    has_link = NUM_GPUS > 1
    assert ("link between GPUs at " in json.loads(report.read_text())["cluster"]) == has_link
    assert ("This machine has one GPU" in capsys.readouterr().out) != has_link


@needs_two_gpus
@pytest.mark.timeout(300)
def test_sums_of_nccl_measure_the_link_between_gpus() -> None:
    link = measure_link(2, on_gpus=True)
    assert 0 < link.latency_s < 1e-3
    assert 1e8 < link.bytes_per_s < 1e13
