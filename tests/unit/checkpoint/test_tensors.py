"""A model that is not divided, in a checkpoint of one part: whatever its state holds comes back to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparkdl.checkpoint.folder import CheckpointFolder
from sparkdl.checkpoint.tensors import Content, TrainingTensors, write_checkpoint
from sparkdl.errors import CheckpointError


class Odd(nn.Module):
    """Tied and empty weights, buffers of unusual kinds, a state beside its tensors, and one that is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.one.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("complex", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.calls = 0
        self._register_state_dict_hook(lambda module, state, prefix, _: state.update(halved=module.scale / 2))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        state = dict(state)
        self.loaded = state.pop("halved")
        return super().load_state_dict(state, *args, **kwargs)

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.tied(self.one(rows))) * self.scale


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
}


def trained(make: Any, steps: int) -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = Odd()
    optimizer = make(module.parameters())
    train(module, optimizer, steps)
    return module, optimizer


def train(module: Odd, optimizer: torch.optim.Optimizer, steps: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(torch.arange(12.0).reshape(4, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def save(folder: CheckpointFolder, part: TrainingTensors) -> Any:
    copies = part.copy()
    content = Content(label="", tensors=copies.tensors, state=copies.values, groups=part.groups(), about={})
    write_checkpoint(folder, content, 0, None)
    return folder.open(folder.names()[-1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_to_the_bit_whatever_the_state_of_the_optimizer_holds(tmp_path, name):
    module, optimizer = trained(OPTIMIZERS[name], 2)
    with torch.no_grad():
        module.sparse.mul_(3)
        module.complex.mul_(1j)
    others = {"best": module.turned.clone()}
    checkpoint = save(
        CheckpointFolder(str(tmp_path), "x"), TrainingTensors(module, optimizer, others, is_divided=False)
    )
    again, fresh = trained(OPTIMIZERS[name], 0)
    room = {"best": torch.zeros(3, 2)}
    part = TrainingTensors(again, fresh, room, is_divided=False)
    checkpoint.check()
    part.check(checkpoint, None)
    values = checkpoint.load_state()
    part.check_optimizer(values, checkpoint.url)
    part.load(checkpoint, values, None)
    assert again.tied.weight is again.one.weight
    assert again.calls == module.calls
    assert torch.equal(again.sparse.to_dense(), 3 * torch.eye(3))
    assert torch.equal(again.complex, module.complex)
    assert torch.equal(again.loaded, module.scale / 2)
    assert torch.equal(room["best"], module.turned)
    for used, model in ((optimizer, module), (fresh, again)):
        train(model, used, 2)
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(module.norm.running_mean, again.norm.running_mean)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("was_fused", [None, True])
def test_loaded_state_keeps_the_kernel_of_the_optimizer(tmp_path, kind, was_fused):
    def train_once(optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    model = nn.Linear(2, 1)
    before = kind(model.parameters(), fused=was_fused)
    train_once(before)
    checkpoint = save(CheckpointFolder(str(tmp_path), "x"), TrainingTensors(model, before, is_divided=False))
    own = None if was_fused else True
    optimizer = kind(model.parameters(), fused=own)
    TrainingTensors(model, optimizer, is_divided=False).load(checkpoint, checkpoint.load_state(), None)
    assert optimizer.param_groups[0]["fused"] is own
    train_once(optimizer)
    assert [int(state["step"]) for state in optimizer.state.values()] == [2, 2]


def test_value_of_a_module_that_no_checkpoint_can_hold_is_named():
    module = Odd()
    module.calls = object()
    with pytest.raises(
        CheckpointError, match=r"module's state\['_extra_state'\]\['calls'\] is a builtins.object"
    ):
        TrainingTensors(module, is_divided=False).copy()
    with pytest.raises(CheckpointError, match="'sparse', a Tensor; checkpoints of divided models hold"):
        TrainingTensors(module, is_divided=True)
