from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from sparkdl.errors import ParamError
from sparkdl.parallel.replaced_parameters import noting_replaced_parameters


def replace_weight(module: nn.Linear) -> None:
    with noting_replaced_parameters(module, "shard()"):
        module.weight = nn.Parameter(torch.zeros(2, 2))


def test_optimizer_that_gets_a_replaced_parameter_after_its_first_step_is_refused() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([module.bias])
    before = module.weight
    replace_weight(module)
    optimizer.step()
    optimizer.add_param_group({"params": [module.weight]})
    optimizer.step()
    optimizer.add_param_group({"params": [before]})
    with pytest.raises(ParamError, match=r"SGD holds the old parameter 'weight', which shard\(\)"):
        optimizer.step()


def test_hook_on_a_gradient_that_the_new_parameter_would_not_have_is_refused() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        module = nn.Linear(2, 2)
        handle = getattr(module.weight, register)(lambda tensor: None)
        with pytest.raises(ParamError, match=r"gradient of 'weight' has a hook, which shard\(\) would lose"):
            replace_weight(module)
        handle.remove()
        replace_weight(module)


def test_new_parameter_has_the_attributes_of_the_replaced_one() -> None:
    module = nn.Linear(2, 2)
    module.weight.lr_scale = 0.5
    replace_weight(module)
    assert module.weight.lr_scale == 0.5


def test_memory_of_a_replaced_parameter_is_free_at_once() -> None:
    module = nn.Linear(2, 2)
    before = weakref.ref(module.weight)
    with noting_replaced_parameters(module, "shard()"):
        module.weight = nn.Parameter(torch.zeros(2, 2))
        assert before() is None


def test_weights_of_other_libraries_may_be_swapped_meanwhile() -> None:
    module = nn.Linear(2, 2, bias=False)
    zeros, ones = torch.zeros(2, 2), torch.ones(2, 2)
    module.weight = nn.Parameter(TwoTensor(zeros, zeros))
    with noting_replaced_parameters(module, "shard()"):  # as fully_shard does that moves them to a GPU
        torch.utils.swap_tensors(module.weight, nn.Parameter(TwoTensor(ones, ones)))
    assert module.weight.a.sum() == 4
