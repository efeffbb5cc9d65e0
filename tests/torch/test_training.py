"""DistributedDataParallel, FSDP2 and distributed checkpoints over the backend give the results of one process.

Tolerance: float32 gradients and weights agree to 1e-6 absolute and 1e-5 relative; only the order of the sums differs.
"""

from __future__ import annotations

import copy
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparkdl.errors import ParamError
from tests.checks import checks_in, require
from tests.torch.checks import run_checks
from tests.torch.training_examples import (
    NUM_STEPS,
    assert_gradients,
    assert_trained,
    batch,
    loss_of,
    model,
    optimizer_of,
    reference_gradients,
)

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
SMALL_BUCKET_MB = 1e-4


def train(module: torch.nn.Module, num_steps: int = NUM_STEPS) -> None:
    optimizer = optimizer_of(module)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(module, batch(dist.get_rank(), step)).backward()
        optimizer.step()


def sharded_model(**options: object) -> torch.nn.Module:
    module = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def check_torch_compile_leaves_the_collectives_of_ddp_as_they_are() -> None:
    module = DistributedDataParallel(model())
    train(torch.compile(module, backend="eager"))
    assert_trained(module.module, dist.get_world_size())

    @torch.compile(backend="eager")
    def doubled_sum(values: torch.Tensor) -> torch.Tensor:
        total = values * 2
        dist.all_reduce(total, async_op=True).wait()
        return total + 1

    assert doubled_sum(torch.ones(2)).tolist() == [2.0 * dist.get_world_size() + 1] * 2


def check_ddp_gradients_equal_one_process_on_the_joined_batch() -> None:
    module = DistributedDataParallel(model())
    loss_of(module, batch(dist.get_rank(), 0)).backward()
    assert_gradients(module.module, reference_gradients(dist.get_world_size()))


def check_ddp_takes_up_parameters_that_are_unfrozen_or_added_later() -> None:
    """Also with a hook, gradients that were accumulated before, and torch.compile."""
    for compiles in (False, True):
        torch.manual_seed(dist.get_rank())
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        module[0].requires_grad_(False)
        wrapped, counts = DistributedDataParallel(module, gradient_as_bucket_view=True), []

        def hook(_, bucket, counts=counts):  # torch compares annotations
            counts.append(len(bucket.parameters()))
            return allreduce_hook(None, bucket)

        wrapped.register_comm_hook(None, hook)
        called = torch.compile(wrapped, backend="eager") if compiles else wrapped
        rows = torch.randn(3, 4)
        called(rows).sum().backward()
        module.zero_grad()
        module[0].requires_grad_(True)
        module.append(torch.nn.Linear(2, 1))
        with wrapped.no_sync():
            called(rows).square().sum().backward()
        called(rows).sum().backward()
        assert counts == [2, 2], "the hook gets the first ones"
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (module.state_dict(), rows))
        copy_of_module, gradients = copy.deepcopy(module), []
        for state, its_rows in of_ranks:
            torch.testing.assert_close(state, module.state_dict(), rtol=0.0, atol=0.0)
            copy_of_module.zero_grad()
            output = copy_of_module(its_rows)
            (output.square() + output).sum().backward()
            gradients.append([parameter.grad.clone() for parameter in copy_of_module.parameters()])
        means = [torch.stack(of_one).mean(0) for of_one in zip(*gradients, strict=True)]
        torch.testing.assert_close([parameter.grad for parameter in module.parameters()], means, **TOLERANCE)


class UnfreezesAfterUse(torch.nn.Module):
    """Its first layer is unfrozen by its second pass, which has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.first.requires_grad_(False)
        self.num_passes = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.last(self.first(rows))
        self.num_passes += 1
        self.first.requires_grad_(self.num_passes >= 2)
        return output


def check_ddp_averages_in_the_pass_in_which_a_layer_is_unfrozen() -> None:
    for static_graph in (False, True):
        torch.manual_seed(0)
        module = UnfreezesAfterUse()
        wrapped = DistributedDataParallel(module, static_graph=static_graph)
        for number in range(4):
            module.zero_grad()
            rows = torch.full((2, 3), float(dist.get_rank() + number))
            wrapped(rows).square().sum().backward()
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, [parameter.grad for parameter in module.parameters()])
            assert (of_ranks[0][0] is None) == (number < 2)
            torch.testing.assert_close(of_ranks, [of_ranks[0]] * len(of_ranks), rtol=0.0, atol=0.0)


def check_a_layer_cannot_be_unfrozen_while_ranks_without_rows_have_joined() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    module[0].requires_grad_(False)
    wrapped = DistributedDataParallel(module)
    with wrapped.join():
        module[0].requires_grad_(True)
        with pytest.raises(ParamError, match=r"under join\(\), where ranks without rows take no part"):
            wrapped(torch.ones(2, 3))


def check_ddp_with_several_buckets_trains_as_one_process() -> None:
    module = DistributedDataParallel(model(), bucket_cap_mb=SMALL_BUCKET_MB, gradient_as_bucket_view=True)
    train(module)
    assert_trained(module.module, dist.get_world_size())


def check_ddp_starts_reducing_before_the_backward_pass_ends() -> None:
    module = DistributedDataParallel(model(), bucket_cap_mb=SMALL_BUCKET_MB)
    loss_of(module, batch(dist.get_rank(), 0)).backward()  # after the first pass DDP reorders its buckets
    events: list[str] = []

    def reduce_bucket(group, bucket):  # type: ignore[no-untyped-def]  # DDP only accepts its own classes as annotations
        events.append("reduce")
        buffer = bucket.buffer().div_(group.size())
        future = group.allreduce([buffer]).get_future()
        return future.then(lambda done: done.value()[0])

    module.register_comm_hook(dist.group.WORLD, reduce_bucket)
    module.module[0].weight.register_hook(lambda _: events.append("last gradient"))
    module.zero_grad()
    loss_of(module, batch(dist.get_rank(), 0)).backward()
    assert events.index("reduce") < events.index("last gradient") < len(events) - 1
    assert_gradients(module.module, reference_gradients(dist.get_world_size()))


def check_ddp_finds_parameters_that_one_rank_does_not_use() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.branches[min(dist.get_rank(), 1)](x).sum()  # type: ignore[no-any-return]

    module = DistributedDataParallel(Branches(), find_unused_parameters=True)
    module(torch.ones(1, 2)).backward()
    size = dist.get_world_size()
    for index, users in enumerate((1, size - 1)):
        grad = module.module.branches[index].weight.grad
        torch.testing.assert_close(grad, torch.full((1, 2), users / size))


def check_ddp_averages_sparse_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def train_on(words: torch.Tensor, *, wraps: bool) -> torch.Tensor:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
        wrapped = DistributedDataParallel(module) if wraps else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(words).square().mean().backward()
            assert module[0].weight.grad.is_sparse
            optimizer.step()
        return module[0].weight.detach()

    words = torch.tensor([[other, 3, 8, 3] for other in range(size)])
    got, expected = train_on(words[rank : rank + 1], wraps=True), train_on(words, wraps=False)
    torch.testing.assert_close(got, expected, **TOLERANCE)


def check_ddp_trains_in_bfloat16() -> None:
    module = DistributedDataParallel(model().bfloat16())
    x, y = batch(dist.get_rank(), 0)
    loss_of(module, (x.bfloat16(), y)).backward()
    gathered = [torch.empty_like(module.module[0].weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, module.module[0].weight.grad)
    assert all(torch.equal(gathered[0], other) for other in gathered)
    expected = reference_gradients(dist.get_world_size())["0.weight"]
    # bfloat16 has 8 significant bits, and the forward and backward passes round at every layer.
    torch.testing.assert_close(gathered[0].float(), expected, rtol=0.1, atol=0.01)


def check_fsdp2_gradients_are_averaged_and_not_summed() -> None:
    module = sharded_model()
    loss_of(module, batch(dist.get_rank(), 0)).backward()
    assert_gradients(module, reference_gradients(dist.get_world_size()))


def check_fsdp2_trains_as_one_process() -> None:
    module = sharded_model()
    train(module)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in module.parameters())
    assert_trained(module, dist.get_world_size())


def check_fsdp2_reduces_in_bfloat16_when_told_to() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    module = sharded_model(mp_policy=policy)
    loss_of(module, batch(dist.get_rank(), 0)).backward()
    assert_gradients(module, reference_gradients(dist.get_world_size()), rtol=0.02, atol=1e-3)


def check_distributed_checkpoints_bring_back_an_fsdp2_model() -> None:
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder, src=0)
    trained = sharded_model()
    train(trained)
    dcp.save({"model": get_model_state_dict(trained)}, checkpoint_id=folder[0])
    fresh = sharded_model()
    state = {"model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(fresh, state["model"])
    assert_trained(fresh, dist.get_world_size())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


CHECKS = checks_in(__name__)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_checks([__name__], 2)


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_two_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
