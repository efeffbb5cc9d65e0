"""Local updates and compressed gradients: their arithmetic on two ranks, and that they converge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from sparkdl.collective import current_communicator
from sparkdl.errors import ParamError
from sparkdl.slow_links import COMPRESSIONS, SYNCHRONIZATIONS, as_dict, settings_of
from sparkdl.torch import DataParallel, DiLoCo, LocalSGD, LocalUpdates, PowerSGD, TopK
from sparkdl.torch.replicas import digests_of
from tests.checks import checks_in
from tests.torch.checks import run_checks
from tests.torch.training_examples import batch, joined_batch, loss_of, model

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
NUM_CLASSES = 4


def require(claim: bool, about: object) -> None:
    """Raise an error that shows ``about`` unless the claim holds; ``assert`` is rewritten in tests alone."""
    if not claim:
        raise AssertionError(about)


def rank() -> int:
    return current_communicator().rank


def world_size() -> int:
    return current_communicator().world_size


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def are_equal_on_all_ranks(module: nn.Module) -> bool:
    numbers = [number for _, parts in digests_of(dict(module.state_dict())).values() for number in parts]
    own, all_of_them = np.array(numbers), np.empty(world_size() * len(numbers), np.int64)
    current_communicator().allgather(own, all_of_them)
    return bool((all_of_them.reshape(world_size(), -1) == own).all())


def locally_trained(
    settings: LocalSGD | DiLoCo, num_steps: int, module: nn.Module | None = None
) -> nn.Module:
    """Train on this rank's batches, and synchronize as the settings say, and at the end."""
    module = module or model()
    local, optimizer = LocalUpdates(module, settings), sgd(module)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(module, batch(rank(), step)).backward()
        optimizer.step()
        local.after_step(ends=step == num_steps - 1)
    return module


def weights_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in module.parameters()])


def set_weights(module: nn.Module, values: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), module.parameters())


def progress_of_each_rank(start: list[torch.Tensor], steps: range) -> list[torch.Tensor]:
    """The weights of each rank after plain local steps from its own weights."""
    found = []
    for other, values in enumerate(start):
        module = model()
        set_weights(module, values)
        optimizer = sgd(module)
        for step in steps:
            optimizer.zero_grad()
            loss_of(module, batch(other, step)).backward()
            optimizer.step()
        found.append(weights_of(module))
    return found


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).mean(0)


def check_local_sgd_of_every_step_is_data_parallel_sgd() -> None:
    module = locally_trained(LocalSGD(every=1), 4)
    expected = model()
    optimizer = sgd(expected)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(expected, joined_batch(world_size(), step)).backward()
        optimizer.step()
    torch.testing.assert_close(weights_of(module), weights_of(expected), **TOLERANCE)


def check_weights_differ_between_synchronizations_and_are_equal_to_the_bit_after_them() -> None:
    for settings in (LocalSGD(every=3), DiLoCo(every=3), DiLoCo(every=3, overlap=True)):
        torch.manual_seed(rank())  # the constructor gives all ranks rank 0's weights
        module = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, NUM_CLASSES))
        local, optimizer = LocalUpdates(module, settings), torch.optim.AdamW(module.parameters())
        require(are_equal_on_all_ranks(module), "equal at the beginning")
        for step in range(8):
            optimizer.zero_grad()
            loss_of(module, batch(rank(), step)).backward()
            optimizer.step()
            is_synchronized = local.after_step()
            require(is_synchronized == (not getattr(settings, "overlap", False) and step in (2, 5)), step)
            require(are_equal_on_all_ranks(module) == is_synchronized, f"{settings} after step {step}")
        local.synchronize()
        require(are_equal_on_all_ranks(module), f"{settings} at the end")


def check_diloco_with_a_plain_outer_step_averages() -> None:
    plain = locally_trained(DiLoCo(every=2, learning_rate=1.0, momentum=0.0), 6)
    averaged = locally_trained(LocalSGD(every=2), 6)
    torch.testing.assert_close(weights_of(plain), weights_of(averaged), rtol=0, atol=0)
    expected = weights_of(model())
    for round_number in range(3):
        steps = range(2 * round_number, 2 * round_number + 2)
        expected = mean(progress_of_each_rank([expected] * world_size(), steps))
    torch.testing.assert_close(weights_of(plain), expected, **TOLERANCE)


def check_outer_step_is_that_of_nesterov_sgd_in_torch() -> None:
    module = locally_trained(
        DiLoCo(every=2, learning_rate=0.7, momentum=0.9), 7
    )  # the last round has one step
    outer = nn.Parameter(weights_of(model()))
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for steps in (range(2), range(2, 4), range(4, 6), range(6, 7)):
        own = progress_of_each_rank([outer.detach()] * world_size(), steps)
        outer.grad = outer.detach() - mean(own)
        optimizer.step()
    torch.testing.assert_close(weights_of(module), outer.detach(), **TOLERANCE)


def check_overlapped_outer_step_is_one_round_late_and_keeps_own_progress() -> None:
    module = locally_trained(DiLoCo(every=2, learning_rate=0.7, momentum=0.9, overlap=True), 7)
    outer = nn.Parameter(weights_of(model()))
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    own = progress_of_each_rank([outer.detach()] * world_size(), range(2))
    for steps in (range(2, 4), range(4, 6), range(6, 7)):
        progress = [values - outer.detach() for values in own]
        later = progress_of_each_rank(own, steps)
        outer.grad = -mean(progress)
        optimizer.step()
        own = [outer.detach() + after - before for after, before in zip(later, own, strict=True)]
    outer.grad = outer.detach() - mean(own)  # of the synchronization at the end
    optimizer.step()
    torch.testing.assert_close(weights_of(module), outer.detach(), **TOLERANCE)


def check_local_updates_begin_after_updates_with_averaged_gradients() -> None:
    module = model()
    local, optimizer = LocalUpdates(module, LocalSGD(every=2, begin_after=3)), sgd(module)
    wrapped = DataParallel(module, current_communicator())
    equal = []
    for step in range(6):
        optimizer.zero_grad()
        if not local.is_local:
            loss_of(wrapped, batch(rank(), step)).backward()
        else:
            wrapped.close()
            loss_of(module, batch(rank(), step)).backward()
        optimizer.step()
        equal.append(local.after_step())
        require(are_equal_on_all_ranks(module) == equal[-1], step)
    require(equal == [True, True, True, False, True, False], equal)


def check_layers_that_are_unfrozen_or_added_are_synchronized_from_then_on() -> None:
    for settings in (DiLoCo(every=4), DiLoCo(every=2, overlap=True)):
        module = model()
        module[0].requires_grad_(False)
        local, optimizer = LocalUpdates(module, settings), sgd(module)
        for step in range(8):
            if step == 3:
                module[0].requires_grad_(True)
            if step == 5:
                torch.manual_seed(rank())
                module.append(nn.Linear(NUM_CLASSES, NUM_CLASSES))
                optimizer.add_param_group({"params": list(module[-1].parameters())})
            local.take_up_changes()
            optimizer.zero_grad()
            loss_of(module, batch(rank(), step)).backward()
            optimizer.step()
            local.after_step()
        first = module[0].weight.detach().clone()
        local.synchronize()
        require(are_equal_on_all_ranks(module), f"{settings}")
        require(not torch.equal(first, model()[0].weight), "it was trained")


def check_weights_of_sixteen_bits_and_complex_ones_are_synchronized() -> None:
    for dtype in (torch.bfloat16, torch.complex64, torch.float64):
        weight = nn.Parameter(torch.full((5, 3), 1.0, dtype=dtype).t())
        module = nn.ParameterList([weight])
        local = LocalUpdates(module, DiLoCo(every=1, learning_rate=1.0, momentum=0.0))
        for _ in range(40):
            with torch.no_grad():
                weight.sub_(torch.full_like(weight, 2.0 * rank() / world_size()))
            local.after_step()
        shift = 40 * 2 / world_size() * (world_size() - 1) / 2
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1.0 - shift), rtol=0.02, atol=0)


def check_local_updates_continue_from_their_state() -> None:
    settings = DiLoCo(every=2)
    whole = locally_trained(settings, 8)
    first = model()
    local, optimizer = LocalUpdates(first, settings), sgd(first)
    for step in range(8):
        if step == 4:
            state, second = local.state_dict(), model()
            state = {
                **state,
                "velocities": {name: value.clone() for name, value in state["velocities"].items()},
            }
            local = LocalUpdates(second, settings)
            local.load_state_dict(state)
            set_weights(second, weights_of(first))
            local.begin()
            first, optimizer = second, sgd(second)
        optimizer.zero_grad()
        loss_of(first, batch(rank(), step)).backward()
        optimizer.step()
        local.after_step()
    torch.testing.assert_close(weights_of(first), weights_of(whole), rtol=0, atol=0)


def check_low_rank_gradients_are_those_of_the_hook_in_torch() -> None:
    seed = int(np.random.RandomState(0).randint(1_000_000_000))  # of the hook's first matrices
    for matrix_rank in (1, 3):
        torch.manual_seed(11)
        ours, theirs = (nn.Linear(40, 30, bias=False) for _ in range(2))
        theirs.load_state_dict(ours.state_dict())
        settings = PowerSGD(rank=matrix_rank, begin_after=2, seed=seed)
        wrapped = DataParallel(ours, current_communicator(), compression=settings)
        ddp = nn.parallel.DistributedDataParallel(theirs)
        state = PowerSGDState(
            None, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2, random_seed=0
        )
        ddp.register_comm_hook(state, powerSGD_hook)
        for step in range(8):
            rows = torch.randn(9, 40, generator=torch.Generator().manual_seed(10 * step + rank()))
            for module in (wrapped, ddp):
                module.zero_grad()
                module(rows).square().mean().backward()
            torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, **TOLERANCE)
            require(bool(torch.linalg.matrix_rank(ours.weight.grad) <= matrix_rank) == (step >= 2), step)


def sent_and_left(settings: PowerSGD | TopK) -> None:
    """Require that what was averaged and what is left add up to the averages of the gradients."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, NUM_CLASSES))
    plain = nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, NUM_CLASSES))
    plain.load_state_dict(module.state_dict())
    wrapped = DataParallel(module, current_communicator(), compression=settings, bucket_bytes=1000)
    exact = DataParallel(plain, current_communicator())
    sums: list[dict[str, Any]] = [{}, {}]
    differs = False
    for step in range(5):
        for summed, trained in zip(sums, (wrapped, exact), strict=True):
            trained.zero_grad()
            loss_of(trained, batch(rank(), step)).backward()
            for name, parameter in trained.module.named_parameters():
                summed[name] = summed.get(name, 0) + parameter.grad.clone()
        differs = differs or any(
            not torch.allclose(sums[0][name], sums[1][name], atol=1e-4) for name in sums[0]
        )
        require(are_equal_on_all_ranks(module), "weights")
    require(differs, "the gradients are compressed")
    errors = wrapped.compression_state()["errors"]
    require(any(error.any() for error in errors.values()), "something is left to send")
    for name, total in sums[1].items():
        left = errors.get(name, torch.zeros_like(total)).clone().reshape(total.shape).contiguous()
        current_communicator().allreduce(left, op="avg")
        torch.testing.assert_close(sums[0][name] + left, total, **TOLERANCE)


def check_low_rank_gradients_and_what_is_left_add_up() -> None:
    sent_and_left(PowerSGD(rank=1))


def check_largest_elements_and_what_is_left_add_up() -> None:
    sent_and_left(TopK(ratio=0.05))


def check_all_elements_are_the_average_to_the_bit() -> None:
    found = []
    for settings in (None, TopK(ratio=1.0)):
        module = model()
        loss_of(
            DataParallel(module, current_communicator(), compression=settings), batch(rank(), 0)
        ).backward()
        found.append(torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


class Branches(nn.Module):
    """Rank 0 uses one branch, the other ranks another, and no rank the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = nn.ModuleList(nn.Linear(30, 20) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[min(rank(), 1)](x).sum()


def check_parameters_without_a_gradient_on_any_rank_get_none_when_compressed() -> None:
    for settings in (PowerSGD(rank=2), TopK(ratio=0.1)):
        module = Branches()
        wrapped = DataParallel(module, current_communicator(), compression=settings, bucket_bytes=8)
        for _ in range(2):
            module.zero_grad()
            wrapped(torch.arange(60.0).view(2, 30)).backward()
            require(module.branches[0].weight.grad is not None, "used on rank 0")
            require(module.branches[1].weight.grad is not None, "used on other ranks")
            require(module.branches[2].weight.grad is None, "used on none")
        errors = wrapped.compression_state()["errors"]
        require(all(bool(torch.isfinite(error).all()) for error in errors.values()), "finite")


def check_compression_continues_from_its_state() -> None:
    for settings in (PowerSGD(rank=2, begin_after=1), TopK(ratio=0.1, begin_after=1)):
        gradients = []
        for is_interrupted in (False, True):
            torch.manual_seed(2)
            module = nn.Linear(40, 30)
            wrapped = DataParallel(module, current_communicator(), compression=settings)
            for step in range(6):
                if is_interrupted and step == 3:
                    state = wrapped.compression_state()
                    wrapped.close()
                    wrapped = DataParallel(module, current_communicator(), compression=settings)
                    wrapped.load_compression_state(state)
                rows = torch.randn(9, 40, generator=torch.Generator().manual_seed(10 * step + rank()))
                module.zero_grad()
                wrapped(rows).square().mean().backward()
            gradients.append(module.weight.grad.clone())
            wrapped.close()
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Task:
    """Classes of points by a teacher of two layers; each rank has other points."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        first, second = (
            torch.randn(12, 32, generator=generator),
            torch.randn(32, NUM_CLASSES, generator=generator),
        )
        self._teach = lambda x: (torch.tanh(x @ first / 3.5) @ second).argmax(1)
        x = torch.randn(4096, 12, generator=generator)
        self.tested = x[:1024], self._teach(x[:1024])
        own = x[1024:][rank() :: world_size()]
        self.own = own, self._teach(own)

    def train(self, settings: Any, num_steps: int = 320) -> tuple[float, nn.Module]:
        """Train a network of 3,000 weights; return its loss on other points."""
        torch.manual_seed(1)
        module = nn.Sequential(
            nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES)
        )
        is_local = isinstance(settings, LocalSGD | DiLoCo)
        local = LocalUpdates(module, settings) if is_local else None
        compression = None if is_local else settings
        called: nn.Module = DataParallel(module, current_communicator(), compression=compression)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
        order = torch.Generator().manual_seed(rank())
        for _ in range(num_steps):
            if local is not None and local.is_local and isinstance(called, DataParallel):
                called.close()
                called = module
            chosen = torch.randint(len(self.own[0]), (64,), generator=order)
            optimizer.zero_grad()
            nn.functional.cross_entropy(called(self.own[0][chosen]), self.own[1][chosen]).backward()
            optimizer.step()
            schedule.step()
            if local is not None:
                local.after_step()
        if local is not None:
            local.synchronize()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(module(self.tested[0]), self.tested[1])), module


CONVERGING = [
    LocalSGD(every=8),
    LocalSGD(every=16, begin_after=80),
    DiLoCo(every=16, momentum=0.5),
    DiLoCo(every=16, momentum=0.5, overlap=True),
    PowerSGD(rank=2),
    PowerSGD(rank=2, begin_after=20),
    TopK(ratio=0.02),
]


def check_each_converges_as_averaged_gradients_do_and_repeats_to_the_bit() -> None:
    """The loss is within 0.05 of that of averaged gradients, which falls from 1.4 to below 0.36."""
    task = Task()
    exact, _ = task.train(None)
    require(exact < 0.36, exact)
    for settings in CONVERGING:
        loss, module = task.train(settings)
        require(loss < exact + 0.05, f"{settings}: {loss:.3f}; averaged gradients reach {exact:.3f}")
        require(are_equal_on_all_ranks(module), f"{settings}")
    for settings in (CONVERGING[3], CONVERGING[4], CONVERGING[6]):
        again = [weights_of(task.train(settings, 40)[1]) for _ in range(2)]
        torch.testing.assert_close(*again, rtol=0, atol=0)


CHECKS = checks_in(__name__)


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, id="two ranks", marks=pytest.mark.slow), pytest.param(3, id="three ranks")],
)
def outcomes(request: pytest.FixtureRequest) -> Any:
    return run_checks([__name__], request.param)


@pytest.mark.parametrize("check", CHECKS)
def test_on_ranks(outcomes: Any, check: str) -> None:
    assert outcomes[check] is None, outcomes[check]


def test_settings_survive_a_round_trip_through_json() -> None:
    for settings in (LocalSGD(every=8), DiLoCo(every=32, overlap=True)):
        assert settings_of(as_dict(settings), SYNCHRONIZATIONS) == settings
    for settings in (PowerSGD(rank=4), TopK(ratio=0.01)):
        assert settings_of(as_dict(settings), COMPRESSIONS) == settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(every=0), "every of LocalSGD is 0; it has to be an integer of at least 1"),
        (lambda: DiLoCo(every=2.5), "every of DiLoCo is 2.5"),
        (
            lambda: DiLoCo(every=2, momentum=1.0),
            "momentum of DiLoCo is 1.0; it has to be a number from 0 to below 1",
        ),
        (lambda: DiLoCo(every=2, learning_rate=0.0), "learning_rate of DiLoCo is 0.0"),
        (lambda: DiLoCo(every=2, group="rack"), "group of DiLoCo is 'rack'; it has to be 'rank' or 'host'"),
        (lambda: TopK(ratio=2.0), "ratio of TopK is 2.0; it has to be a share"),
        (lambda: PowerSGD(rank=0), "rank of PowerSGD is 0"),
        (
            lambda: settings_of({"kind": "DiLoCO", "every": 2}, SYNCHRONIZATIONS),
            "kind is 'DiLoCO'; it may be",
        ),
        (lambda: settings_of({"kind": "TopK", "ration": 2}, COMPRESSIONS), "no setting 'ration'. .*ratio"),
        (lambda: settings_of({"kind": "TopK"}, COMPRESSIONS), "TopK cannot be made of {}: .*ratio"),
    ],
)
def test_values_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        make()
