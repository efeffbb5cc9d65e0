"""Models of transformers used directly, without a wrapping module."""

from __future__ import annotations

import pytest
import torch

from sparkdl.estimators import TorchModel
from tests.spark.estimators.estimator_examples import make_estimator

transformers = pytest.importorskip("transformers")


def own_loss(model, batch):
    found = model(**batch)
    return found.loss, found.logits


def classifier(spark, tmp_path, **changes):
    """Rows, and an estimator of a small BERT for them."""
    rows = [([2, 3 + index % 2, 5, 0], [1, 1, 1, 0], index % 2) for index in range(64)]
    frame = spark.createDataFrame(
        rows, "input_ids array<long>, attention_mask array<long>, labels long"
    ).coalesce(1)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(
        transformers.BertConfig(
            vocab_size=8,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
            num_labels=2,
        )
    )
    estimator = make_estimator(
        tmp_path,
        model=model,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        featuresCol=["input_ids", "attention_mask"],
        passFeaturesBy="name",
        labelCol="labels",
        **changes,
    )
    return frame, estimator


@pytest.mark.any_spark_will_do
def test_classifier_of_transformers_is_trained_and_predicts(spark, tmp_path):
    frame, estimator = classifier(spark, tmp_path, epochs=10)
    fitted = estimator.fit(frame)
    assert fitted.history[-1].loss < 0.1
    assert fitted.transform(frame).filter("prediction = labels").count() == 64


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_classifier_of_transformers_is_trained_by_a_loss_or_by_its_own_loss(spark, tmp_path):
    frame, estimator = classifier(spark, tmp_path, epochs=10)
    fitted = estimator.fit(frame)
    assert fitted.history[-1].loss < 0.1
    fitted.write().save(str(tmp_path / "model"))
    predicted = TorchModel.load(str(tmp_path / "model")).transform(frame)
    assert predicted.filter("prediction = labels").count() == 64
    of_its_own = estimator.copy({estimator.epochs: 1}).setLoss(None).setTrainStep(own_loss).fit(frame)
    assert of_its_own.history[0].loss == pytest.approx(fitted.history[0].loss, rel=1e-4)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_plans_of_transformers_divide_a_model_as_one_worker_computes_it(spark, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (16, 17), generator=generator).tolist()
    frame = spark.createDataFrame([(row[:-1], row[1:]) for row in tokens], "x array<long>, y array<long>")

    def trained(parallelism: dict[str, int] | None) -> torch.nn.Module:
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            pad_token_id=None,
            tie_word_embeddings=True,
        )
        estimator = make_estimator(
            tmp_path,
            model=transformers.LlamaForCausalLM(config),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3),
            loss=next_token_loss,
            featuresCol="x",
            labelCol="y",
            batchSize=8,
            epochs=1,
            shuffle=False,
            numWorkers=1 if parallelism is None else 2,
            **({} if parallelism is None else {"parallelism": parallelism}),
        )
        return estimator.fit(frame.coalesce(1)).module

    alone = dict(trained(None).named_parameters())
    for parallelism in ({"tensor": 2}, {"pipeline": 2}):
        for name, parameter in trained(parallelism).named_parameters():
            torch.testing.assert_close(parameter, alone[name], rtol=1e-4, atol=1e-6, msg=name)
