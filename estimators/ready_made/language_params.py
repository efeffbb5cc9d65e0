"""The Params of :class:`~sparkdl.estimators.LanguageModel` in addition to the Params of all estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Params, TypeConverters

from sparkdl.data.blend.mixture import Mixture
from sparkdl.errors import ParamError
from sparkdl.estimators.params.base import OneOf
from sparkdl.estimators.params.table import at_least, optional, param
from sparkdl.networks.language import ANSWERS

if TYPE_CHECKING:
    from pyspark.ml.param import Param


class HasGeneration(Params):
    """Params for the output of a language model for texts."""

    output, getOutput, setOutput = param(
        OneOf(*ANSWERS),
        "output of transform for a text: continuation (a text), logLikelihood (an array of two numbers: the sum of the "
        "log-probabilities of the tokens after the first, and the number of these tokens) or embedding (the mean of "
        "the last layer's output)",
        default="continuation",
    )
    maxNewTokens, getMaxNewTokens, setMaxNewTokens = param(
        TypeConverters.toInt,
        "maximum number of tokens of a continuation (> 0)",
        default=64,
        check=at_least(1),
    )
    temperature, getTemperature, setTemperature = param(
        TypeConverters.toFloat,
        "temperature at which the tokens of a continuation are drawn (>= 0); 0 to use the most likely token",
        default=0.0,
        check=at_least(0),
        more="The draws depend only on the seed and the text.",
    )
    topK, getTopK, setTopK = param(
        TypeConverters.toInt,
        "number of the most likely tokens among which one is drawn (>= 0); 0 for all tokens",
        default=0,
        check=at_least(0),
    )
    maxLength, getMaxLength, setMaxLength = param(
        TypeConverters.toInt,
        "maximum number of tokens of a packed row, and of a text that the network reads at once in predictions (> 1)",
        default=256,
        check=at_least(2),
    )


class HasDecoder(Params):
    """Params for the network of a language model and its tokens."""

    pretrained, getPretrained, setPretrained = optional(
        TypeConverters.toString,
        "local folder on the driver with a causal language model and a tokenizer of transformers; default: none",
        more="The model has its own tokenizer and layers.",
    )
    vocabularySize, getVocabularySize, setVocabularySize = param(
        TypeConverters.toInt,
        "maximum number of tokens that are learned from the texts, including 256 bytes (> 256); for token arrays, the "
        "number of different tokens (> 0)",
        default=8192,
        check=at_least(1),
    )
    endToken, getEndToken, setEndToken = optional(
        TypeConverters.toInt,
        "token that ends a text, for token arrays (from 0 to below vocabularySize); default: none",
        check=at_least(0),
        more="It is appended to arrays that do not end with it. A continuation ends before it.",
    )
    embeddingSize, getEmbeddingSize, setEmbeddingSize = param(
        TypeConverters.toInt,
        "number of features of a token between the layers (> 0); a multiple of twice numHeads",
        default=256,
        check=at_least(1),
    )
    numLayers, getNumLayers, setNumLayers = param(
        TypeConverters.toInt, "number of layers of the decoder (> 0)", default=4, check=at_least(1)
    )
    numHeads, getNumHeads, setNumHeads = param(
        TypeConverters.toInt, "number of attention heads of each layer (> 0)", default=4, check=at_least(1)
    )
    numKeyHeads, getNumKeyHeads, setNumKeyHeads = optional(
        TypeConverters.toInt,
        "number of heads for keys and values, each shared by several attention heads (> 0); default: numHeads",
        check=at_least(1),
    )
    tieEmbeddings, getTieEmbeddings, setTieEmbeddings = param(
        TypeConverters.toBoolean,
        "whether the output layer shares the weights of the embedding",
        default=True,
    )


def _to_weights(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"it takes a dict of weights by the names of corpora, not {value!r:.80}")
    return {name: TypeConverters.toFloat(weight) for name, weight in value.items()}


def _check_weights(entry: Param[Any], value: Mapping[str, float]) -> None:
    try:
        Mixture(list(value.values()))
    except ParamError as error:
        raise ParamError(f"Param {entry.name} is {value}. {error}") from error


class HasCorpora(Params):
    """Params for texts of several corpora."""

    corpusCol, getCorpusCol, setCorpusCol = optional(
        TypeConverters.toString,
        "column of strings with the name of the corpus of each text, used with corpusWeights; default: none",
    )
    corpusWeights, getCorpusWeights, setCorpusWeights = optional(
        _to_weights,
        "dict with a positive weight for each corpus by name, used with corpusCol; default: none",
        check=_check_weights,
        more="In an epoch, the numbers of packed rows of the corpora are in proportion to the weights, and the rows of "
        "each corpus are spread evenly. Only the ratios of the weights matter.",
    )
    epochRows, getEpochRows, setEpochRows = optional(
        TypeConverters.toInt,
        "number of packed rows of an epoch, used with corpusWeights (> 0); default: as many as include every row",
        check=at_least(1),
        more="Rows of corpora that are too small for their weights are repeated. Of corpora that are too large, some "
        "rows are left out if the epoch is short.",
    )

    def _check_corpora(self) -> None:
        """Check that the Params are consistent.

        Raises:
            ParamError: if a Param is set without another one that it needs.
        """
        if (self.getCorpusCol() is None) != (self.getCorpusWeights() is None):
            alone, other = ("corpusCol", "corpusWeights")
            if self.getCorpusCol() is None:
                alone, other = other, alone
            raise ParamError(f"Param {alone} is set, and {other} is not. Set both, or none.").about(alone)
        if self.getEpochRows() is not None and self.getCorpusWeights() is None:
            raise ParamError(
                f"Param epochRows is set, and corpusWeights is not: {self.epochRows.doc}."
            ).about("epochRows")
