"""Params of the ready-made estimator for texts: one small mixin for each group of them."""

from __future__ import annotations

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.estimators.param_mixins import P, one_of

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

    def setTokenizer(self: P, value: str) -> P:
        """Set what a token is."""
        return self._set(tokenizer=value)

    def setVocabularySize(self: P, value: int) -> P:
        """Set how many words are known at most."""
        return self._set(vocabularySize=value)

    def setMaxLength(self: P, value: int) -> P:
        """Set how many tokens of a text count."""
        return self._set(maxLength=value)

    def setPretrained(self: P, value: str) -> P:
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

    def setEmbeddingSize(self: P, value: int) -> P:
        """Set by how many numbers each token is told."""
        return self._set(embeddingSize=value)

    def setNumLayers(self: P, value: int) -> P:
        """Set the number of layers."""
        return self._set(numLayers=value)

    def setNumHeads(self: P, value: int) -> P:
        """Set the number of heads of each layer."""
        return self._set(numHeads=value)
