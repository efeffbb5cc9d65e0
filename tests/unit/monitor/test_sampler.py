"""The samples of a rank add up to what it did."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from sparkdl.monitor import Monitor, end_step
from sparkdl.monitor.sampler import RankSampler

WIDTH = 8


class Events(list[dict[str, Any]]):
    """Events of a sampler, and a way to wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def report(self, event: dict[str, Any]) -> None:
        with self._changed:
            self.append(event)
            self._changed.notify_all()

    def wait_for_more(self) -> None:
        """Wait for a sample that was begun after this call; the one that is being taken may be an earlier one."""
        with self._changed:
            number = len(self) + 2
            assert self._changed.wait_for(lambda: len(self) >= number, 120)

    def total(self, name: str) -> float:
        return sum(event[name] or 0 for event in self)


def sampling(events: Events, **settings: Any) -> RankSampler:
    return Monitor(**{"seconds": 0.1, "peak_tflops": 1.0, **settings}).on_rank(0, 1, events.report)


def step(sampler: RankSampler, number: int, *, rows: int = 4, reading_s: float = 0.0) -> None:
    sampler.begin_step(number)
    if rows:
        torch.mm(torch.ones(rows, WIDTH), torch.ones(WIDTH, WIDTH))
    batch = {"tokens": np.zeros((rows, 5), np.int64)}
    sampler.end_step(rows, batch=batch, reading_s=reading_s)


def test_samples_add_up_to_the_steps_rows_tokens_and_operations() -> None:
    events = Events()
    with sampling(events) as sampler:
        for number in range(1, 11):
            step(sampler, number)
        events.wait_for_more()
        step(sampler, 11, rows=2)
        events.wait_for_more()
    assert (events.total("steps"), events.total("rows"), events.total("tokens")) == (11, 42, 210)
    assert events.total("flops") == 42 * 2 * WIDTH * WIDTH
    assert {event["peak_flops"] for event in events} == {1e12}
    assert all(event["kind"] == "monitor" and event["memory_bytes"] > 0 for event in events)
    assert all(event["processor_s"] >= 0 for event in events)


def test_time_of_waiting_for_data_goes_on_over_epochs() -> None:
    events = Events()
    with sampling(events) as sampler:
        for number, reading_s in enumerate([0.005, 0.0075, 0.0025, 0.01], start=1):
            step(sampler, number, reading_s=reading_s)
        events.wait_for_more()
    assert events.total("reading_s") == pytest.approx(0.0075 + 0.01)


def test_operations_are_counted_in_the_first_step_with_rows() -> None:
    events = Events()
    with sampling(events) as sampler:
        step(sampler, 1, rows=0)
        step(sampler, 2, rows=3)
        step(sampler, 3, rows=3)
        events.wait_for_more()
    assert events.total("flops") == 6 * 2 * WIDTH * WIDTH


def test_a_loop_of_ones_own_tells_of_its_steps() -> None:
    events = Events()
    with sampling(events):
        for _ in range(3):
            torch.mm(torch.ones(4, WIDTH), torch.ones(WIDTH, WIDTH))
            end_step(rows=4, tokens=7)
        events.wait_for_more()
    assert (events.total("steps"), events.total("rows"), events.total("tokens")) == (3, 12, 21)
    # Counted from the first to the second call; the first step is added if it is in the same sample.
    assert events.total("flops") in (8 * 2 * WIDTH * WIDTH, 12 * 2 * WIDTH * WIDTH)
    end_step(rows=4)  # nothing is monitored any more


def test_steps_before_the_counted_one_have_its_operations_for_a_row() -> None:
    events = Events()
    with sampling(events, seconds=600) as sampler:
        end_step(rows=4)
        until = sampler._before["seconds"] + 0.1  # a last sample of a shorter time is not sent
        is_over = False
        while not is_over:  # at least one step is counted, however busy the machine is
            torch.mm(torch.ones(4, WIDTH), torch.ones(WIDTH, WIDTH))
            end_step(rows=4)
            is_over = events.total("seconds") > 0 or time.perf_counter() >= until
    (event,) = events
    assert event["flops"] == event["rows"] * 2 * WIDTH * WIDTH


def test_operations_that_the_loop_knows_are_taken() -> None:
    events = Events()
    with sampling(events):
        for _ in range(3):
            end_step(rows=4, flops=100.0)
        events.wait_for_more()
    assert events.total("flops") == 300
    assert events[-1]["peak_flops"] == 1e12
    assert events[-1]["tokens"] is None


def test_a_column_of_tokens_may_have_any_name() -> None:
    events = Events()
    with sampling(events, tokens="words") as sampler:
        sampler.begin_step(1)
        sampler.end_step(2, batch={"words": torch.zeros(2, 7), "tokens": torch.zeros(2, 100)})
        events.wait_for_more()
    assert events.total("tokens") == 14


def test_an_error_in_the_counted_step_leaves_nothing_behind() -> None:
    events = Events()
    with pytest.raises(RuntimeError, match="failed"), sampling(events) as sampler:
        sampler.begin_step(1)
        raise RuntimeError("failed")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_receiver_that_is_gone_ends_the_sampling() -> None:
    asked = []

    def fail(event: dict[str, Any]) -> None:
        asked.append(event)
        raise OSError("gone")

    with Monitor(seconds=0.1, peak_tflops=1.0).on_rank(0, 1, fail) as sampler:
        sampler._thread.join(60)
        assert not sampler._thread.is_alive()
    assert 1 <= len(asked) <= 2


def test_an_error_of_the_sampling_ends_it_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: dict[str, Any]) -> None:
        raise ValueError("no sample")

    with Monitor(seconds=0.1, peak_tflops=1.0).on_rank(0, 1, fail) as sampler:
        sampler._thread.join(60)
        assert not sampler._thread.is_alive()
    assert caplog.text.count("Rank 0 is no longer monitored: ValueError: no sample") == 1
