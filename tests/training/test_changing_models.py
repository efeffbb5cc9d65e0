"""Models that change while they are trained end on two ranks with the weights of one process, however they are wrapped.

Each step takes all rows, so that their order does not count.
"""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparkdl.horovod.torch as hvd
from sparkdl.errors import ParamError, ReplicasDifferError
from sparkdl.parallel import Parallelism
from sparkdl.torch import DataParallel, ReplicaCheck, destroy_process_group, init_process_group
from sparkdl.training import trainer
from sparkdl.training.callbacks import Callback, FitContext
from sparkdl.training.distribution import Replicas
from sparkdl.training.spec import CheckpointPlan
from tests.run_ranks import RankEnvironment, run_ranks
from tests.training.scenes.training_scenes import assert_same_weights, make_spec, train_all, write_dataset
from tests.training.test_validation import with_split

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from sparkdl.data import ParquetDataset

NUM_ROWS, NUM_STEPS, WORLD_SIZE = 32, 6, 2
TOLERANCE = 2e-6  # float32, other order of sums
OPTIMIZER = partial(
    torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1
)  # which moves weights of zero gradient


class Model(nn.Module):
    """A classifier that unfreezes its first layer itself, in its third forward pass, if it is told to."""

    def __init__(self, *, unfreezes: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.passes_left = 3 if unfreezes else 0
        if unfreezes:
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.passes_left:
            self.passes_left -= 1
            self.first.requires_grad_(self.passes_left == 0)
        return self.last(torch.tanh(self.first(x)))


class Adapter(nn.Module):
    """A layer with a trained correction of low rank, whose other factor is frozen and drawn at random."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.up = layer, nn.Linear(2, layer.out_features)
        self.down = nn.Parameter(torch.randn(2, layer.in_features), requires_grad=False)
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes = self.num_passes + 1  # type: ignore[has-type]
        return self.layer(x) + self.up(x @ self.down.T)


def freeze_and_unfreeze(first: bool, module: Any, optimizer: Optimizer, step: int) -> None:
    if step in (0, 2, 4):
        module.first.requires_grad_(first == (step == 2))


def unfreeze_one_weight(module: Any, optimizer: Optimizer, step: int) -> None:
    module.last.weight.requires_grad_(step >= 3)


def add_adapter(module: Any, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        module.first = Adapter(module.first)
        optimizer.add_param_group({"params": list(module.first.up.parameters()), "lr": 0.2})


def replace_layer(module: Any, optimizer: Optimizer, step: int) -> None:
    if step == 3:
        module.last = nn.Linear(8, 3)
        optimizer.add_param_group({"params": list(module.last.parameters())})


def parametrize(module: Any, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        (group,) = optimizer.param_groups
        before = set(group["params"])
        nn.utils.parametrizations.weight_norm(module.first)
        group["params"] = [parameter for parameter in module.parameters() if parameter in before]
        optimizer.add_param_group(
            {"params": [parameter for parameter in module.parameters() if parameter not in before]}
        )


def scale_gradient(module: Any, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        module.first.weight.register_hook(lambda gradient: gradient * 3)


def leave(module: Any, optimizer: Optimizer, step: int) -> None:
    """Change nothing: the model does."""


CHANGES: dict[str, Callable[[Any, Any, int], None]] = {
    "a layer is unfrozen and frozen": partial(freeze_and_unfreeze, True),
    "a layer is frozen and unfrozen": partial(freeze_and_unfreeze, False),
    "one weight is unfrozen": unfreeze_one_weight,
    "the model unfreezes a layer": leave,
    "an adapter is added": add_adapter,
    "a layer is replaced": replace_layer,
    "a layer is parametrized": parametrize,
    "a gradient is scaled by a hook": scale_gradient,
}


def model_for(change: str) -> Model:
    return Model(unfreezes=CHANGES[change] is leave)


class Changes(Callback):
    def __init__(self, change: str) -> None:
        self.change = change

    def on_epoch_start(self, context: FitContext) -> None:
        torch.manual_seed(5 + context.rank)  # new weights are rank 0's
        CHANGES[self.change](context.module, context.optimizer, context.epoch - 1)


def train_plainly(
    change: str,
    rows: tuple[Tensor, Tensor],
    module: Model,
    optimizer: Optimizer,
    forward: nn.Module,
    seed: int = 5,
) -> dict[str, Any]:
    for step in range(NUM_STEPS):
        torch.manual_seed(seed)
        CHANGES[change](module, optimizer, step)
        nn.functional.cross_entropy(forward(rows[0]), rows[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.numpy().copy() for name, value in module.state_dict().items()}


def read(dataset: ParquetDataset, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    table = pq.read_table(f"{dataset.url}/part-0.parquet")
    return torch.tensor(table["x"].to_pylist())[part], torch.tensor(table["y"].to_pylist())[part]


class Special(nn.Module):
    """A model with tensors that a communicator cannot send as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(unfreezes=False)
        self.turn = nn.Parameter(torch.eye(4, dtype=torch.complex64) * (1 + 1j))
        self.edges = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
        self.register_buffer("narrow", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("rows", torch.eye(3).to_sparse_csr())
        self.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.qint8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.edges @ self.inner((x.to(torch.complex64) @ self.turn).abs()).T).T


class ReplicasByDDP(Replicas):
    """Replicas as on GPUs, but on the CPU."""

    def _wrap(self, spec: Any, communicator: Any, device: Any) -> nn.Module:
        if communicator.world_size == 1:
            return self.module
        trainer.init_process_group(communicator, cuda=False)
        return self._wrap_by_ddp(self.module)


FITS: dict[str, Any] = {"fit": Replicas, "fit with DistributedDataParallel": ReplicasByDDP}
SCRIPTS = ("DataParallel", "hvd.DistributedOptimizer", "DistributedDataParallel")


# The fit itself has all changes daily, every other way those that take different paths through it.
OF_EVERY_WAY = ("a layer is unfrozen and frozen", "an adapter is added", "a layer is parametrized")


def train_each(
    environment: RankEnvironment, dataset: ParquetDataset, chosen: set[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    weights = {}

    def changes_of(way: str) -> list[str]:
        return [change for change in CHANGES if (way, change) in chosen]

    for way, replicas in FITS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "Replicas", replicas)
            for change in changes_of(way):
                spec = make_spec(
                    model=model_for(change),
                    optimizer=OPTIMIZER,
                    epochs=NUM_STEPS,
                    batch_size=NUM_ROWS // WORLD_SIZE,
                    callbacks=(Changes(change),),
                )
                (outcome,) = train_all(environment, [(spec, dataset)], name=f"{way}, {change}")
                weights[way, change] = outcome.weights
    half = NUM_ROWS // WORLD_SIZE
    rows = read(dataset, slice(environment.rank * half, (environment.rank + 1) * half))
    with environment.communicator() as communicator:
        hvd.init()
        for change in changes_of("DataParallel"):
            module = model_for(change)
            wrapped, optimizer = DataParallel(module, communicator), OPTIMIZER(module.parameters())
            weights["DataParallel", change] = train_plainly(change, rows, module, optimizer, wrapped)
            ReplicaCheck(module, optimizer=optimizer).compare("the end")
            wrapped.close()
        for change in changes_of("hvd.DistributedOptimizer"):
            module = model_for(change)
            distributed = hvd.DistributedOptimizer(
                OPTIMIZER(module.parameters()), named_parameters=module.named_parameters()
            )
            weights["hvd.DistributedOptimizer", change] = train_plainly(
                change, rows, module, distributed, module
            )
        hvd.shutdown()
        init_process_group(communicator, cuda=False)
        for change in changes_of("DistributedDataParallel"):
            module = model_for(change)
            # torch has to be told that parameters may be frozen or removed.
            averaged = DistributedDataParallel(module, find_unused_parameters="added" not in change)
            weights["DistributedDataParallel", change] = train_plainly(
                change, rows, module, OPTIMIZER(module.parameters()), averaged, seed=5 + environment.rank
            )
        destroy_process_group()
    return weights


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ParquetDataset:
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS)


@pytest.fixture(scope="module")
def weights(dataset: ParquetDataset, request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Any]]:
    """The weights of the ways and changes that are among the collected tests of this run."""
    chosen = {
        (item.callspec.params["way"], item.callspec.params["change"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == NAME_OF_TEST
    }
    return run_ranks(WORLD_SIZE, train_each, dataset, chosen)


@pytest.mark.parametrize(
    ("way", "change"),
    [
        pytest.param(way, change, marks=() if way == "fit" or change in OF_EVERY_WAY else pytest.mark.slow)
        for way in (*FITS, *SCRIPTS)
        for change in CHANGES
    ],
)
def test_two_ranks_train_a_changing_model_as_one_process_does(weights, dataset, way, change):
    module = model_for(change)
    expected = train_plainly(change, read(dataset), module, OPTIMIZER(module.parameters()), module)
    for of_rank in weights:
        assert_same_weights(of_rank[way, change], expected, atol=TOLERANCE)


NAME_OF_TEST = test_two_ranks_train_a_changing_model_as_one_process_does.__name__

DIVIDED = [change for change, function in CHANGES.items() if "frozen" in change and function is not leave]


def train_divided(environment: RankEnvironment, dataset: ParquetDataset) -> list[Any]:
    weights = []
    for change in [*DIVIDED, "an adapter is added"]:
        spec = make_spec(
            model=model_for(change),
            optimizer=OPTIMIZER,
            epochs=NUM_STEPS,
            batch_size=NUM_ROWS // WORLD_SIZE,
            callbacks=(Changes(change),),
            parallelism=Parallelism(shard=WORLD_SIZE),
        )
        if change in DIVIDED:
            (outcome,) = train_all(environment, [(spec, dataset)], name=change)
            weights.append(outcome.weights)
        else:
            with pytest.raises(ParamError, match="Layers were added or replaced during a fit with Param par"):
                train_all(environment, [(spec, dataset)], name=change)
    return weights


def test_a_divided_model_may_be_unfrozen_and_must_not_get_layers(dataset):
    of_rank_0, _ = run_ranks(WORLD_SIZE, train_divided, dataset)
    for change, weights in zip(DIVIDED, of_rank_0, strict=True):
        module = model_for(change)
        expected = train_plainly(change, read(dataset), module, OPTIMIZER(module.parameters()), module)
        assert_same_weights(weights, expected, atol=TOLERANCE)


class ChangesOneRank(Callback):
    """Changes a weight of one rank in the second of three epochs, by so much."""

    def __init__(self, by: float) -> None:
        self.by = by

    def on_step_end(self, context: FitContext) -> None:
        if context.epoch == 2 and context.rank == 1:
            with torch.no_grad():
                context.module.last.weight[0, 0] *= 1 + self.by


def tell_of_differences(environment: RankEnvironment, dataset: ParquetDataset, url: str) -> list[str | None]:
    cases: list[dict[str, Any]] = [
        {"callbacks": (ChangesOneRank(0.1),)},
        {"callbacks": (ChangesOneRank(2e-7),)},
        {"callbacks": (ChangesOneRank(0.1),), "compare_replicas": False},
        {"callbacks": (ChangesOneRank(0.1),), "checkpoints": CheckpointPlan(url=url, every_updates=3)},
    ]
    told = []
    for number, changes in enumerate(cases):
        spec = make_spec(model=Model(unfreezes=False), epochs=3, batch_size=4, **changes)
        try:
            train_all(environment, [(spec, dataset)], name=f"case {number}")
            told.append(None)
        except ReplicasDifferError as error:
            told.append(str(error))
    return told


def test_ranks_whose_weights_differ_say_which_where_and_since_when(dataset, tmp_path):
    for changed, rounded, unasked, at_checkpoint in run_ranks(
        WORLD_SIZE, tell_of_differences, dataset, tmp_path.as_uri()
    ):
        what = "at the end of epoch 2 the parameter 'last.weight' on rank 1 differs from rank 0's by up to 0."
        assert what in changed
        assert "They were equal at the end of epoch 1." in changed
        assert rounded is None
        assert unasked is None
        assert "at epoch 2, step 2 the parameter" in at_checkpoint


def train_special(environment: RankEnvironment, dataset: ParquetDataset, url: str) -> list[Any]:
    learned = []
    for way, replicas in FITS.items():
        with pytest.MonkeyPatch.context() as patch, environment.open(name=way) as communicator:
            patch.setattr(trainer, "Replicas", replicas)
            plan = CheckpointPlan(url=f"{url}/{way}", every_updates=3)
            batch_size = NUM_ROWS // environment.world_size
            spec = make_spec(model=Special(), optimizer=OPTIMIZER, batch_size=batch_size, checkpoints=plan)
            spec = with_split(spec, dataset, 0.3)
            result = trainer.train(
                spec, communicator=communicator, dataset=dataset, keep=methodcaller("whole_module")
            )
        learned.append((result.module.turn.detach().numpy(), result.history[-1].loss))
    return learned


def test_complex_sparse_quantized_and_narrow_tensors_train_as_on_one_rank(dataset, tmp_path):
    """With checkpoints and a validation."""
    (of_one,) = run_ranks(1, train_special, dataset, (tmp_path / "one").as_uri())
    for of_rank in run_ranks(WORLD_SIZE, train_special, dataset, (tmp_path / "two").as_uri()):
        for (weights, loss), (expected, expected_loss) in zip(of_rank, of_one, strict=True):
            np.testing.assert_allclose(weights, expected, atol=TOLERANCE)
            assert loss == pytest.approx(expected_loss)
