from __future__ import annotations

import pytest
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel.tensor.plan import divided_layers

PLAN = {"0": "colwise", "2": "rowwise"}


def network(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("first", "plan", "message"),
    [
        (
            nn.utils.spectral_norm(nn.Linear(4, 8)),
            PLAN,
            "'0', whose weight is computed from other parameters",
        ),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)),
            PLAN,
            "'0', whose weight is computed from other parameters",
        ),
        (nn.Linear(4, 9), PLAN, "'0' has 9 output features, which 2 .* divides 9"),
        (nn.Linear(4, 8), {**PLAN, "7": "colwise"}, "'7', which Sequential does not have"),
        (nn.Linear(4, 8), {**PLAN, "0": "sideways"}, "'sideways', which sparkdl does not know"),
        (nn.Embedding(8, 8), PLAN, "'0' in the style 'colwise', which takes a torch.nn.Linear"),
    ],
)
def test_layers_that_cannot_be_divided_are_named(
    first: nn.Module, plan: dict[str, str], message: str
) -> None:
    with pytest.raises(ParamError, match=message):
        divided_layers(network(first), 2, plan)


def test_one_key_head_is_not_to_be_divided() -> None:
    decoder = Decoder(DecoderSizes(vocabulary=8, width=16, layers=1, heads=2, key_heads=1))
    with pytest.raises(ParamError, match="key_heads = 1"):
        divided_layers(decoder, 2)
