"""Values that TextClassifier computes from rows before a fit, and what it refuses, on rows in a folder."""

from __future__ import annotations

import json
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkdl.data import scan_dataset
from sparkdl.errors import DataError, ParamError, ParamTypeError
from sparkdl.estimators import LanguageModel, TextClassifier
from sparkdl.estimators.fit.inputs import first_rows, prepare_fit
from sparkdl.estimators.ready_made.estimator import answer_row
from sparkdl.estimators.ready_made.text import texts_with_words
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel, load_model, save_model
from sparkdl.model.served_model import PyfuncModel
from sparkdl.networks.adapters import merge_adapters
from tests.unit.estimators.fit_examples import learn
from tests.unit.networks.pretrained_folders import NUM_TOKENS, change_config, leave_out, write_folder

TEXTS = ["b a a a", "B c", "d, c", "", "e a d.", "f A d!"] * 5
SMALL = {"embeddingSize": 8, "numLayers": 1, "numHeads": 2}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    table = pa.table(
        {
            "text": TEXTS,
            "number": np.arange(30) * 1.0,
            "words": [["a", "b"]] * 30,
            "bytes": [b"a text"] * 30,
            "unique": [f"only{index}" for index in range(30)],
            "label": np.arange(30) % 3,
            "name": [("ant", "bee")[index % 2] for index in range(30)],
        }
    )
    folder = tmp_path_factory.mktemp("rows") / "rows"
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet", row_group_size=7)
    return scan_dataset(str(folder))


def test_path_of_initial_weights_is_that_of_the_pretrained_folder():
    for path in (None, "/models/bert"):
        estimator = TextClassifier(featuresCol="text", pretrained=path)
        assert estimator._params_of_fit()._path_of_initial_weights() == path


def test_vocabulary_is_ordered_by_document_frequency_then_alphabetically(dataset):
    inputs = learn(TextClassifier(featuresCol="text", **SMALL), dataset)
    assert inputs.spec.inputs.prepare.tokenizer.words == ("a", "d", "b", "c", "!", ",", ".", "e", "f")
    few = learn(TextClassifier(featuresCol="text", vocabularySize=3, **SMALL), dataset)
    assert few.spec.inputs.prepare.tokenizer.words == ("a", "d", "b")
    assert few.spec.model.tokens.num_embeddings == 6


def test_vocabulary_is_taken_from_the_training_rows(dataset):
    inputs = learn(TextClassifier(featuresCol="text", validationFraction=0.5, **SMALL), dataset)
    counts = texts_with_words(dataset, "text", inputs.spec.training_rows)
    assert counts.total() < texts_with_words(dataset, "text", None).total()
    frequent = {word for word, count in counts.items() if count > 1}
    assert set(inputs.spec.inputs.prepare.tokenizer.words) == frequent


def test_word_counts_of_parts_add_up_to_those_of_all_rows(dataset):
    parts = [texts_with_words(dataset, "text", None, part, 4) for part in range(4)]
    assert sum(parts, Counter()) == texts_with_words(dataset, "text", None)


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
def test_a_saved_model_is_served_strings_and_answers_for_one_row(dataset, tmp_path, tokenizer):
    estimator = TextClassifier(featuresCol="text", labelCol="name", tokenizer=tokenizer, **SMALL)
    inputs = learn(estimator, dataset)
    model = SavedModel(inputs.spec.model, inputs.signature)
    save_model(model, tmp_path / "model")
    served = PyfuncModel(load_model(tmp_path / "model"))
    texts = ["a b c", "", "never seen ☃", "a " * 500]
    expected = Predictor(model).predict({"text": np.array(texts, dtype=object)})["name"].tolist()
    assert set(expected) <= {"ant", "bee"}
    assert served.predict({"text": texts})["prediction"].tolist() == expected
    assert [answer_row(model, text, "prediction") for text in texts] == expected
    with pytest.raises(DataError, match="Column 'text' holds null or NaN in 1 of"):
        served.predict({"text": ["a", None]})


def test_params_reach_network_and_inputs(dataset):
    sizes = {"maxLength": 9, "embeddingSize": 12, "numLayers": 3, "numHeads": 4, "dropout": 0.25}
    inputs = learn(TextClassifier(featuresCol="text", tokenizer="bytes", **sizes), dataset)
    network = inputs.spec.model
    assert (network.tokens.num_embeddings, network.tokens.embedding_dim) == (258, 12)
    assert (network.places.num_embeddings, inputs.spec.inputs.prepare.max_length) == (10, 9)
    assert (len(network.layers), network.layers[0].num_heads, network.dropout.p) == (3, 4, 0.25)
    assert network.head.out_features == 3


def test_first_weights_depend_on_the_seed(dataset):
    def first(seed):
        return learn(TextClassifier(featuresCol="text", seed=seed, **SMALL), dataset).spec.model.head.weight

    one = first(1)
    assert torch.equal(one, first(1))
    assert not torch.equal(one, first(2))


def learned(dataset, folder, **params):
    """The inputs of a fit of a pretrained model."""
    return learn(TextClassifier(featuresCol="text", pretrained=str(folder), **params), dataset)


@pytest.fixture
def pretrained(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    return write_folder(tmp_path / "pretrained")


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 1e-3),
        ({"pretrained": "/models/gpt"}, 5e-5),
        ({"pretrained": "/models/gpt", "learningRate": 0.1}, 0.1),
    ],
)
def test_a_pretrained_language_model_is_trained_at_a_rate_that_keeps_what_it_has_learned(options, rate):
    params = LanguageModel(featuresCol="text", **options)._params_of_fit()
    assert params.getOptimizer().keywords["lr"] == rate
    assert (params.getLearningRate(), type(params._caller)) == (rate, LanguageModel)


def test_a_pretrained_model_brings_its_tokenizer_and_gets_a_layer_for_the_classes(
    dataset, pretrained, tmp_path
):
    estimator = TextClassifier(featuresCol="text", labelCol="name", pretrained=pretrained)
    estimator._check_values()
    params = estimator._params_of_fit()
    assert params.getOptimizer().keywords["lr"] == 5e-5
    assert params.getLearningRate() == 5e-5
    assert estimator.getLearningRate() == 1e-3
    inputs = prepare_fit(params, dataset, estimator._learn(params, dataset, None))
    network = inputs.spec.model.model
    assert (network.score.out_features, network.score.weight.dtype) == (2, torch.float32)
    prepare = inputs.spec.inputs.prepare
    assert (prepare.tokenizer.pad_token, prepare.max_length) == ("<end>", 12)
    assert network.config.pad_token_id == prepare.tokenizer.eos_token_id
    assert [entry.name for entry in inputs.spec.inputs.inputs] == ["input_ids", "attention_mask"]
    model = SavedModel(inputs.spec.model, inputs.signature)
    save_model(model, tmp_path / "model")
    rows = {"text": np.array(["short", "a text of more letters than the model takes"], dtype=object)}
    answers = [
        Predictor(predicting).answer(rows, ("probability",))
        for predicting in (model, load_model(tmp_path / "model"))
    ]
    np.testing.assert_array_equal(*[answer["name"]["probability"] for answer in answers])


PADDINGS = {"xlnet": "left", "fnet": "full"}


@pytest.mark.parametrize(
    "kind",
    [
        "bert",
        "gpt2",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("distilbert", "roberta", "llama", "opt")),
        *PADDINGS,
    ],
)
@pytest.mark.parametrize("tokens", ["", "[CLS]"])
def test_probability_of_a_text_does_not_depend_on_the_texts_beside_it(
    dataset, pretrained, tmp_path, kind, tokens
):
    folder = write_folder(
        tmp_path / "left",
        kind=kind,
        tokens=tokens,
        padding_side="left",
        initializer_range=0.5,
        **({"d_model": 4, "n_layer": 1, "n_head": 2, "d_inner": 4} if kind == "xlnet" else {}),
    )
    inputs = learned(dataset, folder, labelCol="name")
    model = SavedModel(inputs.spec.model, inputs.signature)
    save_model(model, tmp_path / "model")
    prepare = inputs.spec.inputs.prepare
    assert prepare.padding == PADDINGS.get(kind, "right")
    texts = ["", "a", "b c", "more letters than the model takes at all", ""]

    def probabilities(model, texts):
        rows = {"text": np.array(texts, dtype=object)}
        return Predictor(model).answer(rows, ("probability",))["name"]["probability"]

    together = probabilities(load_model(tmp_path / "model"), texts)
    assert np.isfinite(together).all()
    assert len(np.unique(together.round(5))) > 2
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_allclose(probabilities(model, [text])[0], row, rtol=1e-4)


def test_model_gets_only_the_tokenizer_outputs_that_it_takes(dataset, pretrained, tmp_path):
    made = ["input_ids", "token_type_ids", "attention_mask"]
    for kind, taken in (("distilbert", []), ("bert", ["token_type_ids"])):
        folder = write_folder(tmp_path / kind, kind=kind, names=made)
        inputs = learned(dataset, folder)
        assert [entry.name for entry in inputs.spec.inputs.inputs] == ["input_ids", "attention_mask", *taken]
        assert inputs.spec.inputs.prepare.max_length == 12


def test_model_with_keyword_arguments_gets_all_tokenizer_outputs(dataset, pretrained, tmp_path):
    import transformers

    class Config(transformers.BertConfig):
        model_type = "handing_on"

    class HandingOn(transformers.BertForSequenceClassification):
        config_class = Config

        def forward(self, **inputs):
            return super().forward(**inputs)

    transformers.AutoConfig.register("handing_on", Config, exist_ok=True)
    transformers.AutoModelForSequenceClassification.register(Config, HandingOn, exist_ok=True)
    made = ["input_ids", "attention_mask", "token_type_ids"]
    folder = write_folder(tmp_path / "handing on", kind="handing_on", names=made)
    inputs = learned(dataset, folder)
    assert type(inputs.spec.model.model) is HandingOn
    assert [entry.name for entry in inputs.spec.inputs.inputs] == made


def test_learning_rate_param_applies_to_a_pretrained_model(pretrained):
    estimator = TextClassifier(featuresCol="text", pretrained=pretrained, learningRate=0.5)
    assert estimator._params_of_fit().getOptimizer().keywords["lr"] == 0.5


def test_params_that_a_pretrained_model_defines_are_refused(dataset, pretrained):
    for changes in ({"tokenizer": "words"}, {"embeddingSize": 8}, {"dropout": 0.1}):
        with pytest.raises(ParamError, match=f"Param {next(iter(changes))} is .* brings its own"):
            TextClassifier(pretrained=pretrained, **changes)._check_values()
    with pytest.raises(ParamError, match="maxLength is 13, .* takes 12 tokens"):
        learned(dataset, pretrained, maxLength=13)


def test_model_with_reserved_positions_takes_fewer_tokens(dataset, pretrained, tmp_path):
    folder = write_folder(tmp_path / "later", kind="roberta")
    inputs = learned(dataset, folder)
    assert inputs.spec.inputs.prepare.max_length == 10
    with pytest.raises(ParamError, match="maxLength is 11, .* takes 10 tokens"):
        learned(dataset, folder, maxLength=11)
    nowhere = write_folder(tmp_path / "nowhere", kind="roberta", places=2)
    with pytest.raises(ParamError, match="failed on the driver with a text of 2 tokens: .*index"):
        learned(dataset, nowhere)


@pytest.mark.parametrize("what", ["missing", "mismatched", "mismatched as transformers 4.57 names it"])
def test_weights_that_do_not_match_their_config_are_refused(dataset, pretrained, tmp_path, monkeypatch, what):
    if "4.57" in what:
        import transformers

        load = transformers.AutoModelForSequenceClassification.from_pretrained

        def load_as_before(*given, **options):
            model, info = load(*given, **options)
            return model, {**info, "mismatched_keys": [name for name, *_ in info["mismatched_keys"]]}

        monkeypatch.setattr(
            transformers.AutoModelForSequenceClassification, "from_pretrained", load_as_before
        )
    head = write_folder(tmp_path / "head", kind="bert")
    leave_out(head, "classifier.weight", "classifier.bias", "bert.pooler.dense.weight")
    learned(dataset, head)
    other = write_folder(tmp_path / "other", kind="bert")
    if what == "missing":
        leave_out(other, "bert.embeddings.word_embeddings.weight")
    else:
        change_config(other, vocab_size=NUM_TOKENS + 1)
    with pytest.raises(ParamError, match="missing or of another shape are bert.*word_embeddings.w.*Save"):
        learned(dataset, other)


def test_folders_without_a_model_are_refused(dataset, pretrained, tmp_path):
    with pytest.raises(ParamError, match="no config.json .* on the driver.*save_pretrained"):
        TextClassifier(pretrained=str(tmp_path / "nowhere"))._check_values()
    (tmp_path / "pretrained" / "config.json").write_text("no JSON")
    with pytest.raises(ParamError, match="loads no tokenizer .*not a valid JSON.*save_pretrained"):
        learned(dataset, pretrained)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_model_without_its_tokenizer_is_refused(dataset, pretrained, tmp_path, kind):
    folder = write_folder(tmp_path / "lone", kind=kind)
    (tmp_path / "lone" / "tokenizer.json").unlink()
    for name in ("tokenizer_config.json", None):  # also if only tokenizer.json has the settings
        with pytest.raises(ParamError, match=r"tokenizer.*save_pretrained\(folder\)"):
            learned(dataset, folder)
        if name is not None:
            (tmp_path / "lone" / name).unlink()


def test_a_tokenizer_with_more_tokens_than_the_model_knows_is_refused(dataset, pretrained, tmp_path):
    folder = write_folder(tmp_path / "more", num_tokens=43)
    with pytest.raises(ParamError, match="token numbers up to 42, .* embeddings for 0 to 39.*resize_token"):
        learned(dataset, folder)


@pytest.mark.parametrize(
    "kept",
    [
        "vocab.txt",
        "bytes",
        *(pytest.param(kept, marks=pytest.mark.slow) for kept in ("tokenizer.4.0.0.json", "characters")),
    ],
)
def test_tokenizers_with_other_vocabulary_files_or_none_are_loaded(dataset, pretrained, tmp_path, kept):
    import transformers

    folder = tmp_path / "other"
    if kept == "characters":
        config = transformers.CanineConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_hash_buckets=8
        )
        transformers.CanineForSequenceClassification(config).save_pretrained(folder)
        transformers.CanineTokenizer().save_pretrained(folder)
    else:
        write_folder(folder, kind="bert", vocab_size=400)
        if kept == "tokenizer.4.0.0.json":
            (folder / "tokenizer.json").rename(folder / kept)
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "fast_tokenizer_files": [kept]}
            (folder / "tokenizer_config.json").write_text(
                json.dumps({**settings, "pad_token": "[PAD]", "unk_token": "[UNK]"})
            )
        else:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (folder / name).unlink()
            if kept == "bytes":
                transformers.ByT5Tokenizer().save_pretrained(folder)
            else:
                (folder / kept).write_text(
                    "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"])
                )
    inputs = learned(dataset, folder)
    ids = inputs.spec.inputs.prepare({"text": np.array(["a b", "b"], dtype=object)})["input_ids"]
    padding = inputs.spec.inputs.prepare.tokenizer.pad_token_id
    assert len({*ids[0].tolist()}) > len({*ids[1].tolist()} - {padding})


def test_error_without_transformers_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ParamError, match="pip install transformers"):
        TextClassifier(pretrained=str(tmp_path))._check_values()


@pytest.mark.parametrize(
    ("column", "params", "error", "message"),
    [
        (["text", "unique"], {}, ParamError, "takes one column of texts. .*concat_ws"),
        ("nowhere", {}, DataError, "no column 'nowhere'"),
        ("number", {}, DataError, "'number' holds numbers, .* takes strings"),
        ("words", {}, DataError, "'words' holds arrays of strings, .* join arrays"),
        ("bytes", {}, DataError, "'bytes' holds binary values, .* takes strings"),
        ("unique", {}, DataError, "No word in column 'unique' .* tokenizer='bytes'"),
        ("text", {"vocabularySize": 0}, ParamError, "Param vocabularySize must be at least 1"),
        ("text", {"maxLength": 0}, ParamError, "Param maxLength must be at least 1"),
        ("text", {"numLayers": 0}, ParamError, "Param numLayers must be at least 1"),
        ("text", {"numHeads": 3}, ParamError, "embeddingSize is 128, and numHeads 3 "),
    ],
)
def test_invalid_params_are_refused_before_ranks_start(dataset, column, params, error, message):
    with pytest.raises(error, match=message):
        estimator = TextClassifier(featuresCol=column, **params)
        estimator._check_values()
        learn(estimator, dataset)


def test_unknown_tokenizer_is_refused_when_it_is_set():
    with pytest.raises(ParamTypeError, match="tokenizer"):
        TextClassifier(tokenizer="letters")


@pytest.mark.parametrize("kind", ["gpt2", "bert", "distilbert"])
def test_adapters_are_trained_in_place_of_pretrained_weights_and_merged_into_them(dataset, tmp_path, kind):
    folder = write_folder(tmp_path / kind, kind=kind)
    fit = learn(TextClassifier(featuresCol="text", labelCol="name", pretrained=folder, loraRank=2), dataset)
    network = fit.spec.model.eval()
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert any("lora_A" in name for name in trained)
    heads = {
        "gpt2": ["score"],
        "bert": ["pooler", "classifier"],
        "distilbert": ["pre_classifier", "classifier"],
    }
    assert all(any(part in name for name in trained) for part in heads[kind])
    assert all("lora_" in name or any(part in name for part in heads[kind]) for name in trained)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in trained:
                parameter.normal_()
    row = {"text": first_rows(dataset, ["text"])["text"][:1]}
    inputs = fit.signature.inputs.tensors(fit.signature.inputs.prepare_batch(row), torch.device("cpu"))
    with torch.no_grad():
        expected = network(*inputs.values())
        merge_adapters(network)
        found = network(*inputs.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "peft" not in {type(part).__module__.partition(".")[0] for part in network.modules()}


def test_adapters_need_a_pretrained_model():
    with pytest.raises(
        ParamError, match="loraRank is 2, and pretrained is not: adapters are for trained weights"
    ):
        TextClassifier(loraRank=2)._check_values()
