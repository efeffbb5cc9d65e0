"""Networks that from_module takes: modules, programs, files and models of MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ParamError, ParamTypeError
from sparkdl.estimators.given_module import load_module
from tests.servers.fresh_mlflow import tracked

__all__ = ["tracked"]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)).eval()


def exported(network: nn.Module) -> Any:
    return torch.export.export(network, (torch.zeros(2, 2),), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def test_programs_and_their_files_compute_what_the_network_does(network, tmp_path) -> None:
    torch.jit.save(torch.jit.script(network), tmp_path / "net.pt")
    torch.export.save(exported(network), tmp_path / "net.pt2")
    rows = torch.rand(5, 2)
    for source in (
        network,
        torch.jit.script(network),
        exported(network),
        tmp_path / "net.pt",
        str(tmp_path / "net.pt2"),
        (tmp_path / "net.pt2").as_uri(),
    ):
        torch.testing.assert_close(load_module(source)(rows), network(rows))


def test_models_that_mlflow_logged_are_loaded_by_their_uris(network, tracked: Path) -> None:
    import mlflow

    how: dict[str, Any] = {"name": "net", "pip_requirements": []}
    logged = mlflow.pytorch.log_model(
        network, registered_model_name="net", serialization_format="pickle", **how
    )
    as_program = mlflow.pytorch.log_model(
        network, serialization_format="pt2", input_example=torch.zeros(2, 2).numpy(), **how
    )
    rows = torch.rand(3, 2)
    for uri in (logged.model_uri, "models:/net/1", as_program.model_uri):
        torch.testing.assert_close(load_module(uri)(rows), network(rows))
    with pytest.raises(ParamError, match="models:/nothing/1 cannot be loaded by mlflow.pytorch"):
        load_module("models:/nothing/1")


def test_what_is_no_network_is_refused_with_what_to_give(network, tmp_path) -> None:
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    torch.save(network, tmp_path / "whole.pt")
    for source, kind, words in (
        (3, ParamTypeError, "got builtins.int"),
        (str(tmp_path / "no.pt"), ParamError, "There is no file .*TorchModel.from_pretrained"),
        (str(tmp_path / "weights.pt"), ParamError, "weights.pt holds what torch.save wrote.*load_state_dict"),
        (str(tmp_path / "whole.pt"), ParamError, "whole module, give torch.load.path, weights_only=False"),
        (exported(network).module(), ParamError, "has no eval.. mode.*give the program itself"),
    ):
        with pytest.raises(kind, match=words):
            load_module(source)
