"""Trials of models of which only a part is copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparkdl.training.probe import TrialGradients, step_without, trial_copy


class Words(nn.Module):
    """An embedding, layers of which one is not used, and a batch norm; the last layer is tied to the embedding."""

    def __init__(self, *, sparse: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 4, sparse=sparse)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, 4)
        self.unused = nn.Linear(30, 30)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 100, bias=False)
        if not sparse:
            self.last.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        found = self.frozen(self.norm(self.embedding(ids)))
        if self.reentrant:
            return self.last(checkpoint(self.hidden, found, use_reentrant=True))
        return self.last(self.hidden(found))


def trial_of(model: Words, copied_bytes: int) -> tuple[Words, list[nn.Parameter], TrialGradients]:
    trial, shared = trial_copy(model, model, copied_bytes)
    return trial, shared, TrialGradients(trial, shared)


def go_backward(trial: Words, gradients: TrialGradients) -> None:
    outputs = trial(torch.tensor([1, 2, 3]))
    gradients.backward(outputs.square().mean())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("copied_bytes", [0, 100, 1000, 1 << 20])
def test_gradients_are_told_whether_parameters_are_copied_or_shared(
    copied_bytes: int, sparse: bool, reentrant: bool
) -> None:
    model = Words(sparse=sparse, reentrant=reentrant)
    trial, shared, gradients = trial_of(model, copied_bytes)
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    assert [parameter.data_ptr() in mine for parameter in trial.parameters()].count(True) == len(shared)
    assert bool(shared) == (copied_bytes < 1 << 20)
    assert not gradients.found.are_there
    for _ in range(2):  # as it is done for each head
        go_backward(trial, gradients)
    assert gradients.found.are_there
    assert gradients.found.are_sparse == sparse
    assert gradients.found.lack_some
    assert all(parameter.grad is None for parameter in shared)
    trial.unused.requires_grad_(False)
    again = TrialGradients(trial, shared)
    go_backward(trial, again)
    assert not again.found.lack_some


def test_shared_parameters_get_no_gradient_at_any_time() -> None:
    trial, shared, gradients = trial_of(Words(), 0)
    outputs = trial(torch.tensor([1, 2, 3]))
    for parameter in shared:
        if parameter.requires_grad:
            parameter.register_hook(
                lambda gradient: pytest.fail(f"a gradient of {tuple(gradient.shape)} was computed")
            )
    gradients.backward(outputs.mean())
    assert gradients.found.are_there


def test_a_copy_keeps_what_is_tied_and_its_buffers_are_its_own() -> None:
    model = Words()
    (trial, again), shared = trial_copy((model, model), model, 0)
    assert trial is again
    assert trial.last.weight is trial.embedding.weight
    assert len(shared) == len(list(model.parameters()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trial.train()(torch.tensor([1, 2, 3]))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_a_step_changes_copies_alone() -> None:
    model = Words()
    trial, shared, gradients = trial_of(model, 1000)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(trial.parameters(), lr=1.0, weight_decay=1.0)
    go_backward(trial, gradients)
    for parameter in shared:  # though there be one
        parameter.grad = torch.ones_like(parameter)
    step_without(optimizer, shared)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert not torch.equal(trial.hidden.bias, model.hidden.bias)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(trial.parameters()))


def test_an_error_of_the_backward_pass_is_told_as_it_is() -> None:
    trial, _, gradients = trial_of(Words(), 0)
    outputs = trial(torch.tensor([1, 2, 3]))
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients.backward(outputs.detach().mean())
