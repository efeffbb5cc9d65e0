"""What ``sparkdl plan --measure`` times on ranks: forward and backward passes of one part of a decoder, and sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.sessions import Trial
from sparkdl.planner.sums import SumTimes, time_sums

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Part = tuple[Callable[[], Any], list[Tensor]]
    """A function that computes a loss, or updates weights, and the tensors that get gradients."""


class LayerTrial(Trial):
    """Forward and backward passes of one part on some rows, or steps of AdamW.

    Args:
        case: settings of the case: ``part``, one of :data:`PARTS`, ``autocast``, and the sizes that the part takes.

    Attributes:
        tensors: the tensors that get gradients.
    """

    num_warm_ups = 2

    def __init__(self, case: Mapping[str, Any]) -> None:
        import torch

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(0)
        with self._device:
            self._part, self.tensors = PARTS[case["part"]](case)
        self._autocast = case["autocast"]

    def run(self, operations: int) -> None:
        """Run this number of passes."""
        import torch

        for _ in range(operations):
            for weight in self.tensors:
                weight.grad = None  # as at the begin of a step: gradients are written, not added
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                output = self._part()
            if output is not None:
                output.backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _product(case: Mapping[str, Any]) -> Part:
    """A linear layer, whose output's gradient is one and the same number: its sum would take time of its own."""
    import torch

    inputs = torch.randn(case["rows"] * case["positions"], case["depth"], requires_grad=True)
    layer = torch.nn.Linear(case["depth"], case["columns"], bias=False)
    return lambda: _sum_up(layer(inputs)), [inputs, layer.weight]


def _attention(case: Mapping[str, Any]) -> Part:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    size = case["head_size"]
    heads = [case["heads"], case["key_heads"], case["key_heads"]]
    dtype = torch.bfloat16 if case["autocast"] else torch.float32
    query, key, value = (
        torch.randn(case["rows"], number, case["positions"], size, dtype=dtype, requires_grad=True)
        for number in heads
    )
    is_grouped = case["heads"] != case["key_heads"]
    attend = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=is_grouped)
    return lambda: _sum_up(attend(query, key, value)), [query, key, value]


def _blocks(case: Mapping[str, Any]) -> Part:
    """Several blocks, whose weights come from memory as in training: those of one would stay in the caches."""
    import torch

    blocks, rotation = _decoder_blocks(case)
    inputs = torch.randn(case["rows"], case["positions"], case["width"], requires_grad=True)

    def compute() -> Tensor:
        hidden = inputs
        for block in blocks:
            hidden = block(hidden, rotation, None)
        return _sum_up(hidden)

    return compute, [inputs, *blocks.parameters()]


def _head(case: Mapping[str, Any]) -> Part:
    import torch
    from torch.nn.functional import cross_entropy

    positions = case["rows"] * case["positions"]
    inputs = torch.randn(positions, case["width"], requires_grad=True)
    head = torch.nn.Linear(case["width"], case["vocabulary"], bias=False)
    labels = torch.randint(case["vocabulary"], (positions,))
    return lambda: cross_entropy(head(inputs).float(), labels), [inputs, head.weight]


def _update(case: Mapping[str, Any]) -> Part:
    import torch

    blocks, _ = _decoder_blocks(case)
    for parameter in blocks.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-6, fused=True)

    def update() -> None:
        optimizer.step()

    return update, []


def _decoder_blocks(case: Mapping[str, Any]) -> tuple[torch.nn.ModuleList, tuple[Tensor, Tensor]]:
    """``blocks`` layers of the decoder, and the rotary positions of a row."""
    import torch

    from sparkdl.networks.decoder import Decoder, DecoderSizes

    width, hidden = case["width"], case["hidden"]
    names = ("width", "heads", "key_heads", "hidden")
    decoder = Decoder(
        DecoderSizes(vocabulary=2, layers=case["blocks"], **{name: case[name] for name in names})
    )
    if not case["is_gated"]:
        for block in decoder.blocks:
            block.feed_forward = torch.nn.Sequential(
                torch.nn.Linear(width, hidden, bias=False),
                torch.nn.GELU(),
                torch.nn.Linear(hidden, width, bias=False),
            )
    rotation = decoder.rotation(None, torch.zeros(1, case["positions"], dtype=torch.int64))
    return decoder.blocks, rotation


def _sum_up(output: Tensor) -> Tensor:
    """A scalar whose backward pass gives ``output`` a gradient without reading or writing it."""
    result: Tensor = _sum_class().apply(output)
    return result


@functools.cache
def _sum_class() -> Any:
    import torch

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, whole: Tensor) -> Tensor:
            ctx.shape = whole.shape
            return whole.new_zeros(())

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0].expand(ctx.shape)

    return Sum


PARTS: dict[str, Callable[[Mapping[str, Any]], Part]] = {
    "product": _product,
    "attention": _attention,
    "blocks": _blocks,
    "head": _head,
    "update": _update,
}


class SumsTrial(Trial):
    """Measurements of sums over all ranks.

    Args:
        device: type of the device on which the ranks sum.
    """

    num_warm_ups = 0

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._times: SumTimes | None = None

    def run(self, operations: int) -> None:
        """Measure this many times."""
        for _ in range(operations):
            self._times = time_sums(None, self._device)

    def result(self) -> dict[str, Any]:
        """Return the figures of the last measurement."""
        assert self._times is not None
        return asdict(self._times)
