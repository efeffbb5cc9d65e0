"""What the planner says about a rank's memory is what ranks take, and what it measures makes a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import sparkdl.torch
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel import Parallelism, cross_entropy, parallelize, sequence
from sparkdl.planner import DecoderShape, Link
from sparkdl.planner.cluster import link_of_sums
from sparkdl.planner.counting import shape_of_module
from sparkdl.planner.measure import measure_device, measure_link
from sparkdl.planner.memory import memory_of
from sparkdl.planner.shape import RECIPES
from sparkdl.planner.sums import SumTimes, time_sums
from sparkdl.torch import RendezvousStore
from tests.nccl_stand_in.building import stand_in_variables
from tests.run_ranks import RankEnvironment, run_ranks
from tests.torch.scenes.delegated_checks import substitute_accelerator
from tests.torch.scenes.substitute_groups import DelegatingGroup, default_group

SIZES = DecoderSizes(vocabulary=512, width=128, layers=4, heads=4, is_tied=False)
ROWS, POSITIONS = 4, 64
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "shard": {"shard": 2},
    "shard, recompute": {"shard": 2, "recompute": True},
    "tensor": {"tensor": 2},
    "tensor and sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step(sizes: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a forward pass keeps on this rank, without weights, and of its training state after a step."""
    layout = Parallelism(**sizes).lay_out()
    torch.manual_seed(0)
    module = parallelize(Decoder(SIZES), layout)
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    group = layout.group("context")
    rows = ROWS // layout.size("data", "shard")
    tokens = sequence.shard(torch.zeros(rows, POSITIONS, dtype=torch.int64), 1, group)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = module(tokens, sequence.positions(POSITIONS, group))
        if layout.size("tensor") > 1:
            loss = cross_entropy(logits, tokens, layout.group("tensor"))
        else:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    # Weights that FSDP has gathered are freed by now and have no bytes.
    weights = {_local(parameter).untyped_storage()._cdata for parameter in module.parameters()}
    saved = sum(storage.nbytes() for key, storage in kept.items() if key not in weights)
    optimizer = torch.optim.AdamW(module.parameters())
    loss.backward()
    optimizer.step()
    tensors = [tensor for parameter in module.parameters() for tensor in (parameter, parameter.grad)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return saved, sum(_local(tensor).nbytes for tensor in tensors if tensor is not None)


def _measure(environment: RankEnvironment, layouts: list[dict[str, Any]]) -> list[tuple[int, int]]:
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0)
        found = [_step(layout) for layout in layouts]
        dist.barrier()
        sparkdl.torch.destroy_process_group()
    return found


def test_memory_of_every_layout_is_predicted() -> None:
    """The state to the byte, activations within ten percent."""
    shape = shape_of_module(Decoder(SIZES), sequence=POSITIONS)
    measured = run_ranks(2, _measure, list(LAYOUTS.values()))
    for rank in range(2):
        for (name, factors), (saved, state) in zip(LAYOUTS.items(), measured[rank], strict=True):
            sizes = Parallelism(**factors).resolve(2)
            rows = ROWS // (sizes.data * sizes.shard)
            predicted = memory_of(
                shape, sizes, rows=rows, microbatches=2, recipe=RECIPES["float32"], is_cpu=True
            )
            assert predicted.weights + predicted.gradients + predicted.optimizer == state, name
            assert predicted.activations == pytest.approx(saved, rel=0.1), name


def _time_sums_of_nccl(environment: RankEnvironment) -> SumTimes:
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        store = RendezvousStore(environment.rendezvous, timeout_s=60.0)
        accelerator = substitute_accelerator("NCCL", environment, communicator)
        with default_group(DelegatingGroup, communicator, store, accelerator, 60.0):
            return time_sums(None, torch.device("cpu"))


def test_a_link_between_gpus_is_timed_by_sums_of_nccl(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    variables = stand_in_variables(tmp_path, CUDA_STAND_IN_ALL_MEMORY="1", NCCL_STAND_IN_CALLS=str(calls))
    times, of_other = run_ranks(2, _time_sums_of_nccl, variables=variables)
    assert of_other == times, "the figures of the slowest rank are those of all"
    summed = [path.read_text().split().count("ncclAllReduce") for path in tmp_path.glob("calls-*")]
    assert len(summed) == 2
    assert min(summed) >= 2 * len(times.num_bytes)
    link = link_of_sums(times, 2, name="NCCL", is_cpu=False)
    assert link.latency_s > 0
    assert link.bytes_per_s > 0
    assert link.occupies == Link.occupies


@pytest.mark.slow  # tests/unit/planner has what becomes of the figures
def test_measured_devices_and_links_have_all_figures() -> None:
    shape = DecoderShape(vocabulary=64, width=64, layers=2, heads=4, key_heads=2, sequence=32)
    device = measure_device(shape, RECIPES["float32"], ranks=2)
    figures = (device.rate, device.attention_rate, device.bandwidth, device.moved_rate, device.memory_bytes)
    assert all(figure > 1e6 for figure in figures)
    assert 0 < device.kernel_s < 1
    link = measure_link(2)
    assert 0 < link.latency_s < 1
    assert link.bytes_per_s > 1e6
    assert 0 < link.occupies <= 1
