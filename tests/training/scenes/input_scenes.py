"""Columns of many kinds, models that take them, and the losses of these models in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparkdl.data import ParquetDataset, scan_dataset

KINDS = ("apple", "pear", "plum")
CODES = (3, 7, 9)


def write_rows(folder: Path, num_rows: int = 37) -> ParquetDataset:
    """Write features and labels of every kind; each class has about as many rows."""
    rng = np.random.default_rng(5)
    number = rng.integers(0, 3, num_rows)
    dense = rng.normal(size=(num_rows, 4)).astype(np.float32) + number[:, None].astype(np.float32)
    lengths = rng.integers(1, 6, num_rows)
    tokens = [rng.integers(1, 10, length).tolist() for length in lengths]
    table = pa.table(
        {
            "dense": pa.array(dense.tolist(), pa.list_(pa.float32())),
            "triple": pa.array(rng.integers(0, 10, (num_rows, 3)).tolist(), pa.list_(pa.int64())),
            "tokens": pa.array(tokens, pa.list_(pa.int64())),
            "age": rng.normal(size=num_rows).astype(np.float32),
            "blob": [row.tobytes() for row in dense],
            "kind": [KINDS[index] for index in number],
            "flag": number > 0,
            "code": np.array(CODES)[number],
            "number": number,
            "padded": np.array([-100, 0, 1])[number],
            "padded_double": np.array([-100.0, 0.0, 1.0])[number],
            "large": np.array([2**53 + 1, 2**53 + 2, 2**53 + 3])[number],
            "target": dense.sum(axis=1),
            "w": rng.random(num_rows),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "part-0.parquet", row_group_size=10)
    return scan_dataset(str(folder), shapes={"tokens": (None,)})


class Two(nn.Module):
    """A model of an embedding of integers, and of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, padding_idx=0)
        self.last = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, dense: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64
        present = (tokens != 0).sum(dim=1, keepdim=True).clamp(min=1)
        return self.last(torch.cat([self.table(tokens).sum(dim=1) / present, dense], dim=1))


class Heads(nn.Module):
    """A model of two outputs, a class and a number, as a tuple or by name in another order."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.classes, self.value, self.named = nn.Linear(4, 3), nn.Linear(4, 1), named

    def forward(self, dense: Tensor) -> Any:
        classes, value = self.classes(dense), self.value(dense)
        return {"target": value, "number": classes} if self.named else (classes, value)


def decode(columns: dict[str, Any]) -> Any:
    """Decode bytes and strings to numbers."""
    pixels = np.stack([np.frombuffer(content, np.float32) for content in columns["blob"]])
    return {"pixels": pixels, "kind": np.array([KINDS.index(kind) for kind in columns["kind"]], np.float32)}


class Decoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 1)

    def forward(self, *, pixels: Tensor, kind: Tensor) -> Tensor:
        return self.last(torch.cat([pixels, kind], dim=1))


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "dense": batch["dense"] * 2}


class Penalized(nn.Linear):
    """A model with a method besides forward, which a train step may call."""

    def penalty(self, dense: Tensor) -> Tensor:
        return 0.1 * self(dense).pow(2).mean() + 0.01 * self.weight.pow(2).sum()


def step_with_penalty(model: Penalized, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    outputs = model(batch["dense"])
    return F.cross_entropy(outputs, batch["number"]) + model.penalty(batch["dense"]), outputs


def padded(rows: Any) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


def tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def index(values: Any, names: tuple[Any, ...]) -> Tensor:
    return torch.tensor([names.index(value) for value in values])


@dataclass(frozen=True)
class Scene:
    """A model, the Params of its fit, and its loss on joined rows in plain torch."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, dict[str, Any]], Tensor]
    params: dict[str, Any] = field(default_factory=dict)


def _linear(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(4, outputs)


def _heads_loss(model: nn.Module, rows: dict[str, Any], *, weighted: bool = False) -> Tensor:
    returned = model(tensor(rows["dense"]))
    classes, value = (returned["number"], returned["target"]) if isinstance(returned, dict) else returned
    by_class = F.cross_entropy(classes, tensor(rows["number"]), reduction="none")
    by_value = F.mse_loss(value.squeeze(1), tensor(rows["target"]), reduction="none")
    per_row = by_class + 0.5 * by_value
    weights = tensor(rows["w"]).float() if weighted else torch.ones(len(per_row))
    return (per_row * weights).sum() / weights.sum()


def _step_loss(model: Penalized, rows: dict[str, Any]) -> Tensor:
    return step_with_penalty(model, {"dense": tensor(rows["dense"]), "number": tensor(rows["number"])})[0]


HEADS = {
    "featuresCol": "dense",
    "labelCol": ["number", "target"],
    "loss": [nn.CrossEntropyLoss(), nn.MSELoss()],
    "lossWeights": [1.0, 0.5],
}

SCENES = {
    "two columns by position": Scene(
        Two,
        lambda model, rows: F.cross_entropy(
            model(tensor(rows["triple"]), tensor(rows["dense"])), tensor(rows["number"])
        ),
        {"featuresCol": ["triple", "dense"]},
    ),
    "padded tokens by name": Scene(
        Two,
        lambda model, rows: F.cross_entropy(
            model(padded(rows["tokens"]), tensor(rows["dense"])), tensor(rows["number"])
        ),
        {"featuresCol": ["dense", "tokens"], "passFeaturesBy": "name", "paddingValue": 0},
    ),
    "columns of one number each as a matrix": Scene(
        lambda: nn.Linear(3, 3),
        lambda model, rows: F.cross_entropy(
            model(torch.stack([tensor(rows[name]).float() for name in ("age", "code", "target")], dim=1)),
            tensor(rows["number"]),
        ),
        {"featuresCol": ["age", "code", "target"], "passFeaturesBy": "matrix"},
    ),
    "bytes and strings": Scene(
        Decoded,
        lambda model, rows: F.mse_loss(
            model(
                pixels=torch.from_numpy(decode(rows)["pixels"]),
                kind=torch.from_numpy(decode(rows)["kind"]).unsqueeze(1),
            ).squeeze(1),
            tensor(rows["target"]),
        ),
        {
            "featuresCol": ["blob", "kind"],
            "passFeaturesBy": "name",
            "prepareFeatures": decode,
            "labelCol": "target",
            "loss": nn.MSELoss(),
        },
    ),
    "two heads as a tuple": Scene(lambda: Heads(named=False), _heads_loss, HEADS),
    "two heads by name, weighted rows": Scene(
        lambda: Heads(named=True),
        lambda model, rows: _heads_loss(model, rows, weighted=True),
        {**HEADS, "weightCol": "w"},
    ),
    "string labels": Scene(
        _linear(3),
        lambda model, rows: F.cross_entropy(model(tensor(rows["dense"])), index(rows["kind"], KINDS)),
        {"featuresCol": "dense", "labelCol": "kind"},
    ),
    "boolean labels": Scene(
        _linear(1),
        lambda model, rows: F.binary_cross_entropy_with_logits(
            model(tensor(rows["dense"])).squeeze(1), tensor(rows["flag"]).float()
        ),
        {"featuresCol": "dense", "labelCol": "flag", "loss": nn.BCEWithLogitsLoss()},
    ),
    "integers that do not count from 0": Scene(
        _linear(3),
        lambda model, rows: F.cross_entropy(model(tensor(rows["dense"])), index(rows["code"], CODES)),
        {"featuresCol": "dense", "labelCol": "code"},
    ),
    "features that are the labels": Scene(
        _linear(4),
        lambda model, rows: F.mse_loss(model(tensor(rows["dense"])), tensor(rows["dense"])),
        {"featuresCol": "dense", "labelCol": "dense", "loss": nn.MSELoss()},
    ),
    "the user's own step": Scene(
        lambda: Penalized(4, 3),
        _step_loss,
        {"featuresCol": "dense", "labelCol": "number", "loss": None, "trainStep": step_with_penalty},
    ),
    "changed for training": Scene(
        _linear(3),
        lambda model, rows: F.cross_entropy(model(2 * tensor(rows["dense"])), tensor(rows["number"])),
        {"featuresCol": "dense", "augment": double},
    ),
}
