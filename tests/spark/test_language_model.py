"""A language model is fitted on a column of texts, speaks, and is tracked, saved and served."""

from __future__ import annotations

import math

import mlflow
import pytest

from sparkdl.errors import DataError, ParamError
from sparkdl.estimators import LanguageModel, LanguageModelModel

SENTENCE = "the cat number {} sat on the mat and looked at the dog."


@pytest.fixture(scope="module")
def texts(spark):
    return spark.createDataFrame(
        [(SENTENCE.format(index),) for index in range(200)], "text string"
    ).repartition(2)


def make(tmp_path, **changes):
    params = {
        "featuresCol": "text",
        "vocabularySize": 400,
        "embeddingSize": 64,
        "numLayers": 2,
        "maxLength": 64,
        "epochs": 5,
        "learningRate": 0.01,
        "maxNewTokens": 24,
        "numWorkers": 2,
        "seed": 1,
        "store": str(tmp_path / "store"),
        "tracking": "off",
        "showProgress": False,
    }
    return LanguageModel(**{**params, **changes})


def test_a_model_of_texts_speaks_and_is_saved_and_served(spark, texts, tmp_path, tracked):
    model = make(tmp_path, tracking="on").fit(texts)
    losses = [record.loss for record in model.history]
    assert losses[-1] < losses[0] / 2
    start = "the cat number 7 sat on"
    continued = model.generate(start)
    assert "the mat" in continued
    asked = spark.createDataFrame([(start,), ("",), (None,)], "text string")
    found = {row["text"]: row["prediction"] for row in model.transform(asked).collect()}
    assert found[start] == continued
    assert isinstance(found[""], str)
    assert found[None] is None
    assert model.perplexity(texts) < math.exp(losses[0])
    embedded = model.copy({model.output: "embedding"}).transform(asked).first()
    assert len(embedded["prediction"]) == 64
    model.write().save(str(tmp_path / "model"))
    loaded = LanguageModelModel.load(str(tmp_path / "model"))
    assert loaded.generate(start) == continued
    served = mlflow.pyfunc.load_model(model.summary.model_uri)
    answer = served.predict({"text": [start]})
    assert list(answer.iloc[0]) == [continued]
    assert "string" in str(served.metadata.signature.outputs)


@pytest.mark.any_spark_will_do
def test_ranks_that_share_the_decoder_learn_the_same(texts, tmp_path):
    rows = texts.coalesce(1)
    expected = make(tmp_path, epochs=1, numWorkers=1).fit(rows)
    for sizes in ({"tensor": 2}, {"context": 2, "data": 1}):
        found = make(tmp_path, epochs=1, parallelism=sizes).fit(rows)
        assert found.history[0].loss == pytest.approx(expected.history[0].loss, rel=1e-4), sizes
    untied = {"tieEmbeddings": False, "epochs": 1}
    expected = make(tmp_path, numWorkers=1, **untied).fit(rows)
    found = make(tmp_path, parallelism={"pipeline": 2}, **untied).fit(rows)
    assert found.history[0].loss == pytest.approx(expected.history[0].loss, rel=1e-4)


@pytest.mark.any_spark_will_do
def test_a_folder_of_hugging_face_is_tuned_by_adapters(texts, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from sparkdl.networks.language import learn_tokenizer

    learned = learn_tokenizer([SENTENCE.format(index) for index in range(9)], 300)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, eos_token="<|end|>")
    folder = str(tmp_path / "folder")
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    changes = {"vocabularySize": None, "embeddingSize": None, "numLayers": None, "pretrained": folder}
    model = make(tmp_path, loraRank=4, epochs=2, **changes).fit(texts)
    losses = [record.loss for record in model.history]
    assert losses[1] < losses[0]
    assert type(model.module.decoder).__name__ == "LlamaForCausalLM"  # the adapters are in its weights
    assert isinstance(model.generate("the cat"), str)


@pytest.mark.any_spark_will_do
def test_what_cannot_be_learned_is_refused(spark, texts, tmp_path):
    with pytest.raises(ParamError, match="width 65 cannot have 4 heads"):
        make(tmp_path, embeddingSize=65).fit(texts)
    with pytest.raises(ParamError, match="loraRank is set, and pretrained is not"):
        make(tmp_path, loraRank=4).fit(texts)
    with pytest.raises(ParamError, match="weightCol has no meaning"):
        make(tmp_path, weightCol="w").fit(texts)
    with pytest.raises(DataError, match="null or no strings"):
        make(tmp_path).fit(spark.createDataFrame([("a",), (None,)], "text string"))
    with pytest.raises(ParamError, match="holds no causal language model"):
        make(tmp_path, vocabularySize=None, embeddingSize=None, numLayers=None, pretrained=str(tmp_path)).fit(
            texts
        )
