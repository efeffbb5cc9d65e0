"""The networks of ready-made estimators, and the preparation of their inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.networks.initial_weights import seeded
from sparkdl.networks.standardization import Moments, StandardizedMSELoss
from sparkdl.networks.tabular import CODES, NUMBERS, TabularInputs, TabularNetwork, category_codes


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    mean=st.floats(-1e4, 1e4),  # a much larger mean relative to the scale would count as a constant
    scale=st.floats(1e-2, 1e3),
)
def test_moments_of_batches_equal_the_moments_of_all_rows(lengths, mean, scale):
    rows = np.random.default_rng(1).normal(mean, scale, (sum(lengths), 3))
    moments = Moments()
    for batch in np.split(rows, np.cumsum(lengths)[:-1]):
        moments.add(batch)
    assert moments.num_rows == len(rows)
    if len(rows) > 1:
        np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(moments.deviation, rows.std(axis=0), rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e7])
def test_a_constant_has_a_deviation_of_one(value):
    moments = Moments()
    for rows in (3, 7):
        moments.add(np.full((rows, 1), value))
    assert moments.deviation.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [object, np.int32, np.int64])
def test_categories_are_numbered_from_one_and_unknown_ones_are_zero(dtype):
    known = ("ant", "bee", "cat") if dtype is object else (-4, 0, 9)
    strange = "zebra" if dtype is object else 5
    values = np.array([known[2], strange, known[0], known[1]], dtype=dtype)
    assert category_codes(values, known).tolist() == [3, 0, 1, 2]


def test_numeric_columns_are_joined_in_their_order():
    inputs = TabularInputs(numeric=("pair", "one", "flag"), categories={"kind": ("a", "b")})
    columns = {"one": [1.5, 2.5], "flag": [True, False], "pair": [[1, 2], [3, 4]]}
    kinds = np.array(["b", "?"], dtype=object)
    made = inputs({"kind": kinds, **{name: np.array(values) for name, values in columns.items()}})
    assert made[NUMBERS].tolist() == [[1, 2, 1.5, 1], [3, 4, 2.5, 0]]
    assert made[NUMBERS].dtype == np.float64
    assert made[CODES].tolist() == [[2], [0]]


def make_network(**changes):
    scales = {"mean": [1.0, -2.0], "deviation": [2.0, 0.5]}
    with seeded(3):
        return TabularNetwork(**{**scales, "hidden_sizes": [4], "dropout": 0.0, "num_outputs": 2, **changes})


def test_numbers_are_standardized_and_outputs_scaled_by_buffers_among_the_weights():
    plain = make_network(mean=[0.0, 0.0], deviation=[1.0, 1.0])
    scaled = make_network(output_mean=100.0, output_deviation=10.0)
    rows = torch.tensor([[1.0, -2.0], [5.0, 0.5]])
    standardized = (rows - torch.tensor([1.0, -2.0])) / torch.tensor([2.0, 0.5])
    torch.testing.assert_close(scaled(rows), plain(standardized) * 10 + 100)
    assert all(scaled.get_buffer(name).dtype == torch.float64 for name, _ in scaled.named_buffers())
    assert {"mean", "deviation", "output_mean", "output_deviation"} < set(scaled.state_dict())


def test_unknown_category_is_embedded_as_zeros_and_gets_no_gradient():
    network = make_network(num_categories=[3])
    rows, codes = torch.zeros(2, 2), torch.tensor([[0], [2]])
    network(rows, codes).sum().backward()
    (embedding,) = network.embeddings
    assert embedding.weight[0].tolist() == [0.0] * embedding.embedding_dim
    assert embedding.weight.grad[0].abs().sum() == 0
    assert embedding.weight.grad[2].abs().sum() > 0


def test_network_may_have_only_categories_or_no_hidden_layer():
    network = make_network(mean=[], deviation=[], num_categories=[3, 200], hidden_sizes=[])
    assert network(torch.tensor([[1, 200], [0, 0]])).shape == (2, 2)
    assert len(network.layers) == 1


@pytest.mark.parametrize("deviation", [1e-6, 1.0, 1e6])
def test_standardized_loss_has_the_units_of_the_labels_and_gradients_of_standardized_ones(deviation):
    labels = deviation * torch.tensor([[1.0], [2.0], [4.0]])
    layers = torch.tensor([[0.5], [2.5], [3.0]], requires_grad=True)
    loss = StandardizedMSELoss(deviation)(layers * deviation, labels)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5 * deviation**2, rel=1e-5)
    np.testing.assert_allclose(layers.grad, 2 / 3 * np.array([[-0.5], [0.5], [-1.0]]), rtol=1e-5)
    per_row = StandardizedMSELoss(deviation, reduction="none")(layers * deviation, labels)
    np.testing.assert_allclose(per_row.detach(), deviation**2 * np.array([[0.25], [0.25], [1.0]]), rtol=1e-5)


@pytest.mark.parametrize("output_mean", [1e5, 0.0])
def test_outputs_have_full_precision_although_layers_have_less(output_mean):
    sizes = {"mean": np.zeros(1), "deviation": np.ones(1), "hidden_sizes": [], "num_outputs": 1}
    network = make_network(**sizes, output_mean=output_mean, output_deviation=1e-3)
    rows = torch.tensor([[-1.0], [1.0]])
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(rows)
    assert outputs.dtype == torch.float64
    expected = network(rows).detach()
    np.testing.assert_allclose(outputs.detach(), expected, rtol=1e-5, atol=1e-2 if output_mean else 1e-5)
