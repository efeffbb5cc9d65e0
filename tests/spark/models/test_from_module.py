"""Models of modules that were trained elsewhere, on a real session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.feature import VectorAssembler
from torch import nn

import sparkdl.mlflow
from sparkdl.errors import DataError, ParamError, ParamTypeError
from sparkdl.estimators import TorchModel
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


class MeanOfRows(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(0)


def test_modules_and_arguments_that_do_not_fit_are_refused_with_what_to_do(spark) -> None:
    rows = spark.createDataFrame(
        [([1.0, 2.0], None), ([3.0, 5.0], None)], "features array<double>, none double"
    )
    module = nn.Linear(2, 3)
    refused = [
        (ParamTypeError, "Call TorchModel.from_module", lambda: TorchModel(module)),
        (ParamTypeError, "got builtins.str", lambda: TorchModel.from_module("net", example=rows)),
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
        (ParamError, "beside another", lambda: TorchModel.from_module(MeanOfRows(), example=rows)),
        (DataError, "does not fit the model", lambda: TorchModel.from_module(nn.Linear(3, 1), example=rows)),
        (DataError, "no such column", lambda: TorchModel.from_module(module, example=rows, featuresCol="x")),
        (DataError, "no rows", lambda: TorchModel.from_module(module, example=rows, featuresCol="none")),
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
    with pytest.raises(ParamError, match="takes 'text-classification' or 'feature-extraction'"):
        TorchModel.from_pretrained(folder, example=texts, task="translation")


def test_a_model_that_was_not_trained_for_a_task_is_refused(texts, tmp_path) -> None:
    import transformers

    folder = write_folder(tmp_path / "body", kind="bert")
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(ParamError, match=r"not trained for text-classification: .*classifier.bias"):
        TorchModel.from_pretrained(folder, example=texts)
