"""Trainings for the tests of the loop: on ranks by ``train``, and in one process by plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from sparkdl.data import Column, ParquetDataset, ParquetFeed, scan_dataset
from sparkdl.model.heads import Head, LabelColumn
from sparkdl.training.distribution import ModelDistribution, Replicas
from sparkdl.training.history import EpochRecord
from sparkdl.training.remote.transfer import fetch_module, store_trained
from sparkdl.training.spec import TrainingSpec
from sparkdl.training.trainer import train
from tests.training.signatures import make_inputs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.run_ranks import RankEnvironment


@dataclass
class Outcome:
    """The results of one rank's training."""

    weights: dict[str, np.ndarray]
    history: tuple[EpochRecord, ...]
    events: list[dict[str, Any]] = field(default_factory=list)
    model_epoch: int = 0


def write_dataset(folder: Path, num_rows: int, *, rows_per_group: int = 5) -> ParquetDataset:
    """Write rows with 4 features, one of 3 classes, a target, weights, and validation indicators."""
    rng = np.random.default_rng(num_rows)
    features = rng.normal(size=(num_rows, 4)).astype(np.float32)
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), 4).cast(
                pa.list_(pa.float32())
            ),
            "y": (features.sum(axis=1) > 0).astype(np.int64) + (features[:, 0] > 1),
            "target": features @ np.array([1.0, -2.0, 0.5, 0.0]),
            "w": rng.uniform(0.0, 2.0, size=num_rows),
            "heavy": 2000.0 * rng.uniform(0.0, 2.0, size=num_rows),
            "nothing": np.zeros(num_rows),
            "validates": rng.random(num_rows) < 0.3,
            "never": np.zeros(num_rows, bool),
            "always": np.ones(num_rows, bool),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "part-0.parquet", row_group_size=rows_per_group)
    return scan_dataset(str(folder))


def make_model(outputs: int = 3, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, outputs))


def make_spec(**changes: Any) -> TrainingSpec:
    fields: dict[str, Any] = {
        "model": make_model(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "features": "x",
        "label": "y",
        "label_dtype": "int64",
        "batch_size": 8,
        "epochs": 2,
        "seed": 7,
    }
    given = {**fields, **changes}
    names = given.pop("features")
    label = LabelColumn(name=given.pop("label"), dtype=given.pop("label_dtype"))
    heads = (Head(label=label, loss=given.pop("loss")),)  # unless heads are given
    column = Column(name=names, dtype="float32", shape=(4,))
    return TrainingSpec(**{"inputs": make_inputs(names, **{names: column}), "heads": heads, **given})


def train_all(
    environment: RankEnvironment, cases: list[tuple[TrainingSpec, ParquetDataset]], name: str = "case"
) -> list[Outcome]:
    """Train every case on this rank, one after the other, each on a communicator whose name begins with ``name``."""
    outcomes = []
    for number, (spec, dataset) in enumerate(cases):
        events: list[dict[str, Any]] = []
        with environment.open(name=f"{name}-{number}") as communicator:
            keep = partial(keep_module, folder=f"{dataset.url}-{name}-{number}")
            result = train(spec, communicator=communicator, dataset=dataset, report=events.append, keep=keep)
        state = {} if result.module is None else result.module.state_dict()
        weights = {name: value.numpy().copy() for name, value in state.items()}
        outcomes.append(Outcome(weights, result.history, events, result.model_epoch))
    return outcomes


def keep_module(distribution: ModelDistribution, folder: str) -> nn.Module | None:
    """The trained module; of one that is divided among ranks, as the driver gets it, on rank 0 alone."""
    if isinstance(distribution, Replicas):
        return distribution.whole_module()
    stored = store_trained(distribution, folder)
    return None if stored is None else fetch_module(stored, folder)


def train_beside_gpus(
    environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset
) -> list[Outcome]:
    """Train on a rank of a simulated machine with GPUs; using a GPU fails, as it would initialize CUDA."""

    def initialize_cuda(*_: object) -> None:
        raise AssertionError("CUDA was initialized")

    torch.cuda.is_available = torch.distributed.is_nccl_available = lambda: True
    torch.cuda.current_device = torch.cuda.get_device_properties = initialize_cuda
    return train_all(environment, [(spec, dataset)])


def train_in_one_process(
    spec: TrainingSpec, dataset: ParquetDataset, world_size: int
) -> dict[str, np.ndarray]:
    """Train by a plain loop over the joined batches of all ranks."""
    model = spec.model.train()
    optimizer = spec.optimizer(model.parameters())
    for steps in joined_epochs(spec, dataset, world_size):
        for joined in steps:
            outputs = model(torch.from_numpy(joined["x"]))
            label = torch.from_numpy(joined[spec.label_names[0]])
            targets = label if spec.heads[0].label.dtype == "int64" else label.to(torch.float32).unsqueeze(-1)
            optimizer.zero_grad()
            joined_loss(spec, outputs, targets, joined).backward()
            optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def joined_epochs(
    spec: TrainingSpec, dataset: ParquetDataset, world_size: int
) -> Iterator[list[dict[str, np.ndarray]]]:
    """The steps of each epoch, each with the rows of all ranks."""
    with ExitStack() as stack:
        feeds = [
            stack.enter_context(
                ParquetFeed(
                    dataset,
                    columns=spec.columns(),
                    rank=rank,
                    world_size=world_size,
                    batch_size=spec.batch_size,
                    seed=spec.seed,
                )
            )
            for rank in range(world_size)
        ]
        for epoch in range(spec.epochs):
            yield [
                {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                for parts in zip(*(feed.epoch(epoch) for feed in feeds), strict=True)
            ]


def assert_same_weights(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, atol: float = 0.0, rtol: float = 0.0
) -> None:
    """Assert that all weights and buffers agree, to the bit unless there is a tolerance."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=atol, err_msg=name)


def joined_loss(
    spec: TrainingSpec, outputs: torch.Tensor, targets: torch.Tensor, joined: dict[str, np.ndarray]
) -> torch.Tensor:
    if spec.weight is None:
        return spec.heads[0].loss(outputs, targets).mean()
    weights = torch.from_numpy(joined[spec.weight]).to(torch.float32)
    per_row = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (per_row * weights).sum() / weights.sum()
