"""Checkpoints of sharded models on four ranks: every layout loads those of every other, and killed ranks lose none."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sparkdl.torch
from sparkdl.checkpoint.folder import MANIFEST
from sparkdl.errors import (
    CheckpointError,
    CheckpointsInUseError,
    CommunicatorError,
    ParamError,
    SparkdlError,
    StoreError,
)
from sparkdl.parallel.checkpoint import ShardedCheckpoints
from sparkdl.parallel.parallelism import Parallelism, RankLayout
from sparkdl.parallel.pipeline.cut import cut
from sparkdl.parallel.pipeline.pipeline import Pipeline
from sparkdl.parallel.sharding import average_gradients, shard
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.tensor.loss import cross_entropy
from tests.checks import chosen, require, slow, with_marks
from tests.parallel.models import SIZES, batch, decoder, optimizer_of
from tests.run_ranks import RankEnvironment, run_ranks
from tests.servers.s3_server import S3, s3, s3_endpoint
from tests.torch.checks import run_checks

__all__ = ["s3", "s3_endpoint"]

LAYOUTS = {
    "plain": Parallelism(data=4),
    "FSDP2": Parallelism(shard=4),
    "TP": Parallelism(tensor=4),
    "PP": Parallelism(pipeline=4),
    "TP x PP": Parallelism(tensor=2, pipeline=2),
    "FSDP2 x TP": Parallelism(shard=2, tensor=2),
}
STEPS = 2


@functools.cache
def layout_of(name: str) -> RankLayout:
    return LAYOUTS[name].lay_out()


def model(**changes: Any) -> nn.Module:
    """A decoder whose head shares the embedding's weights, which lie on the first and the last pipeline stage."""
    # In float64 layouts differ by 1e-15, so that a value that was not restored is detected.
    return decoder(replace(SIZES, key_heads=4, **changes)).double()


class Training:
    """AdamW with a schedule in one of the layouts; losses and weights are those of the whole batch and model."""

    def __init__(
        self, layout: RankLayout, make: Callable[[], nn.Module] = model, *, schedule: str = "1f1b"
    ) -> None:
        self.layout = layout
        self.stages = [make()]
        if layout.size("pipeline") > 1:
            self.stages = cut(self.stages[0], layout.group("pipeline"), schedule=schedule)
        for stage in self.stages:
            if layout.size("tensor") > 1:
                divide(stage, layout.mesh["tensor"])
            if layout.size("shard") > 1:
                shard(stage, layout)
        named = [pair for stage in self.stages for pair in stage.named_parameters()]
        self.parameters = dict(named)
        self.optimizer = optimizer_of(nn.ParameterList(parameter for _, parameter in named))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.pipeline = (
            Pipeline(
                self.stages, layout.group("pipeline"), schedule=schedule, microbatches=4, loss=self._loss
            )
            if layout.size("pipeline") > 1
            else None
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.shape[-1] < SIZES.vocabulary:
            return cross_entropy(logits, labels, self.layout.group("tensor"))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def step(self, number: int) -> float:
        reader, readers = self.layout.row_reader
        tokens, labels = (part.chunk(readers)[reader] for part in batch(number))
        self.optimizer.zero_grad()
        if self.pipeline is not None:
            loss = self.pipeline.step(tokens, target=labels)
        else:
            loss = self._loss(self.stages[0](tokens), labels)
            loss.backward()
        if self.layout.size("data") > 1 and self.layout.size("shard") == 1:
            average_gradients(self.parameters.values(), self.layout.group("data"))
        self.optimizer.step()
        self.scheduler.step()
        total = loss.detach().double()
        dist.all_reduce(total, group=self.layout.group("data", "shard"))
        return total.item() / readers

    def weights(self) -> dict[str, Tensor]:
        return {
            name: p.full_tensor().detach().clone() if isinstance(p, DTensor) else p.detach().clone()
            for name, p in self.parameters.items()
        }

    def save(self, checkpoints: ShardedCheckpoints, step: int) -> None:
        checkpoints.save(step, self.stages, self.optimizer, self.scheduler, state={"step": step})

    def load(self, checkpoints: ShardedCheckpoints) -> Any:
        return checkpoints.load(self.stages, self.optimizer, self.scheduler)


def new_folder() -> str:
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return str(made[0])


@functools.cache
def undisturbed(name: str) -> tuple[str, float, dict[str, Tensor]]:
    """The folder of a checkpoint of a layout, and the loss and the weights of the step after it."""
    folder = new_folder()
    training = Training(layout_of(name))
    with ShardedCheckpoints(folder, layout_of(name)) as checkpoints:
        for step in range(STEPS):
            training.step(step)
        training.save(checkpoints, STEPS)
        loss = training.step(STEPS)  # the checkpoint is still being written
    return folder, loss, training.weights()


def loads(target: str, sources: Iterable[str]) -> None:
    layout = layout_of(target)
    _, loss, weights = undisturbed(target)
    training = Training(layout)  # new for the first source; for later ones a step after the checkpoint
    for source in sources:
        with ShardedCheckpoints(undisturbed(source)[0], layout) as checkpoints:
            assert training.load(checkpoints) == {"step": STEPS}
        assert training.step(STEPS) == pytest.approx(loss, rel=1e-10)
        for name, weight in training.weights().items():
            torch.testing.assert_close(
                weight, weights[name], rtol=1e-9, atol=1e-12, msg=f"{source} to {target}: {name}"
            )


# Together they have replicas and every way to divide a model.
DAILY = ("plain", "TP x PP", "FSDP2 x TP")


def check_layouts_of_every_dimension_load_from_one_another() -> None:
    for number, target in enumerate(DAILY):
        loads(target, [DAILY[number - 1]])


@slow
def check_each_layout_loads_from_another_one() -> None:
    names = list(LAYOUTS)
    for number, target in enumerate(names):
        loads(target, [names[number - 1]])


@slow
def check_each_layout_loads_from_every_layout() -> None:
    for target in LAYOUTS:
        loads(target, LAYOUTS)


def check_a_rank_with_both_copies_of_a_weight_continues() -> None:
    """With the schedule zbv, the first rank has the first and the last stage."""
    layout = layout_of("PP")

    def eight_layers() -> nn.Module:
        return model(layers=8)

    training = Training(layout, eight_layers, schedule="zbv")
    own = new_folder()
    with ShardedCheckpoints(own, layout) as checkpoints:
        training.step(0)
        training.save(checkpoints, 1)
        losses = [training.step(1), training.step(2)]
        resumed = Training(layout, eight_layers, schedule="zbv")
        resumed.load(checkpoints)
        assert [resumed.step(1), resumed.step(2)] == losses
    torch.testing.assert_close(resumed.weights(), training.weights(), rtol=0.0, atol=0.0)
    for divided in (training, resumed):
        copies = [
            stage.get_parameter("embedding.weight")
            for stage in divided.stages
            if layout.rank("pipeline") == 0
        ]
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def check_all_ranks_write_and_no_tensor_is_written_twice() -> None:
    all_write(DAILY)


@slow
def check_all_ranks_of_every_layout_write_and_no_tensor_is_written_twice() -> None:
    all_write(LAYOUTS)


def all_write(layouts: Iterable[str]) -> None:
    whole = sum(p.numel() * p.element_size() for p in model().parameters())
    for name in layouts:
        (checkpoint,) = Path(undisturbed(name)[0]).iterdir()
        sizes = [path.stat().st_size for path in sorted(checkpoint.glob("*.safetensors"))]
        assert len(sizes) == dist.get_world_size()
        assert sum(sizes) == pytest.approx(3 * whole, rel=0.3)  # weights, two moments, and headers
        assert min(sizes) > 0.1 * sum(sizes)
    names = json.loads((checkpoint / MANIFEST).read_text())["tensors"]
    assert {name.removeprefix("model/") for name in names if name.startswith("model/")} == {
        name for name, _ in model().named_parameters()
    }


def check_replicas_of_shards_shared_sequences_and_sharded_stages_save_the_whole_model() -> None:
    for sizes in (
        Parallelism(data=2, shard=2),
        Parallelism(shard=2, context=2),
        Parallelism(shard=2, pipeline=2),
    ):
        layout, folder = sizes.lay_out(), new_folder()
        stages = cut(model(), layout.group("pipeline"), schedule="1f1b") if sizes.pipeline > 1 else [model()]
        with ShardedCheckpoints(folder, layout) as checkpoints:
            checkpoints.save(1, [shard(stage, layout) for stage in stages])
        loaded = model().apply(fill)
        with ShardedCheckpoints(folder, layout_of("plain")) as checkpoints:
            checkpoints.load(loaded)
        torch.testing.assert_close(dict(loaded.state_dict()), dict(model().state_dict()), rtol=0.0, atol=0.0)


def check_the_same_layout_continues_to_the_bit() -> None:
    layout = layout_of("FSDP2")

    def make() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(
            nn.Embedding(32, 16), nn.Linear(16, 24), nn.Dropout(0.5), nn.Linear(24, 7), nn.Linear(7, 32)
        )

    torch.manual_seed(dist.get_rank())
    training = Training(layout, make)
    with ShardedCheckpoints(new_folder(), layout) as checkpoints:
        training.step(0)
        training.save(checkpoints, 1)
        expected = training.step(1), draws(), training.weights()
        training.step(2)
        assert training.load(checkpoints) == {"step": 1}
        found = training.step(1), draws(), training.weights()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def check_on_other_layouts_ranks_that_read_the_same_rows_draw_the_same_numbers() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(4, 4)
    for source, target in (("FSDP2", "FSDP2 x TP"), ("TP x PP", "FSDP2 x TP"), ("FSDP2 x TP", "FSDP2")):
        folder = new_folder()
        with ShardedCheckpoints(folder, layout_of(source)) as checkpoints:
            checkpoints.save(1, module)
        with ShardedCheckpoints(folder, layout_of(target)) as checkpoints:
            checkpoints.load(module)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (layout_of(target).row_reader[0], draws()))
        drawn = dict(found)
        assert all(drawn[reader] == numbers for reader, numbers in found)
        assert len({numbers[2] for numbers in drawn.values()}) == len(drawn)


def check_stages_of_one_rank_and_uneven_parts_are_loaded_by_others() -> None:
    def make() -> nn.Module:
        torch.manual_seed(8)
        return nn.Sequential(*(nn.Linear(5, 5) for _ in range(8)))

    stages = cut(make(), layout_of("PP").group("pipeline"), schedule="interleaved-1f1b")
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach() + number
    folders = [new_folder(), new_folder()]
    with ShardedCheckpoints(folders[0], layout_of("PP")) as checkpoints:
        checkpoints.save(1, stages, optimizer)
    sharded = shard(make().apply(fill), layout_of("FSDP2"))  # 5 rows on 4 ranks: 2, 2, 1 and 0
    other = torch.optim.SGD(sharded.parameters(), lr=0.5, momentum=0.9)
    with ShardedCheckpoints(folders[0], layout_of("FSDP2")) as checkpoints:
        checkpoints.load(sharded, other)
    for parameter, whole in zip(sharded.parameters(), make().parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), whole, rtol=0.0, atol=0.0)
    assert other.param_groups[0]["lr"] == 0.1
    with ShardedCheckpoints(folders[1], layout_of("FSDP2")) as checkpoints:
        checkpoints.save(1, sharded, other)
    expected = [value["momentum_buffer"].clone() for value in optimizer.state.values()]
    for parameter in parameters:
        nn.init.zeros_(parameter)
    with ShardedCheckpoints(folders[1], layout_of("PP")) as checkpoints:
        checkpoints.load(stages, optimizer)
    found = [value["momentum_buffer"] for value in optimizer.state.values()]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    whole = dict(make().named_parameters())
    torch.testing.assert_close(
        dict(zip(names, parameters, strict=True)), {name: whole[name] for name in names}, rtol=0.0, atol=0.0
    )


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def check_tied_weights_and_buffers_are_saved() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(8, 4), nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

    folder, layout = new_folder(), layout_of("FSDP2")
    module = shard(Tied(), layout, blocks=[])
    module.norm.running_mean.fill_(3.0)
    expected = module.embedding.weight.full_tensor().clone()
    with ShardedCheckpoints(folder, layout) as checkpoints:
        checkpoints.save(1, module)
        loaded = Tied()
        assert checkpoints.load(loaded) == {}
    assert loaded.head.weight is loaded.embedding.weight
    torch.testing.assert_close(loaded.head.weight.detach(), expected, rtol=0.0, atol=0.0)
    assert loaded.norm.running_mean.tolist() == [3.0] * 4


def check_checkpoints_of_another_model_are_refused_before_anything_changes() -> None:
    folder, *_ = undisturbed("FSDP2 x TP")
    layout = layout_of("TP x PP")
    for changes, words in (
        ({"layers": 5}, r"it lacks blocks\.4\."),
        ({"layers": 3}, r"it has blocks\.3\..*, which the model does not have"),
        ({"hidden": 32}, r"feed_forward\.gate\.weight \(float64\[96, 32\] there, float64\[32, 32\] here\)"),
    ):
        training = Training(layout, lambda changes=changes: model(**changes))
        before = training.weights()
        with (
            ShardedCheckpoints(folder, layout) as checkpoints,
            pytest.raises(CheckpointError, match=words),
        ):
            training.load(checkpoints)
        torch.testing.assert_close(training.weights(), before, rtol=0.0, atol=0.0)
    with ShardedCheckpoints(folder, layout) as checkpoints:
        with pytest.raises(CheckpointError, match="float64.* there, float32.* here"):
            checkpoints.load(model().float())
        with pytest.raises(ParamError, match="meta device"):
            checkpoints.load(model().to("meta"))


def check_checkpoints_of_another_optimizer_are_refused() -> None:
    folder, *_ = undisturbed("FSDP2 x TP")
    module = model()
    parameters = list(module.parameters())
    with ShardedCheckpoints(folder, layout_of("plain")) as checkpoints:
        with pytest.raises(CheckpointError, match="AdamW with 1 parameter groups"):
            checkpoints.load(module, torch.optim.SGD(parameters, lr=0.1))
        with pytest.raises(CheckpointError, match=r"other groups of them: .*norm\.weight"):
            checkpoints.load(
                module, torch.optim.AdamW([{"params": parameters[:-2]}, {"params": parameters[-2:]}])
            )
        with pytest.raises(ParamError, match="does not have"):
            checkpoints.load(module, optimizer_of(model()))
        other = new_folder()
    with ShardedCheckpoints(other, layout_of("plain")) as checkpoints:
        checkpoints.save(1, module)
        with pytest.raises(CheckpointError, match="no state of the optimizer"):
            checkpoints.load(module, optimizer_of(module))


def check_what_no_checkpoint_can_hold_is_refused() -> None:
    module = model()
    optimizer = optimizer_of(module)
    with ShardedCheckpoints(new_folder(), layout_of("plain")) as checkpoints:
        with pytest.raises(CheckpointError, match=r"the state given to save\(\)\['path'\] is a .*Path"):
            checkpoints.save(1, module, state={"path": Path()})
        optimizer.state[module.head.weight]["names"] = ["a"]
        with pytest.raises(CheckpointError, match=r"'names' of 'embedding\.weight' is a list"):
            checkpoints.save(1, module, optimizer)
        assert checkpoints.load(module) is None


def check_the_newest_are_kept_and_a_step_can_be_chosen() -> None:
    module = nn.Linear(2, 2)
    with ShardedCheckpoints(new_folder(), layout_of("plain"), num_kept=2) as checkpoints:
        for step in (1, 2, 3):
            nn.init.constant_(module.weight, step)
            checkpoints.save(step, module)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        with pytest.raises(CheckpointError, match="no checkpoint of step 1; it has those of 2, 3"):
            checkpoints.load(module, step=1)
        checkpoints.load(module, step=2)
        assert module.weight[0, 0].item() == 2.0
        checkpoints.save(1, module)  # the newest by its time of writing
        checkpoints.wait()
        assert checkpoints.steps() == [3, 1]
    with pytest.raises(ParamError, match="num_kept"):
        ShardedCheckpoints("x", layout_of("plain"), num_kept=0)


def check_damaged_newest_checkpoint_is_skipped_and_is_an_error_if_its_step_is_asked_for() -> None:
    module, folder, layout = model(), new_folder(), layout_of("FSDP2 x TP")
    with ShardedCheckpoints(folder, layout) as checkpoints:
        checkpoints.save(1, module, state={"step": 1})
        checkpoints.save(2, module, state={"step": 2})
        checkpoints.wait()
        assert checkpoints.load(module) == {"step": 2}
        newest = sorted(Path(folder).iterdir())[-1]
        for name, damage in (
            ("rank-00002.safetensors", flip_a_bit),
            ("rank-00001.pt", cut_off),
            ("rank-00003.safetensors", Path.unlink),
            (MANIFEST, cut_off),
        ):
            content = (newest / name).read_bytes()
            dist.barrier()
            if dist.get_rank() == 0:
                damage(newest / name)
            dist.barrier()
            assert checkpoints.load(module) == {"step": 1}
            with pytest.raises(CheckpointError, match=f"{name} is damaged"):
                checkpoints.load(module, step=2)
            if name != MANIFEST and dist.get_rank() == 0:
                (newest / name).write_bytes(content)
            dist.barrier()
        checkpoints.load(module)
        checkpoints.save(3, module)  # removes the one of step 2, and keeps two others
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]


def check_rank_that_does_not_see_the_folder_is_named_and_nothing_is_removed() -> None:
    module, folder, layout = nn.Linear(2, 2), new_folder(), layout_of("plain")
    with ShardedCheckpoints(folder, layout) as checkpoints:
        checkpoints.save(1, module)
    with (
        ShardedCheckpoints(tempfile.mkdtemp() if dist.get_rank() == 3 else folder, layout) as checkpoints,
        pytest.raises(StoreError, match="Rank 3 finds no checkpoint .*step-00000001"),
    ):
        checkpoints.load(module)
    with ShardedCheckpoints(folder, layout) as checkpoints:
        assert checkpoints.load(module) == {}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


class StumblingFileSystem(LocalFileSystem):
    """The local filesystem at URLs ``stumbling://``; it calls a function before a file is written or renamed."""

    protocol = ("stumbling",)
    before: Callable[[str, str], object] | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("stumbling://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"stumbling://{name}"

    def open(self, path: Any, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode and StumblingFileSystem.before is not None:
            StumblingFileSystem.before("write", str(path))
        return super().open(path, mode, **kwargs)

    def mv(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        if StumblingFileSystem.before is not None:
            StumblingFileSystem.before("rename", str(path2))
        super().mv(path1, path2, **kwargs)


fsspec.register_implementation("stumbling", StumblingFileSystem, clobber=True)


def check_training_continues_while_a_checkpoint_is_written() -> None:
    layout, folder, may_write = layout_of("FSDP2 x TP"), new_folder(), threading.Event()
    training = Training(layout)
    saved = training.weights()
    with ShardedCheckpoints(f"stumbling://{folder}", layout) as checkpoints:
        StumblingFileSystem.before = lambda *_: may_write.wait(15.0)
        training.save(checkpoints, 0)
        for step in range(2):
            training.step(step)
        assert checkpoints.steps() == []
        may_write.set()
        StumblingFileSystem.before = None
        training.load(checkpoints)
        torch.testing.assert_close(training.weights(), saved, rtol=0.0, atol=0.0)


def check_a_checkpoint_that_is_not_written_in_time_is_an_error() -> None:
    may_write = threading.Event()
    StumblingFileSystem.before = lambda _, path: "rank-" not in path or may_write.wait(15.0)
    checkpoints = ShardedCheckpoints(f"stumbling://{new_folder()}", layout_of("plain"), timeout_s=3.0)
    checkpoints.save(1, nn.Linear(2, 2))
    with pytest.raises(StoreError, match="still being written"):
        checkpoints.close()
    StumblingFileSystem.before = None
    may_write.set()
    with pytest.raises(StoreError, match="was given up, as it was not written before the end"):
        checkpoints._hold()  # as before the manifest: another job may use the folder now


def check_a_rank_that_saves_no_checkpoint_is_named() -> None:
    """The other ranks wait for it until the deadline, or until it reports the error that has ended its training."""
    module, is_missing = nn.Linear(2, 2), dist.get_rank() == 2
    for fails, said in ((False, "rank 2 had not joined"), (True, "rank 2 aborted: ValueError: bad rows")):
        with (
            suppress(ValueError),
            ShardedCheckpoints(new_folder(), layout_of("plain"), timeout_s=2.0) as checkpoints,
        ):
            if not is_missing:
                checkpoints.save(1, module)
                with pytest.raises(CommunicatorError, match=said):
                    checkpoints.wait()
            elif fails:
                raise ValueError("bad rows")
            if not fails:
                dist.barrier()
        dist.barrier()


def check_a_folder_belongs_to_one_job_at_a_time() -> None:
    folder, layout, module = new_folder(), layout_of("plain"), nn.Linear(2, 2)
    with ShardedCheckpoints(folder, layout) as checkpoints:
        checkpoints.save(1, module)
        checkpoints.wait()
        with ShardedCheckpoints(folder, layout) as others:
            assert others.load(module) == {}
            others.save(2, module)
            with pytest.raises(CheckpointsInUseError, match="Another job, of process .* uses the folder"):
                others.wait()
            assert others.steps() == [1]
    with ShardedCheckpoints(folder, layout) as others:
        others.save(3, module)
    dist.barrier()
    assert [path.name.startswith("checkpoint-") for path in Path(folder).iterdir()] == [True] * 2


def check_a_failure_to_write_on_one_rank_is_raised_on_all() -> None:
    def fail(_: str, path: str) -> None:
        if path.endswith("rank-00002.pt"):
            raise PermissionError(13, "Permission denied", path)

    module = nn.Linear(2, 2)
    with ShardedCheckpoints(f"stumbling://{new_folder()}", layout_of("plain")) as checkpoints:
        StumblingFileSystem.before = fail
        checkpoints.save(1, module)
        with pytest.raises(StoreError, match=r"step-00000001 .* could not be written by rank 2: Perm"):
            checkpoints.save(2, module)
        StumblingFileSystem.before = None
        checkpoints.save(3, module)
        checkpoints.wait()
        assert checkpoints.steps() == [3]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_checks([__name__], 4, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])


KILLS = {
    "when a rank has written half of it": (1, "write", "rank-00001.pt", [1]),
    "before rank 0 has written": (0, "write", "rank-00000.safetensors", [1]),
    "before the manifest is written": (0, "write", f"{MANIFEST}.tmp", [1]),
    "before the manifest is renamed": (0, "rename", MANIFEST, [1]),
    "after the commit": (0, "rename", "", [1, 2]),
    "after the commit, before it knows of it": (1, "rename", "", [1, 2]),
}
"""The killed rank, the event at which it is killed, and the steps of the checkpoints that exist afterwards.

Only rank 0 writes the manifest, and renames a file.
"""


# The last moment before the commit, the first one after it, and a death of a rank that does not commit.
DAILY_KILLS = (
    "when a rank has written half of it",
    "before the manifest is renamed",
    "after the commit, before it knows of it",
)


@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=() if moment in DAILY_KILLS else pytest.mark.slow) for moment in KILLS],
)
def test_rank_killed_during_a_save_leaves_earlier_checkpoints_usable(moment: str, tmp_path: Path) -> None:
    victim, event, name, steps = KILLS[moment]
    others = run_ranks(2, save_and_die, str(tmp_path), victim, event, name, may_die=[victim])
    assert others[1 - victim] == steps
    assert run_ranks(2, resume_and_save, str(tmp_path)) == [(steps[-1], [steps[-1], 3], 2)] * 2


def save_and_die(environment: RankEnvironment, folder: str, victim: int, event: str, name: str) -> list[int]:
    module, layout = start(environment)
    checkpoints = ShardedCheckpoints(f"stumbling://{folder}", layout)
    checkpoints.save(1, module, state={"step": 1})
    checkpoints.wait()
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())

    def kill(its_event: str, path: str) -> None:
        if its_event == event and path.endswith(name):
            if not name:
                shutil.copyfile(f"{path}.tmp", path)
            elif event == "write":
                Path(path).write_bytes(b"half")
            os.kill(pids[victim], signal.SIGKILL)

    StumblingFileSystem.before = kill
    checkpoints.save(2, module, state={"step": 2})
    with pytest.raises(SparkdlError):
        checkpoints.wait()
    checkpoints.__exit__(SparkdlError, None, None)
    return checkpoints.steps()


def resume_and_save(environment: RankEnvironment, folder: str) -> tuple[int, list[int], int]:
    module, layout = start(environment)
    with ShardedCheckpoints(folder, layout) as checkpoints:
        state = checkpoints.load(module)
        assert state is not None
        checkpoints.save(3, module)
        checkpoints.wait()
        return state["step"], checkpoints.steps(), len(list(Path(folder).glob("checkpoint-*")))


def test_checkpoints_are_kept_on_an_object_store(s3: S3) -> None:
    url = f"s3://{s3.make_bucket()}/run"
    assert run_ranks(2, save_three, url, variables=s3.environment) == [([2, 3], {"step": 3})] * 2


def save_three(environment: RankEnvironment, url: str) -> tuple[list[int], Any]:
    module, layout = start(environment)
    with ShardedCheckpoints(url, layout) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, module, state={"step": step})
        checkpoints.wait()
        return checkpoints.steps(), checkpoints.load(module)


def start(environment: RankEnvironment) -> tuple[nn.Module, RankLayout]:
    torch.set_num_threads(1)
    communicator = environment.open(timeout_s=10.0)
    sparkdl.torch.init_process_group(communicator, timeout_s=10.0)
    layout = Parallelism(shard=2).lay_out()
    return shard(nn.Linear(4, 4), layout), layout
