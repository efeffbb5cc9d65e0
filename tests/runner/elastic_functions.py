"""Functions that train, lose a rank, and continue from their last commit."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import sparkdl.horovod.torch as hvd
from sparkdl.errors import CheckpointError, ParamError
from sparkdl.parallel import Parallelism, Pipeline, ShardedCheckpoints, cut, divide, shard
from sparkdl.runner import TrainingState

NUM_EPOCHS = 5


def make_parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def make_gradients(model: torch.nn.Module, epoch: int) -> None:
    """Compute the gradients of all ranks together; every rank has the same rows."""
    rows = torch.arange(12.0).reshape(3, 4) / (epoch + 1)
    model.zero_grad()
    model(rows).square().mean().backward()


def train(marker: str | None, executor_of: str | None = None) -> dict[str, Any]:
    """Train with torch.distributed; unless the file ``marker`` exists, the last rank is killed in the fourth epoch.

    With ``executor_of``, the URL of a driver, an executor of that driver is killed instead.
    """
    model, optimizer = make_parts()
    state = TrainingState(model=model, optimizer=optimizer, epoch=0, losses=[])
    began_with = state.epoch
    while state.epoch < NUM_EPOCHS:
        make_gradients(model, state.epoch)
        die_once(marker, state.epoch, executor_of)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        state.losses = [*state.losses, float(state.epoch)]
        state.epoch += 1
        state.commit()
    return {"began_with": began_with, "losses": state.losses, "weight": model.weight.detach()}


def train_for_horovod(marker: str | None) -> dict[str, Any]:
    """Train as :func:`train` does, written as in Horovod's documentation."""
    hvd.init()
    model, optimizer = make_parts()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    began_with = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        began_with.append(state.epoch)
        while state.epoch < NUM_EPOCHS:
            die_once(marker, state.epoch)
            make_gradients(state.model, state.epoch)
            state.optimizer.step()
            state.epoch += 1
            state.commit()

    run(hvd.elastic.TorchState(model, optimizer, epoch=0))
    return {"began_with": began_with[0], "weight": model.weight.detach()}


def keep_what_no_state_can() -> None:
    state = TrainingState(best=object())
    with (
        pytest.raises(CheckpointError, match="the state's best is a builtins.object")
        if dist.get_rank() == 0  # which writes the commits
        else nullcontext()
    ):
        state.commit()
    # The state of a model of FSDP1 differs between ranks without showing it.
    flat = FullyShardedDataParallel(torch.nn.Linear(4, 2), device_id=torch.device("cpu"))
    with pytest.raises(ParamError, match=r"\(FSDP1\) cannot be kept in a state: .*fully_shard"):
        TrainingState(model=flat)
    model = torch.nn.Linear(4, 2)
    fully_shard(model)
    hvd.init()
    for values in ({"sd": model.state_dict()}, {"w": model.weight}, {"all": [{"w": (model.weight,)}]}):
        with pytest.raises(
            ParamError, match=f"The state's {next(iter(values))} is .*each rank has another part"
        ):
            TrainingState(**values)
    with pytest.raises(
        ParamError if hvd.rank() == 0 else PicklingError, match="each rank has another part|Rank 0"
    ):
        hvd.broadcast_object(model.state_dict())
    state = TrainingState(sd=None)
    state.sd = model.state_dict()
    with pytest.raises(ParamError, match="each rank has another part"):
        state.commit()


def train_sharded(marker: str | None, mesh_name: str = "ranks") -> dict[str, Any]:
    """Train as :func:`train` does with FSDP2, in which one rank has no rows of the last layer."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(mesh_name,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for refused in (
        lambda: hvd.broadcast_parameters(model.state_dict(), 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
        lambda: hvd.allreduce(model[0].weight),
        lambda: hvd.DistributedOptimizer(optimizer),
    ):
        hvd.init()
        with pytest.raises(ValueError, match="A DTensor is not supported"):
            refused()
    state = TrainingState(model=model, optimizer=optimizer, epoch=0)
    began_with = state.epoch
    while state.epoch < NUM_EPOCHS:
        make_gradients(model, 10 * state.epoch + dist.get_rank())
        die_once(marker, state.epoch)
        optimizer.step()
        state.epoch += 1
        state.commit()
    committed = model[0].weight.full_tensor()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state.restore()
    assert torch.equal(model[0].weight.full_tensor(), committed)
    weights = [parameter.full_tensor().flatten() for parameter in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].full_tensor().flatten() for p in model.parameters()]
    means = [torch.empty(3) for _ in range(dist.get_world_size())]  # not sharded, and different on each rank
    dist.all_gather(means, model[1].running_mean)
    return {
        "began_with": began_with,
        "weight": torch.cat([*weights, *moments, *means]).detach(),
    }


def train_pipeline(marker: str | None) -> dict[str, Any]:
    """Train as :func:`train` does with one pipeline stage on each rank, so that ranks have different parameters."""
    group = Parallelism(pipeline=-1).lay_out().group("pipeline")
    torch.manual_seed(3)
    stages = cut(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), group)
    pipeline = Pipeline(stages, group, schedule="1f1b", microbatches=2, loss=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(stages[0].parameters(), lr=0.1)
    state = TrainingState(model=stages[0], optimizer=optimizer, epoch=0)
    began_with = state.epoch
    while state.epoch < NUM_EPOCHS:
        optimizer.zero_grad()
        rows = torch.arange(8.0).reshape(2, 4) / (state.epoch + 1)
        pipeline.step(rows, target=rows)
        die_once(marker, state.epoch)
        optimizer.step()
        state.epoch += 1
        state.commit()
    return {"began_with": began_with, "weight": pipeline.step(rows, target=rows)}


def train_in_layout(folder: str, marker: str | None, **sizes: int) -> dict[str, Any]:
    """Train as :func:`train` does, with checkpoints that any layout of the ranks can load."""
    layout = Parallelism(**sizes).lay_out()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    if layout.size("tensor") > 1:
        divide(model, layout.mesh["tensor"], {"0": "colwise", "2": "rowwise"})
    shard(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ShardedCheckpoints(folder, layout) as checkpoints:
        began_with = (checkpoints.load(model, optimizer) or {"epoch": 0})["epoch"]
        for epoch in range(began_with, NUM_EPOCHS):
            make_gradients(model, 10 * epoch + layout.row_reader[0])
            die_once(marker, epoch)
            optimizer.step()
            checkpoints.save(epoch + 1, model, optimizer, state={"epoch": epoch + 1})
    weights = [parameter.full_tensor().flatten().detach() for parameter in model.parameters()]
    return {"began_with": began_with, "weight": torch.cat(weights)}


def die_once(marker: str | None, epoch: int, executor_of: str | None = None) -> None:
    """Kill the last rank once all have committed the third epoch, and before any can commit the fourth."""
    if marker is None or epoch != 3 or Path(marker).exists():
        return
    dist.barrier()
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    Path(marker).touch()
    if executor_of is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    from tests.spark.estimators.estimator_examples import process_of_executor

    os.kill(process_of_executor(executor_of), signal.SIGKILL)
    threading.Event().wait(60)  # all ranks end, whichever executor was killed


def commit_two_states(fails: bool) -> tuple[int, int]:
    first, second = TrainingState(value=1), TrainingState(value=10)
    seen = first.value, second.value
    second.value += 1
    second.commit()
    if fails:
        raise LookupError("on purpose")
    return seen
