"""A model whose output for a row depends on other rows is refused before ranks are started."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkdl.data import Column
from sparkdl.errors import ParamError
from sparkdl.estimators.fit.probe import ProbeResult, probe
from sparkdl.model.heads import Head, LabelColumn
from sparkdl.model.independent_rows import layers_over_rows
from sparkdl.model.inputs import ModelInputs


class Computing(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(3, 2, dtype=dtype), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


PAIR = np.array([[1.0, 2.0, 3.0], [-4.0, 0.5, 9.0]])


def probe_pair(model: nn.Module, rows: np.ndarray = PAIR, **inputs) -> ProbeResult:
    column = Column(name="x", dtype="float64", shape=(3,))
    if rows.dtype == object:
        column = Column(
            name="x", dtype="object", kind="ragged", lengths=(None,), element=("number", "float64")
        )
    return probe(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        inputs=ModelInputs(columns=(column,), **inputs),
        heads=[Head(label=LabelColumn(name="y", shape=(2,)), loss=nn.MSELoss())],
        row={"x": rows[:1]},
        labels={"y": np.zeros((1, 2))},
        pair={"x": rows},
    )


OVER_ROWS = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "softmax": lambda x: x.softmax(0),
    "sum of the rows before": lambda x: x.cumsum(0),
    "sum of the rows after": lambda x: x.flip(0).cumsum(0).flip(0),
    "number of rows": lambda x: x / len(x),
    "largest of all": lambda x: x / x.abs().max(),
    "first row": lambda x: x[:1].expand_as(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "batch norm": lambda x: F.batch_norm(torch.stack([x, x + 1], 2), None, None, training=True).sum(2),
    "a small share": lambda x: x + 0.01 * x.mean(0),
}


@pytest.mark.parametrize("name", OVER_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_that_depend_on_other_rows_are_refused(name, dtype):
    with pytest.raises(ParamError, match="prediction must not depend on other rows"):
        probe_pair(Computing(OVER_ROWS[name], dtype))


def test_one_output_per_batch_is_refused_with_its_shape():
    with pytest.raises(ParamError, match=r"for a batch of 2 rows it returned shape \(1, 2\)"):
        probe_pair(Computing(lambda x: x.mean(0, keepdim=True)))


def test_a_function_that_prepares_features_by_their_batch_is_refused():
    with pytest.raises(ParamError, match="prepareFeatures"):
        probe_pair(Computing(lambda x: x), prepare=lambda columns: columns["x"] - columns["x"].mean(0))


RIGHT = {
    "linear": (lambda x: x, torch.float32),
    "in half precision": (lambda x: x.tanh() * 100, torch.bfloat16),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), torch.float32),
    "not a number": (lambda x: x * float("nan"), torch.float32),
    "infinite": (lambda x: x * float("inf"), torch.float32),
    "zero": (lambda x: x * 0, torch.float32),
    "random": (lambda x: x + torch.rand_like(x), torch.float32),
}


@pytest.mark.parametrize("name", RIGHT)
def test_outputs_of_each_row_alone_are_accepted(name):
    probe_pair(Computing(*RIGHT[name]))


def test_rounding_that_differs_between_batches_is_no_dependence():
    def rounded(x: Tensor) -> Tensor:  # as a kernel whose sums have another order for another number of rows
        return x + (len(x) - 1) * torch.finfo(x.dtype).eps * 1e4

    probe_pair(Computing(rounded))


class Pooled(nn.Module):
    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.layer, self.masked = nn.Linear(1, 2), masked

    def forward(self, x: Tensor) -> Tensor:
        present = (x != -1) if self.masked else torch.ones_like(x)
        hidden = self.layer(x.unsqueeze(2)) * present.unsqueeze(2)
        return hidden.sum(1) / present.sum(1, keepdim=True)


def test_padding_has_to_be_masked():
    rows = np.empty(2, object)
    rows[:] = [np.array([1.0, 2.0]), np.array([1.0, 2.0, 3.0, 4.0])]
    probe_pair(Pooled(masked=True), rows, padding_value=-1.0)
    with pytest.raises(ParamError, match="mask what pads shorter arrays"):
        probe_pair(Pooled(masked=False), rows, padding_value=-1.0)


@pytest.mark.parametrize("positions", [1, 4])
def test_a_batch_norm_without_running_statistics_is_named(positions):
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)

        def forward(self, x: Tensor) -> Tensor:
            spread = self.layer(x).unsqueeze(2) * torch.arange(1, positions + 1)
            return self.norm(spread).sum(2)

    with pytest.raises(ParamError, match=r"'norm' \(BatchNorm1d\).*track_running_stats=True"):
        probe_pair(Normalized())


def test_ten_of_the_layers_that_normalize_by_the_batch_are_named():
    layers = nn.Sequential(*(nn.BatchNorm1d(2, track_running_stats=False) for _ in range(13)))
    assert "'9' (BatchNorm1d) and 3 more normalize" in layers_over_rows(layers)


def test_layers_that_normalize_each_row_are_accepted():
    probe_pair(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.BatchNorm1d(2), nn.GroupNorm(1, 2)))


def test_layers_quantized_by_the_range_of_the_batch_are_named():
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no engine for quantized layers")
    torch.manual_seed(0)
    hidden = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 64), nn.ReLU()), {nn.Linear})
    with pytest.raises(ParamError, match=r"'0\.0' \(Linear\).*dynamic quantization"):
        probe_pair(nn.Sequential(hidden, nn.Linear(64, 2)), PAIR * [[1.0], [1000.0]])


def test_frozen_batch_norms_are_named_in_a_warning(caplog):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with caplog.at_level(logging.WARNING):
        probe_pair(model.eval())
        assert not caplog.records
        model.train()[1].eval()
        probe_pair(model)
    assert "BatchNorm layers 1 are in eval() mode" in caplog.text
