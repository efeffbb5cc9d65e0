"""What TextClassifier learns of rows before a fit, and what it refuses; on rows in a folder.

transformers is a stand-in, but for one test that needs the library itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkdl.data import scan_dataset
from sparkdl.errors import DataError, ParamError, ParamTypeError
from sparkdl.estimators import TextClassifier
from sparkdl.estimators.fit_inputs import prepare_fit
from sparkdl.estimators.ready_made.single_row import answer_row
from sparkdl.estimators.ready_made.vocabulary import texts_with_words
from sparkdl.training.predictor import Predictor
from sparkdl.training.pyfunc import PyfuncModel
from sparkdl.training.saved_model import SavedModel, load_model, save_model
from tests.unit.training.pretrained_folders import install, write_folder

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


def learn(estimator, dataset):
    """What a fit would send to the ranks, and what its model would take and give."""
    learning = estimator.params_of_fit()
    learning.check_values()
    learning.learn(dataset)
    return prepare_fit(learning, dataset)


def test_words_are_learned_by_in_how_many_texts_they_are_then_by_the_alphabet(dataset):
    inputs = learn(TextClassifier(featuresCol="text", **SMALL), dataset)
    assert inputs.spec.inputs.prepare.tokenizer.words == ("a", "d", "b", "c", "!", ",", ".", "e", "f")
    few = learn(TextClassifier(featuresCol="text", vocabularySize=3, **SMALL), dataset)
    assert few.spec.inputs.prepare.tokenizer.words == ("a", "d", "b")
    assert few.spec.model.tokens.num_embeddings == 6


def test_words_are_those_of_the_rows_that_are_trained_on(dataset):
    inputs = learn(TextClassifier(featuresCol="text", validationFraction=0.5, **SMALL), dataset)
    counts = texts_with_words(dataset, "text", inputs.spec.training_rows)
    assert counts.total() < texts_with_words(dataset, "text", None).total()
    frequent = {word for word, count in counts.items() if count > 1}
    assert set(inputs.spec.inputs.prepare.tokenizer.words) == frequent


def test_parts_of_the_rows_add_up_to_all_of_them(dataset):
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
    estimator = TextClassifier(
        featuresCol="text",
        tokenizer="bytes",
        maxLength=9,
        embeddingSize=12,
        numLayers=3,
        numHeads=4,
        dropout=0.25,
    )
    inputs = learn(estimator, dataset)
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


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    return write_folder(tmp_path / "pretrained")


def test_a_pretrained_model_brings_its_tokenizer_and_gets_a_layer_for_the_classes(
    dataset, pretrained, tmp_path
):
    estimator = TextClassifier(featuresCol="text", labelCol="name", pretrained=pretrained)
    learning = estimator.params_of_fit()
    learning.check_values()
    learning.learn(dataset)
    assert learning.getOptimizer().learning_rate == 5e-5
    assert learning.further_params()["learningRate"] == 5e-5
    assert estimator.getLearningRate() == 1e-3
    inputs = prepare_fit(learning, dataset)
    network = inputs.spec.model.model
    assert (network.classifier.out_features, network.classifier.weight.dtype) == (2, torch.float32)
    assert network.config.pad_token_id == 39
    prepare = inputs.spec.inputs.prepare
    assert (prepare.tokenizer.pad_token, prepare.max_length) == ("<end>", 12)
    assert [each.name for each in inputs.spec.inputs.inputs] == ["input_ids", "attention_mask"]
    model = SavedModel(inputs.spec.model, inputs.signature)
    save_model(model, tmp_path / "model")
    rows = {"text": np.array(["short", "a text of more letters than the model takes"], dtype=object)}
    answers = [
        Predictor(each).answer(rows, ("probability",)) for each in (model, load_model(tmp_path / "model"))
    ]
    np.testing.assert_array_equal(*[each["name"]["probability"] for each in answers])


def test_texts_may_all_be_empty_to_a_tokenizer_that_adds_no_token(dataset, pretrained, tmp_path):
    folder = write_folder(tmp_path / "bare", tokenizer={"begins": False})
    inputs = learn(TextClassifier(featuresCol="text", labelCol="name", pretrained=folder), dataset)
    model = SavedModel(inputs.spec.model, inputs.signature)
    alone, among = (
        Predictor(model).answer({"text": np.array(texts, dtype=object)}, ("probability",))["name"]
        for texts in (["", ""], ["", "more"])
    )
    assert inputs.spec.inputs.prepare({"text": np.array([""], dtype=object)})["input_ids"].tolist() == [[39]]
    np.testing.assert_allclose(alone["probability"][0], among["probability"][0], rtol=1e-6)


def test_a_model_is_given_those_outputs_of_its_tokenizer_that_it_takes(dataset, pretrained, tmp_path):
    made = ["input_ids", "token_type_ids", "attention_mask"]
    for hands_on, taken in ((False, []), (True, ["token_type_ids"])):
        folder = write_folder(
            tmp_path / str(hands_on), tokenizer={"model_input_names": made}, hands_on=hands_on
        )
        inputs = learn(TextClassifier(featuresCol="text", pretrained=folder), dataset)
        assert [each.name for each in inputs.spec.inputs.inputs] == ["input_ids", "attention_mask", *taken]
        assert inputs.spec.inputs.prepare.max_length == 12


def test_a_learning_rate_that_is_set_is_taken_with_a_pretrained_model(dataset, pretrained):
    estimator = TextClassifier(featuresCol="text", pretrained=pretrained, learningRate=0.5)
    assert estimator.params_of_fit().getOptimizer().learning_rate == 0.5


def test_what_a_pretrained_model_brings_itself_is_refused_beside_it(dataset, pretrained, tmp_path):
    for changes in ({"tokenizer": "words"}, {"embeddingSize": 8}, {"dropout": 0.1}):
        with pytest.raises(ParamError, match=f"Param {next(iter(changes))} is .* brings its own"):
            TextClassifier(pretrained=pretrained, **changes).check_values()
    with pytest.raises(ParamError, match="maxLength is 13, and the model in .* takes 12 tokens at most"):
        learn(TextClassifier(featuresCol="text", pretrained=pretrained, maxLength=13), dataset)


def test_a_model_whose_first_places_are_no_texts_takes_fewer_tokens(dataset, pretrained, tmp_path):
    folder = write_folder(tmp_path / "later", first_place=2)
    inputs = learn(TextClassifier(featuresCol="text", pretrained=folder), dataset)
    assert inputs.spec.inputs.prepare.max_length == 10
    with pytest.raises(ParamError, match="maxLength is 11, and the model in .* takes 10 tokens at most"):
        learn(TextClassifier(featuresCol="text", pretrained=folder, maxLength=11), dataset)
    nowhere = write_folder(tmp_path / "nowhere", first_place=40)
    with pytest.raises(ParamError, match="fails with a text of 8 tokens, tried on the driver: IndexError"):
        learn(TextClassifier(featuresCol="text", pretrained=nowhere), dataset)


@pytest.mark.parametrize("what", ["missing", "mismatched", "mismatched_names"])
def test_weights_of_another_model_than_its_config_tells_of_are_refused(dataset, pretrained, tmp_path, what):
    anew = ["classifier.weight", "classifier.bias", "body.pooler.dense.weight"]
    head = write_folder(tmp_path / "head", **{what: anew})
    learn(TextClassifier(featuresCol="text", pretrained=head), dataset)
    other = write_folder(tmp_path / "other", **{what: [*anew, "body.words.weight"]})
    with pytest.raises(
        ParamError,
        match=r"not those of the model .*: missing or of another shape are body.words.weight\. Save",
    ):
        learn(TextClassifier(featuresCol="text", pretrained=other), dataset)


def test_folders_without_a_model_are_refused(dataset, pretrained, tmp_path):
    with pytest.raises(ParamError, match="no config.json in such a folder on the driver.*save_pretrained"):
        TextClassifier(pretrained=str(tmp_path / "nowhere")).check_values()
    (tmp_path / "pretrained" / "tokenizer.json").write_text("no JSON")
    with pytest.raises(
        ParamError,
        match=r"makes no tokenizer and model that tells classes: JSONDecodeError: .*save_pretrained",
    ):
        learn(TextClassifier(featuresCol="text", pretrained=pretrained), dataset)


def test_a_model_without_its_tokenizer_is_refused(dataset, pretrained, tmp_path):
    folder = tmp_path / "pretrained"
    (folder / "tokenizer.json").unlink()
    for name in ("tokenizer_config.json", None):  # also where the settings of the tokenizer lie there alone
        with pytest.raises(
            ParamError,
            match=r"holds no vocabulary of a tokenizer .*letters.txt.* beside the model: tokenizer",
        ):
            learn(TextClassifier(featuresCol="text", pretrained=pretrained), dataset)
        if name is not None:
            (folder / name).unlink()


def test_a_tokenizer_with_more_tokens_than_the_model_knows_is_refused(dataset, pretrained, tmp_path):
    folder = write_folder(tmp_path / "more", tokenizer={"num_tokens": 43})
    with pytest.raises(ParamError, match=r"numbers tokens up to 42, and whose model knows 40 .*resize_token"):
        learn(TextClassifier(featuresCol="text", pretrained=folder), dataset)


@pytest.mark.parametrize("file", ["letters.txt", "sentencepiece.bpe.model", "tokenizer.4.0.0.json", None])
def test_tokenizers_may_keep_words_in_files_of_other_names_or_need_none(dataset, pretrained, tmp_path, file):
    settings = {"vocab_files_names": {}} if file is None else {}
    folder = write_folder(tmp_path / "other", tokenizer=settings)
    (tmp_path / "other" / "tokenizer.json").unlink()
    if file is not None:
        (tmp_path / "other" / file).write_text("")
    learn(TextClassifier(featuresCol="text", pretrained=folder), dataset)


def test_without_transformers_it_is_said_what_to_install(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "pretrained")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ParamError, match="not installed here. Install it .* pip install transformers"):
        TextClassifier(pretrained=folder).check_values()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_bert_of_transformers_itself_is_taken_saved_and_loaded(dataset, tmp_path):
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", *"abcdef"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    folder = str(tmp_path / "bert")
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    inputs = learn(TextClassifier(featuresCol="text", labelCol="label", pretrained=folder), dataset)
    assert inputs.spec.model.model.classifier.out_features == 3
    assert inputs.spec.inputs.prepare.max_length == 16
    model = SavedModel(inputs.spec.model, inputs.signature)
    save_model(model, tmp_path / "model")
    rows = {"text": np.array(["a b c", "", "a " * 30], dtype=object)}
    answers = [
        Predictor(each).answer(rows, ("probability",)) for each in (model, load_model(tmp_path / "model"))
    ]
    np.testing.assert_array_equal(*[each["label"]["probability"] for each in answers])
    alone = Predictor(model).answer({"text": rows["text"][:1]}, ("probability",))["label"]["probability"]
    np.testing.assert_allclose(answers[0]["label"]["probability"][:1], alone, atol=1e-6)


REFUSED = {
    "two columns": (
        ["text", "unique"],
        {},
        ParamError,
        "takes one column of texts. Join several with .*concat_ws",
    ),
    "no column": ("nowhere", {}, DataError, "no column 'nowhere'"),
    "numbers": ("number", {}, DataError, "'number' holds number values, and TextClassifier takes strings"),
    "arrays of words": ("words", {}, DataError, "'words' holds arrays, and .* join arrays of strings with"),
    "bytes": ("bytes", {}, DataError, "'bytes' holds binary values, and TextClassifier takes strings"),
    "words of one text each": ("unique", {}, DataError, "No word in column 'unique' .* tokenizer='bytes'"),
    "no words": ("text", {"vocabularySize": 0}, ParamError, "Param vocabularySize is 0"),
    "no length": ("text", {"maxLength": 0}, ParamError, "Param maxLength is 0"),
    "no layers": ("text", {"numLayers": 0}, ParamError, "Param numLayers is 0"),
    "heads that do not fit": (
        "text",
        {"numHeads": 3},
        ParamError,
        "embeddingSize is 128, which numHeads, 3, does not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_named_before_anything_starts(dataset, name):
    column, params, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        estimator = TextClassifier(featuresCol=column, **params)
        estimator.check_values()
        learn(estimator, dataset)


def test_a_tokenizer_of_another_name_is_refused_when_it_is_set():
    with pytest.raises(ParamTypeError, match="tokenizer"):
        TextClassifier(tokenizer="letters")
