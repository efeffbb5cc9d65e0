"""Networks as they were trained, by hub id, folder, or library and name; nothing is downloaded."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from sparkdl.errors import DataError, ParamError
from sparkdl.networks.images import TransformedImages
from sparkdl.networks.trained import IMAGES, Source, find_source, load_trained, tell_apart
from tests.unit.networks.image_libraries import TIMM, TORCHVISION, keep_weights
from tests.unit.networks.pretrained_folders import write_folder

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of huggingface_hub, without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def load(name, **options):
    return load_trained(
        find_source(name, task=None, revision=None),
        **{"column": "x", "max_length": 8, "weights": None, **options},
    )


def test_an_id_is_found_in_the_cache_of_the_hub_with_the_task_of_its_configuration(hub, tmp_path):
    folder = write_folder(tmp_path / "written", kind="bert")
    kept = hub / "models--some--bert"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(REVISION)
    shutil.copytree(folder, kept / "snapshots" / REVISION)
    source = find_source("some/bert", task=None, revision=None)
    assert source == Source(name=str(kept / "snapshots" / REVISION), task="text-classification")
    assert find_source("some/bert", task=None, revision=REVISION) == source
    assert find_source("some/bert", task="sentiment-analysis", revision=None) == source
    trained = load_trained(source, column="x", max_length=8, weights=None)
    assert trained.kind == "class"
    assert len(trained.labels) == 7


def test_an_id_that_cannot_be_fetched_says_what_to_do(hub):
    for name, words in (
        ("some/bert", "is not a folder here.*hf auth login.*hf download some/bert --local-dir"),
        ("timm/resnet18", "'timm:resnet18'"),
        ("resnet18", "hf auth login.* given as 'timm:resnet18'"),
        ("not a name", "is not a folder here"),
    ):
        with pytest.raises(ParamError, match=words):
            find_source(name, task=None, revision=None)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "text-generation"),
        ({"architectures": ["LlamaForCausalLM"]}, "text-generation"),
        ({"architectures": ["BertForMaskedLM"]}, "feature-extraction"),
        ({"architectures": ["BertModel"]}, "feature-extraction"),
        ({"architectures": ["ViTForImageClassification"]}, IMAGES),
        ({"architecture": "resnet18", "pretrained_cfg": {}}, IMAGES),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification. Set task to one of"),
        ({}, "does not say what it was trained for"),
    ],
)
def test_the_task_is_that_of_the_configuration_or_has_to_be_set(tmp_path, config, task):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if " " not in task:
        assert find_source(str(tmp_path), task=None, revision=None).task == task
        return
    with pytest.raises(ParamError, match=task):
        find_source(str(tmp_path), task=None, revision=None)


def test_own_weights_of_a_network_of_a_library_say_its_classes_and_have_to_be_all(tmp_path):
    import timm

    network = timm.create_model("test_resnet", num_classes=5).eval()
    torch.save({"state_dict": network.state_dict()}, tmp_path / "weights.pt")
    trained = load(TIMM, weights=str(tmp_path / "weights.pt"))
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(trained.network.eval()(images), network(images))
    assert (trained.kind, trained.labels) == ("class", None)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    assert str(trained.prepare.transform) == str(transform)

    from torchvision.models import get_model, get_model_weights

    _, name = TORCHVISION.split(":")
    torch.save(get_model(name, num_classes=5).state_dict(), tmp_path / "weights.pt")
    trained = load(TORCHVISION, weights=str(tmp_path / "weights.pt"))
    assert repr(trained.prepare.transform) == repr(get_model_weights(name).DEFAULT.transforms())
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 260, 3), np.uint8))
    expected = get_model_weights(name).DEFAULT.transforms()(image)
    torch.testing.assert_close(trained.prepare.transform(image), expected)

    body = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("fc.")}
    for weights, words in (
        (body, "holds no weights of fc, the last layer"),
        ({**network.state_dict(), "more": images}, "left over: more"),
    ):
        torch.save(weights, tmp_path / "weights.pt")
        with pytest.raises(ParamError, match=words):
            load(TIMM, weights=str(tmp_path / "weights.pt"))
    for name, options, words in (
        ("timm:resnt18", {}, "Did you mean resnet18"),
        (TIMM, {"weights": str(tmp_path / "no.pt")}, "there is no such file"),
    ):
        with pytest.raises(ParamError, match=words):
            load(name, **options)
    with pytest.raises(
        ParamError, match="is a network for 'image-classification' or 'image-feature-extraction'"
    ):
        find_source(TIMM, task="feature-extraction", revision=None)


@pytest.mark.parametrize(("name", "label"), [(TIMM, "tench, Tinca tinca"), (TORCHVISION, "tench")])
def test_weights_that_a_library_fetches_bring_transform_and_labels(tmp_path, monkeypatch, name, label):
    keep_weights(tmp_path, monkeypatch)
    trained = load(name)
    assert (len(trained.labels), trained.labels[0]) == (1000, label)
    biases = [tensor for part, tensor in trained.network.named_parameters() if part.endswith("bias")]
    assert all(bool((bias == 0.5).all()) for bias in biases)


@pytest.mark.parametrize(("name", "last"), [(TIMM, "fc"), (TORCHVISION, "classifier.1")])
def test_an_embedding_of_an_image_is_what_the_last_layer_of_a_network_takes(
    tmp_path, monkeypatch, name, last
):
    keep_weights(tmp_path, monkeypatch)
    whole = load(name).network.eval()
    taken = []
    whole.get_submodule(last).register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    images = torch.randn(2, 3, 160, 160)
    whole(images)
    source = find_source(name, task="image-feature-extraction", revision=None)
    trained = load_trained(source, column="x", max_length=8, weights=None)
    assert (trained.kind, trained.labels) == ("value", None)
    torch.testing.assert_close(trained.network.eval()(images), taken[0])


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
SMALL_IMAGES = {"image_size": 8, "patch_size": 4}


@pytest.mark.parametrize("kind", ["vit without pooler", "convnext", "clip"])
def test_an_embedding_of_transformers_is_pooled_by_the_model_if_it_was_trained_to(tmp_path, kind):
    import transformers

    if kind == "clip":
        config = transformers.CLIPConfig(
            text_config={**SMALL, "vocab_size": 10}, vision_config={**SMALL, **SMALL_IMAGES}, projection_dim=6
        )
        model = transformers.CLIPModel(config)
    elif kind == "convnext":
        config = transformers.ConvNextConfig(num_stages=2, hidden_sizes=[4, 6], depths=[1, 1], image_size=8)
        model = transformers.ConvNextModel(config)
    else:
        model = transformers.ViTModel(
            transformers.ViTConfig(**SMALL, **SMALL_IMAGES), add_pooling_layer=False
        )
    model.eval().save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    source = find_source(
        str(tmp_path), task="image-feature-extraction" if kind == "clip" else None, revision=None
    )
    trained = load_trained(source, column="x", max_length=8, weights=None)
    pixels = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        found = trained.network.eval()(pixels)
        if kind == "clip":
            states = model.vision_model(pixel_values=pixels).pooler_output
            expected = model.visual_projection(states)
        elif kind == "convnext":
            expected = model(pixel_values=pixels).pooler_output
        else:
            expected = model(pixel_values=pixels).last_hidden_state.mean(dim=1)
    torch.testing.assert_close(found, expected)
    assert trained.kind == "value"


def test_rows_that_are_not_images_and_transforms_that_fail_name_the_row():
    images = np.empty(2, object)
    images[:] = [np.zeros((4, 4, 3), np.uint8), np.zeros((5, 4, 3), np.uint8)]

    def fails(_image):
        raise ValueError("too small")

    for rows, transform, words in (
        (images, np.asarray, r"shapes \(4, 4, 3\) and \(5, 4, 3\).*CenterCrop"),
        (images, fails, "failed on the image in column 'x', row 0 of its batch,: ValueError: too small"),
        (np.array(["text"], object), np.asarray, "is not an image but str"),
        (np.array([b"text"], object), np.asarray, "cannot be decoded"),
    ):
        with pytest.raises(DataError, match=words):
            TransformedImages(column="x", transform=transform)({"x": rows})
    blue = np.zeros((4, 4, 3), np.uint8)
    blue[..., 0] = 9  # Spark's images are blue, green, red
    rows = np.empty(1, object)
    rows[:] = [blue]
    assert TransformedImages(column="x", transform=np.asarray)({"x": rows})[0, 0, 0].tolist() == [0, 0, 9]


@pytest.mark.parametrize("name", [TIMM, "."])
def test_a_revision_is_refused_for_what_is_not_on_the_hub(name):
    with pytest.raises(ParamError, match="revision is 'main'.*Leave it out"):
        find_source(name, task=None, revision="main")


def test_classes_with_one_label_are_told_apart_by_their_numbers() -> None:
    assert tell_apart(["crane", "tern", "crane"]) == ("crane (0)", "tern", "crane (2)")
