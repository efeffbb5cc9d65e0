from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.dataset.row_choice import random_bits
from sparkdl.data.feed.batches import ShuffleOrder, remaining_positions, rows_per_draw


def positions_in_order(num_rows: int, buffer_rows: int, seed: int) -> np.ndarray:
    """The positions of rows in the order in which they leave the buffer, computed step by step by the definition."""
    order = ShuffleOrder(num_rows, buffer_rows, random_bits(seed))
    point = order.start_at(0)
    buffer, following = point.positions.copy(), order.draws_after(1)
    slots, incoming, leaving = point.slots, order.size, []
    for _ in range(order.num_draws):
        leaving.append(buffer[slots])
        buffer[slots] = np.arange(incoming, incoming + len(slots))
        incoming += len(slots)
        slots = next(following)
    leaving.append(buffer[slots])
    return np.concatenate(leaving)


sizes = st.integers(1, 400)
buffers = st.integers(1, 500)


@given(num_rows=sizes, buffer_rows=buffers, seed=st.integers(0, 100))
def test_every_row_leaves_once(num_rows: int, buffer_rows: int, seed: int) -> None:
    np.testing.assert_array_equal(
        np.sort(positions_in_order(num_rows, buffer_rows, seed)), np.arange(num_rows)
    )


@given(num_rows=sizes, buffer_rows=buffers, seed=st.integers(0, 100), share=st.floats(0, 1))
def test_remaining_positions_are_those_that_have_not_left(
    num_rows: int, buffer_rows: int, seed: int, share: float
) -> None:
    num_taken = round(share * num_rows)
    order = ShuffleOrder(num_rows, buffer_rows, random_bits(seed))
    buffered, rest = remaining_positions(order, num_taken)
    left = np.concatenate([buffered, np.arange(rest, num_rows)])
    expected = np.sort(positions_in_order(num_rows, buffer_rows, seed)[num_taken:])
    np.testing.assert_array_equal(left, expected)


@given(buffer_rows=st.integers(1, 10**7))
def test_a_draw_is_a_power_of_two_and_at_most_an_eighth_of_the_buffer(buffer_rows: int) -> None:
    rows = rows_per_draw(buffer_rows)
    assert rows & (rows - 1) == 0
    assert 1 <= rows <= max(1, buffer_rows // 8)
    assert rows <= 4096


def test_every_slot_is_drawn_equally_often() -> None:
    """The first rows to leave come from all slots equally often."""
    drawn = np.concatenate(
        [ShuffleOrder(10_000, 64, random_bits(seed)).start_at(0).slots for seed in range(4000)]
    )
    counts = np.bincount(drawn, minlength=64)
    assert counts.sum() == 4000 * 8
    # 500 each, up to sqrt(500 * 56 / 64); a deviation above five times that is no chance.
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500 * 56 / 64)


def test_a_row_stays_for_eight_draws_on_average() -> None:
    order = positions_in_order(100_000, 1024, 0)
    left_at = np.argsort(order)
    stays = (left_at - (np.arange(100_000) - 1024))[2048:90_000] / rows_per_draw(1024)
    assert stays.mean() == pytest.approx(8, rel=0.05)


def test_the_order_stays_the_same_in_every_release() -> None:
    order = [12, 8, 4, 0, 6, 19, 21, 15, 9, 13, 1, 11, 20, 2, 7, 10, 22, 17, 14, 5, 23, 16, 18, 3]
    assert positions_in_order(24, 16, 5).tolist() == order
