"""Futures and their callbacks, and works that are dropped while C++ waits for them."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparkdl.torch.futures import FutureCompleter
from sparkdl.torch.work import CollectiveWork, UnawaitedWorks
from tests.torch.scenes.rank_tensors import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable

_ENOUGH_S = 100.0


def _start(size: int = 1) -> dist.Work:
    return dist.all_reduce(torch.ones(size), async_op=True)


def check_callbacks_may_wait_for_a_later_future_in_any_way() -> None:
    def poll(later: torch.futures.Future[Any]) -> None:
        deadline = time.monotonic() + _ENOUGH_S
        while not later.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert later.done()

    _, size = rank_and_size()
    ways: list[Callable[[torch.futures.Future[Any]], Any]] = [
        poll,
        lambda later: later.wait(),
        lambda later: later.then(lambda done: done.value()).wait(),
        lambda later: torch.futures.collect_all([later]).wait(),
    ]
    for wait in ways:
        first, second = (
            _start(4 << 20),
            _start(),
        )  # so large that the callback is there before its work is complete
        waiting, later = first.get_future(), second.get_future()
        waiting.then(lambda _, wait=wait, later=later: wait(later)).wait()
        assert later.value()[0].item() == size


def check_several_callbacks_may_wait_for_one_later_future() -> None:
    _, size = rank_and_size()
    works = [_start(1 << 20) for _ in range(6)]
    last = _start()
    futures, later = [work.get_future() for work in works], last.get_future()
    waiting = [future.then(lambda _: later.wait()[0].item()) for future in futures]
    assert [future.wait() for future in waiting] == [size] * 6


class _Dropping(torch.nn.Module):
    """A module that starts collectives in its forward pass and drops them."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.count, self.elements, self.layer = count, elements, torch.nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            dist.all_reduce(torch.ones(self.elements), async_op=True)
        return self.layer(rows)  # type: ignore[no-any-return]


def check_the_reducer_gets_its_work_although_others_are_dropped_after_it() -> None:
    rank, size = rank_and_size()
    for count, elements in ((1, 5 << 20), (1500, 1)):
        module = DistributedDataParallel(_Dropping(count, elements))
        with module.join(divide_by_initial_world_size=False):
            for _ in range(2):
                module(torch.full((2, 4), rank + 1.0)).sum().backward()
        mean = 2 * 2 * sum(range(1, size + 1)) / size  # 2 rows in 2 passes
        torch.testing.assert_close(module.module.layer.weight.grad, torch.full((1, 4), mean))


def check_expanded_outputs_may_be_nan() -> None:
    held = torch.full((3, 1), float("nan"))
    dist.all_reduce(held.expand(3, 4))
    assert held.isnan().all()


class _Handle:
    """A handle of an operation that is done, or never is."""

    def __init__(self, *, is_done: bool) -> None:
        self.is_done = is_done

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        assert self.is_done, timeout_s


def check_outputs_are_released_behind_an_incomplete_work_and_while_others_are_dropped() -> None:
    completer = FutureCompleter("checks", timeout_s=10.0)
    works, made, finished = completer.unawaited, [], []

    def work_of(number: int, *, is_done: bool = True) -> CollectiveWork:
        def finish() -> None:
            finished.append(number)
            works.keep(work_of(number + 100))  # as the garbage collector may call it anywhere

        outputs, handles = (torch.empty(1 << 20),), (_Handle(is_done=is_done),)
        made.append(CollectiveWork(outputs, handles, completer, [finish] if number < 100 else ()))
        return made[-1]

    works.keep(work_of(0, is_done=False))
    kept = [work_of(number) for number in range(1, 7)]
    for work in kept:
        works.keep(work)
    assert finished[:2] == [1, 2]
    assert len(set(finished)) == len(finished)
    assert kept[0].wait()
    assert (kept[0].result(), len(kept[5].result())) == ([], 1)
    held = sum(output.nbytes for work in made for output in work.result())
    assert held <= UnawaitedWorks.MAX_BYTES + (8 << 20)
    for work in made:
        work.is_awaited = True
    works.close()


def check_large_outputs_of_dropped_works_are_released() -> None:
    outputs = []

    def start() -> None:
        outputs.append(weakref.ref(output := torch.ones(1 << 20)))
        dist.all_reduce(output, async_op=True)

    for _ in range(20):
        start()
    dist.barrier()
    start()
    num_held = sum(output() is not None for output in outputs)
    assert num_held << 22 <= UnawaitedWorks.MAX_BYTES + (4 << 20)
