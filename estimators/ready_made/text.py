"""The ready-made estimator for texts, its Params, and the words that it learns from a column of texts.

There is one small mixin for each group of Params. The words are counted on the *executors*; the training runs on the
ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn

from sparkdl.data import ParquetFeed
from sparkdl.data.spark.jobs import spark_job
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.params.base import ParamsT, one_of
from sparkdl.estimators.ready_made.estimator import MadeModel, ReadyMadeEstimator, TorchClassificationModel
from sparkdl.estimators.ready_made.params import (
    SharedArguments,
    _ReadyMadeClassifierParams,
    out_of_range,
    with_shared_arguments,
)
from sparkdl.networks.initial_weights import seeded
from sparkdl.networks.pretrained import PretrainedTextInputs, check_folder, load_folder, longest_text
from sparkdl.networks.text import (
    ByteTokenizer,
    TextInputs,
    TextNetwork,
    Tokenizer,
    WordTokenizer,
    checked_texts,
    words_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice
    from sparkdl.estimators.params.inputs import Labels
    from sparkdl.estimators.torch_estimator import TorchEstimator


TOKENIZERS = ("words", "bytes")


class HasTexts(Params):
    """Params ``tokenizer``, ``vocabularySize``, ``maxLength`` and ``pretrained``."""

    tokenizer: Param[str] = Param(
        Params._dummy(),
        "tokenizer",
        "what a token is: one of the words, of which the most frequent are learned from the rows, or of the bytes",
        one_of(*TOKENIZERS),
    )
    vocabularySize: Param[int] = Param(
        Params._dummy(), "vocabularySize", "how many words are known at most (> 0)", TypeConverters.toInt
    )
    maxLength: Param[int] = Param(
        Params._dummy(),
        "maxLength",
        "tokens of a text that count (> 0); what comes after them is left out",
        TypeConverters.toInt,
    )
    pretrained: Param[str] = Param(
        Params._dummy(),
        "pretrained",
        "local folder on the driver with a model and a tokenizer of transformers, that is trained on; default: none",
        TypeConverters.toString,
    )

    def getTokenizer(self) -> str:
        """Return ``"words"`` or ``"bytes"``."""
        return self.getOrDefault(self.tokenizer)

    def getVocabularySize(self) -> int:
        """Return how many words are known at most."""
        return self.getOrDefault(self.vocabularySize)

    def getMaxLength(self) -> int:
        """Return how many tokens of a text count."""
        return self.getOrDefault(self.maxLength)

    def getPretrained(self) -> str | None:
        """Return the folder of a model that is trained on, where that was set."""
        return self.getOrDefault(self.pretrained) if self.isSet(self.pretrained) else None

    def setTokenizer(self: ParamsT, value: str) -> ParamsT:
        """Set what a token is."""
        return self._set(tokenizer=value)

    def setVocabularySize(self: ParamsT, value: int) -> ParamsT:
        """Set how many words are known at most."""
        return self._set(vocabularySize=value)

    def setMaxLength(self: ParamsT, value: int) -> ParamsT:
        """Set how many tokens of a text count."""
        return self._set(maxLength=value)

    def setPretrained(self: ParamsT, value: str) -> ParamsT:
        """Set the folder of a model that is trained on."""
        return self._set(pretrained=value)


class HasTransformer(Params):
    """Params ``embeddingSize``, ``numLayers`` and ``numHeads``."""

    embeddingSize: Param[int] = Param(
        Params._dummy(),
        "embeddingSize",
        "numbers by which each token is told (> 0); numHeads divides it",
        TypeConverters.toInt,
    )
    numLayers: Param[int] = Param(
        Params._dummy(),
        "numLayers",
        "layers in which tokens attend to each other (> 0)",
        TypeConverters.toInt,
    )
    numHeads: Param[int] = Param(
        Params._dummy(), "numHeads", "of each layer (> 0); they divide embeddingSize", TypeConverters.toInt
    )

    def getEmbeddingSize(self) -> int:
        """Return by how many numbers each token is told."""
        return self.getOrDefault(self.embeddingSize)

    def getNumLayers(self) -> int:
        """Return the number of layers."""
        return self.getOrDefault(self.numLayers)

    def getNumHeads(self) -> int:
        """Return the number of heads of each layer."""
        return self.getOrDefault(self.numHeads)

    def setEmbeddingSize(self: ParamsT, value: int) -> ParamsT:
        """Set by how many numbers each token is told."""
        return self._set(embeddingSize=value)

    def setNumLayers(self: ParamsT, value: int) -> ParamsT:
        """Set the number of layers."""
        return self._set(numLayers=value)

    def setNumHeads(self: ParamsT, value: int) -> ParamsT:
        """Set the number of heads of each layer."""
        return self._set(numHeads=value)


COUNTED_HERE = 20_000
"""Rows up to which the driver counts: Spark would take longer to start."""

_ROWS_AT_ONCE = 1 << 12
_MOST_PARTS = 256
_LEAST_TEXTS = 2
"""A word of one text tells nothing about others; it teaches what a word is like that is not known."""


def learn_words(
    dataset: ParquetDataset,
    column: str,
    *,
    size: int,
    training: RowChoice | None,
    spark: SparkSession | None,
) -> tuple[str, ...]:
    """Return the words that are in most texts, the most frequent first, those as frequent in alphabetical order.

    Args:
        dataset: the rows.
        column: of texts.
        size: how many words there are at most.
        training: the rows that are trained on, whose words alone are counted; None for all.
        spark: whose executors count where there are many rows; None counts here. The words are the same.

    Raises:
        DataError: if no word is in two texts.
    """
    if spark is None or dataset.num_rows <= COUNTED_HERE:
        counts = texts_with_words(dataset, column, training)
        frequent = [(word, count) for word, count in counts.items() if count >= _LEAST_TEXTS]
        words = tuple(word for word, _ in sorted(frequent, key=lambda each: (-each[1], each[0]))[:size])
    else:
        words = _learned_by_spark(dataset, column, size, training, spark)
    if not words:
        raise DataError(
            f"No word in column {column!r} is in two of the texts that are trained on, so that there is nothing to "
            "learn by words. Take tokenizer='bytes', or more rows."
        )
    return words


def texts_with_words(
    dataset: ParquetDataset, column: str, training: RowChoice | None, part: int = 0, num_parts: int = 1
) -> Counter[str]:
    """Return for each word in how many texts it is, of one part of the rows."""
    counts: Counter[str] = Counter()
    with ParquetFeed(
        dataset,
        columns=[column],
        batch_size=_ROWS_AT_ONCE,
        rank=part,
        world_size=num_parts,
        shuffle=False,
        row_filter=training,
    ) as feed:
        for batch in feed.epoch(0):
            for text in checked_texts(batch[column], column):
                counts.update(set(words_of(text)))
    return counts


def _learned_by_spark(
    dataset: ParquetDataset, column: str, size: int, training: RowChoice | None, spark: SparkSession
) -> tuple[str, ...]:
    from pyspark.sql import functions as F

    num_parts = min(_MOST_PARTS, len(dataset.row_groups))
    count = partial(_count_parts, dataset=dataset, column=column, training=training, num_parts=num_parts)
    counted = spark.range(0, num_parts, 1, num_parts).mapInArrow(count, "word string, texts long")
    frequent = (
        counted.groupBy("word")
        .agg(F.sum("texts").alias("texts"))
        .filter(F.col("texts") >= _LEAST_TEXTS)
        .orderBy(F.desc("texts"), "word")
        .limit(size)
    )
    with spark_job(spark, "counting words"):
        rows = frequent.collect()
    return tuple(row["word"] for row in rows)


def _count_parts(
    batches: Iterator[pa.RecordBatch],
    *,
    dataset: ParquetDataset,
    column: str,
    training: RowChoice | None,
    num_parts: int,
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for part in batch.column(0).to_pylist():
            counts = texts_with_words(dataset, column, training, part, num_parts)
            yield pa.RecordBatch.from_pydict(
                {
                    "word": pa.array(counts.keys(), pa.string()),
                    "texts": pa.array(counts.values(), pa.int64()),
                }
            )


TEXT_DEFAULTS: dict[str, Any] = {
    "tokenizer": "words",
    "vocabularySize": 20_000,
    "maxLength": 256,
    "embeddingSize": 128,
    "numLayers": 2,
    "numHeads": 4,
    "dropout": 0.1,
    "predictionBatchSize": 128,
}

PRETRAINED_LEARNING_RATE = 5e-5
"""As Devlin et al. (2019) tuned BERT; at that of new weights a trained model forgets what it knows."""


@partial(with_shared_arguments, predictionBatchSize="rows per forward pass of ``transform``; default 128.")
class TextClassifier(
    ReadyMadeEstimator[TorchClassificationModel],
    HasTexts,
    HasTransformer,
    _ReadyMadeClassifierParams,
    Classifier[TorchClassificationModel],
):
    """Tells classes by texts, with a small transformer, or a model of Hugging Face that lies in a local folder.

    Words are those in two texts at least that are trained on, in lower case, and marks between them; all others count
    as one unknown word. For languages without spaces, or texts in which single characters matter, take bytes. An empty
    string is a text; null is an error in training, and null in ``transform``. ``fit`` reads the texts once to count
    their words, on the executors where there are many, and all labels to count and check the classes; it returns a
    :class:`TorchClassificationModel`.

    Args:
        featuresCol: column of strings; default ``"features"``.
        labelCol: column of classes: whole numbers from 0, as Spark ML has them, or strings, booleans or other integers,
            which are predicted as they are called; default ``"label"``.
        labels: what it calls the classes, in the order that they are to have, where rows may lack one, as in a fold of
            ``CrossValidator``, or need not be read to find them; default: those that the rows hold.
        tokenizer: what a token is: one of the ``"words"`` (default) or of the ``"bytes"`` in UTF-8.
        vocabularySize: words that are known at most, the most frequent ones; default 20000.
        maxLength: tokens of a text that count; what comes after them is left out; default 256.
        pretrained: local folder on the driver with a model and a tokenizer of transformers, as ``save_pretrained``
            writes them, which is trained on; executors need transformers as well. It brings its own tokenizer and
            layers; its last layer is new where it was for another number of classes. Default: none.
        embeddingSize: numbers by which the transformer tells each token; default 128.
        numLayers: its layers; default 2.
        numHeads: of each layer; default 4.
        dropout: share of what its layers put out that is dropped in training; default 0.1.
        learningRate: of AdamW; default 0.001, and 0.00005 with a pretrained model.
        weightDecay: of AdamW; default 0.0001.
        batchSize: rows per rank and step; default 64.
        epochs: how often every row is visited; default 20.
        seed: of the first weights, the order of rows and of all random numbers during the fit; default 0.
        probabilityCol: column of the probabilities of the classes, a vector; default ``"probability"``.
        rawPredictionCol: column of their scores, a vector; default ``"rawPrediction"``.
        predictionType: type of predictionCol: ``"auto"`` (default), ``"double"`` or ``"long"`` for the number of the
            class where labels are strings, ``"array"`` or ``"vector"``.
    """

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | None = None,
        labelCol: str | None = None,
        labels: Labels | None = None,
        tokenizer: str | None = None,
        vocabularySize: int | None = None,
        maxLength: int | None = None,
        pretrained: str | None = None,
        embeddingSize: int | None = None,
        numLayers: int | None = None,
        numHeads: int | None = None,
        dropout: float | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        batchSize: int | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
        predictionType: str | None = None,
        **shared: Unpack[SharedArguments],
    ) -> None:
        super().__init__()
        self._setDefault(**TEXT_DEFAULTS)
        self._set_arguments()

    def check_ranges(self) -> None:
        """Check what needs no data; see :meth:`check_values`."""
        super().check_ranges()
        if len(self.getFeaturesCols()) > 1:
            raise ParamError(
                f"Param featuresCol is {self.getFeaturesCols()}, and TextClassifier takes one column of texts. Join "
                "several with pyspark.sql.functions.concat_ws."
            )
        sizes = (self.vocabularySize, self.maxLength, self.embeddingSize, self.numLayers, self.numHeads)
        for param in sizes:
            if self.getOrDefault(param) < 1:
                raise out_of_range(self, param)
        if self.getEmbeddingSize() % self.getNumHeads():
            raise ParamError(
                f"Param embeddingSize is {self.getEmbeddingSize()}, which numHeads, {self.getNumHeads()}, does not "
                "divide. Change one of them."
            )
        self._check_pretrained()

    def _check_pretrained(self) -> None:
        folder = self.getPretrained()
        if folder is None:
            return
        own = (
            self.tokenizer,
            self.vocabularySize,
            self.embeddingSize,
            self.numLayers,
            self.numHeads,
            self.dropout,
        )
        for param in own:
            if self.isSet(param):
                raise ParamError(
                    f"Param {param.name} is {self.getOrDefault(param)!r}, and the model in Param pretrained, "
                    f"{folder!r}, brings its own. Leave {param.name} out."
                )
        check_folder(folder)

    def params_of_fit(self) -> TorchEstimator:
        """Return the estimator that a fit goes by, at the learning rate of new weights or of trained ones."""
        if self.getPretrained() is None or self.isSet(self.learningRate):
            return super().params_of_fit()
        tuned = self.copy()
        tuned._setDefault(learningRate=PRETRAINED_LEARNING_RATE)
        return super(TextClassifier, tuned).params_of_fit()

    def make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> MadeModel:
        """Make the network for rows; see :class:`ReadyMadeEstimator`."""
        (name,) = self.getFeaturesCols()
        column = dataset.column(name)
        if column.kind != "string" or column.shape:
            held = "arrays" if column.shape or column.kind == "ragged" else f"{column.kind} values"
            raise DataError(
                f"Column {name!r} holds {held}, and TextClassifier takes strings. Cast it, or join arrays of strings "
                "with pyspark.sql.functions.concat_ws."
            )
        num_classes = self._count_classes(dataset)
        folder = self.getPretrained()
        if folder is not None:
            return self._make_pretrained(folder, name, num_classes)
        tokenizer: Tokenizer = ByteTokenizer()
        if self.getTokenizer() == "words":
            size = self.getVocabularySize()
            tokenizer = WordTokenizer(learn_words(dataset, name, size=size, training=training, spark=spark))
        inputs = TextInputs(column=name, tokenizer=tokenizer, max_length=self.getMaxLength())
        with seeded(self.getSeed()):
            network = TextNetwork(
                num_tokens=tokenizer.num_tokens,
                max_tokens=1 + self.getMaxLength(),
                size=self.getEmbeddingSize(),
                num_layers=self.getNumLayers(),
                num_heads=self.getNumHeads(),
                dropout=self.getDropout(),
                num_outputs=num_classes,
            )
        return MadeModel(network, inputs, nn.CrossEntropyLoss())

    def _make_pretrained(self, folder: str, name: str, num_classes: int) -> MadeModel:
        with seeded(self.getSeed()):
            tokenizer, network = load_folder(folder, num_outputs=num_classes)
        max_length = self.getMaxLength()
        longest = longest_text(tokenizer, network, max_length)
        if longest < max_length and self.isSet(self.maxLength):
            raise ParamError(
                f"Param maxLength is {max_length}, and the model in {folder!r} takes {longest} tokens at most. "
                f"Lower maxLength to {longest}."
            )
        inputs = PretrainedTextInputs(column=name, tokenizer=tokenizer, max_length=longest)
        return MadeModel(network, inputs, nn.CrossEntropyLoss())

    def model_class(self) -> type[TorchClassificationModel]:
        """Return the class of the models that fits return."""
        return TorchClassificationModel
