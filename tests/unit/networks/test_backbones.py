"""Which weights of a file a network for other classes loads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.networks.backbones import load_fitting


class Network(nn.Module):
    """A network whose width may equal the number of classes without being the size of a head."""

    def __init__(self, width, num_outputs, *, num_heads=1):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.heads = nn.ModuleList(nn.Linear(8, num_outputs) for _ in range(num_heads))


def test_layer_as_wide_as_the_number_of_classes_is_not_taken_for_the_head():
    module = Network(64, 64)
    before = [tensor.clone() for tensor in module.state_dict().values()]
    with pytest.raises(ParamError, match=r"\(missing or of another shape: stem.weight, stem.bias\)"):
        load_fitting(module, Network(32, 10).state_dict(), num_outputs=64, path="w")
    assert all(map(torch.equal, before, module.state_dict().values()))


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("num_given", [10, 64])
def test_heads_for_other_classes_are_kept_and_all_other_layers_loaded(num_heads, num_given):
    module, given = Network(64, 64, num_heads=num_heads), Network(64, num_given, num_heads=num_heads)
    before = module.heads[0].weight.clone()
    load_fitting(module, given.state_dict(), num_outputs=64, path="w")
    assert torch.equal(module.stem.weight, given.stem.weight)
    assert torch.equal(module.heads[0].weight, before if num_given == 10 else given.heads[0].weight)
