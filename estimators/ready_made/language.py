"""The ready-made estimator for language models, and the model that it returns.

Texts are tokenized and packed on the *executors* (:mod:`sparkdl.estimators.ready_made.language_rows`). The ranks train
on the packed rows as on any other rows.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch
from pyspark import keyword_only
from pyspark.ml.base import _FitMultipleIterator
from pyspark.ml.param import Param
from torch import nn

from sparkdl.data import Column
from sparkdl.data.spark.columns import check_frame, check_session, quote
from sparkdl.data.spark.input_files import check_tables
from sparkdl.data.spark.reading import reading_job
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.fit.fit import TrialRun, check_rows_to_fit, fit_on_rows, with_param_maps
from sparkdl.estimators.fit.inputs import check_columns
from sparkdl.estimators.fit.rows import share_rows
from sparkdl.estimators.params.estimator import SharedArguments, _SharedParams
from sparkdl.estimators.params.inputs import HasFeatureColumns
from sparkdl.estimators.params.table import check_entries, check_of, with_arguments
from sparkdl.estimators.params.training import HasFunctions, HasTraining
from sparkdl.estimators.persistence import SavedInFolder, carry
from sparkdl.estimators.ready_made.language_evaluator import PerplexityEvaluator
from sparkdl.estimators.ready_made.language_params import HasCorpora, HasDecoder, HasGeneration
from sparkdl.estimators.ready_made.language_rows import (
    HELD_OUT,
    Blend,
    Texts,
    blend_rows,
    estimate_rows,
    first_text,
    holds_tokens,
    pack_rows,
)
from sparkdl.estimators.ready_made.language_weights import (
    Beginning,
    beginning_of_folder,
    beginning_of_sizes,
)
from sparkdl.estimators.ready_made.params import (
    RATE_WITH_PRETRAINED,
    HasAdamW,
    HasAdapters,
    check_one_column,
    check_unset,
    with_rate_of_pretrained,
)
from sparkdl.estimators.torch_estimator import FittingEstimator, TorchEstimator
from sparkdl.estimators.torch_model import TorchModel
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.networks.adapters import merge_into_weights
from sparkdl.networks.decoder import DecoderSizes
from sparkdl.networks.generation import Generation
from sparkdl.networks.language import (
    LanguageNetwork,
    LanguageTokenizer,
    PromptInputs,
    TextModel,
    TokenNumbers,
    learn_tokenizer,
    num_tokens_of,
)
from sparkdl.networks.language_folder import load_language_folder, save_language_folder
from sparkdl.spark.jobs import jobs_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from typing_extensions import Unpack

    from sparkdl.estimators.fit.split import RowCounts
    from sparkdl.estimators.summary import TrainingSummary
    from sparkdl.model.losses import PredictionKind

_SAMPLE_TEXTS = 20_000
"""Number of texts from which a tokenizer is learned."""

_BYTES = 256
"""Number of tokens for single bytes, which every learned tokenizer has."""

_MOST_PLAIN_MODELS = 4


class LanguageModelModel(TorchModel, HasGeneration):
    """The model of :class:`LanguageModel`: a :class:`TorchModel` of texts.

    ``transform`` adds ``predictionCol`` with the output that ``output`` selects. The continuation of a string is a
    string, and the continuation of a token array is a token array. A model without a tokenizer, which was trained on
    token arrays, takes only token arrays. If a text has more than ``maxLength`` tokens, its last ones are used for a
    continuation and its first ones for an embedding; its log-likelihood is computed over all tokens, in windows.
    """

    setSeed = HasTraining.setSeed  # of the draws of continuations

    def __init__(self, saved: SavedModel, summary: TrainingSummary | None = None) -> None:
        super().__init__(saved, summary)
        self._plain_models: dict[
            tuple[Any, ...], TorchModel
        ] = {}  # copies share it, as they share the module

    @property
    def saved(self) -> SavedModel:
        """The module with its inputs and outputs, which depend on ``output`` and the other Params.

        The input is a column of strings if the model has a tokenizer, and of token arrays otherwise.
        """
        answering = self._answering(self.getOutput(), takes_tokens=not self._has_tokenizer)
        return answering.with_signature(batch_size=self.getPredictionBatchSize())

    @overload
    def generate(self, text: str) -> str: ...
    @overload
    def generate(self, text: Sequence[int]) -> list[int]: ...
    def generate(self, text: Any) -> Any:
        """Continue a text, on the driver.

        Args:
            text: text as a string, or as a list of tokens.

        Returns:
            The continuation, as a string for a string and as a list of tokens for tokens.

        Raises:
            ParamError: if the text is a string and the model has no tokenizer, or several texts are given.
        """
        takes_tokens = not isinstance(text, str)
        if takes_tokens and any(isinstance(token, str) for token in text):
            raise ParamError(
                "generate() continues one text. For several, use transform() on a DataFrame of them."
            )
        if not takes_tokens and not self._has_tokenizer:
            raise ParamError(
                "The model was trained on token arrays and has no tokenizer. Give the tokens of the text."
            )
        saved = self._answering("continuation", takes_tokens=takes_tokens)
        model, inputs = saved.module, saved.signature.inputs
        assert isinstance(model, TextModel), "fits of LanguageModel make a TextModel"
        assert inputs.prepare is not None, "inputs of a TextModel have a function that makes tokens"
        column = np.empty(1, object)
        column[0] = np.asarray(text, np.int64) if takes_tokens else text
        arrays = inputs.prepare({inputs.names[0]: column})
        with torch.inference_mode():
            (tokens,) = model.continuations(
                *(torch.from_numpy(np.asarray(arrays[name])) for name in ("tokens", "lengths"))
            )
        return tokens if takes_tokens else model.decode(tokens)

    def perplexity(self, dataset: DataFrame) -> float:
        """Return the exponential of the mean negative log-likelihood of all tokens; runs on the executors.

        Raises:
            DataError: if no text has two tokens, or the rows are of files that a table has removed.
        """
        check_frame(dataset, "perplexity")
        check_tables(dataset)
        scored = self.copy({self.output: "logLikelihood"}).transform(dataset)
        return PerplexityEvaluator(predictionCol=self.getPredictionCol()).evaluate(scored)

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save the model for transformers: ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it from the folder.

        A decoder of sparkdl is saved as a Llama model with the same weights. A model without a tokenizer is saved
        without one.

        Args:
            folder: path or URL of the folder.
            overwrite: whether to replace an existing folder.

        Raises:
            SavedModelError: if the folder exists and is not to be replaced, or cannot be written.
            ParamError: if transformers is missing.
        """
        trained = self._trained
        with tempfile.TemporaryDirectory(prefix="sparkdl-save-") as made:
            save_language_folder(trained.decoder, trained.tokenizer, made, max_length=trained.max_length)
            remedy = "Use save_pretrained(folder, overwrite=True) to replace it."
            carry(Path(made), folder, last="config.json", overwrite=overwrite, remedy=remedy)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_session(dataset, "transform")
        takes_tokens = not self._has_tokenizer or holds_tokens(dataset, self.getFeaturesCol())
        # A plain model with the module for these Params, as models of other estimators have it.
        plain = self._copyValues(self._plain_model(takes_tokens=takes_tokens).copy())
        plain._resetUid(self.uid)
        return plain._transform(dataset)

    def _plain_model(self, *, takes_tokens: bool) -> TorchModel:
        """Return the model for the values of Params, the same for equal values, so that executors load it once."""
        values = self.getOutput(), takes_tokens, self._generation(), self.getMaxLength()
        if values not in self._plain_models:
            made = TorchModel(self._answering(self.getOutput(), takes_tokens=takes_tokens))
            while len(self._plain_models) >= _MOST_PLAIN_MODELS:
                self._plain_models.pop(next(iter(self._plain_models)))
            self._plain_models[values] = made
        return self._plain_models[values]

    def _generation(self) -> Generation:
        return Generation(
            max_tokens=self.getMaxNewTokens(),
            temperature=self.getTemperature(),
            top_k=self.getTopK(),
            seed=self.getOrDefault("seed"),
        )

    @property
    def _has_tokenizer(self) -> bool:
        return not isinstance(self._trained.tokenizer, TokenNumbers)

    @property
    def _trained(self) -> TextModel:
        trained = self._saved.module
        assert isinstance(trained, TextModel), "fits of LanguageModel make a TextModel"
        return trained

    def _answering(self, answer: str, *, takes_tokens: bool) -> SavedModel:
        return text_model(
            self._trained.decoder,
            self._trained.tokenizer,
            column=self._saved.signature.inputs.names[0],
            answer=answer,
            generation=self._generation(),
            max_length=self.getMaxLength(),
            takes_tokens=takes_tokens,
        )


def model_of_folder(
    folder: str, example: DataFrame, *, featuresCol: str, maxLength: int, **params: Any
) -> LanguageModelModel:
    """Return the model for a causal language model of transformers as it was trained.

    Args:
        folder: local folder with the model and its tokenizer.
        example: DataFrame with the column of texts or of token arrays.
        featuresCol: name of the column.
        maxLength: number of tokens that the network reads at once; at most its positions.
        params: further Params of the model.

    Raises:
        ParamError: if the folder has no such model, or a Param is not valid.
        DataError: if the column is missing, or holds neither texts nor tokens.
    """
    check_frame(example, "TorchModel.from_pretrained")
    tokenizer, decoder = load_language_folder(folder, lora_rank=None, seed=0)
    config: Any = decoder.config
    most = min(maxLength, getattr(config, "max_position_embeddings", None) or maxLength)
    saved = text_model(
        decoder.eval(),
        tokenizer,
        column=featuresCol,
        answer="continuation",
        generation=Generation(),
        max_length=most,
    )
    model = LanguageModelModel(saved).setParams(featuresCol=featuresCol, maxLength=most, **params)
    check_columns(model, [(model.featuresCol, [featuresCol])], example.columns)
    holds_tokens(example, featuresCol)
    return model


def text_model(
    decoder: nn.Module,
    tokenizer: LanguageTokenizer | TokenNumbers,
    *,
    column: str,
    answer: str,
    generation: Generation,
    max_length: int,
    takes_tokens: bool = False,
) -> SavedModel:
    """Return the model for a column of texts or of token arrays."""
    continues = answer == "continuation"
    module = TextModel(
        decoder,
        tokenizer,
        answer=answer,
        generation=generation,
        max_length=max_length,
        in_tokens=takes_tokens,
    ).eval()
    shape: tuple[int, ...] = () if continues else (2,)
    if answer == "embedding":
        with torch.inference_mode():
            shape = tuple(
                module(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)).shape[1:]
            )
    kind: PredictionKind = "value"
    if continues:
        kind = "tokens" if takes_tokens else "text"
    inputs = ModelInputs(
        columns=(_column(column, takes_tokens=takes_tokens),),
        inputs=(ModelInput(name="tokens", dtype="int64"), ModelInput(name="lengths", dtype="int64")),
        prepare=PromptInputs(
            column=column,
            tokenizer=tokenizer,
            num_tokens=module.num_tokens,
            takes_tokens=takes_tokens,
            # A log-likelihood is computed in windows, over all tokens.
            max_length=None if answer == "logLikelihood" else max_length,
            from_end=continues,
        ),
    )
    outputs = (ModelOutput(name=answer, kind=kind, shape=shape),)
    return SavedModel(module, ModelSignature(inputs=inputs, outputs=outputs, batch_size=inputs.rows_at_once))


def _column(name: str, *, takes_tokens: bool) -> Column:
    if takes_tokens:
        return Column(name=name, dtype="object", kind="ragged", lengths=(None,), element=("number", "int64"))
    return Column(name=name, dtype="object", kind="string")


@with_arguments
class LanguageModel(
    FittingEstimator[LanguageModelModel],
    HasGeneration,
    HasDecoder,
    HasCorpora,
    HasAdapters,
    HasFunctions,
    HasAdamW,
    _SharedParams,
    SavedInFolder[Any],
):
    """Learns to continue texts: trains a decoder that predicts each token from the tokens before it.

    Example::

        model = LanguageModel(featuresCol="text", epochs=2, numWorkers=4).fit(texts)
        model.transform(beginnings).select("prediction").show(truncate=False)

    The network is :class:`sparkdl.networks.decoder.Decoder`, or a Hugging Face model in a local folder. ``fit`` learns
    a tokenizer from up to 20,000 texts, unless the folder contains one or the texts are token arrays; for token arrays
    without a folder, ``vocabularySize`` is the number of different tokens. ``fit`` packs the texts into rows of
    ``maxLength`` tokens, in which attention stays within each text; with ``corpusWeights``, a row has texts of one
    corpus only. The loss of an epoch is the mean over all tokens; its exponential is the perplexity. ``batchSize`` is
    the number of packed rows.
    """

    featuresCol = HasFeatureColumns.featuresCol.reword(
        "column of strings, or of arrays of integers that are the tokens of texts"
    )
    learningRate = RATE_WITH_PRETRAINED
    seed = HasTraining.seed.reword(
        "seed of the initial weights, the order of rows, and the draws of continuations",
        more="With the same seed, a fit on CPU repeats to the bit.",
    )
    _model_class = LanguageModelModel
    _own_defaults: ClassVar[Mapping[str, Any]] = {
        "batchSize": 8,
        "epochs": 1,
        "predictionBatchSize": PromptInputs.rows_at_once,
    }

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | None = None,
        output: str | None = None,
        maxNewTokens: int | None = None,
        temperature: float | None = None,
        topK: int | None = None,
        maxLength: int | None = None,
        pretrained: str | None = None,
        loraRank: int | None = None,
        vocabularySize: int | None = None,
        endToken: int | None = None,
        embeddingSize: int | None = None,
        numLayers: int | None = None,
        numHeads: int | None = None,
        numKeyHeads: int | None = None,
        tieEmbeddings: bool | None = None,
        corpusCol: str | None = None,
        corpusWeights: Mapping[str, float] | None = None,
        epochRows: int | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        **params: Unpack[SharedArguments],
    ) -> None:
        super().__init__()
        self._set_arguments()

    def _check_values(self) -> None:
        """Check all Params, as far as that needs no data.

        Raises:
            ParamError: if a value cannot work; the message names the Param, its value and what it may be.
        """
        check_entries(self)
        check_one_column(self, "texts. Join several with pyspark.sql.functions.concat_ws")
        for entry, why in (
            (self.weightCol, "packed rows hold several texts. Repeat texts that shall count more"),
            (self.validationIndicatorCol, "packed rows hold several texts. Use validationFraction"),
        ):
            if self.isSet(entry):
                raise ParamError(f"Param {entry.name} has no meaning for LanguageModel: {why}.").about(
                    entry.name
                )
        self._check_corpora()
        if self.getPretrained() is None:
            if self.getLoraRank() is not None:
                raise ParamError(
                    "Param loraRank is set, and pretrained is not: adapters are for trained weights."
                ).about("loraRank")
            with check_of("embeddingSize", "numHeads", "numKeyHeads"):
                self._sizes(num_tokens=self.getVocabularySize())
            end, num_tokens = self.getEndToken(), self.getVocabularySize()
            if end is not None and end >= num_tokens:
                raise ParamError(
                    f"Param endToken is {end}, and vocabularySize {num_tokens}: {self.endToken.doc}."
                ).about("endToken", "vocabularySize")
        else:
            of_network: list[Param[Any]] = [
                self.vocabularySize,
                self.endToken,
                self.embeddingSize,
                self.numLayers,
            ]
            of_network += [self.numHeads, self.numKeyHeads, self.tieEmbeddings]
            check_unset(self, of_network, "pretrained", "the model in Param pretrained brings its own")
        parallelism = self.getParallelism()
        with check_of("parallelism", "numWorkers"):
            sizes = (
                None
                if parallelism is None or isinstance(parallelism, str)
                else parallelism.resolve(self.getNumWorkers())
            )
        if sizes is not None and sizes.context > 1 and self.getMaxLength() % (2 * sizes.context):
            raise ParamError(
                f"Param maxLength is {self.getMaxLength()}, and each of the {sizes.context} ranks of a sequence "
                f"has two parts of it. Set it to a multiple of {2 * sizes.context}."
            ).about("maxLength", "parallelism")
        if self.getLoraRank() is not None and sizes is not None and sizes.tensor > 1:
            raise ParamError(
                "Param loraRank is set, and adapters do not support tensor parallelism. Use shard in place of tensor."
            ).about("loraRank", "parallelism")
        self._params_of_fit()._check_settings()

    def _params_of_fit(self) -> TorchEstimator:
        """Return the Params of a fit on packed rows, without the network."""
        return self._estimator(None)

    def _columns_of_fit(self) -> list[tuple[Param[Any], Sequence[str]]]:
        """Return the columns of a DataFrame that a fit reads, with the Params that name them."""
        corpus = self.getCorpusCol()
        return [
            (self.featuresCol, self.getFeaturesCols()),
            *([] if corpus is None else [(self.corpusCol, [corpus])]),
        ]

    def _plan_rows(self, dataset: DataFrame) -> tuple[TorchEstimator, RowCounts]:
        """Return the Params of a fit, and the number of packed rows, estimated from the first texts."""
        check_columns(self, self._columns_of_fit(), dataset.columns)
        tokenizer, beginning = self._make(dataset)
        texts = self._texts(dataset, tokenizer, beginning.network.decoder)
        length = self.getMaxLength()
        rows = estimate_rows(dataset, texts, self._blend(), length=length, tokenizer=tokenizer)
        return self._estimator(beginning.network), rows

    def fitMultiple(self, dataset: DataFrame, paramMaps: Any) -> Any:
        """Return a thread-safe iterator of ``(index, model)``, with a model and packed rows for each Param map."""
        check_rows_to_fit(dataset)
        estimators = with_param_maps(self, paramMaps)
        return _FitMultipleIterator(lambda index: estimators[index].fit(dataset), len(estimators))

    def _fit_once(self, dataset: DataFrame, trial: TrialRun | None = None) -> LanguageModelModel:
        self._check_values()
        with (
            jobs_of(f"fit {type(self).__name__}"),
            self._prepare_rows(dataset) as (beginning, packed_rows, tokenizer),
            beginning.reachable_weights(self.getStore()) as weights,
        ):
            estimator = self._estimator(beginning.network, weights)
            (rows,) = share_rows(packed_rows, [estimator])
            return fit_on_rows(
                estimator,
                dataset.sparkSession,
                rows,
                partial(self._text_model, tokenizer=tokenizer),
                first_input=partial(first_text, dataset, self.getFeaturesCols()[0]),
                trial=trial,
            )

    @contextmanager
    def _prepare_rows(
        self, dataset: DataFrame
    ) -> Iterator[tuple[Beginning, DataFrame, LanguageTokenizer | TokenNumbers]]:
        """Give the network at the beginning of a fit, its packed rows within this context, and the tokenizer."""
        check_columns(self, self._columns_of_fit(), dataset.columns)
        tokenizer, beginning = self._make(dataset)
        texts = self._texts(dataset, tokenizer, beginning.network.decoder)
        blend, length = self._blend(), self.getMaxLength()
        if blend is None:
            yield beginning, pack_rows(dataset, texts, length=length, tokenizer=tokenizer), tokenizer
            return
        with blend_rows(dataset, texts, blend, length=length, tokenizer=tokenizer) as rows:
            yield beginning, rows, tokenizer

    def _texts(
        self, dataset: DataFrame, tokenizer: LanguageTokenizer | TokenNumbers, decoder: nn.Module
    ) -> Texts:
        (name,) = self.getFeaturesCols()
        takes_tokens = holds_tokens(dataset, name)
        return Texts(
            column=name,
            tokenizer=None if takes_tokens or isinstance(tokenizer, TokenNumbers) else tokenizer,
            num_tokens=num_tokens_of(decoder, tokenizer),
        )

    def _blend(self) -> Blend | None:
        column, weights = self.getCorpusCol(), self.getCorpusWeights()
        if column is None or weights is None:
            return None
        return Blend(
            column=column,
            weights=weights,
            num_rows=self.getEpochRows(),
            held_out=self.getValidationFraction() or 0.0,
            seed=self.getSeed(),
        )

    def _text_model(
        self,
        saved: SavedModel,
        summary: TrainingSummary,
        *,
        tokenizer: LanguageTokenizer | TokenNumbers,
    ) -> LanguageModelModel:
        network = saved.module
        assert isinstance(network, LanguageNetwork), "what was trained"
        made = text_model(
            merge_into_weights(network.decoder),
            tokenizer,
            column=self.getFeaturesCols()[0],
            answer=self.getOutput(),
            generation=Generation(),
            max_length=self.getMaxLength(),
            takes_tokens=isinstance(tokenizer, TokenNumbers),
        )
        return self._make_model(made, summary)

    def _estimator(self, network: nn.Module | None, weights: str | None = None) -> TorchEstimator:
        """Return the estimator that trains on packed rows, from initial weights that its ranks can read."""
        params = with_rate_of_pretrained(self)
        estimator = TorchEstimator(
            model=network,
            initialWeights=weights,
            loss=nn.CrossEntropyLoss(ignore_index=-100),
            optimizer=partial(
                torch.optim.AdamW, lr=params.getLearningRate(), weight_decay=params.getWeightDecay()
            ),
        )
        params._copyValues(estimator)
        estimator._made_for = params
        if self.getCorpusWeights() is not None and self.getValidationFraction() is not None:
            # A repeated row must not be a training row and a validation row.
            estimator._set(validationFraction=None, validationIndicatorCol=HELD_OUT)
        return estimator._set(featuresCol=["tokens", "documents"], labelCol="labels")

    def _make(self, dataset: DataFrame) -> tuple[LanguageTokenizer | TokenNumbers, Beginning]:
        """Return the network of a fit before it, and its tokenizer; for token arrays their numbers in its place."""
        (name,) = self.getFeaturesCols()
        takes_tokens = holds_tokens(dataset, name)
        folder = self.getPretrained()
        if folder is not None:
            return beginning_of_folder(folder, lora_rank=self.getLoraRank(), seed=self.getSeed())
        tokenizer = self._token_numbers(name) if takes_tokens else self._learn_tokenizer(dataset, name)
        return tokenizer, beginning_of_sizes(self._sizes(num_tokens=tokenizer.num_tokens))

    def _token_numbers(self, name: str) -> TokenNumbers:
        if not self.isSet(self.vocabularySize):
            raise ParamError(
                f"Param vocabularySize is not set, and column {name!r} holds token arrays. Set how many different "
                "tokens there are, or pretrained to the folder of the model and its tokenizer."
            )
        return TokenNumbers(self.getVocabularySize(), self.getEndToken())

    def _learn_tokenizer(self, dataset: DataFrame, name: str) -> LanguageTokenizer:
        if self.getVocabularySize() <= _BYTES:
            raise ParamError(
                f"Param vocabularySize is {self.getVocabularySize()}, and column {name!r} holds strings, whose "
                f"{_BYTES} byte values are tokens. Set it to {_BYTES + 1} or more."
            )
        if self.getEndToken() is not None:
            raise ParamError(
                f"Param endToken is {self.getEndToken()}, and column {name!r} holds strings. Leave endToken out: the "
                "tokenizer that is learned for strings has its own end token."
            )
        blend = self._blend()
        samples = [(dataset, 1.0)] if blend is None else blend.corpora(dataset)
        with reading_job(dataset.sparkSession, "reading the first texts"):
            texts = [
                row[0]
                for rows, part in samples
                for row in rows.select(quote(name)).limit(math.ceil(part * _SAMPLE_TEXTS)).collect()
            ]
        if not texts:
            raise DataError(f"There are no texts in column {name!r}.")
        if None in texts:
            raise DataError(f"Column {name!r} holds null, which is not a text. Leave those rows out.")
        return learn_tokenizer(texts, self.getVocabularySize())

    def _sizes(self, *, num_tokens: int) -> DecoderSizes:
        return DecoderSizes(
            # Divisible by 64, because tensor parallelism divides the vocabulary among ranks.
            vocabulary=math.ceil(num_tokens / 64) * 64,
            width=self.getEmbeddingSize(),
            layers=self.getNumLayers(),
            heads=self.getNumHeads(),
            key_heads=self.getNumKeyHeads(),
            is_tied=self.getTieEmbeddings(),
        )
