"""The networks of ready-made estimators, and the preparation of their inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.networks.standardization import Moments, StandardizedMSELoss
from sparkdl.networks.tabular import CODES, NUMBERS, TabularInputs, TabularNetwork, category_codes, time_parts
from sparkdl.random_state import seeded


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


def test_moments_leave_missing_values_out():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(50, 3))
    rows[rng.random(rows.shape) < 0.4] = np.nan
    rows[:, 2] = np.nan
    moments = Moments()
    for batch in np.array_split(rows, 7):
        moments.add(batch)
    np.testing.assert_allclose(moments.mean, [*np.nanmean(rows[:, :2], axis=0), 0.0])
    np.testing.assert_allclose(moments.deviation, [*np.nanstd(rows[:, :2], axis=0), 1.0])
    assert moments.counts.tolist() == (~np.isnan(rows)).sum(axis=0).tolist()


def test_missing_numbers_are_the_mean_and_the_layers_are_told():
    network = make_network(mean=[3.0, 5.0], deviation=[2.0, 4.0], imputes=True, indicators=[1]).eval()
    rows = torch.tensor([[np.nan, 5.0], [3.0, 5.0], [3.0, np.nan]], dtype=torch.float64)
    first, second, third = network(rows)
    assert torch.equal(first, second)  # no training row lacked the first number
    assert not torch.equal(second, third)
    assert make_network()(rows)[0].isnan().all()


@pytest.mark.parametrize("values", [np.array(["b", None, "?"], object), np.array([7.0, np.nan, 8.0])])
def test_a_missing_category_is_the_last_one_if_training_rows_have_it(values):
    known = ("a", "b") if values.dtype == object else (5, 7)
    assert category_codes(values, known, has_null=True).tolist() == [2, 3, 0]
    assert category_codes(values, known).tolist() == [2, 0, 0]
    assert category_codes(values[1:2], (), has_null=True).tolist() == [1]
    inputs = TabularInputs(categories={"kind": known}, null_categories=("kind",))
    assert inputs.num_categories == [3]


def test_parts_of_times_repeat_with_their_periods():
    day = np.datetime64("2024-02-29", "D")
    parts = time_parts(np.array([day, day + 7, day + 1]))
    assert parts.shape == (3, 11)
    assert parts[0, 0] == day.astype(np.int64) * 86400
    np.testing.assert_allclose(parts[0, 1:7], parts[1, 1:7], atol=1e-12)  # the same weekday
    seconds = time_parts(
        np.array(["2024-02-29T06:30:00.25", "1969-03-01T06:30:00.25", "NaT"], "datetime64[us]")
    )
    assert seconds.shape == (3, 15)
    np.testing.assert_allclose(seconds[0, 11:], seconds[1, 11:], atol=1e-12)  # the same time of the day
    assert seconds[0, 0] == 1709188200.25
    assert np.isnan(seconds[2]).all()
    noon = time_parts(np.array(["2024-07-01T12:00"], "datetime64[us]"))[0]
    np.testing.assert_allclose(noon[11:13], [0.0, -1.0], atol=1e-12)


def test_weekdays_are_told_apart_by_a_linear_layer():
    days = np.datetime64("2024-01-01", "D") + np.arange(7)
    assert np.linalg.matrix_rank(time_parts(days)[:, 1:7]) == 6  # and 7 with a bias
