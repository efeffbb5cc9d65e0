"""Memory per rank falls with the number of ranks, and several ranks train a model that is too large for one."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import sparkdl.torch
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel import Parallelism, draw_weights, on_meta, parallelize, sequence
from tests.run_ranks import RankEnvironment, run_ranks

SMALL = DecoderSizes(vocabulary=512, width=128, layers=4, heads=4)
LARGE = DecoderSizes(vocabulary=1024, width=768, layers=16, heads=12)
"""115 million parameters; each takes 16 bytes with its gradient and two moments."""

MIB = 1 << 20
_M_MMAP_THRESHOLD = -3
LIMIT_BYTES = 1000 * MIB


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(kind: str) -> int:
    """Number of bytes of weights, gradients and AdamW's moments on this rank after a step."""
    layout = Parallelism(**{kind: dist.get_world_size()}).lay_out()
    torch.manual_seed(0)
    module = parallelize(Decoder(SMALL), layout, whole_outputs=True)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
    optimizer.step()
    tensors = [tensor for parameter in module.parameters() for tensor in (parameter, parameter.grad)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return sum(_local(tensor).nbytes for tensor in tensors if tensor is not None)


def saved_bytes(length: int) -> int:
    """Number of bytes that the forward pass of a sequence keeps on this rank for the backward pass, without weights."""
    layout = Parallelism(context=dist.get_world_size()).lay_out()
    torch.manual_seed(0)
    module = parallelize(Decoder(SMALL), layout)
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    group = layout.group("context")
    tokens = sequence.shard(torch.zeros(1, length, dtype=torch.int64), 1, group)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = module(tokens, sequence.positions(length, group))
    assert outputs.requires_grad
    # Weights that FSDP has gathered are freed by now and have no bytes.
    weights = {_local(parameter).untyped_storage()._cdata for parameter in module.parameters()}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in weights)


def measure(environment: RankEnvironment, cases: list[tuple[Callable[..., int], Any]]) -> list[int]:
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0)
        found = [measured(argument) for measured, argument in cases]
        sparkdl.torch.destroy_process_group()
    return found


CASES = {
    "training state, sharded": (state_bytes, "shard", 0.1),
    "training state, divided": (state_bytes, "tensor", 0.1),
    "activations of 1,024 positions": (saved_bytes, 1024, 0.02),
}
"""The measurements, and the tolerance of a rank's share."""

LONG_CASES = {f"activations of {length:,} positions": (saved_bytes, length, 0.02) for length in (8192, 32768)}


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG_CASES, marks=pytest.mark.slow)])
def test_memory_of_a_rank_is_the_total_divided_by_the_number_of_ranks(
    cases: dict[str, Any], subtests: pytest.Subtests
) -> None:
    calls = [case[:2] for case in cases.values()]
    (wholes,) = run_ranks(1, measure, calls)
    for ranks in (2, 4):
        of_ranks = run_ranks(ranks, measure, calls)
        for number, (name, (*_, tolerance)) in enumerate(cases.items()):
            with subtests.test(name, ranks=ranks):
                shares = [peaks[number] for peaks in of_ranks]
                assert shares == pytest.approx([wholes[number] / ranks] * ranks, rel=tolerance)


def train_within_a_limit(environment: RankEnvironment) -> float:
    """Train three steps of a large model; this process may take 1,000 MiB more than it has."""
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=100.0)
        torch.set_num_threads(1)
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)  # returns freed memory to the system
        layout = Parallelism(shard=environment.world_size).lay_out()
        has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (has + LIMIT_BYTES, resource.RLIM_INFINITY))
        with on_meta():
            module = Decoder(LARGE)
        parallelize(module, layout)
        draw_weights(module, seed=0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        tokens = torch.arange(32)[None]
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(tokens)[0, :-1], tokens[0, 1:])
            loss.backward()
            optimizer.step()
        sparkdl.torch.destroy_process_group()
    return loss.item()


@pytest.mark.slow
def test_a_model_that_exceeds_the_memory_of_one_rank_is_trained_by_four() -> None:
    assert sum(parameter.numel() for parameter in Decoder(LARGE).parameters()) * 16 > LIMIT_BYTES
    with pytest.raises(Exception, match="can't allocate memory|Cannot allocate|MemoryError|bad_alloc"):
        run_ranks(1, train_within_a_limit)
    losses = run_ranks(4, train_within_a_limit)
    assert len(set(losses)) == 1
    assert losses[0] < 7
