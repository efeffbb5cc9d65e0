"""A language model is fitted on a column of texts, continues texts, and is tracked, saved and served."""

from __future__ import annotations

import math
from pathlib import Path

import mlflow
import pytest

from sparkdl.errors import CheckpointError, DataError, ParamError
from sparkdl.estimators import LanguageModel, LanguageModelModel, PerplexityEvaluator

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


@pytest.mark.slow_elsewhere
def test_language_model_continues_texts_and_is_saved_and_served(spark, texts, tmp_path, tracked):
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
    logged = mlflow.get_run(model.summary.run_id).data.params
    assert (logged["embeddingSize"], logged["maxLength"], logged["epochs"]) == ("64", "64", "5")
    example = served.metadata.load_input_example(mlflow.artifacts.download_artifacts(model.summary.model_uri))
    assert example["text"].tolist() == [texts.first()["text"]]
    assert len(served.predict(example)) == 1
    answer = served.predict({"text": [start]})
    assert list(answer.iloc[0]) == [continued]
    assert "string" in str(served.metadata.signature.outputs)


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"context": 2, "data": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_that_share_the_decoder_learn_the_same(texts, tmp_path, sizes):
    rows = texts.coalesce(1)
    changes = {"epochs": 1}
    shared = make(tmp_path, parallelism=sizes, **changes)
    assert all(parameter.is_meta for parameter in shared._plan_rows(rows)[0].getModel().parameters())
    alone = make(tmp_path, numWorkers=1, **changes).fit(rows)
    assert shared.fit(rows).history[0].loss == pytest.approx(alone.history[0].loss, rel=1e-4)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_a_folder_of_hugging_face_is_tuned_by_adapters(spark, texts, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from sparkdl.networks.language import learn_tokenizer

    learned = learn_tokenizer([SENTENCE.format(index) for index in range(9)], 300)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned.library_tokenizer, eos_token="<|end|>"
    )
    folder = str(tmp_path / "folder")
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    changes = {"vocabularySize": None, "embeddingSize": None, "numLayers": None, "pretrained": folder}
    tuned = make(tmp_path, loraRank=4, epochs=2, checkpointDir=str(tmp_path / "run"), **changes)
    assert all(parameter.is_meta for parameter in tuned._plan_rows(texts)[0].getModel().parameters())
    model = tuned.fit(texts)
    losses = [record.loss for record in model.history]
    assert losses[1] < losses[0]
    assert type(model.module.decoder).__name__ == "LlamaForCausalLM"  # the adapters are in its weights
    assert isinstance(model.generate("the cat"), str)
    # Tokens of the folder's tokenizer are accepted like texts, and the model learns the same from them.
    tokens = spark.createDataFrame(
        [(tokenizer(row["text"])["input_ids"],) for row in texts.collect()], "text array<long>"
    )
    rows = texts.coalesce(1)
    alone = make(tmp_path, loraRank=4, epochs=2, numWorkers=1, **changes).fit(rows)
    for sizes in ({"pipeline": 2}, {"context": 2, "data": 1}):
        shared = make(tmp_path, loraRank=4, epochs=2, parallelism=sizes, **changes).fit(rows)
        assert shared.history[1].loss == pytest.approx(alone.history[1].loss, rel=1e-4)
    sharded = make(tmp_path, loraRank=4, epochs=2, parallelism={"shard": 2}, **changes)
    same = sharded.fit(tokens.repartition(2))
    assert same.history[1].loss == pytest.approx(losses[1], rel=0.05)
    assert same.generate("the cat") == tokenizer.decode(same.generate(tokenizer("the cat")["input_ids"]))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)  # with other weights
    with pytest.raises(CheckpointError, match="initial weights: model.safetensors was .* and is "):
        tuned.fit(texts)


OF_TOKENS = {"featuresCol": "tokens", "vocabularySize": 40, "endToken": 2, "maxLength": 32}


def tokens_of(spark, num_rows):
    rows = [([3 + index % 4, *range(20, 30)],) for index in range(num_rows)]
    return spark.createDataFrame(rows, "tokens array<int>").repartition(2)


@pytest.mark.any_spark_will_do
def test_token_arrays_are_planned_and_numbers_beyond_the_vocabulary_are_refused(spark, tmp_path):
    tokens = tokens_of(spark, 20)
    planned, rows = make(tmp_path, **OF_TOKENS)._plan_rows(tokens)
    assert rows.num_rows > 0
    assert planned.getModel() is not None
    with pytest.raises(ParamError, match="vocabularySize is not set"):
        make(tmp_path, **{**OF_TOKENS, "vocabularySize": None}).fit(tokens)
    with pytest.raises(DataError, match="the token 29, and there are 29 tokens"):
        make(tmp_path, **{**OF_TOKENS, "vocabularySize": 29}).fit(tokens)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_token_arrays_are_learned_and_continued(spark, tmp_path):
    tokens = tokens_of(spark, 200)
    model = make(tmp_path, **OF_TOKENS).fit(tokens)
    assert model.generate([3, 20, 21, 22]) == list(range(23, 30))  # followed by the end token
    asked = spark.createDataFrame([([3, 20, 21],), (None,)], "tokens array<int>")
    found = {
        row["tokens"] and tuple(row["tokens"]): row["prediction"] for row in model.transform(asked).collect()
    }
    assert found == {(3, 20, 21): list(range(22, 30)), None: None}
    assert model.perplexity(tokens) < 2
    model.write().save(str(tmp_path / "model"))
    assert LanguageModelModel.load(str(tmp_path / "model")).generate([3, 20]) == list(range(21, 30))
    with pytest.raises(ParamError, match="has no tokenizer"):
        model.generate("text")
    with pytest.raises(DataError, match="holds string"):
        model.transform(spark.createDataFrame([("a",)], "tokens string"))


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_epoch_draws_rows_of_each_corpus_by_its_weight(spark, tmp_path):
    rows = [([3 + index % 4] * 15, "few" if index % 8 == 0 else "many") for index in range(160)]
    tokens = spark.createDataFrame(rows, "tokens array<int>, corpus string").repartition(2)
    changes = {
        "featuresCol": "tokens",
        "vocabularySize": 10,
        "endToken": 2,
        "maxLength": 16,
        "epochs": 1,
        "corpusCol": "corpus",
        "corpusWeights": {"few": 1, "many": 3},
    }
    # 140 rows of "many", and one row of "few" for every three of them.
    model = make(tmp_path, **changes).fit(tokens)
    assert model.history[0].rows == 187
    short = make(tmp_path, **changes, epochRows=40, validationFraction=0.1).fit(tokens)
    assert short.history[0].rows == 40
    _, estimated = make(tmp_path, **changes, validationFraction=0.1)._plan_rows(tokens)
    assert estimated.num_marked == 16
    assert estimated.num_rows - 16 == pytest.approx(168, abs=1)  # 4/3 of the other rows of "many"
    assert "val_loss" in short.history[0].metrics
    for weights, message in (
        ({"few": 1}, "holds 'many', which has no weight"),
        ({"few": 1, "many": 3, "none": 1}, "'none' has a weight of 1, and no rows"),
    ):
        with pytest.raises(DataError, match=message):
            make(tmp_path, **{**changes, "corpusWeights": weights}).fit(tokens)


OF_A_FOLDER = {
    "vocabularySize": None,
    "embeddingSize": None,
    "numLayers": None,
    "pretrained": str(Path(__file__).parent),
}
REFUSED = [
    ({"embeddingSize": 65}, "width 65 cannot have 4 heads"),
    ({"loraRank": 4}, "loraRank is set, and pretrained is not"),
    (
        {**OF_A_FOLDER, "loraRank": 4, "parallelism": {"tensor": 2}},
        "adapters do not support tensor parallelism",
    ),
    (OF_A_FOLDER, "holds no causal language model"),
    ({"weightCol": "w"}, "weightCol has no meaning"),
    ({"vocabularySize": 100}, "Set it to 257 or more"),
    ({"endToken": 7}, "Leave endToken out"),
    ({"endToken": 400}, "endToken is 400, and vocabularySize 400"),
]


@pytest.mark.any_spark_will_do
def test_invalid_params_and_rows_of_a_language_model_are_refused(spark, texts, tmp_path):
    for changes, message in REFUSED:
        with pytest.raises(ParamError, match=message):
            make(tmp_path, **changes).fit(texts)
    for rows, type_of_spark, message in (
        ([("a",), (None,)], "string", "holds null"),
        ([(0.5,)], "double", "holds double, and LanguageModel takes"),
    ):
        with pytest.raises(DataError, match=message):
            make(tmp_path).fit(spark.createDataFrame(rows, f"text {type_of_spark}"))


@pytest.mark.any_spark_will_do
def test_a_perplexity_above_all_numbers_is_infinite(spark):
    def perplexity(*rows):
        return PerplexityEvaluator().evaluate(
            spark.createDataFrame([(row,) for row in rows], "prediction array<float>")
        )

    assert perplexity([-4.0, 2.0], None, [0.0, 0.0], [-6.0, 3.0]) == pytest.approx(math.exp(2))
    assert perplexity([-1e6, 2.0]) == math.inf
    with pytest.raises(DataError, match="no perplexity"):
        perplexity([0.0, 0.0])
