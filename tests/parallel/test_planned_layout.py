"""A layout that the planner chooses on the ranks is trained as if it had been named."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from torch import nn

import sparkdl.torch
from sparkdl.data import ParquetDataset
from sparkdl.errors import ParamError
from sparkdl.parallel import Parallelism
from sparkdl.planner.on_ranks import RankPlanner, choose_layout, make_planner
from sparkdl.planner.shape import RECIPES, DecoderShape
from sparkdl.training.spec import CheckpointPlan, TrainingSpec
from tests.run_ranks import RankEnvironment, run_ranks
from tests.runner.local_runner import make_runner
from tests.servers.fresh_mlflow import tracked
from tests.training.scenes.training_scenes import (
    assert_same_weights,
    make_model,
    make_spec,
    train_all,
    write_dataset,
)

__all__ = ["tracked"]

DEEP = DecoderShape(name="deep", vocabulary=1024, width=5280, layers=400, heads=16, sequence=2)
"""Its state takes 2 TB, and each of its layers little."""

adamw = partial(torch.optim.AdamW, lr=0.05, eps=1e-3)


def with_plan() -> nn.Module:
    model = make_model()
    model.tensor_plan = {"0": "colwise", "2": "rowwise"}  # type: ignore[assignment]
    return model


@dataclass(frozen=True)
class AlwaysOne:
    """A planner that chooses one layout."""

    parallelism: Parallelism

    def choose(self, module: nn.Module, device: torch.device) -> tuple[Parallelism, dict[str, str]]:
        del module, device
        return self.parallelism, {"code": "given", "reason": "."}


def test_a_step_has_the_rows_of_replicas_in_every_chosen_layout(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "rows", 45)
    spec = make_spec(model=with_plan(), optimizer=adamw, batch_size=3)
    layouts = ({"tensor": 2}, {"pipeline": 2, "microbatches": 3}, {"shard": 2})
    planners = [AlwaysOne(Parallelism(**sizes)) for sizes in layouts]
    planners.append(make_planner(spec.model, (torch.zeros(2, 4),), batch_size=3))
    # Each with a model of its own, as ranks divide it in place.
    specs = [
        spec,
        *(dataclasses.replace(spec, planner=planner.choose, model=with_plan()) for planner in planners),
    ]
    replicas, *others = run_ranks(2, train_all, [(planned, dataset) for planned in specs])[0]
    for outcome in others:
        assert_same_weights(outcome.weights, replicas.weights, atol=1e-4)
        assert outcome.history[-1].loss == pytest.approx(replicas.history[-1].loss, rel=1e-4)
    assert_same_weights(others[-1].weights, replicas.weights)  # replicas, to the bit
    said = [event for event in others[-1].events if event["kind"] == "layout"]
    assert [event["code"] for event in said] == ["Parallelism(data=2)"]
    assert "Replicas fit" in said[0]["reason"]


def test_a_fit_resumes_in_the_layout_that_its_planner_chooses_then(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "rows", 45)
    spec = make_spec(optimizer=adamw, batch_size=3)

    def planned(sizes: dict[str, int], folder: str, epochs: int) -> tuple[TrainingSpec, ParquetDataset]:
        checkpoints = CheckpointPlan(url=str(tmp_path / folder), every_updates=None, num_kept=2)
        planner = AlwaysOne(Parallelism(**sizes))
        changes: dict[str, Any] = {
            "planner": planner.choose,
            "model": with_plan(),
            "checkpoints": checkpoints,
            "epochs": epochs,
        }
        return dataclasses.replace(spec, **changes), dataset

    cases = [planned({"shard": 2}, "whole", 2), planned({"data": 2}, "resumed", 1)]
    cases.append(planned({"tensor": 2}, "resumed", 2))
    whole, _, resumed = run_ranks(2, train_all, cases)[0]
    assert [event["epoch"] for event in resumed.events if event["kind"] == "resumed"] == [2]
    assert_same_weights(resumed.weights, whole.weights, atol=1e-4)


def _choose(environment: RankEnvironment) -> tuple[Parallelism, str]:
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=300.0)
        chosen = choose_layout(make_model(), (torch.zeros(2, 4),), batch_size=8)
        large = RankPlanner(shape=DEEP, recipe=RECIPES["float32"], batch_size=1, dimensions=("data", "shard"))
        with pytest.raises(ParamError) as refused:
            large.choose(make_model(), torch.device("cpu"))
        sparkdl.torch.destroy_process_group()
    return chosen, str(refused.value)


def test_every_rank_of_a_script_gets_one_layout_or_one_refusal() -> None:
    (chosen, refused), other = run_ranks(2, _choose)
    assert other == (chosen, refused)
    assert chosen == Parallelism(data=2)
    assert re.match(r"deep with \d+ billion parameters fits on 1 x 2 cpu", refused)
    assert "The smallest cluster of such hosts on which it fits has" in refused


def _choose_in_a_run() -> Parallelism:
    return choose_layout(make_model(), (torch.zeros(2, 4),), batch_size=8)


def test_the_driver_of_a_runner_logs_the_layout_to_the_active_run(tracked: Path) -> None:
    del tracked
    with mlflow.start_run() as active:
        assert make_runner().run(_choose_in_a_run) == Parallelism(data=2)
    params = mlflow.get_run(active.info.run_id).data.params
    assert params["parallelism"] == "Parallelism(data=2)"
    assert params["parallelismReason"].startswith("Replicas fit")
