"""Tensors in nested optimizer states are taken out and put back in the same structure."""

from __future__ import annotations

from collections import namedtuple

import torch

from sparkdl.horovod.torch.functions import _put_in_tensors, _take_out_tensors

Moments = namedtuple("Moments", ["first", "second"])


def test_named_tuples_and_dicts_keep_their_structure() -> None:
    state = {"moments": Moments(torch.ones(2), [torch.zeros(3), 1.5]), "step": 4}
    taken: list[torch.Tensor] = []
    outline = _take_out_tensors(state, taken)
    assert [tensor.tolist() for tensor in taken] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    made: list[torch.Tensor] = []
    again = _put_in_tensors(outline, made)
    assert isinstance(again["moments"], Moments)
    assert [tensor.shape for tensor in made] == [(2,), (3,)]
    assert (again["moments"].second[1], again["step"]) == (1.5, 4)
