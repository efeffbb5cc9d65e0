"""Predicted memory against the memory of small models: state to the byte, activations within ten percent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel import Parallelism, blocks_of, recompute_activations
from sparkdl.planner import DecoderShape
from sparkdl.planner.counting import shape_of_module
from sparkdl.planner.memory import in_flight, memory_of, parts_of_ranks
from sparkdl.planner.shape import RECIPES

ONE = Parallelism(data=1)
ROWS, POSITIONS = 4, 96
MODELS = {
    "as many keys": DecoderSizes(vocabulary=512, width=128, layers=4, heads=4, is_tied=False),
    "grouped": DecoderSizes(vocabulary=256, width=192, layers=3, heads=6, key_heads=2, hidden=640),
}


def step(sizes: DecoderSizes, *, autocast: bool = False, recompute: bool = False) -> tuple[int, int]:
    """Bytes that a forward pass keeps, and bytes of weights, gradients and AdamW's moments after a step."""
    torch.manual_seed(0)
    module = Decoder(sizes)
    if recompute:
        recompute_activations(blocks_of(module))
    tokens = torch.randint(sizes.vocabulary, (ROWS, POSITIONS + 1))
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = module(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    saved = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)
    optimizer = torch.optim.AdamW(module.parameters())
    loss.backward()
    optimizer.step()
    state = [*module.parameters(), *(parameter.grad for parameter in module.parameters())]
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return saved, sum(tensor.nbytes for tensor in [*state, *moments] if tensor is not None)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_a_decoder_is_predicted(model: str, precision: str, recompute: bool) -> None:
    sizes = MODELS[model]
    saved, state = step(sizes, autocast=precision == "bfloat16", recompute=recompute)
    predicted = memory_of(
        shape_of_module(Decoder(sizes), sequence=POSITIONS),
        Parallelism(data=1, recompute=recompute),
        rows=ROWS,
        microbatches=2,
        recipe=RECIPES[precision],
        is_cpu=True,
    )
    assert predicted.weights + predicted.gradients + predicted.optimizer == state
    if precision == "float32":
        assert predicted.activations == pytest.approx(saved, rel=0.1)
    elif not recompute:  # casts of weights are kept like activations, and are buffers in a prediction
        logits = 2 * ROWS * POSITIONS * sizes.vocabulary
        casts = predicted.buffers - logits - 8 * ROWS * POSITIONS * sizes.vocabulary
        assert predicted.activations + casts == pytest.approx(saved, rel=0.1)


SHAPE = DecoderShape(vocabulary=1024, width=64, layers=16, heads=4, sequence=32)
FLOAT32 = RECIPES["float32"]


def memory(sizes: Parallelism, *, rows: float = 2, microbatches: int = 8) -> dict[str, float]:
    return vars(memory_of(SHAPE, sizes, rows=rows, microbatches=microbatches, recipe=FLOAT32))


def test_shards_divide_the_state_and_gather_two_blocks() -> None:
    whole, shards = memory(ONE), memory(Parallelism(data=1, shard=4))
    for kind in ("weights", "gradients", "optimizer"):
        assert shards[kind] == whole[kind] / 4
    assert shards["activations"] == whole["activations"]
    numbers = SHAPE.on_rank(ONE, FLOAT32)
    outside = numbers.before + numbers.after
    assert shards["buffers"] - whole["buffers"] == 4 * (outside + 2 * numbers.block) + 4 * numbers.block
    kept = memory(Parallelism(data=1, shard=4, sharding_stage=2))
    assert kept["buffers"] - whole["buffers"] == 4 * (SHAPE.parameters + numbers.block)


def test_context_divides_activations_and_state() -> None:
    whole, parts = memory(ONE), memory(Parallelism(data=1, context=4))
    assert parts["activations"] == whole["activations"] / 4
    assert parts["optimizer"] == whole["optimizer"] / 4


def test_first_rank_of_a_pipeline_holds_a_microbatch_for_each_rank() -> None:
    sizes = Parallelism(data=1, pipeline=4)
    parts = parts_of_ranks(SHAPE, SHAPE.on_rank(sizes, FLOAT32), sizes, FLOAT32)
    assert sum(part.layers * ranks for part, ranks in parts) == 16
    assert in_flight(parts[0][0], sizes, 8) == 4
    assert in_flight(parts[0][0], sizes, 2) == 2
    assert in_flight(parts[-1][0], sizes, 8) == 1


def test_interleaved_stages_hold_more_as_korthikanti_has_it() -> None:
    sizes = Parallelism(data=1, pipeline=4, schedule="interleaved-1f1b")
    narrow = replace(SHAPE, vocabulary=8)
    ((first, _), *_) = parts_of_ranks(narrow, narrow.on_rank(sizes, FLOAT32), sizes, FLOAT32)
    assert in_flight(first, sizes, 8) * first.layers == pytest.approx(16 * (1 + 3 / (4 * 2)), rel=0.05)


def test_fewer_positions_in_parts_need_less_memory_with_tensor_ranks() -> None:
    divided, parted = (
        memory(Parallelism(data=1, tensor=2)),
        memory(Parallelism(data=1, tensor=2, sequence=True)),
    )
    assert parted["activations"] < divided["activations"] < memory(ONE)["activations"]


def test_gradients_of_a_single_pass_grow_while_activations_are_freed() -> None:
    """Few rows: all gradients are there at the end; many: all activations are there when the first gradients come."""
    numbers = SHAPE.on_rank(ONE, FLOAT32)
    few, many = memory(ONE, rows=1, microbatches=1), memory(ONE, rows=64, microbatches=1)
    assert few["gradients"] == 4 * SHAPE.parameters
    assert few["activations"] == numbers.saved
    assert many["gradients"] == 4 * (numbers.block + numbers.after)
    assert many["activations"] == 64 * (16 * numbers.saved + numbers.outside_saved)
    several = memory(ONE, rows=64, microbatches=2)
    assert several["gradients"] == few["gradients"]
    assert several["activations"] == many["activations"]


def test_replicas_of_cpus_reduce_gradients_in_memory_of_their_own() -> None:
    on_gpus, on_cpus = (
        memory_of(SHAPE, Parallelism(data=2), rows=2, microbatches=2, recipe=FLOAT32, is_cpu=is_cpu)
        for is_cpu in (False, True)
    )
    assert on_cpus.buffers - on_gpus.buffers == 4 * SHAPE.parameters
