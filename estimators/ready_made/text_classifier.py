"""The ready-made estimator for texts. Runs on the *driver*; the training runs on the ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from torch import nn

from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.ready_made.models import TorchClassificationModel
from sparkdl.estimators.ready_made.params import _ReadyMadeClassifierParams, out_of_range
from sparkdl.estimators.ready_made.ready_made_estimator import MadeModel, ReadyMadeEstimator
from sparkdl.estimators.ready_made.shared_arguments import SharedArguments, with_shared_arguments
from sparkdl.estimators.ready_made.text_params import HasTexts, HasTransformer
from sparkdl.estimators.ready_made.vocabulary import learn_words
from sparkdl.networks.initial_weights import seeded
from sparkdl.networks.pretrained import PretrainedTextInputs, check_folder, load_folder, longest_text
from sparkdl.networks.text import ByteTokenizer, TextInputs, TextNetwork, Tokenizer, WordTokenizer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice
    from sparkdl.estimators.label_mixins import Labels
    from sparkdl.estimators.torch_estimator import TorchEstimator

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
