"""The digest of replicas changes with every ordinary difference between them."""

from __future__ import annotations

import pytest
import torch

from sparkdl.torch.replicas import digest

NUMBERS = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
SWAPPED = [1, 0, *range(2, 100)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [2, 16, 64])
def test_signs_and_orders_change_the_digest(dtype: torch.dtype, length: int) -> None:
    tensor = NUMBERS[:, :length].to(dtype)
    columns = torch.ones(length, dtype=dtype)
    columns[1::2] = -1
    others = [-tensor, tensor * columns, tensor.flip(0), tensor.flip(1), tensor[SWAPPED], tensor.roll(1, 0)]
    digests = {digest(changed.contiguous()).item() for changed in (tensor, *others)}
    assert len(digests) == 1 + len(others)
    assert digest(tensor.clone().contiguous()) == digest(tensor.contiguous())
