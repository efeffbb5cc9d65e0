"""Models of modules that were trained elsewhere, on a real session."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from torch import nn

import sparkdl.mlflow
from sparkdl import Runner
from sparkdl.errors import DataError, ParamError, ParamTypeError
from sparkdl.estimators import LanguageModelModel, TorchModel, torch_model
from tests.unit.networks.pretrained_folders import write_folder

pytestmark = pytest.mark.no_cluster_needed

LABELS = ["red", "green", "blue"]


class Words(nn.Module):
    """Returns logits and an embedding of numbers of words, by name, as a model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.EmbeddingBag(100, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, *, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        embedded = self.words(input_ids)
        return {"logits": self.last(embedded), "embedding": embedded}


def tokenize(columns: dict[str, Any]) -> dict[str, Any]:
    rows = [[1 + hash_of(word) for word in text.split()] for text in columns["text"]]
    width = max(map(len, rows))
    return {"input_ids": np.array([row + [0] * (width - len(row)) for row in rows])}


def hash_of(word: str) -> int:
    return sum(map(ord, word)) % 99


@pytest.fixture(scope="module")
def texts(spark):
    return spark.createDataFrame(
        [(0, "one two"), (1, None), (2, "three"), (3, "four five six")], "id int, text string"
    )


@pytest.mark.slow_on("connect")
def test_module_predicts_as_it_does_itself_and_is_saved_logged_and_served(
    spark, tracked: Path, tmp_path
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    values = torch.randn(7, 4)
    rows = spark.createDataFrame([(row.tolist(),) for row in values.double()], "x array<double>")
    vectors = VectorAssembler(inputCols=[f"c{i}" for i in range(4)], outputCol="features").transform(
        rows.selectExpr(*(f"x[{i}] as c{i}" for i in range(4)))
    )
    model = TorchModel.from_module(
        module, example=vectors, outputs="class", labels=LABELS, probabilityCol="probability"
    )
    with torch.no_grad():
        expected = module.eval()(values)
    model.write().save(str(tmp_path / "model"))
    for made in (model, TorchModel.load(str(tmp_path / "model"))):
        scored = made.transform(vectors).collect()
        assert [row["prediction"] for row in scored] == [LABELS[i] for i in expected.argmax(1)]
        np.testing.assert_allclose(
            [row["probability"].toArray() for row in scored], expected.softmax(1), rtol=1e-5
        )
    import mlflow
    import pandas as pd

    uri = sparkdl.mlflow.log_model(model).model_uri
    served = mlflow.pyfunc.load_model(uri).predict(pd.DataFrame({"features": values.numpy().tolist()}))
    assert served["prediction"].tolist() == [LABELS[i] for i in expected.argmax(1)]


@pytest.mark.slow  # Lightning takes seconds to import
def test_a_lightning_module_that_a_trainer_has_trained_predicts_as_it_does_itself(spark, tmp_path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    class Classifier(lightning.LightningModule):
        def __init__(self, width: int, loss: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["loss"])
            self.net = nn.Sequential(
                nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3)
            )
            self.loss, self.accuracy = loss, torchmetrics.Accuracy("multiclass", num_classes=3)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.net(features)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            outputs = self(batch[0])
            self.log("accuracy", self.accuracy(outputs, batch[1]))
            return self.loss(outputs, batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.05)

    torch.manual_seed(0)
    values = torch.randn(60, 4)
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(values, values[:, :3].argmax(1)), batch_size=20
    )
    module = Classifier(16, nn.CrossEntropyLoss())
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=20, logger=False, default_root_dir=tmp_path, enable_progress_bar=False
    )
    trainer.fit(module, batches)
    rows = spark.createDataFrame([(row.tolist(),) for row in values.double()], "features array<double>")
    model = TorchModel.from_module(
        module, example=rows, outputs="class", labels=LABELS, probabilityCol="probability"
    )
    assert module.trainer is trainer, "the module is still Lightning's"
    with torch.no_grad():
        expected = module.eval()(values)
    assert (expected.argmax(1) == values[:, :3].argmax(1)).float().mean() > 0.9
    model.write().overwrite().save(str(tmp_path / "model"))
    for made in (model, TorchModel.load(str(tmp_path / "model"))):
        scored = made.transform(rows).collect()
        assert [row["prediction"] for row in scored] == [LABELS[i] for i in expected.argmax(1)]
        np.testing.assert_allclose([row["probability"] for row in scored], expected.softmax(1), rtol=1e-4)


def test_module_with_named_inputs_and_outputs_predicts_text_of_any_length(texts) -> None:
    module = Words()
    model = TorchModel.from_module(
        module,
        example=texts,
        featuresCol="text",
        passFeaturesBy="name",
        prepareFeatures=tokenize,
        outputs={"logits": "class", "embedding": "value"},
        labels={"logits": LABELS},
    )
    scored = model.transform(texts).orderBy("id").collect()
    assert scored[1]["prediction"] is None
    with torch.no_grad():
        expected = module(input_ids=torch.tensor(tokenize({"text": ["four five six"]})["input_ids"]))
    assert scored[3]["prediction"]["logits"] == LABELS[int(expected["logits"].argmax())]
    np.testing.assert_allclose(scored[3]["prediction"]["embedding"], expected["embedding"][0], rtol=1e-5)
    first = TorchModel.from_module(
        module,
        example=texts,
        featuresCol="text",
        passFeaturesBy="name",
        prepareFeatures=tokenize,
        outputs="class",
    )
    assert first.transform(texts).orderBy("id").first()["prediction"] in (0.0, 1.0, 2.0)


@pytest.mark.slow_on("connect")
def test_a_program_in_a_file_predicts_is_saved_and_is_what_export_writes(spark, tmp_path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)).eval()
    rows = spark.createDataFrame([([1.0, 2.0],), ([3.0, 5.0],), ([0.5, 1.0],)], "features array<double>")
    with torch.no_grad():
        expected = module(torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.5, 1.0]]))
    vectors = rows.withColumn("features", array_to_vector("features"))
    given = TorchModel.from_module(module, example=vectors)
    given.export((tmp_path / "net.pt2").as_uri())
    given.export(str(tmp_path / "again.pt2"), example=vectors)
    given.write().save(str(tmp_path / "given"))
    TorchModel.load(str(tmp_path / "given")).export(str(tmp_path / "loaded"), format="export")
    model = TorchModel.from_module(str(tmp_path / "net.pt2"), example=rows)
    model.write().save(str(tmp_path / "saved"))
    scored = TorchModel.load(str(tmp_path / "saved")).transform(rows).collect()
    np.testing.assert_allclose([row["prediction"] for row in scored], expected, rtol=1e-5)
    rows_at_once = {0: torch.export.Dim("rows", max=2)}
    few = torch.export.export(module, (torch.zeros(2, 2),), dynamic_shapes=(rows_at_once,))
    assert TorchModel.from_module(few, example=rows).saved.signature.max_batch_size == 2
    with pytest.raises(DataError, match="There is no column 'features'"):
        given.export(str(tmp_path / "net.onnx"), example=rows.select(F.lit(1).alias("other")))


def test_a_module_is_logged_with_example_rows(spark, tracked: Path) -> None:
    import mlflow

    module, rows = nn.Linear(2, 3), spark.createDataFrame([([1.0, 2.0],)], "features array<double>")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        uri = sparkdl.mlflow.log_model(module, example=rows, outputs="class", labels=LABELS).model_uri
    assert not any("input example" in str(warning.message) for warning in caught)
    served = mlflow.pyfunc.load_model(uri)
    (given,) = served.metadata.load_input_example(mlflow.artifacts.download_artifacts(uri))["features"]
    assert list(given) == [1.0, 2.0]
    model = sparkdl.mlflow.load_model(uri)
    assert model.labels == LABELS
    with pytest.raises(ParamError, match="was not logged by mlflow.pytorch.*sparkdl.mlflow.load_model"):
        TorchModel.from_module(uri, example=rows)
    with pytest.raises(ParamTypeError, match="arguments of TorchModel.from_module.*example=df"):
        sparkdl.mlflow.log_model(module)
    with pytest.raises(ParamTypeError, match="got outputs, which are for a torch module"):
        sparkdl.mlflow.log_model(model, outputs="class")


def trained_by_a_runner() -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    network = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    inputs = torch.randn(64, 2)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), (inputs[:, 0] > 0).long()).backward()
        optimizer.step()
    return network.module


@pytest.mark.any_spark_will_do
def test_a_module_that_a_function_of_a_runner_trained_predicts(spark) -> None:
    module = Runner(num_workers=2, local=True).run(trained_by_a_runner)
    rows = spark.createDataFrame([([2.0, 0.1],), ([-2.0, 0.1],)], "features array<double>")
    model = TorchModel.from_module(module, example=rows, outputs="class", labels=["left", "right"])
    assert [row["prediction"] for row in model.transform(rows).collect()] == ["right", "left"]


class Kinds(nn.Module):
    """Returns features and scores, in a dict or a tuple."""

    def __init__(self, names: tuple[str, ...] = ("features", "scores")) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.scores, self.names = nn.Linear(2, 5), nn.Linear(5, 3), names

    def forward(self, rows: torch.Tensor) -> Any:
        features = self.features(rows)
        return dict(zip(self.names, (features, self.scores(features)), strict=True))


PAIRS = [[1.0, 2.0], [3.0, -5.0], [-0.5, 1.0]]


@pytest.mark.parametrize(("names", "outputs"), [(("a", "logits"), "class"), (("a", "b"), {"b": "class"})])
def test_the_output_of_a_dict_that_is_predicted_has_a_name(spark, names, outputs) -> None:
    rows = spark.createDataFrame([(pair,) for pair in PAIRS], "features array<double>").coalesce(1)
    module = Kinds(names)
    model = TorchModel.from_module(module, example=rows, outputs=outputs, labels=np.array(LABELS))
    with torch.no_grad():
        expected = module(torch.tensor(PAIRS))[names[1]].argmax(1)
    assert model.labels == LABELS
    assert [row["prediction"] for row in model.transform(rows).collect()] == [LABELS[i] for i in expected]


def test_probabilities_of_classes_are_the_outputs_themselves(spark) -> None:
    rows = spark.createDataFrame([(pair,) for pair in PAIRS], "features array<double>").coalesce(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1))
    model = TorchModel.from_module(
        module, example=rows, outputs="class_probability", labels=["no", "yes"], probabilityCol="p"
    )
    with torch.no_grad():
        expected = module(torch.tensor(PAIRS))
    scored = model.transform(rows).collect()
    np.testing.assert_allclose([row["p"].toArray() for row in scored], expected, rtol=1e-5)
    assert [row["prediction"] for row in scored] == [("no", "yes")[i] for i in expected.argmax(1)]


class MeanOfRows(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(0)


def test_modules_and_arguments_that_do_not_fit_are_refused_with_what_to_do(spark) -> None:
    rows = spark.createDataFrame(
        [([1.0, 2.0], None), ([3.0, 5.0], None)], "features array<double>, none double"
    )
    module = nn.Linear(2, 3)
    softmax, far = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1)), nn.Linear(2, 1)
    nn.init.constant_(far.bias, 9)
    refused = [
        (ParamTypeError, "Call TorchModel.from_module", lambda: TorchModel(module)),
        (
            ParamError,
            "both make the module's inputs",
            lambda: TorchModel.from_module(module, example=rows, imageTransform=len, prepareFeatures=len),
        ),
        (
            ParamError,
            "images of one column",
            lambda: TorchModel.from_module(module, example=rows, imageTransform=len, featuresCol=["a", "b"]),
        ),
        (
            ParamError,
            "one of class,",
            lambda: TorchModel.from_module(module, example=rows, outputs="classes"),
        ),
        (
            ParamError,
            "labels has 2 entries",
            lambda: TorchModel.from_module(module, example=rows, outputs="class", labels=[0, 1]),
        ),
        (
            ParamError,
            "probabilityCol",
            lambda: TorchModel.from_module(module, example=rows, probabilityCol="p"),
        ),
        (
            ParamError,
            "outputs names one, two",
            lambda: TorchModel.from_module(module, example=rows, outputs={"one": "value", "two": "value"}),
        ),
        *(
            (
                kind,
                words,
                lambda outputs=outputs, labels=labels, of=of: TorchModel.from_module(
                    of, example=rows, outputs=outputs, labels=labels
                ),
            )
            for kind, words, outputs, labels, of in (
                (ParamError, "'class' for 'prediction', .*'binary_logit'", "class", None, nn.Linear(2, 1)),
                (ParamError, "add up to 1.*'class_probability'", "class", None, softmax),
                (ParamError, "add up to 1.*'class_probability'", "binary_probability", None, softmax),
                (ParamError, "no probabilities.*'class'", "class_probability", None, module),
                (ParamError, "not all between 0 and 1.*'binary_logit'", "binary_probability", None, far),
                (ParamError, "two labels per row.*'class'", "binary_logit", ["a", "b"], nn.Linear(2, 2)),
                (ParamError, "tensors features, scores", "class", None, Kinds()),
                (ParamTypeError, "each once", "class", ["a", "b", "a"], module),
                (ParamTypeError, "all strings, booleans or whole", "class", ["a", "b", 1], module),
                (ParamError, "labels has 'zzz'.*Give a list", "class", {"zzz": LABELS}, module),
            )
        ),
        (ParamError, "beside another", lambda: TorchModel.from_module(MeanOfRows(), example=rows)),
        (DataError, "does not fit the model", lambda: TorchModel.from_module(nn.Linear(3, 1), example=rows)),
        (DataError, "no such column", lambda: TorchModel.from_module(module, example=rows, featuresCol="x")),
        (
            DataError,
            "no row without a null",
            lambda: TorchModel.from_module(module, example=rows, featuresCol="none"),
        ),
    ]
    for kind, words, make in refused:
        with pytest.raises(kind, match=words):
            make()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_trained_model_of_transformers_predicts_as_its_pipeline(texts, tmp_path, kind) -> None:
    import transformers

    folder = write_folder(tmp_path / "trained", kind=kind, id2label={i: "abcdefg"[i] for i in range(7)})
    model = TorchModel.from_pretrained(folder, example=texts, probabilityCol="probability")
    assert model.labels == list("abcdefg")
    assert model.getPredictionBatchSize() == 128
    rows = model.transform(texts).orderBy("id").collect()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder).float()
    network.config.pad_token_id = tokenizer.pad_token_id
    pipeline = transformers.pipeline("text-classification", model=network, tokenizer=tokenizer, top_k=None)
    assert rows[1]["prediction"] is None
    for row in (rows[0], rows[2]):  # with fewer tokens than the model takes
        (scores,) = pipeline([row["text"]], truncation=True)
        expected = {item["label"]: item["score"] for item in scores}
        assert row["prediction"] == max(expected, key=lambda label: expected[label])
        np.testing.assert_allclose(row["probability"].toArray(), [expected[x] for x in "abcdefg"], rtol=1e-4)
    embedding = TorchModel.from_pretrained(folder, example=texts, task="feature-extraction")
    vectors = [row["prediction"] for row in embedding.transform(texts).orderBy("id").collect()]
    assert [vector and len(vector) for vector in vectors] == [4, None, 4, 4]
    body = transformers.AutoModel.from_pretrained(folder).float()
    pipeline = transformers.pipeline("feature-extraction", model=body, tokenizer=tokenizer)
    for row, vector in ((rows[0], vectors[0]), (rows[2], vectors[2])):
        states = np.array(pipeline(row["text"])[0])  # (tokens, hidden size)
        np.testing.assert_allclose(vector, states.mean(axis=0), rtol=1e-4, atol=1e-6)
    with pytest.raises(ParamError, match="takes 'text-classification', 'feature-extraction'"):
        TorchModel.from_pretrained(folder, example=texts, task="translation")


def test_a_model_that_was_not_trained_for_a_task_is_refused(texts, tmp_path) -> None:
    import transformers

    folder = write_folder(tmp_path / "body", kind="bert")
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(ParamError, match=r"not trained for text-classification: .*classifier.bias"):
        TorchModel.from_pretrained(folder, example=texts, task="text-classification")


@pytest.mark.slow_on("connect")
def test_a_trained_language_model_continues_texts(texts, tmp_path, monkeypatch) -> None:
    import transformers

    folder = write_folder(tmp_path / "written", kind="gpt2")
    config = transformers.AutoConfig.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    network.save_pretrained(folder)
    model = TorchModel.from_pretrained(folder, example=texts, maxNewTokens=3, predictionCol="more")
    assert isinstance(model, LanguageModelModel)
    assert model.getPredictionBatchSize() == model.saved.signature.batch_size == 32
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("one two", return_tensors="pt")
    tokens = network.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert model.transform(texts).orderBy("id").first()["more"] == model.generate("one two") == expected
    sent = Mock(wraps=torch_model.prediction_udf)
    monkeypatch.setattr(torch_model, "prediction_udf", sent)
    model.transform(texts)
    model.copy().transform(texts, {model.predictionCol: "other"})
    model.transform(texts, {model.maxNewTokens: 4})
    first, copied, longer = (call.args[0].module_key for call in sent.call_args_list)
    assert first == copied != longer
    for setting in ({"labels": ["a"]}, {"weights": "file"}):
        with pytest.raises(ParamError, match=f"{next(iter(setting))} is .*continues texts"):
            TorchModel.from_pretrained(folder, example=texts, **setting)


@pytest.fixture(scope="module")
def images(spark, tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    numbers = np.random.default_rng(0)
    for number in range(3):
        pixels = numbers.integers(0, 256, (180 + 20 * number, 200, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return spark.read.format("binaryFile").load(str(folder)).orderBy("path")


def scores_of(network: nn.Module, transform: Any, images: Any) -> torch.Tensor:
    from PIL import Image

    opened = [Image.open(BytesIO(row["content"])).convert("RGB") for row in images.collect()]
    with torch.no_grad():
        return network.eval()(torch.stack([transform(image) for image in opened]))


@pytest.mark.slow_on("connect")
def test_a_trained_network_of_timm_scores_a_folder_of_images(images, tmp_path) -> None:
    import timm

    network = timm.create_model("test_resnet", num_classes=5)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    expected = scores_of(network, transform, images)
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    timm.models.save_for_hf(
        network, str(tmp_path / "folder"), {"label_names": list("abcde")}, safe_serialization=True
    )
    settings = {"example": images, "rawPredictionCol": "scores"}
    by_name = TorchModel.from_pretrained(
        "timm:test_resnet", weights=str(tmp_path / "weights.pt"), labels=list("abcde"), **settings
    )
    own = TorchModel.from_module(
        network,
        imageTransform=transform,
        featuresCol="content",
        outputs="class",
        labels=list("abcde"),
        **settings,
    )
    folder = TorchModel.from_pretrained(str(tmp_path / "folder"), **settings)
    in_structs = images.selectExpr("path as id", "struct(path, content as bytes) as content")
    for model, frame in ((by_name, images), (own, in_structs), (folder, images)):
        rows = model.transform(frame).collect()
        assert [row["prediction"] for row in rows] == ["abcde"[index] for index in expected.argmax(1)]
        np.testing.assert_allclose([row["scores"].toArray() for row in rows], expected, rtol=1e-4, atol=1e-5)
        assert model.getPredictionBatchSize() == model.saved.signature.batch_size == 64


def test_a_trained_image_classifier_of_transformers_predicts_with_its_processor(images, tmp_path) -> None:
    import transformers
    from PIL import Image

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, id2label={0: "cat", 1: "dog"})
    network = transformers.ViTForImageClassification(config)
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    for part in (network, processor):
        part.save_pretrained(tmp_path)
    model = TorchModel.from_pretrained(str(tmp_path), example=images, probabilityCol="probability")
    pipeline = transformers.pipeline("image-classification", model=network, image_processor=processor)
    rows = model.transform(images).collect()
    for row in rows:
        best = pipeline(Image.open(BytesIO(row["content"])))[0]
        assert row["prediction"] == best["label"]
        np.testing.assert_allclose(row["probability"].toArray().max(), best["score"], rtol=1e-4)

    embeddings = TorchModel.from_pretrained(
        str(tmp_path), task="image-feature-extraction", example=images
    ).transform(images)
    for row in embeddings.collect():
        inputs = processor(Image.open(BytesIO(row["content"])), return_tensors="pt")
        with torch.no_grad():
            states = network.eval().vit(**inputs).last_hidden_state
        np.testing.assert_allclose(row["prediction"], states[0].mean(dim=0), rtol=1e-3, atol=1e-5)
