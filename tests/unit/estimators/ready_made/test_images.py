"""Values that ImageClassifier computes from rows before a fit, and what it refuses, on rows in a folder."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

from sparkdl.data import scan_dataset
from sparkdl.errors import DataError, ParamError, ParamTypeError
from sparkdl.estimators import ImageClassifier
from sparkdl.estimators.fit.inputs import first_rows
from sparkdl.estimators.ready_made.estimator import answer_row
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel, load_model, save_model
from sparkdl.model.served_model import PyfuncModel
from sparkdl.networks.adapters import merge_adapters
from sparkdl.networks.backbones import last_layers
from tests.unit.estimators.fit_examples import learn
from tests.unit.networks.image_libraries import TIMM, TORCHVISION, keep_weights

NUM_ROWS = 40
SPARK_IMAGE = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)


def encoded(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def of_spark(pixels):
    height, width, channels = pixels.shape
    mode = {1: 0, 3: 16, 4: 24}[channels]
    return {
        "origin": "file:///a.png",
        "height": height,
        "width": width,
        "nChannels": channels,
        "mode": mode,
        "data": pixels[..., ::-1].tobytes(),
    }


def make_images():
    """Colour images of different sizes; the median size is 10 x 12."""
    rng = np.random.default_rng(3)
    sizes = [(8, 12), (10, 9), (14, 16), (10, 12)]
    return [
        rng.integers(0, 200, (*sizes[index % len(sizes)], 3), dtype=np.uint8) for index in range(NUM_ROWS)
    ]


IMAGES = make_images()
FLOATS = np.random.default_rng(4).random((NUM_ROWS, 6, 5))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    nested = pa.list_(pa.list_(pa.float64()))
    table = pa.table(
        {
            "encoded": [encoded(image) for image in IMAGES],
            "image": pa.array([of_spark(image) for image in IMAGES], SPARK_IMAGE),
            "nested": pa.array(FLOATS.tolist(), nested),
            "colours": pa.array(np.stack([FLOATS] * 3, axis=3).tolist(), pa.list_(nested)),
            "channels first": pa.array(np.stack([FLOATS] * 3, axis=1).tolist(), pa.list_(nested)),
            "spectrum": pa.array(np.stack([FLOATS] * 7, axis=3).tolist(), pa.list_(nested)),
            "flat": pa.array(FLOATS.reshape(NUM_ROWS, -1).tolist(), pa.list_(pa.float64())),
            "line": pa.array([[1.0] * 9] * NUM_ROWS, pa.list_(pa.float64())),
            "deep": pa.array([[[[[1.0]]]]] * NUM_ROWS, pa.list_(pa.list_(nested))),
            "ragged": [[1.0] * (1 + index % 2) for index in range(NUM_ROWS)],
            "holes": pa.array(np.where(FLOATS > 0.5, np.nan, FLOATS).tolist(), nested),
            "broken": [b"no image"] * NUM_ROWS,
            "words": ["image"] * NUM_ROWS,
            "number": np.arange(NUM_ROWS) * 1.0,
            "label": np.arange(NUM_ROWS) % 3,
            "name": [("ant", "bee")[index % 2] for index in range(NUM_ROWS)],
        }
    )
    folder = tmp_path_factory.mktemp("rows") / "rows"
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet", row_group_size=15)
    return scan_dataset(str(folder), shapes={"ragged": (None,)})


SMALL = {"stageWidths": [4, 8], "blocksPerStage": 1}


def learned(dataset, column, **params):
    """The inputs of a fit of images in a column, by default with a small network."""
    return learn(
        ImageClassifier(featuresCol=column, **({} if "backbone" in params else SMALL), **params), dataset
    )


def saved(dataset, column, **params):
    inputs = learned(dataset, column, **params)
    return SavedModel(inputs.spec.model, inputs.signature)


COLUMNS = {
    "encoded": ({}, (10, 12), 3),
    "image": ({"imageSize": 7}, (7, 7), 3),
    "nested": ({}, (6, 5), 1),
    "colours": ({"imageSize": [3, 4], "resizeMode": "stretch"}, (3, 4), 3),
    "channels first": ({}, (6, 5), 3),
    "spectrum": ({}, (6, 5), 7),
    "flat": ({"imageShape": [6, 5]}, (6, 5), 1),
}


def first_row(dataset, name):
    return {name: first_rows(dataset, [name])[name][:1]}


@pytest.mark.parametrize("name", COLUMNS)
def test_images_of_all_columns_become_predictions(dataset, name):
    params, size, channels = COLUMNS[name]
    inputs = learned(dataset, name, **params)
    prepare = inputs.spec.inputs.prepare
    assert (prepare.size, prepare.num_channels) == (size, channels)
    assert inputs.spec.inputs.inputs[0].dtype == "float32"
    row = first_row(dataset, name)
    predictor = Predictor(SavedModel(inputs.spec.model, inputs.signature))
    assert predictor.answer(row, ("probability",))["label"]["probability"].shape == (1, 3)


def test_image_scales_are_computed_from_the_pixels_trained_on(dataset):
    model = learned(dataset, "nested").spec.model
    assert model.mean.item() == pytest.approx(FLOATS.mean(), rel=1e-4)
    assert model.deviation.item() == pytest.approx(FLOATS.std(), rel=1e-4)
    half = learned(dataset, "nested", validationFraction=0.5).spec.model
    assert half.mean.item() != pytest.approx(FLOATS.mean(), rel=1e-4)
    plain = learned(dataset, "encoded", normalization="none").spec.model
    assert (plain.mean.flatten().tolist(), plain.deviation.flatten().tolist()) == ([0] * 3, [1] * 3)


@pytest.mark.parametrize(
    ("name", "mean"),
    [("encoded", [123.7, 116.3, 103.5]), ("colours", [0.485, 0.456, 0.406]), ("nested", [0.449])],
)
def test_scales_of_imagenet_are_in_the_unit_of_the_images(dataset, name, mean):
    model = learned(dataset, name, normalization="imagenet").spec.model
    assert model.mean.flatten().tolist() == pytest.approx(mean, rel=1e-3)


def test_encoded_images_and_images_of_spark_are_prepared_alike(dataset):
    one, other = (
        learned(dataset, name).spec.inputs.prepare(first_row(dataset, name)) for name in ("encoded", "image")
    )
    np.testing.assert_array_equal(one, other)


def test_path_of_initial_weights_is_that_of_the_file():
    for weights, path in (("none", None), ("pretrained", None), ("/models/net.pt", "/models/net.pt")):
        estimator = ImageClassifier(featuresCol="encoded", backboneWeights=weights)
        assert estimator._params_of_fit()._path_of_initial_weights() == path


def test_params_reach_network_and_random_changes(dataset):
    network = {"stageWidths": [4, 8, 16], "blocksPerStage": 2, "dropout": 0.25}
    params = {"featuresCol": "encoded", "labelCol": "name", "augmentation": ["flip"], **network}
    inputs = learn(ImageClassifier(**params), dataset)
    backbone = inputs.spec.model.backbone
    assert len(backbone.blocks) == 6
    assert (backbone.head.in_features, backbone.head.out_features, backbone.dropout.p) == (16, 2, 0.25)
    assert (inputs.spec.augment.flips, inputs.spec.augment.crops) == (True, False)
    assert inputs.signature.outputs[0].classes == ("ant", "bee")


def test_first_weights_depend_on_the_seed(dataset):
    def first(seed):
        return learned(dataset, "nested", seed=seed).spec.model.backbone.head.weight

    one = first(1)
    assert torch.equal(one, first(1))
    assert not torch.equal(one, first(2))


def test_residual_network_loads_the_weights_of_a_file_except_a_head_for_other_classes(dataset, tmp_path):
    first = learned(dataset, "encoded", seed=1).spec.model.backbone
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    weights = str(tmp_path / "weights.pt")
    for label, is_same in (("label", True), ("name", False)):
        network = learned(dataset, "encoded", labelCol=label, backboneWeights=weights).spec.model.backbone
        assert torch.equal(network.blocks[0].first.weight, first.blocks[0].first.weight)
        assert (network.head.weight.shape == first.head.weight.shape) is is_same


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    pytest.importorskip("timm", reason="timm, which comes with torchvision, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        keep_weights(tmp_path_factory.mktemp("pretrained weights"), patch)
        yield


def test_a_backbone_of_a_library_gets_three_channels_of_grey_images(libraries, dataset):
    estimator = ImageClassifier(featuresCol="nested", backbone=TORCHVISION)
    backbone = learn(estimator, dataset).spec.model.backbone
    assert backbone.layers[0].in_channels == 3
    assert isinstance(backbone.classifier[1], nn.Linear)
    for changes in ({"stageWidths": [4]}, {"dropout": 0.5}):
        with pytest.raises(ParamError, match="the network of Param backbone, .* brings its own"):
            estimator.copy().setParams(**changes)._check_values()
    with pytest.raises(DataError, match="takes images with 1 or 3 channels, and .* 'spectrum' have 7"):
        learn(estimator.copy().setFeaturesCol("spectrum"), dataset)


def test_error_of_a_backbone_about_the_size_of_images_is_reported(libraries, dataset):
    with pytest.raises(DataError, match=r"AssertionError: Input height \(10\) doesn't match model \(160\)"):
        learned(dataset, "encoded", backbone="timm:test_vit3")
    learned(dataset, "encoded", backbone="timm:test_vit3", imageSize=160)


@pytest.mark.parametrize("name", [TORCHVISION, TIMM])
def test_a_model_with_a_backbone_of_a_library_answers_the_same_once_it_is_loaded(
    libraries, dataset, tmp_path, name
):
    model = saved(dataset, "encoded", backbone=name, backboneWeights="pretrained", imageSize=32)
    save_model(model, tmp_path / "model")
    rows = {"encoded": np.array([encoded(image) for image in IMAGES[:5]], dtype=object)}
    answers = [
        Predictor(predicting).answer(rows, ("probability",))
        for predicting in (model, load_model(tmp_path / "model"))
    ]
    np.testing.assert_array_equal(*[answer["label"]["probability"] for answer in answers])


IMAGENET_MEAN, IMAGENET_DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("name", "params", "mean", "deviation"),
    [
        ("encoded", {}, [127.5] * 3, [127.5] * 3),
        ("colours", {}, [0.5] * 3, [0.5] * 3),
        ("nested", {}, [0.5], [0.5]),
        ("encoded", {"backbone": TORCHVISION}, IMAGENET_MEAN * 255, IMAGENET_DEVIATION * 255),
        ("nested", {"backbone": TORCHVISION}, [IMAGENET_MEAN.mean()], [IMAGENET_DEVIATION.mean()]),
        ("colours", {"normalization": "imagenet"}, IMAGENET_MEAN, IMAGENET_DEVIATION),
        ("colours", {"normalization": "none"}, [0.0] * 3, [1.0] * 3),
        ("nested", {"normalization": "learned"}, [FLOATS.mean()], [FLOATS.std()]),
    ],
)
def test_images_are_normalized_for_the_pretrained_weights_unless_set_otherwise(
    libraries, dataset, name, params, mean, deviation
):
    params = {"backbone": TIMM, "backboneWeights": "pretrained", **params}
    model = learned(dataset, name, **params).spec.model
    assert model.mean.flatten().tolist() == pytest.approx(mean, rel=1e-4)
    assert model.deviation.flatten().tolist() == pytest.approx(deviation, rel=1e-4)


def test_served_model_takes_bytes_and_predicts_single_rows(dataset, tmp_path):
    model = saved(dataset, "encoded", labelCol="name")
    save_model(model, tmp_path / "model")
    served = PyfuncModel(load_model(tmp_path / "model"))
    contents = [encoded(image) for image in IMAGES[:5]]
    expected = Predictor(model).predict({"encoded": np.array(contents, dtype=object)})["name"].tolist()
    assert served.predict({"encoded": contents})["prediction"].tolist() == expected
    for content, name in zip(contents, expected, strict=True):
        assert answer_row(model, bytearray(content), "prediction") == name


def test_single_image_of_spark_and_its_pixels_get_the_same_answer(dataset):
    model = saved(dataset, "image")
    row = of_spark(IMAGES[0])
    answers = [answer_row(model, image, "probability") for image in (row, IMAGES[0][..., ::-1])]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("image", b"png", "'image' takes a row of .*, not bytes"),
        ("image", "a.png", "'image' takes a row of .*, not str"),
        ("image", {"height": 2}, "not dict. KeyError: 'width'"),
        ("image", {**of_spark(IMAGES[0]), "data": b"1"}, "not dict. ValueError: cannot reshape"),
        ("encoded", "a.png", "'encoded' takes bytes, .*, not str. Give what"),
        ("encoded", 7, "'encoded' takes bytes, .*, not int"),
        ("encoded", None, "'encoded' is null in this row"),
        ("nested", b"png", "'nested' takes arrays of numbers, .*, not bytes"),
        ("nested", [[1.0], [1.0, 2.0]], "'nested' takes arrays of numbers, .*, not list"),
    ],
)
def test_single_row_of_another_type_is_refused_with_the_type_of_the_column(dataset, name, value, message):
    model = saved(dataset, name)
    with pytest.raises(DataError, match=message):
        answer_row(model, value, "prediction")


@pytest.mark.parametrize(
    ("column", "params", "error", "message"),
    [
        (["encoded", "image"], {}, ParamError, "takes one column of images"),
        ("nowhere", {}, DataError, "no column 'nowhere'"),
        ("words", {}, DataError, "'words' holds strings, .* takes images"),
        ("number", {}, DataError, "'number' holds numbers, .* takes images"),
        ("ragged", {}, DataError, "'ragged' holds arrays that differ in length"),
        ("deep", {}, DataError, "arrays of 1 x 1 x 1 x 1, which are not images"),
        ("flat", {}, DataError, r"30 numbers. Set the shape .* imageShape=\[3, 8\]"),
        ("line", {}, DataError, r"9 numbers. Set the shape .* imageShape=\[3, 3\]"),
        ("flat", {"imageShape": [6, 6]}, DataError, "36 numbers, and .* have 30"),
        ("encoded", {"imageShape": [6, 6]}, DataError, "have their own shape"),
        ("nested", {"imageShape": [5, 6]}, DataError, r"arrays of 6 x 5, and Param imageShape"),
        ("holes", {}, DataError, "column 'holes', row .* NaN"),
        ("broken", {}, DataError, "'broken', row 0 .*: UnidentifiedImageError"),
        ("spectrum", {"normalization": "imagenet"}, DataError, "have 7. Take 'learned'"),
        ("encoded", {"imageSize": 0}, ParamError, "imageSize must be at least 1"),
        ("flat", {"imageShape": [-6, -5]}, ParamError, "imageShape must be at least 1"),
        ("flat", {"imageShape": [30]}, ParamError, "imageShape has 1 numbers"),
        ("encoded", {"stageWidths": []}, ParamError, "stageWidths is empty"),
        ("encoded", {"blocksPerStage": 0}, ParamError, "blocksPerStage must be at least 1"),
        ("encoded", {"backbone": "resnet18"}, ParamError, "a name with its library"),
        ("encoded", {"backboneWeights": "pretrained"}, ParamError, "residual network has no such"),
        ("encoded", {"backboneWeights": "/nowhere.pt"}, ParamError, "no such file on the driver"),
    ],
)
def test_invalid_params_are_refused_before_ranks_start(dataset, column, params, error, message):
    with pytest.raises(error, match=message):
        estimator = ImageClassifier(featuresCol=column, **params)
        estimator._check_values()
        learn(estimator, dataset)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"imageSize": [1, 2, 3]}, "neither a number of pixels nor a height and a width"),
        ({"imageSize": "large"}, "imageSize"),
        ({"augmentation": ["spin"]}, "'spin' is none of 'flip', 'crop'"),
        ({"resizeMode": "pad"}, "resizeMode"),
        ({"normalization": "mean"}, "normalization"),
    ],
)
def test_values_of_another_type_are_refused_when_they_are_set(params, message):
    with pytest.raises(ParamTypeError, match=message):
        ImageClassifier(**params)


def test_adapters_are_trained_in_place_of_pretrained_weights(dataset, tmp_path):
    plain = learned(dataset, "encoded").spec.model.backbone
    torch.save(plain.state_dict(), tmp_path / "weights.pt")
    fit = learned(dataset, "encoded", backboneWeights=str(tmp_path / "weights.pt"), loraRank=2)
    network = fit.spec.model.eval()
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    (head,) = last_layers(plain, fit.signature.outputs[0].num_classes)
    assert all("lora_" in name or f"{head}.modules_to_save" in name for name in trained)
    assert any("lora_" in name for name in trained)
    assert any("modules_to_save" in name for name in trained)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in trained:
                parameter.normal_(std=0.1)
        images = torch.rand(2, 3, 10, 12)
        expected = network(images)
        merge_adapters(network)
        torch.testing.assert_close(network(images), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ParamError, match="loraRank is 2, and backboneWeights is 'none'"):
        ImageClassifier(loraRank=2)._check_values()
