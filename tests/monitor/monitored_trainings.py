"""Trainings that ranks run with a monitor, for the tests of :mod:`sparkdl.monitor`."""

from __future__ import annotations

import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparkdl.horovod.torch as hvd
from sparkdl.collective import set_current_communicator
from sparkdl.data import ParquetDataset
from sparkdl.errors import SparkdlError
from sparkdl.monitor import Monitor, end_step
from sparkdl.training.callbacks import Callback, FitContext
from sparkdl.training.spec import TrainingSpec
from sparkdl.training.trainer import train
from tests.run_ranks import RankEnvironment
from tests.training.scenes.training_scenes import keep_module

WIDTH = 16
PATIENCE_S = 120.0


def train_with_samples(
    environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, settings: Monitor | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train; return the weights and the samples of this rank."""
    events: list[dict[str, Any]] = []
    keep = partial(keep_module, folder=f"{dataset.url}-trained")
    with environment.communicator() as communicator:
        if settings is None:
            result = train(spec, communicator=communicator, dataset=dataset, keep=keep)
        else:
            with settings.on_rank(communicator.rank, communicator.world_size, events.append) as sampler:
                result = train(spec, communicator=communicator, dataset=dataset, keep=keep, monitor=sampler)
    state = {} if result.module is None else result.module.state_dict()
    return {name: value.numpy().copy() for name, value in state.items()}, events


def train_until(folder: str, num_steps: int) -> int:
    """Train by Horovod's API for some steps, and on until the test has seen what it wants; return the steps."""
    hvd.init()
    torch.manual_seed(0)
    network = nn.Linear(WIDTH, WIDTH)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1), named_parameters=network.named_parameters()
    )
    began = time.monotonic()
    steps = 0
    while True:
        is_enough = steps >= num_steps and Path(folder, "seen").exists()
        if hvd.allreduce(torch.tensor(float(is_enough)), op=hvd.Min).item():
            return steps
        if time.monotonic() - began > PATIENCE_S:
            raise TimeoutError("the test has not seen what it waits for")
        optimizer.zero_grad()
        network(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        steps += 1
        end_step(rows=8, tokens=24)


def sum_in_steps(num_steps: int) -> None:
    """Sum a tensor in each of some steps."""
    hvd.init()
    for _ in range(num_steps):
        hvd.allreduce(torch.ones(WIDTH))
        end_step(rows=1)


def sum_in_own_profile(num_steps: int) -> None:
    """Sum a tensor in each of some steps, under a profiler."""
    with torch.profiler.profile():
        sum_in_steps(num_steps)


def fail_after_a_step() -> None:
    """Raise an exception while the operations of a step are counted."""
    end_step(rows=1)
    raise ValueError("no more")


def wait_for_each_other(environment: RankEnvironment, settings: Monitor) -> list[dict[str, Any]]:
    """Rank 1 comes to a sum when rank 0, which waits in it, has sent samples; return the samples of rank 0."""
    events: list[dict[str, Any]] = []

    def report(event: dict[str, Any]) -> None:
        events.append(event)
        if environment.rank == 0 and event["communicating_s"] > 0.9 * event["seconds"] and len(events) > 2:
            environment.rendezvous.set("seen", b"")

    with environment.communicator(timeout_s=PATIENCE_S) as communicator:
        with settings.on_rank(environment.rank, 2, report):
            if environment.rank == 1:
                environment.rendezvous.get("seen", PATIENCE_S)
            communicator.barrier()
            communicator.barrier()
        return events


def train_and_fail(
    environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, settings: Monitor
) -> str:
    """Train with a callback that fails during the trace; return the error of this rank."""
    with environment.open() as communicator:
        set_current_communicator(communicator)
        try:
            with settings.on_rank(environment.rank, 2, lambda _: None) as sampler:
                train(spec, communicator=communicator, dataset=dataset, keep=id, monitor=sampler)
        except SparkdlError as error:
            return str(error)
    return ""


class FailsAtStep(Callback):
    """Fails on rank 1 after the second step."""

    def on_step_end(self, context: FitContext) -> None:
        if context.step == 2 and context.rank == 1:
            raise ValueError("a step has failed")


def train_in_turn(
    environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, settings: Monitor, pairs: int
) -> dict[str, list[tuple[float, float]]]:
    """Train in pairs; return processor and elapsed seconds of the plain and the monitored trainings."""
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "monitored": []}
    with environment.communicator() as world:
        for pair in range(-1, pairs):  # the first pair is not counted: it imports what it needs
            for kind in sorted(times, reverse=pair % 2 == 0):
                with world.split(range(world.world_size), f"{kind} {pair}") as communicator:
                    world.barrier()
                    began, processor = time.perf_counter(), time.process_time()
                    if kind == "plain":
                        train(deepcopy(spec), communicator=communicator, dataset=dataset, keep=id)
                    else:
                        with settings.on_rank(world.rank, world.world_size, lambda _: None) as sampler:
                            train(
                                deepcopy(spec),
                                communicator=communicator,
                                dataset=dataset,
                                keep=id,
                                monitor=sampler,
                            )
                    if pair >= 0:
                        seconds = time.process_time() - processor, time.perf_counter() - began
                        times[kind].append(seconds)
    return times
