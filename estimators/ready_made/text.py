"""The ready-made estimator for texts, its Params, and the words that it learns from a column of texts.

The *driver* counts the words, or the *executors* if there are many rows. The training runs on the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn

from sparkdl.data import ParquetFeed
from sparkdl.data.spark.reading import reading_job
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.fit.recipe import Recipe
from sparkdl.estimators.params.base import OneOf
from sparkdl.estimators.params.estimator import ClassArguments
from sparkdl.estimators.params.inputs import HasFeatureColumns
from sparkdl.estimators.params.table import at_least, check_of, optional, param, with_arguments
from sparkdl.estimators.ready_made.estimator import ReadyMadeEstimator, TorchClassificationModel
from sparkdl.estimators.ready_made.params import (
    RATE_WITH_PRETRAINED,
    HasAdapters,
    _ReadyMadeClassifierParams,
    check_one_column,
    check_unset,
    describe_kind,
    with_rate_of_pretrained,
)
from sparkdl.networks.adapters import with_adapters
from sparkdl.networks.pretrained import check_folder, fitting_inputs, load_folder
from sparkdl.networks.text import (
    ByteTokenizer,
    TextInputs,
    TextNetwork,
    Tokenizer,
    WordTokenizer,
    check_texts,
    words_of,
)
from sparkdl.random_state import seeded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.estimators.torch_estimator import TorchEstimator


TOKENIZERS = ("words", "bytes")


class HasTexts(Params):
    """Params for the tokens of texts, and for a pretrained network."""

    tokenizer, getTokenizer, setTokenizer = param(
        OneOf(*TOKENIZERS),
        "kind of the tokens: words (the most frequent words are learned from the rows) or bytes (in UTF-8)",
        default="words",
    )
    vocabularySize, getVocabularySize, setVocabularySize = param(
        TypeConverters.toInt,
        "maximum size of the vocabulary, which holds the most frequent words (> 0)",
        default=20_000,
        check=at_least(1),
    )
    maxLength, getMaxLength, setMaxLength = param(
        TypeConverters.toInt,
        "maximum number of tokens of a text (> 0); later tokens are cut off",
        default=256,
        check=at_least(1),
    )
    pretrained, getPretrained, setPretrained = optional(
        TypeConverters.toString,
        "local folder on the driver with a pretrained model and a tokenizer of transformers, in place of a new "
        "network; default: none",
        more="``save_pretrained`` writes such a folder. The executors need transformers as well. The model has its own "
        "tokenizer and layers. Its last layer is new if it was for another number of classes.",
    )


class HasTransformer(Params):
    """Params for the layers of a new network."""

    embeddingSize, getEmbeddingSize, setEmbeddingSize = param(
        TypeConverters.toInt,
        "size of the transformer's vector for each token (> 0); a multiple of numHeads",
        default=128,
        check=at_least(1),
    )
    numLayers, getNumLayers, setNumLayers = param(
        TypeConverters.toInt, "number of layers of the transformer (> 0)", default=2, check=at_least(1)
    )
    numHeads, getNumHeads, setNumHeads = param(
        TypeConverters.toInt,
        "number of attention heads of each layer (> 0); a divisor of embeddingSize",
        default=4,
        check=at_least(1),
    )


COUNTED_HERE = 20_000
"""Maximum number of rows whose words the driver counts; for more rows, Spark is faster."""

_ROWS_AT_ONCE = 1 << 12
_MOST_PARTS = 256
_LEAST_TEXTS = 2
"""Minimum number of texts that contain a word; rarer words train the embedding of unknown words."""


def learn_words(
    dataset: ParquetDataset,
    column: str,
    *,
    size: int,
    training: RowChoice | None,
    spark: SparkSession | None,
) -> tuple[str, ...]:
    """Return the words that most texts contain, the most frequent first; equally frequent words are sorted.

    Args:
        dataset: dataset of all rows.
        column: name of the column of texts.
        size: maximum number of words.
        training: training rows, the only rows whose words are counted; None for all rows.
        spark: session whose executors count the words of many rows; None to count on the driver. The words are the
            same.

    Raises:
        DataError: if no word is in two texts.
    """
    if spark is None or dataset.num_rows <= COUNTED_HERE:
        counts = texts_with_words(dataset, column, training)
        frequent = [(word, count) for word, count in counts.items() if count >= _LEAST_TEXTS]
        words = tuple(word for word, _ in sorted(frequent, key=lambda each: (-each[1], each[0]))[:size])
    else:
        words = _learn_by_spark(dataset, column, size, training, spark)
    if not words:
        raise DataError(
            f"No word in column {column!r} is in two training texts, so no words can be learned. Take "
            "tokenizer='bytes', or more rows."
        )
    return words


def texts_with_words(
    dataset: ParquetDataset, column: str, training: RowChoice | None, part: int = 0, num_parts: int = 1
) -> Counter[str]:
    """Return the number of texts that contain each word, for one part of the rows."""
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
            for text in check_texts(batch[column], column):
                counts.update(set(words_of(text)))
    return counts


def _learn_by_spark(
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
    with reading_job(spark, "counting words"):
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


@with_arguments
class TextClassifier(
    ReadyMadeEstimator[TorchClassificationModel],
    HasTexts,
    HasTransformer,
    HasAdapters,
    _ReadyMadeClassifierParams,
    Classifier[TorchClassificationModel],
):
    """Classifies texts with a small transformer, or with a Hugging Face model in a local folder.

    Example::

        model = TextClassifier(featuresCol="review", labelCol="stars", numWorkers=4).fit(train)
        model.transform(test).select("review", "prediction").show()

    The known words are the words in lower case, and the marks between them, that at least two training texts contain;
    all others are one unknown word. Use bytes for languages without spaces, or if single characters matter. An empty
    string is a text. Null is an error in training, and gives null in ``transform``. ``fit`` reads the texts once to
    count their words, on the executors if there are many texts, and reads all labels to count and check the classes.
    It returns a :class:`TorchClassificationModel`.
    """

    featuresCol = HasFeatureColumns.featuresCol.reword("column of strings")
    learningRate = RATE_WITH_PRETRAINED
    _model_class = TorchClassificationModel
    _own_defaults: ClassVar[Mapping[str, Any]] = {"predictionBatchSize": TextInputs.rows_at_once}

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | None = None,
        labelCol: str | None = None,
        tokenizer: str | None = None,
        vocabularySize: int | None = None,
        maxLength: int | None = None,
        pretrained: str | None = None,
        loraRank: int | None = None,
        embeddingSize: int | None = None,
        numLayers: int | None = None,
        numHeads: int | None = None,
        dropout: float | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        **params: Unpack[ClassArguments],
    ) -> None:
        super().__init__()
        self._set_arguments()

    def _check_values(self) -> None:
        """Check all Params, as far as that needs no data.

        Raises:
            ParamError: if a value cannot work; the message names the Param, its value and what it may be.
        """
        super()._check_values()
        check_one_column(self, "texts. Join several with pyspark.sql.functions.concat_ws")
        if self.getEmbeddingSize() % self.getNumHeads():
            raise ParamError(
                f"Param embeddingSize is {self.getEmbeddingSize()}, and numHeads {self.getNumHeads()} does not "
                "divide it. Change one of them."
            ).about("embeddingSize", "numHeads")
        self._check_pretrained()

    def _check_pretrained(self) -> None:
        folder = self.getPretrained()
        if folder is None:
            check_unset(
                self, [self.loraRank], "pretrained", "pretrained is not: adapters are for trained weights"
            )
            return
        of_network: list[Param[Any]] = [self.tokenizer, self.vocabularySize, self.dropout]
        of_network += [self.embeddingSize, self.numLayers, self.numHeads]
        check_unset(self, of_network, "pretrained", "the model in Param pretrained brings its own")
        with check_of("pretrained"):
            check_folder(folder)

    def _params_of_fit(self) -> TorchEstimator:
        """Return the estimator that runs the fit, with the default learning rate of new or of pretrained weights."""
        return super(TextClassifier, with_rate_of_pretrained(self))._params_of_fit()

    def _feature_fault(self, column: Column) -> str:
        """Return what is wrong with the type of the feature column, and what to do."""
        if column.kind == "string" and not column.shape:
            return ""
        return (
            f"Column {column.name!r} holds {describe_kind(column)}, and TextClassifier takes strings. Cast it, or join "
            "arrays of strings with pyspark.sql.functions.concat_ws."
        )

    def _make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> Recipe:
        """Make the network for rows; see :class:`ReadyMadeEstimator`."""
        (name,) = self.getFeaturesCols()
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
        return Recipe(network, inputs, nn.CrossEntropyLoss(), num_classes=num_classes)

    def _make_pretrained(self, folder: str, name: str, num_classes: int) -> Recipe:
        with seeded(self.getSeed()):
            tokenizer, network = load_folder(folder, num_outputs=num_classes)
        max_length = self.getMaxLength()
        inputs = fitting_inputs(folder, tokenizer, network, column=name, wanted=max_length)
        if inputs.max_length < max_length and self.isSet(self.maxLength):
            raise ParamError(
                f"Param maxLength is {max_length}, and the model in {folder!r} takes {inputs.max_length} tokens at "
                f"most. Lower maxLength to {inputs.max_length}."
            )
        rank = self.getLoraRank()
        if rank is not None:
            with seeded(self.getSeed()):
                network.model = with_adapters(network.model, rank, trained=network.new_layers())
        return Recipe(network, inputs, nn.CrossEntropyLoss(), num_classes=num_classes)
