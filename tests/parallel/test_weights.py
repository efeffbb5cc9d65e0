"""Weights drawn, written and read in parts on four ranks, in every layout."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparkdl.errors import ParamError, SavedModelError, StoreError
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel import (
    Parallelism,
    RankLayout,
    cut,
    draw_weights,
    load_weights,
    on_meta,
    parallelize,
    save_weights,
    weights,
)
from tests.checks import chosen, require, slow, with_marks
from tests.parallel.models import SIZES, llama
from tests.torch.checks import run_checks

LAYOUTS = {
    "plain": Parallelism(),
    "fsdp": Parallelism(shard=4),
    "tp": Parallelism(tensor=2),
    "pp": Parallelism(pipeline=2),
    "tp x pp": Parallelism(tensor=2, pipeline=2),
    "fsdp x tp": Parallelism(shard=2, tensor=2),
}


def untied() -> nn.Module:
    return Decoder(DecoderSizes(**{**vars(SIZES), "is_tied": False}))


def tied() -> nn.Module:
    return Decoder(SIZES)


def on_ranks(make: Callable[[], nn.Module], parallelism: Parallelism) -> tuple[RankLayout, list[nn.Module]]:
    layout = parallelism.lay_out()
    with on_meta():
        module = make()
    assert all(parameter.is_meta for parameter in module.parameters())
    stages = [module]
    sizes = layout.sizes
    if sizes.pipeline > 1:
        stages = cut(module, layout.group("pipeline"))
    if sizes.pipeline == 1 and sizes != Parallelism().resolve(4):
        parallelize(module, layout)
    elif sizes.tensor > 1:
        from sparkdl.parallel import divide

        for stage in stages:
            divide(stage, layout.mesh["tensor"])
    return layout, stages


def whole(stages: list[nn.Module]) -> dict[str, Tensor]:
    found = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            value = parameter.detach()
            found[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def shared_folder() -> str:
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return names[0]


# Together they have every way to divide a model.
DAILY = ("plain", "tp x pp", "fsdp x tp")


def check_drawn_weights_are_the_same_in_layouts_of_every_dimension() -> None:
    draw((tied, DAILY), (llama, ["tp x pp"]))


@slow
def check_drawn_weights_are_the_same_in_every_layout() -> None:
    draw((tied, LAYOUTS), (untied, ["tp x pp"]), (llama, ["tp x pp", "fsdp x tp"]))


def draw(*cases: tuple[Callable[[], nn.Module], Iterable[str]]) -> None:
    for make, layouts in cases:
        reference = make()
        draw_weights(reference, seed=5)
        expected = dict(reference.named_parameters())
        assert (
            len({float(weight.detach().double().std()) for weight in expected.values() if weight.ndim > 1})
            > 3
        )
        for name in layouts:
            _, stages = on_ranks(make, LAYOUTS[name])
            draw_weights(stages, seed=5)
            for key, value in whole(stages).items():
                assert torch.equal(value, expected[key]), f"{name} {key}"


def check_tied_weights_stay_one_parameter() -> None:
    for name in ("plain", "fsdp", "tp", "fsdp x tp"):
        _, (module,) = on_ranks(tied, LAYOUTS[name])
        draw_weights(module, seed=5)
        assert module.head.weight is module.embedding.weight, name
        assert len(whole([module])) == len(dict(tied().named_parameters()))


def check_a_rank_has_its_part_alone() -> None:
    _, (module,) = on_ranks(untied, LAYOUTS["fsdp"])
    draw_weights(module, seed=5)
    own = sum(parameter.to_local().numel() for parameter in module.parameters())
    everything = sum(parameter.numel() for parameter in module.parameters())
    assert own <= 1.1 * everything / 4


def check_folders_of_layouts_of_every_dimension_are_read_in_another() -> None:
    read_folders(lambda source: [DAILY[DAILY.index(source) - 1]], DAILY)


@slow
def check_folders_of_every_layout_are_read_in_another() -> None:
    names = list(LAYOUTS)
    read_folders(lambda source: [names[names.index(source) - 1]])


@slow
def check_folders_of_every_layout_are_read_in_every_other() -> None:
    read_folders(lambda _: LAYOUTS)


def read_folders(targets_of: Callable[[str], Iterable[str]], sources: Iterable[str] = LAYOUTS) -> None:
    reference = tied()
    draw_weights(reference, seed=7)
    expected = dict(reference.named_parameters())
    for name in sources:
        folder = shared_folder()
        layout, stages = on_ranks(tied, LAYOUTS[name])
        draw_weights(stages, seed=7)
        save_weights(stages, folder, layout, file_bytes=10_000)
        weight_map = json.loads(Path(folder, "model.safetensors.index.json").read_text())["weight_map"]
        files = {file: safetensors.torch.load_file(Path(folder, file)) for file in set(weight_map.values())}
        assert len(files) > 2
        assert sorted(path.name for path in Path(folder).iterdir()) == sorted(
            [*files, "model.safetensors.index.json"]
        )
        assert weight_map.keys() == expected.keys()
        for key, file in weight_map.items():
            assert torch.equal(files[file][key], expected[key]), f"{name} {key}"
        for other in targets_of(name):
            _, stages = on_ranks(tied, LAYOUTS[other])
            load_weights(stages, folder)
            for key, value in whole(stages).items():
                assert torch.equal(value, expected[key]), f"{name} to {other}: {key}"


def check_a_folder_of_hugging_face_is_read_part_by_part() -> None:
    folder = shared_folder()
    reference = llama()
    if dist.get_rank() == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    _, stages = on_ranks(llama, LAYOUTS["fsdp x tp"])
    load_weights(stages, folder)
    for key, value in whole(stages).items():
        assert torch.equal(value, reference.get_parameter(key)), key


def check_all_copies_of_a_tied_weight_are_read_and_drawn() -> None:
    folder, sizes = shared_folder(), DecoderSizes(**{**vars(SIZES), "layers": 8})
    reference = Decoder(sizes)
    draw_weights(reference, seed=9)
    if dist.get_rank() == 0:
        safetensors.torch.save_model(reference, str(Path(folder, "model.safetensors")))
    dist.barrier()
    for fill in (lambda stages: load_weights(stages, folder), lambda stages: draw_weights(stages, seed=9)):
        with on_meta():
            module = Decoder(sizes)
        stages = cut(module, Parallelism(pipeline=-1).lay_out().group("pipeline"), schedule="zbv")
        fill(stages)
        for stage in stages:  # the first rank has the first and the last stage
            for key, value in stage.named_parameters():
                assert torch.equal(value, reference.get_parameter(key)), key
    if dist.get_rank() == 0:
        assert stages[0].embedding.weight is not stages[1].head.weight


def check_an_interrupted_save_leaves_no_index_of_earlier_weights() -> None:
    folder = shared_folder()
    layout, stages = on_ranks(untied, LAYOUTS["plain"])
    draw_weights(stages, seed=7)
    save_weights(stages, folder, layout)

    def no_space(*_: object) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "write_weights", no_space)
        with contextlib.suppress(StoreError):  # on the rank that writes
            save_weights(stages, folder, layout, file_bytes=1)
    dist.barrier()
    with pytest.raises(StoreError, match="index"):
        load_weights(stages, folder)


def check_a_folder_that_the_ranks_do_not_share_is_refused() -> None:
    layout, stages = on_ranks(untied, LAYOUTS["tp x pp"])
    draw_weights(stages, seed=7)
    with pytest.raises(StoreError, match="a folder that all ranks share"):
        save_weights(stages, tempfile.mkdtemp(), layout)


def check_weights_of_another_model_are_refused_before_anything_is_changed() -> None:
    folder = shared_folder()
    layout, stages = on_ranks(untied, LAYOUTS["plain"])
    draw_weights(stages, seed=7)
    save_weights(stages, folder, layout)
    wider = Decoder(DecoderSizes(**{**vars(SIZES), "is_tied": False, "hidden": 64}))
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    with pytest.raises(SavedModelError, match="feed_forward"):
        load_weights(wider, folder)
    assert all(torch.equal(value, before[name]) for name, value in wider.state_dict().items())
    deeper = Decoder(DecoderSizes(**{**vars(SIZES), "is_tied": False, "layers": 5}))
    with pytest.raises(SavedModelError, match=r"hold no 'blocks\.4"):
        load_weights(deeper, folder)
    flatter = Decoder(DecoderSizes(**{**vars(SIZES), "is_tied": False, "layers": 3}))
    with pytest.raises(SavedModelError, match=r"'blocks\.3\..*does not have"):
        load_weights(flatter, folder)
    with pytest.raises(StoreError, match=r"model\.safetensors in .* cannot be read"):
        load_weights(untied(), tempfile.mkdtemp())
    outside = Path(tempfile.mkdtemp())
    (outside / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other/a.safetensors"}}')
    with pytest.raises(StoreError, match="not a file of that folder"):
        load_weights(untied(), str(outside))
    with torch.device("meta"):
        broken = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ParamError, match="on_meta"):
        draw_weights(broken, seed=0)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_checks([__name__], 4, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
