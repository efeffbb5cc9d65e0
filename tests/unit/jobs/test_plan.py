from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.jobs.make_estimator import model_size
from sparkdl.jobs.plan import Host, JobPlan, RowCounts, plan_text
from tests.unit.jobs.job_files import read

MIB = 1 << 20


def test_size_of_a_model_is_the_size_of_its_tensors():
    module = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50), nn.Linear(50, 10))
    module[0].weight.requires_grad_(False)
    size = model_size(module, torch.optim.Adam)
    weights = sum(parameter.numel() for parameter in module.parameters())
    assert size.num_parameters == weights
    assert size.weights == 4 * weights + 2 * 50 * 4 + 8  # mean and variance, and a counter of BatchNorm
    assert size.gradients == 4 * (weights - 5000)
    assert size.optimizer == pytest.approx(2 * size.gradients, abs=100)  # two moments, and counters of steps
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (torch.optim.Adagrad, 1),
        (torch.optim.RMSprop, 1),
    ],
)
def test_size_of_optimizer_state_is_found_by_a_step_without_memory(optimizer, factor):
    module = nn.Linear(1000, 100)
    assert model_size(module, optimizer).optimizer == pytest.approx(
        factor * module.weight.nbytes, rel=0.01, abs=100
    )


def test_a_model_too_large_for_this_machine_has_a_size():
    with torch.device("meta"):
        module = nn.Linear(1 << 20, 1 << 20)
    assert model_size(module, torch.optim.Adam).weights > 4 << 40


def test_optimizer_that_reads_numbers_has_no_known_size():
    class Curious(torch.optim.SGD):
        def step(self, closure=None):
            return self.param_groups[0]["params"][0].sum().item()

    assert model_size(nn.Linear(2, 2), Curious).optimizer is None


def make_plan(**changes) -> JobPlan:
    values = {
        "rows": RowCounts(num_rows=1000, num_marked=None, bytes_per_row=4096.0),
        "num_training": 803,
        "is_exact": False,
        "shards": (401, 402),
        "steps": 26,
        "updates": 13,
        "epochs": 3,
        "batch_size": 16,
        "model": model_size(nn.Linear(4, 3), torch.optim.SGD),
        "hosts": (
            Host(name="alpha", ranks=(0,), available_bytes=1 * MIB, num_cores=4, num_threads=1),
            Host(name="beta", ranks=(1,), available_bytes=None, num_cores=8, num_threads=2),
        ),
    }
    return JobPlan(**{**values, **changes})


def test_plan_has_rows_shards_steps_memory_and_ranks_per_host(tmp_path):
    text = plan_text(read(tmp_path), make_plan(), ["image", "digit"], "/out is empty")
    assert text.splitlines() == [
        "job      job.yaml: TorchEstimator",
        "rows     1,000 of parquet rows; about 803 for training, about 197 for validation",
        "columns  image, digit: 3.9 MiB when decoded",
        "ranks    2, with 16 rows each per step",
        "shards   401 or 402 rows per rank and epoch",
        "steps    about 26 per epoch, 13 updates of the weights; about 78 in 3 epochs",
        "model    15 parameters: weights 60 B, gradients 60 B, optimizer 0 B",
        "memory   of each rank: model, gradients and optimizer 120 B, rows read ahead up to 7.8 MiB; in addition "
        "Python with torch, and the activations of a step",
        "host     alpha: 1 rank (0) on 4 cores, with 1 thread, 1.0 MiB of free memory: less than the 7.8 MiB that "
        "these need",
        "host     beta: 1 rank (1) on 8 cores, with 2 threads",
        "overhead spark.executor.memoryOverhead=520m on YARN or Kubernetes, for 1 rank of a host in one executor; in "
        "addition the activations of a step, the size of /dev/shm, and Spark's own default, 10 % of "
        "spark.executor.memory and at least 384m",
        "output   /out is empty",
    ]


def test_ranks_that_read_the_same_rows_are_named_as_groups(tmp_path):
    lines = plan_text(read(tmp_path), make_plan(shards=(803,)), ["image"], "").splitlines()
    assert "ranks    2, in groups of 2 that read the same rows, 16 per step" in lines


def test_model_that_depends_on_the_rows_has_no_known_size(tmp_path):
    lines = plan_text(read(tmp_path), make_plan(model=None), ["image"], "").splitlines()
    assert "model    size not known before the fit, as the rows determine the model" in lines
    assert "in addition the model, the activations of a step" in next(
        line for line in lines if line.startswith("overhead")
    )


def test_read_ahead_of_a_feed_is_twice_a_small_dataset_and_bounded_for_a_large_one():
    assert make_plan().read_ahead_bytes == 2 * 4096 * 1000
    many = RowCounts(num_rows=10**9, num_marked=None, bytes_per_row=1.0)
    assert make_plan(rows=many).read_ahead_bytes == 256 * MIB
