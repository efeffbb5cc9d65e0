"""The shape of a model: its parameters, arithmetic and activations, by block, as a function of how it is divided.

:class:`DecoderShape` computes them from the sizes of a decoder, such as Llama, GPT or
:class:`sparkdl.networks.decoder.Decoder`. :mod:`sparkdl.planner.counting` counts them in any other module.

Sources: V. A. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), for the
activations of a layer; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), for
the number of operations.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkdl.parallel import Parallelism


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How a program that trains holds numbers and sends them.

    Attributes:
        weight_bytes: bytes of a weight on the ranks.
        gradient_bytes: bytes of a gradient.
        optimizer_bytes: bytes of the optimizer's state of one weight: two moments of AdamW, and a float32 copy of the
            weight if the weight itself is smaller.
        compute_bytes: bytes of a number in matrix products and of most activations.
        gathered_bytes: bytes in which sharded weights are gathered.
        reduced_bytes: bytes in which gradients are reduced.
        casts: whether weights and activations are cast for each layer, as autocast does, so that copies of both are
            kept for the backward pass.
        passes: times that each activation outside of matrix products is read or written in a forward pass, as a
            multiple of its saved bytes; a backward pass takes twice as many. 1 where kernels are fused, as by
            torch.compile; 2 in torch's eager mode.
        keeps_gathered: whether the gathered inputs of divided layers are kept for the backward pass; Megatron-LM
            gathers them again.
        divides_optimizer: whether replicas divide the optimizer's state, as by Megatron-LM's distributed optimizer.
        hides: share of the communication of tensor ranks and between pipeline stages that is hidden behind arithmetic.
        stages_per_rank: number of pipeline stages of a rank; 0 for what the schedule says.
    """

    weight_bytes: int = 4
    gradient_bytes: float = 4
    optimizer_bytes: float = 8
    compute_bytes: int = 4
    gathered_bytes: int = 4
    reduced_bytes: int = 4
    casts: bool = False
    passes: float = 2.0
    keeps_gathered: bool = True
    divides_optimizer: bool = False
    hides: float = 0.0
    stages_per_rank: int = 0


RECIPES = {
    "float32": TrainingRecipe(),
    "bfloat16": TrainingRecipe(compute_bytes=2, casts=True),
    "bfloat16-shards": TrainingRecipe(compute_bytes=2, gathered_bytes=2),
}
"""How sparkdl trains with AdamW: an estimator by its Param ``precision``, and a script by
``shard(dtype=torch.bfloat16)``, which keeps no casts."""


@dataclass(frozen=True, kw_only=True)
class RankNumbers:
    """The numbers of a model on one rank; those of activations and arithmetic are for one row.

    Attributes:
        block: number of parameters of a block.
        before: number of parameters before the blocks.
        after: number of parameters after the blocks.
        saved: bytes that a block's forward pass keeps for its backward pass.
        inputs: bytes of the input of a block.
        outside_saved: bytes that the parts after the blocks, and the loss, keep for the backward pass.
        outside_passing: bytes that the outputs and the loss take for a moment, such as logits and their gradient.
        positions: rows of the matrix products.
        products: columns and depth of each matrix product of a block's forward pass.
        outside_products: the same, of the parts after the blocks.
        attention: operations of a block's attention kernel.
        moved: bytes of activations that a block's other kernels produce.
        outside_moved: the same, of the parts after the blocks and of the loss.
        queries: bytes of a block's queries.
        keys: bytes of a block's keys.
        summed: bytes of a block's whole output, which tensor ranks sum.
    """

    block: int
    before: int
    after: int
    saved: float
    inputs: float
    outside_saved: float
    positions: float
    products: Sequence[tuple[float, float]]
    outside_products: Sequence[tuple[float, float]]
    moved: float
    outside_moved: float
    outside_passing: float = 0.0
    attention: float = 0.0
    queries: float = 0.0
    keys: float = 0.0
    summed: float = 0.0


class ModelShape(ABC):
    """A model as a sequence of equal blocks, with parts before and after them.

    Attributes:
        name: name of the model in tables.
        layers: number of blocks.
        sequence: number of positions of a row; 1 for rows without positions.
    """

    name: str
    layers: int
    sequence: int

    @abstractmethod
    def on_rank(self, sizes: Parallelism, recipe: TrainingRecipe, *, is_fused: bool = True) -> RankNumbers:
        """Return the numbers of the model on one rank.

        Args:
            sizes: resolved sizes.
            recipe: how numbers are held.
            is_fused: whether a norm is one kernel, as on GPUs; on CPUs it also keeps the normalized input.
        """

    @abstractmethod
    def flops_per_row(self) -> float:
        """Operations of a forward and backward pass of a row without recomputation, to which utilization refers."""

    @abstractmethod
    def why_not(self, sizes: Parallelism) -> str | None:
        """Why the model cannot be divided by these sizes; None if it can."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters of the whole model."""


@dataclass(frozen=True, kw_only=True)
class DecoderShape(ModelShape):
    """The sizes of a decoder for language models.

    Attributes:
        vocabulary: number of tokens in the vocabulary.
        width: number of features of a position between the layers.
        layers: number of layers.
        heads: number of attention heads of a layer.
        key_heads: number of heads of keys and values; ``heads`` if None.
        hidden: number of features inside of a feed-forward part; four times the width if None.
        head_size: number of features of a head; ``width / heads`` if None.
        sequence: number of positions of a row.
        is_tied: whether the head shares the embedding's weights.
        is_gated: whether the feed-forward part has a third layer that gates its features, as SwiGLU.
        has_biases: whether layers have biases, and norms a shift.
        name: name of the model in tables.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    sequence: int
    key_heads: int | None = None
    hidden: int | None = None
    head_size: int | None = None
    is_tied: bool = False
    is_gated: bool = True
    has_biases: bool = False
    name: str = "decoder"

    def __post_init__(self) -> None:
        optional = ("key_heads", "hidden", "head_size")
        for field in ("vocabulary", "width", "layers", "heads", "sequence", *optional):
            value = getattr(self, field)
            is_missing = value is None and field in optional
            if not is_missing and (not isinstance(value, int) or value < 1):
                raise ParamError(f"{self.name}: {field} must be a positive number, got {value!r}.")
        if self.head_size is None and self.width % self.heads:
            raise ParamError(f"{self.name}: width {self.width} is not a multiple of heads {self.heads}.")
        if self.heads % (self.key_heads or self.heads):
            raise ParamError(f"{self.name}: key_heads {self.key_heads} must divide heads {self.heads}.")

    @property
    def queries(self) -> int:
        """Number of features of all queries of a position."""
        return self.heads * (self.head_size or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Number of features of all keys of a position."""
        return self.queries // self.heads * (self.key_heads or self.heads)

    @property
    def inner(self) -> int:
        """Number of features inside of a feed-forward part."""
        return self.hidden or 4 * self.width

    def _key_repeats(self, sizes: Parallelism) -> int:
        """How often all-to-all attention repeats keys, so that each context rank has some."""
        if sizes.context == 1 or sizes.attention != "all-to-all":
            return 1
        return sizes.context // math.gcd((self.key_heads or self.heads) // sizes.tensor, sizes.context)

    def _block(self, tensor: int) -> int:
        """Number of parameters of a layer; norms, and the biases of sums, are not divided."""
        matrices = self.width * (2 * self.queries + 2 * self.keys + (3 if self.is_gated else 2) * self.inner)
        biases = self.queries + 2 * self.keys + self.inner if self.has_biases else 0
        return (matrices + biases) // tensor + (6 if self.has_biases else 2) * self.width

    def _after(self, tensor: int, *, is_tied: bool) -> int:
        """Number of parameters of the last norm and of the head."""
        norm = (2 if self.has_biases else 1) * self.width
        return norm + (0 if is_tied else self.vocabulary * self.width // tensor)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        after = self._after(1, is_tied=self.is_tied)
        return self.vocabulary * self.width + self.layers * self._block(1) + after

    def on_rank(self, sizes: Parallelism, recipe: TrainingRecipe, *, is_fused: bool = True) -> RankNumbers:
        """Return the numbers of the model on one rank.

        A layer keeps for each position the inputs of both norms, their outputs as inputs of products, queries, keys,
        values and the attention's output, and the features inside of the feed-forward part before and after its
        activation; attention kernels keep the logarithm of a sum in place of all weights. With ``sequence``, tensor
        ranks divide the inputs of norms, but gather their outputs. Causal attention computes half of all pairs of
        positions. The loss reads and writes 48 bytes for each logit in eager mode, and keeps its probability.
        """
        tensor, number = sizes.tensor, recipe.compute_bytes
        residual = recipe.weight_bytes if recipe.casts else number
        divided = tensor if sizes.sequence else 1
        positions = self.sequence / sizes.context
        of_norm = residual * (1 if is_fused else 2)
        casts = (
            (5 if self.is_gated else 4) if recipe.casts else 2
        )  # one for each product with a norm's output
        outputs = casts * number / (1 if recipe.keeps_gathered else divided)
        keys = self._key_repeats(sizes) * self.keys
        inside = (2 * self.queries + 2 * keys + (4 if self.is_gated else 2) * self.inner) * number
        saved = self.width * (2 * of_norm / divided + outputs) + (inside + 4 * self.heads) / tensor
        logits = positions * self.vocabulary / tensor
        is_tied = self.is_tied and sizes.pipeline == 1  # the last stage has a copy
        return RankNumbers(
            block=self._block(tensor),
            before=self.vocabulary * self.width // tensor,
            after=self._after(tensor, is_tied=is_tied),
            saved=positions * saved,
            inputs=positions * self.width * residual / divided,
            outside_saved=positions * self.width * (of_norm + number) + 4 * logits,
            outside_passing=logits * (8 if number == 4 else 8 + number),
            positions=positions,
            products=(
                ((self.queries + 2 * self.keys) / tensor, self.width),
                (self.width, self.queries / tensor),
                ((2 if self.is_gated else 1) * self.inner / tensor, self.width),
                (self.width, self.inner / tensor),
            ),
            outside_products=((self.vocabulary / tensor, self.width),),
            attention=2 * positions * self.sequence * self.queries / tensor,
            moved=positions * saved,
            outside_moved=8 * logits,
            queries=positions * self.queries * number / tensor,
            keys=positions * keys * number / tensor,
            summed=positions * self.width * number,
        )

    def flops_per_row(self) -> float:
        """Operations of a row: six for each position and weight of a product, and attention over all pairs.

        Megatron-LM and torchtitan count so, too, though causal attention computes half of the pairs of positions.
        """
        weights = self.layers * (self._block(1) - 2 * self.width) + self.vocabulary * self.width
        return self.sequence * (6.0 * weights + 12.0 * self.layers * self.queries * self.sequence)

    def why_not(self, sizes: Parallelism) -> str | None:
        """Why the sizes do not suit the model; None if they do."""
        lengths = {"heads": self.heads, "key_heads": self.key_heads or self.heads, "hidden": self.inner}
        for name, length in {**lengths, "vocabulary": self.vocabulary}.items():
            if length % sizes.tensor:
                return f"tensor {sizes.tensor} does not divide {name} {length}"
        if sizes.context > 1 and self.sequence % (
            2 * sizes.context * (sizes.tensor if sizes.sequence else 1)
        ):
            return f"sequence {self.sequence} is not a multiple of twice context {sizes.context}"
        if sizes.sequence and self.sequence % sizes.tensor:
            return f"tensor {sizes.tensor} does not divide sequence {self.sequence}"
        if (
            sizes.context > 1
            and sizes.attention == "all-to-all"
            and (
                self.heads // sizes.tensor % sizes.context
                or self.heads % ((self.key_heads or self.heads) * self._key_repeats(sizes))
            )
        ):
            return f"context {sizes.context} does not divide the heads of a tensor rank"
        return None


def _llama(
    name: str, width: int, layers: int, heads: int, key_heads: int, hidden: int, **more: Any
) -> DecoderShape:
    sizes = {"vocabulary": 128256, "sequence": 8192, **more}
    return DecoderShape(
        name=name, width=width, layers=layers, heads=heads, key_heads=key_heads, hidden=hidden, **sizes
    )


MODELS = {
    shape.name: shape
    for shape in (
        _llama("llama-1b", 2048, 16, 32, 8, 8192, is_tied=True),
        _llama("llama-3b", 3072, 28, 24, 8, 8192, is_tied=True),
        _llama("llama-8b", 4096, 32, 32, 8, 14336),
        _llama("llama-13b", 5120, 40, 40, 40, 13824, vocabulary=32000, sequence=4096),
        _llama("llama-70b", 8192, 80, 64, 8, 28672),
        _llama("llama-405b", 16384, 126, 128, 8, 53248),
    )
}
"""Shapes by name. Sources: Meta, "Llama 2" (2023), "The Llama 3 Herd of Models" (2024), model cards of Llama 3.2."""

_KEYS = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "key_heads": ("num_key_value_heads",),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim"),
    "head_size": ("head_dim",),
    "sequence": ("max_position_embeddings", "n_positions"),
}
"""Names of the sizes in the configurations of transformers."""

_WITHOUT_GATES = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2")
_TIED = (
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "starcoder2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "cohere",
    "smollm3",
)
"""Decoders, by ``model_type``, whose head is tied where ``tie_word_embeddings`` is missing, as in transformers."""

_UNTIED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi",
    "phi3",
    "olmo",
    "olmo2",
    "gpt_neox",
    "gptj",
    "stablelm",
    "granite",
    "glm",
)
"""Decoders whose head is not tied where ``tie_word_embeddings`` is missing."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of_config(
    config: Mapping[str, Any], *, name: str = "model", sequence: int | None = None
) -> DecoderShape:
    """Return the shape of a decoder that a configuration of transformers describes.

    Args:
        config: content of its ``config.json``.
        name: name of the model in tables.
        sequence: number of positions of a row; the maximum of the model if None.

    Raises:
        ParamError: if it has no such sizes, or describes a mixture of experts or another kind of model.
    """
    config = {**config, **(config.get("text_config") or {})}
    experts = [key for key in _EXPERTS if (config.get(key) or 0) > 1]
    if experts:
        raise ParamError(
            f"{name} is a mixture of experts ({experts[0]} {config[experts[0]]}), which the planner does not know. "
            "Plan for a dense model of the same size."
        )
    sizes: dict[str, Any] = {
        field: next((config[key] for key in keys if config.get(key) is not None), None)
        for field, keys in _KEYS.items()
    }
    sizes["sequence"] = sizes["sequence"] if sequence is None else sequence
    missing = [
        field for field in ("vocabulary", "width", "layers", "heads", "sequence") if sizes[field] is None
    ]
    if missing:
        raise ParamError(
            f"{name}: its configuration has no {' and no '.join(_KEYS[field][0] for field in missing)}. Give the sizes "
            "of a decoder, or the module itself."
        )
    kind = config.get("model_type", "")
    if kind not in _TIED + _UNTIED:
        raise ParamError(
            f"{name}: the planner cannot read the sizes of model_type {kind!r}; it knows "
            f"{', '.join(sorted(_TIED + _UNTIED))}. Give sizes such as width=4096,layers=32,heads=32,vocabulary=32000."
        )
    if kind == "falcon":
        many = config.get("num_kv_heads") if config.get("new_decoder_architecture") else None
        sizes["key_heads"] = many or (1 if config.get("multi_query", True) else None)
    plain = kind in _WITHOUT_GATES
    tied = config.get("tie_word_embeddings")
    return DecoderShape(
        **sizes,
        name=name,
        is_gated=not plain,
        has_biases=plain,
        is_tied=kind in _TIED if tied is None else bool(tied),
    )


def shape_from_text(text: str, *, sequence: int | None = None) -> DecoderShape:
    """Return the shape that a command line names: a key of :data:`MODELS`, a Hugging Face folder, or sizes.

    Only the ``config.json`` of a folder is read.

    Args:
        text: such as ``"llama-8b"``, ``"/models/llama"``, or ``"width=4096,layers=32,heads=32,vocabulary=32000"``.
        sequence: number of positions of a row; that of the model if None.

    Raises:
        ParamError: if it is none of these, or the folder describes no decoder.
    """
    if sequence is not None and sequence < 1:
        raise ParamError(f"sequence must be a positive number of positions, got {sequence}.")
    if text in MODELS:
        return replace(MODELS[text], sequence=sequence or MODELS[text].sequence)
    if Path(text).is_dir():
        path = Path(text) / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ParamError(f"{text} is not a folder of a Hugging Face model: {path}: {error}") from error
        return shape_of_config(config, name=Path(text).absolute().name, sequence=sequence)
    if "=" not in text:
        raise ParamError(
            f"{text!r} is not a model: give one of {', '.join(MODELS)}, a folder with a config.json, or sizes such as "
            "width=4096,layers=32,heads=32,vocabulary=32000. A module is planned in Python: "
            "sparkdl.planner.plan(module, ...)."
        )
    fields = {name for name in DecoderShape.__dataclass_fields__ if name not in ("name", "sequence")}
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in fields or not value.strip().isdigit():
            raise ParamError(
                f"{part!r} is not a size. Write name and number, such as width=512; names are "
                f"{', '.join(sorted(fields))}."
            )
        number = int(value)
        sizes[key.strip()] = bool(number) if key.strip().startswith(("is_", "has_")) else number
    missing = [name for name in ("width", "layers", "heads", "vocabulary") if name not in sizes]
    if missing or sequence is None:
        what = ", ".join(missing) or "--sequence"
        raise ParamError(f"The sizes {text!r} lack {what}.")
    return DecoderShape(**sizes, sequence=sequence)
