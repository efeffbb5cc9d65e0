"""Each kind of parallelism on GPUs: losses and gradients equal those of one process on the CPU."""

from __future__ import annotations

import pytest

from sparkdl.parallel import Parallelism
from tests.checks import first_failures
from tests.gpu.gpu_scenes import attend, nccl_variables, needs_gpu, needs_nccl_over, train_in_parts
from tests.run_ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES = {
    "shard": Parallelism(shard=2),
    "tensor": Parallelism(tensor=2),
    "tensor and sequence": Parallelism(tensor=2, sequence=True),
    "context, ring": Parallelism(context=2, data=1),
    "context, all-to-all": Parallelism(context=2, data=1, attention="all-to-all"),
    "pipeline": Parallelism(pipeline=2),
    "pipeline, recomputed": Parallelism(pipeline=2, recompute=True),
}


@pytest.mark.parametrize(
    ("backend", "variables"),
    [
        pytest.param("host", {"CUDA_VISIBLE_DEVICES": "0"}, id="two ranks on one GPU"),
        pytest.param("sparkdl", nccl_variables(2), marks=needs_nccl_over(2), id="NCCL"),
    ],
)
def test_parallelism_on_gpus_equals_one_process(backend: str, variables: dict[str, str] | None) -> None:
    outcomes = run_ranks(2, train_in_parts, backend, CASES, timeout_s=300, variables=variables)
    failures = {name: why for name, why in first_failures(outcomes).items() if why is not None}
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())


def test_attention_over_a_sharded_sequence_on_a_gpu_equals_attention_over_the_whole_sequence() -> None:
    outcomes = run_ranks(4, attend, timeout_s=300, variables={"CUDA_VISIBLE_DEVICES": "0"})
    failures = {name: why for name, why in first_failures(outcomes).items() if why is not None}
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())
