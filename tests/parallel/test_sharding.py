"""Sharded data parallelism on four ranks: losses and gradients of three steps equal one process on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparkdl.errors import ParamError
from sparkdl.parallel.parallelism import Parallelism, RankLayout
from sparkdl.parallel.parallelize import check_parts
from sparkdl.parallel.sharding import (
    accumulated,
    average_gradients,
    blocks_of,
    clip_gradients,
    recompute_activations,
    shard,
)
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.tensor.loss import cross_entropy
from tests.checks import chosen, require, slow, with_marks
from tests.parallel.models import (
    BATCH,
    SIZES,
    batch,
    decoder,
    gpt2,
    llama,
    logits_of,
    optimizer_of,
    reference,
)
from tests.torch.checks import run_checks


def rows_of(layout: RankLayout, step: int) -> tuple[Tensor, Tensor]:
    number, readers = layout.row_reader
    tokens, labels = batch(step)
    return tokens.chunk(readers)[number], labels.chunk(readers)[number]


def loss_of(module: nn.Module, layout: RankLayout, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = logits_of(module, tokens)
    if logits.shape[-1] < SIZES.vocabulary:
        return cross_entropy(logits, labels, layout.group("tensor"))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_over_readers(loss: Tensor, layout: RankLayout) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total, group=layout.group("data", "shard"))
    return total.item() / layout.size("data", "shard")


def check(
    parallelism: Parallelism,
    make: Callable[[], nn.Module] = decoder,
    *,
    stage: int = 3,
    sequence: bool = False,
    recompute: bool = False,
) -> None:
    layout = parallelism.lay_out()
    module = make()
    if layout.size("tensor") > 1:
        divide(module, layout.mesh["tensor"], sequence=sequence)
    if recompute:
        recompute_activations(blocks_of(module))
    shard(module, layout, stage=stage)
    optimizer = optimizer_of(module)
    for step, (loss_of_one, gradients) in enumerate(reference(make)):
        loss = loss_of(module, layout, *rows_of(layout, step))
        optimizer.zero_grad()
        loss.backward()
        assert mean_over_readers(loss, layout) == pytest.approx(loss_of_one, rel=1e-5)
        for name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            torch.testing.assert_close(
                parameter.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6, msg=name
            )
        optimizer.step()


def check_each_stage_equals_one_process() -> None:
    for stage in (1, 2, 3):
        check(Parallelism(shard=4), stage=stage, recompute=stage == 3)


def check_sharding_and_tensor_parallelism_equal_one_process() -> None:
    check(Parallelism(shard=2, tensor=2), sequence=True, recompute=True)


@slow  # test_pairs.py has models of transformers in this layout
def check_a_llama_sharded_and_divided_equals_one_process() -> None:
    check(Parallelism(shard=2, tensor=2), llama)


class Listed(nn.Module):
    """A model without a list of blocks, which has parameters in a list and reads those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(16)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.head(self.embedding(tokens) * self.scales[0] + self.scales[1])
        return F.linear(hidden, self.embedding.weight)


def check_parameters_in_lists_are_sharded_and_changing_rows_are_refused() -> None:
    check(Parallelism(shard=4), Listed)
    module = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 2))
    with pytest.raises(ParamError, match="'0' is an embedding with max_norm"):
        shard(module, Parallelism(shard=4).lay_out())


def check_recomputed_blocks_begin_with_the_same_buffers() -> None:
    def norms(*, recompute: bool) -> nn.Module:
        torch.manual_seed(5)
        module = nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(6, 6)) for _ in range(3)))
        if recompute:
            recompute_activations(module)
        for _ in range(2):  # the power iteration goes on from the buffers of the pass before
            module.zero_grad()
            module(torch.linspace(-1, 1, 24).view(4, 6)).square().sum().backward()
        return module

    recomputed, plain = norms(recompute=True), norms(recompute=False)
    for (name, one), other in zip(recomputed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-7, msg=name)
    torch.testing.assert_close(
        dict(recomputed.named_buffers()), dict(plain.named_buffers()), rtol=0.0, atol=0.0
    )


def check_a_gpt2_sharded_by_its_blocks_equals_one_process() -> None:
    check(Parallelism(data=2, shard=2), gpt2, recompute=True)
    for sizes in (Parallelism(tensor=4), Parallelism(pipeline=4)):
        with pytest.raises(ParamError, match="carries no plan|how it can be cut"):
            check_parts(gpt2(), sizes.resolve(4), 8)


def check_statistics_of_norms_count_each_batch_once_where_activations_are_computed_again() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    module = nn.Sequential(*copy.deepcopy(blocks))
    recompute_activations(blocks_of(module))
    plain = nn.Sequential(*blocks)
    rows = torch.randn(8, 4)
    for network in (plain, module):
        loss = network(rows).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, buffer), expected in zip(module.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)
    torch.testing.assert_close(module[0][0].weight.grad, plain[0][0].weight.grad)
    if dist.get_rank() == 0:  # takes a second of the processor
        torch.compile(module, backend="aot_eager")(rows)


def tied_without_blocks() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(32, 8), nn.Tanh(), nn.Linear(8, 32, bias=False))
    module[2].weight = module[0].weight
    return module


class Repeated(nn.Module):
    """A model that applies one layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, layer = nn.Embedding(32, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([layer] * 3)
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


def repeated() -> nn.Module:
    torch.manual_seed(0)
    return Repeated()


def check_any_module_can_be_sharded() -> None:
    for make in (tied_without_blocks, repeated, lambda: decoder(replace(SIZES, layers=1))):
        check(Parallelism(shard=4), make)


def check_accumulated_gradients_equal_those_of_the_joined_batch() -> None:
    accumulate(stages=(2, 3))


@slow
def check_accumulated_gradients_of_the_first_stage_equal_those_of_the_joined_batch() -> None:
    accumulate(stages=(1,))


def accumulate(stages: tuple[int, ...]) -> None:
    for stage in stages:
        layout = Parallelism(data=2, shard=2).lay_out()
        module = shard(decoder(), layout, stage=stage)
        _, gradients = reference(decoder)[0]
        # Each reader has one row; the first half of its losses is computed, and then the second half.
        tokens, labels = rows_of(layout, 0)
        halves = [labels.clone(), labels.clone()]
        halves[0][:, labels.shape[1] // 2 :] = -100
        halves[1][:, : labels.shape[1] // 2] = -100
        with accumulated(module):
            (loss_of(module, layout, tokens, halves[0]) / 2).backward()
        (loss_of(module, layout, tokens, halves[1]) / 2).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                parameter.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6, msg=name
            )


def check_gradients_are_clipped_by_their_norm_over_all_ranks() -> None:
    layout = Parallelism(shard=2, tensor=2).lay_out()
    module = divide(decoder(), layout.mesh["tensor"])
    shard(module, layout)
    loss_of(module, layout, *rows_of(layout, 0)).backward()
    _, gradients = reference(decoder)[0]
    whole = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    torch.testing.assert_close(clip_gradients(module, 0.01, layout), whole, rtol=1e-4, atol=0.0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), gradients[name] * (0.01 / whole), rtol=1e-3, atol=1e-7, msg=name
        )


def check_a_rank_holds_its_share_of_weights_and_optimizer_state() -> None:
    layout = Parallelism(shard=4).lay_out()
    module = shard(decoder(), layout)
    optimizer = optimizer_of(module)
    loss_of(module, layout, *rows_of(layout, 0)).backward()
    optimizer.step()
    whole = sum(parameter.numel() for parameter in decoder().parameters())
    held = sum(parameter.to_local().numel() for parameter in module.parameters())
    moments = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())
    assert held == moments == whole // 4


class Choice(nn.Module):
    """A model in which the number of rows decides which of two equally large experts computes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.experts[len(rows) % 2](rows))


def check_ranks_that_use_different_layers_are_told() -> None:
    rows = torch.ones(2 + (dist.get_rank() == 1), 4)
    used = pytest.raises(ParamError, match=r"used different blocks or parameters .*'experts\.0'")
    called = pytest.raises(ParamError, match=r"called different blocks .*'experts\.0'")
    for verify in (None, True):
        torch.manual_seed(0)
        module = shard(Choice(), Parallelism(shard=-1, verify=verify).lay_out())
        for number in (2, 3) if verify else ():  # all ranks use one expert, which may change
            module(torch.ones(number, 4)).sum().backward()
            module.zero_grad()
            with torch.no_grad():
                module(torch.ones(number, 4))
        with used:
            module(rows).sum().backward()
        with called, torch.no_grad():
            module(rows)


def check_an_optimizer_of_replaced_parameters_is_refused_in_its_first_step() -> None:
    layout = Parallelism(shard=2, tensor=2).lay_out()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for name, replace_parameters in (
        ("divide", lambda model: divide(model, layout.mesh["tensor"])),
        ("shard", lambda model: shard(model, layout)),
    ):
        model = decoder()
        before = optimizer_of(model)
        replace_parameters(model)
        before.zero_grad()
        with pytest.raises(
            ParamError, match=rf"holds the old parameter 'embedding.weight', which {name}\(\)"
        ):
            before.step()
        optimizer_of(model).step()
        other.step()


def check_hooks_of_sharded_parameters_are_called_or_refused() -> None:
    layout = Parallelism(shard=4).lay_out()
    module = shard(decoder(), layout)
    rows = rows_of(layout, 0)
    parameter = module.embedding.weight
    parameter.register_post_accumulate_grad_hook(lambda tensor: tensor.grad.mul_(2))
    loss_of(module, layout, *rows).backward()
    _, gradients = reference(decoder)[0]
    found = parameter.grad.full_tensor()
    torch.testing.assert_close(found, 2 * gradients["embedding.weight"], rtol=1e-4, atol=1e-6)
    module = shard(decoder(), layout)
    module.embedding.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ParamError, match=r"register_hook\(\) was called for 'embedding.weight' of a sharded"):
        loss_of(module, layout, *rows).backward()


def check_a_second_division_is_refused() -> None:
    layout = Parallelism(shard=2, tensor=2).lay_out()
    model = decoder()
    shard(model, layout)
    with pytest.raises(ParamError, match=r"Call shard\(\) once"):
        shard(model, layout)
    for unsuited in (model, divide(decoder(), layout.mesh["tensor"])):
        with pytest.raises(ParamError, match=r"'embedding.weight' .* before shard\(\)"):
            divide(unsuited, layout.mesh["tensor"])


def check_a_missing_gradient_counts_as_zero_in_an_average() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    parameters[rank % 2].grad = torch.ones(2)
    parameters[2].grad = torch.full((2,), float(rank), dtype=torch.float32)
    average_gradients(parameters, dist.group.WORLD)
    assert [parameter.grad.tolist() for parameter in parameters[:3]] == [
        [0.5] * 2,
        [0.5] * 2,
        [(size - 1) / 2] * 2,
    ]
    assert parameters[3].grad is None


def check_what_cannot_be_sharded_so_is_refused() -> None:
    scaled = nn.Sequential(nn.Linear(2, 2))
    scaled.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ParamError, match="'scale' is a parameter without dimensions"):
        check_parts(scaled, Parallelism(shard=4).resolve(4), 8)
    scaled.scale = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ParamError, match="'scale' is a complex parameter"):
        check_parts(scaled, Parallelism(shard=4).resolve(4), 8)
    layout = Parallelism(shard=4).lay_out()
    with pytest.raises(ParamError, match="stage"):
        shard(decoder(), layout, stage=4)
    with pytest.raises(ParamError, match="offload"):
        shard(decoder(), layout, offload=True)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    assert BATCH == 4
    return run_checks([__name__], 4, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
