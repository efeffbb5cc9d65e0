"""Pixels, augmentation and backbones of the ready-made image network."""

from __future__ import annotations

import hashlib
import io
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from sparkdl.errors import DataError, ParamError
from sparkdl.networks.adapters import with_adapters
from sparkdl.networks.backbones import (
    check_backbone,
    last_layers,
    load_trained_network,
    make_backbone,
    pretrained_scales,
)
from sparkdl.networks.images import (
    ImageAugmentation,
    ImageInputs,
    ImageNetwork,
    ResidualNetwork,
    encoded_size,
    resize_images,
)
from tests.unit.networks.image_libraries import TIMM, TORCHVISION, keep_weights

RED_LEFT = np.zeros((4, 6, 3), np.uint8)
RED_LEFT[:, :3, 0] = 200
RED_LEFT[:, 3:, 2] = 100


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def column(*values):
    rows = np.empty(len(values), dtype=object)
    rows[:] = values
    return rows


def inputs_of(kind, size=(4, 6), **options):
    return ImageInputs(column="image", kind=kind, size=size, **options)


def bytes_to_pixels(content, size=(4, 6)):
    return inputs_of("binary", size)({"image": column(content)})[0].transpose(1, 2, 0)


KINDS = {
    "colours": (Image.fromarray(RED_LEFT), RED_LEFT),
    "transparent": (Image.fromarray(np.dstack([RED_LEFT, np.full((4, 6), 9, np.uint8)])), RED_LEFT),
    "palette": (Image.fromarray(RED_LEFT).quantize(4), RED_LEFT),
    "grey": (Image.fromarray(RED_LEFT[..., 0]), np.repeat(RED_LEFT[..., :1], 3, axis=2)),
    "grey of 16 bits": (
        Image.fromarray(RED_LEFT[..., 0].astype(np.uint16) * 256),
        np.repeat(RED_LEFT[..., :1], 3, axis=2),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_encoded_images_of_all_kinds_become_red_green_and_blue(name):
    image, expected = KINDS[name]
    np.testing.assert_array_equal(bytes_to_pixels(encoded(image)), expected)


def test_a_jpeg_on_its_side_is_put_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotate by a quarter
    content = encoded(Image.fromarray(RED_LEFT.repeat(8, 0).repeat(8, 1)), "JPEG", exif=exif)
    assert encoded_size(content, where="a test") == (48, 32)
    pixels = bytes_to_pixels(content, (48, 32))
    assert pixels.shape == (48, 32, 3)
    top, bottom = pixels[4, 16], pixels[-4, 16]
    assert top[0] > 150 > top[2]
    assert bottom[2] > 80 > bottom[0]


@pytest.mark.parametrize(
    ("channels", "expected"),
    [(1, [[7, 7, 7]]), (3, [[3, 2, 1]]), (4, [[3, 2, 1]])],
)
def test_images_of_spark_are_read_in_blue_green_red_order(channels, expected):
    pixels = np.array([[[1, 2, 3, 99][:channels] if channels > 1 else [7]]], np.uint8)
    (image,) = inputs_of("image", (1, 1))({"image": column(pixels)})
    np.testing.assert_array_equal(image[:, 0].T, expected)


def test_images_of_two_channels_are_refused():
    rows = column(*(np.zeros((1, 1, channels), np.uint8) for channels in (3, 2)))
    with pytest.raises(DataError, match=r"column 'image', row 1 .* has 2 channels"):
        inputs_of("image", (1, 1))({"image": rows})


@pytest.mark.parametrize("content", [b"", b"no image at all", encoded(Image.fromarray(RED_LEFT))[:-30]])
def test_a_broken_image_is_named_by_its_row_and_a_digest_that_finds_it(content):
    digest = hashlib.sha256(content).hexdigest()
    rows = column(encoded(Image.fromarray(RED_LEFT)), content)
    with pytest.raises(DataError, match=rf"column 'image', row 1 .* {len(content)} bytes.*'{digest}'"):
        inputs_of("binary")({"image": rows})


def test_pixels_of_floating_point_numbers_are_refused():
    image = Image.fromarray(np.ones((4, 6), np.float32))
    with pytest.raises(DataError, match="floating-point numbers; give .* arrays"):
        bytes_to_pixels(encoded(image, "TIFF"))


def test_error_without_pillow_says_what_to_install(monkeypatch):
    content = encoded(Image.fromarray(RED_LEFT))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        DataError, match=r"Decoding the image .* needs pillow: .*pip install pillow, .*'images'"
    ):
        bytes_to_pixels(content)


@pytest.mark.parametrize(
    ("shape", "first", "channels"),
    [((2, 3), False, 1), ((2, 3, 4), False, 4), ((4, 2, 3), True, 4)],
)
def test_arrays_keep_their_channels_in_either_position(shape, first, channels):
    rows = np.arange(2 * np.prod(shape), dtype=np.float64).reshape(2, -1)
    made = inputs_of("number", (2, 3), shape=shape, has_channels_first=first)
    images = made({"image": rows})
    assert (images.shape, images.dtype, made.num_channels) == ((2, channels, 2, 3), np.float32, channels)
    expected = rows.reshape(2, *shape)
    expected = expected[:, None] if len(shape) == 2 else expected if first else np.moveaxis(expected, 3, 1)
    np.testing.assert_array_equal(images, expected)


def test_an_array_with_nan_is_named_by_its_row():
    rows = np.ones((3, 2, 3))
    rows[2, 1, 1] = np.nan
    with pytest.raises(DataError, match="column 'image', row 2 .* NaN"):
        inputs_of("number", (2, 3), shape=(2, 3))({"image": rows})


@given(
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    wanted=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    mode=st.sampled_from(["crop", "stretch"]),
    dtype=st.sampled_from([np.uint8, np.float32]),
)
def test_images_of_any_size_are_brought_to_the_wanted_size(size, wanted, mode, dtype):
    images = np.full((2, 3, *size), 7, dtype)
    made = resize_images(images, wanted, mode)
    assert (made.shape, made.dtype) == ((2, 3, *wanted), dtype)
    np.testing.assert_allclose(made, 7, rtol=1e-5)
    np.testing.assert_array_equal(resize_images(images[0], wanted, mode), made[0])


def test_crop_keeps_the_middle_and_stretch_keeps_all():
    image = np.zeros((1, 4, 12), np.uint8)
    image[..., :4], image[..., 4:8], image[..., 8:] = 10, 20, 30
    np.testing.assert_array_equal(resize_images(image, (4, 4), "crop"), np.full((1, 4, 4), 20))
    stretched = resize_images(image, (4, 6), "stretch")
    assert stretched.min() == 10
    assert stretched.max() == 30


def test_augmentation_depends_on_the_random_numbers_and_keeps_labels_and_inputs():
    images = np.arange(8 * 3 * 16 * 8, dtype=np.float32).reshape(8, 3, 16, 8)
    before, labels = images.copy(), np.arange(8)
    change = ImageAugmentation(column="image", flips=True, crops=True)

    def changed(seed):
        np.random.seed(seed)
        return change({"image": images, "label": labels})

    first = changed(1)
    np.testing.assert_array_equal(first["image"], changed(1)["image"])
    assert not np.array_equal(first["image"], changed(2)["image"])
    assert first["label"] is labels
    np.testing.assert_array_equal(images, before)
    assert set(first["image"].ravel()) <= set(images.ravel())


def test_flips_mirror_left_to_right_and_crops_move_by_no_more_than_an_eighth():
    images = np.zeros((200, 1, 16, 8), np.float32)
    images[:, :, 8, 2] = 1
    np.random.seed(0)
    flipped = ImageAugmentation(column="image", flips=True, crops=False)({"image": images})["image"]
    places = {tuple(place) for place in np.argwhere(flipped)[:, 2:].tolist()}
    assert places == {(8, 2), (8, 5)}
    moved = ImageAugmentation(column="image", flips=False, crops=True)({"image": images})["image"]
    places = {tuple(place) for place in np.argwhere(moved)[:, 2:].tolist()}
    assert places == {(8 + down, 2 + right) for down in range(-2, 3) for right in (-1, 0, 1)}


@pytest.mark.parametrize("side", [1, 2, 8, 96])
def test_a_residual_network_takes_images_of_any_size_and_begins_as_the_identity(side):
    torch.manual_seed(0)
    network = ResidualNetwork(
        num_channels=2, size=(side, side), stage_widths=[4, 8], blocks_per_stage=2, dropout=0.5, num_outputs=3
    )
    images = torch.rand(5, 2, side, side)
    assert network(images).shape == (5, 3)
    stem = torch.relu(network.eval().stem(images))
    torch.testing.assert_close(network.blocks[0](stem), stem)


def test_channels_are_normalized_and_grey_ones_repeated_for_a_backbone_of_colours():
    class Backbone(torch.nn.Module):
        def forward(self, images):
            return images.mean(dim=(2, 3))

    network = ImageNetwork(mean=[2.0], deviation=[4.0], backbone=Backbone(), takes_colours=True)
    torch.testing.assert_close(network(torch.full((1, 1, 2, 2), 10.0)), torch.full((1, 3), 2.0))
    with pytest.raises(TypeError, match="floating-point"):
        network(torch.ones(1, 1, 2, 2, dtype=torch.int64))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    pytest.importorskip("timm", reason="timm, which comes with torchvision, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        keep_weights(tmp_path_factory.mktemp("pretrained weights"), patch)
        yield


@pytest.mark.parametrize("name", [TORCHVISION, TIMM, f"{TIMM}.r160_in1k"])
def test_backbones_of_libraries_get_a_last_layer_for_the_classes(libraries, name):
    check_backbone(name)
    network = make_backbone(name, num_outputs=5, weights="none")
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 5)


def test_both_heads_of_a_distilled_network_are_new(libraries, tmp_path):
    name = "timm:deit_tiny_distilled_patch16_224"
    weights = {
        key: tensor
        for key, tensor in make_backbone(name, num_outputs=5, weights="none").state_dict().items()
        if not key.startswith(("head.", "head_dist."))
    }
    torch.save(weights, tmp_path / "weights.pt")
    network = make_backbone(name, num_outputs=7, weights=str(tmp_path / "weights.pt"))
    assert last_layers(network, 7) == ["head", "head_dist"]
    adapted = with_adapters(network, 2, trained=last_layers(network, 7))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert sum("modules_to_save" in name and "weight" in name for name in trained) == 2


def test_pretrained_backbones_have_weights_of_the_library_and_a_new_last_layer(libraries):
    for name, first, last in ((TORCHVISION, "layers.1", "classifier.1"), (TIMM, "bn1", "fc")):
        network = make_backbone(name, num_outputs=5, weights="pretrained")
        assert (network.get_submodule(first).bias == 0.5).all()
        assert network.get_submodule(last).out_features == 5
        assert not (network.get_submodule(last).bias == 0.5).any()


def test_normalization_of_pretrained_weights_comes_from_the_library(libraries):
    assert pretrained_scales(TORCHVISION) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert pretrained_scales("timm:test_byobnet.r160_in1k") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for name in (TIMM, f"{TIMM}.r160_in1k"):
        assert pretrained_scales(name) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    with pytest.raises(ParamError, match="torchvision does not say .*Set normalization"):
        pretrained_scales("torchvision:without_weights")


@pytest.mark.parametrize("ending", ["safetensors", "pt", "wrapped.pt"])
@pytest.mark.parametrize("num_outputs", [5, 7])
def test_weights_of_a_file_are_loaded_except_a_layer_for_other_classes(
    libraries, tmp_path, ending, num_outputs
):
    path = str(tmp_path / f"weights.{ending}")
    weights = make_backbone(TORCHVISION, num_outputs=5, weights="none").state_dict()
    if ending == "safetensors":
        save_file(weights, path)
    elif ending == "pt":
        torch.save(weights, path)
    else:
        torch.save(
            {"epoch": 3, "state_dict": {f"module.{key}": weight for key, weight in weights.items()}}, path
        )
    loaded = make_backbone(TORCHVISION, num_outputs=num_outputs, weights=path).state_dict()
    for key, tensor in weights.items():
        is_loaded = num_outputs == 5 or not key.startswith("classifier")
        assert torch.equal(loaded[key], tensor) is is_loaded, key


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "model._orig_mod.", "net."])
@pytest.mark.parametrize("key", ["state_dict", "model_state_dict"])
def test_weights_of_a_checkpoint_are_found_under_the_names_of_other_trainers(
    libraries, tmp_path, key, prefix
):
    weights = make_backbone(TORCHVISION, num_outputs=5, weights="none").state_dict()
    values = {f"{prefix}{name}": tensor for name, tensor in weights.items()}
    torch.save({"epoch": 3, "optimizer": {"state": {}}, key: values}, tmp_path / "checkpoint.pt")
    loaded = make_backbone(TORCHVISION, num_outputs=5, weights=str(tmp_path / "checkpoint.pt")).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_a_checkpoint_of_timms_training_is_loaded(libraries, tmp_path):
    from timm.utils import CheckpointSaver

    trained = make_backbone(TIMM, num_outputs=5, weights="none")
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    arguments = Namespace(model="test_resnet", mean=None, lr=0.1, amp_dtype="float16")
    CheckpointSaver(trained, optimizer, arguments, checkpoint_dir=str(tmp_path)).save_checkpoint(
        1, metric=0.5
    )
    loaded = load_trained_network(TIMM, str(tmp_path / "model_best.pth.tar"))[0].state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.state_dict().items())


@pytest.fixture
def faulty_weights(tmp_path):
    torch.save(torch.nn.Linear(1, 1), tmp_path / "network.pt")
    torch.save({}, tmp_path / "empty.pt")
    torch.save({"other.weight": torch.ones(2)}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("no weights")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.pt", "there is no such file"),
        ("text.pt", "cannot be read"),
        ("network.pt", r"holds a torch.nn.modules.linear.Linear: it is not unpickled, .*from_module\(model"),
        ("empty.pt", "missing or of another shape"),
        ("list.pt", "does not hold tensors by name"),
        ("other.pt", r"missing or of another shape: layers.0.weight.* more; left over: other"),
    ],
)
def test_files_without_weights_of_the_backbone_are_refused(libraries, faulty_weights, file, message):
    with pytest.raises(ParamError, match=message):
        make_backbone(TORCHVISION, num_outputs=5, weights=str(faulty_weights / file))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "a name with its library") for name in ("resnet18", "keras:resnet", "torchvision:")),
        ("torchvision:resnet_18", "torchvision has no model 'resnet_18'. Did you mean resnet18"),
        ("timm:x", r"timm has no model 'x'. It has \d{4}, such as "),
        (f"{TIMM}.r160", "no model 'test_resnet.r160'. Did you mean test_resnet.r160_in1k or"),
    ],
)
def test_unknown_backbones_are_refused_with_similar_names(libraries, name, message):
    with pytest.raises(ParamError, match=message):
        check_backbone(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("test_mambaout", "No pretrained weights exist"), ("test_vit", "LocalEntryNotFoundError")],
)
def test_a_backbone_that_its_library_does_not_make_is_named(libraries, name, reason):
    with pytest.raises(ParamError, match=f"{name}'?, which timm cannot create with weights .*: .*{reason}"):
        make_backbone(f"timm:{name}", num_outputs=2, weights="pretrained")


def test_missing_and_broken_libraries_are_named_with_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "timm")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, name, None)  # makes monkeypatch remove what the test imports
    with pytest.raises(
        ParamError, match=r"timm, which cannot be imported here: ModuleNotFoundError: .* timm, .*'backbones'"
    ):
        check_backbone(TIMM)
    # A broken installation of both, found before the installed libraries.
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "timm.py").write_text("import torchvision\n")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator does not exist')\n")
    del sys.modules["timm"]
    with pytest.raises(
        ParamError, match=r"No.*torchvision.*version for their torch\. .*pip install --upgrade torchvision"
    ):
        check_backbone(TIMM)
    del sys.modules["torchvision"]
    for name in (TORCHVISION, TIMM):
        with pytest.raises(
            ParamError, match=r"cannot be imported here: RuntimeError: operator .* torchvision"
        ):
            check_backbone(name)
