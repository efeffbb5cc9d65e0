"""Lines that ranks print alike."""

from __future__ import annotations

import time

from sparkdl.launch import AlikeLines
from sparkdl.launch import lines as module


def showing(num_ranks):
    shown = []
    lines = AlikeLines(lambda ranks, line: shown.append((ranks, line)))
    lines.num_ranks = num_ranks
    return lines, shown


def test_a_line_of_all_ranks_is_shown_once_and_at_once():
    lines, shown = showing(3)
    for rank in (2, 0, 1):
        lines(rank, "a warning")
    assert shown == [([0, 1, 2], "a warning")]


def test_a_line_of_the_only_rank_is_not_held_back():
    lines, shown = showing(1)
    lines(0, "hello")
    assert shown == [([0], "hello")]


def test_lines_of_a_rank_stay_in_their_order_and_a_repeated_line_is_shown_twice():
    lines, shown = showing(2)
    for line in ("a", "b", "a"):
        lines(0, line)
    for line in ("b", "a"):
        lines(1, line)
    lines.show_due(is_end=True)
    assert shown == [([0], "a"), ([0, 1], "b"), ([0, 1], "a")]


def test_a_line_costs_the_same_however_many_are_held_back():
    lines, shown = showing(2)
    begin = time.process_time()
    for number in range(30_000):
        lines(0, f"line {number}")
    lines.show_due(is_end=True)
    assert len(shown) == 30_000
    assert time.process_time() - begin < 5  # it was a minute when each line was compared with all


def test_a_line_that_others_do_not_print_is_shown_when_it_is_due(monkeypatch):
    lines, shown = showing(2)
    lines(0, "mine")
    assert shown == []
    monkeypatch.setattr(module, "JOIN_WITHIN_S", 0.0)
    lines.show_due()
    assert shown == [([0], "mine")]


def test_without_a_known_number_of_ranks_lines_wait_for_their_time():
    lines, shown = showing(0)
    lines(4, "x")
    lines(5, "x")
    assert shown == []
    lines.show_due(is_end=True)
    assert shown == [([4, 5], "x")]
