"""The next steps of ranks whose requests are in different order."""

from __future__ import annotations

import random

from sparkdl.horovod.torch.engine.plan import missing_ranks, plan_steps
from sparkdl.horovod.torch.engine.request import Description, Kind

JOIN = Description(kind=Kind.JOIN, name="join")


def allreduce(name: str, extent: int = 2) -> Description:
    return Description(kind=Kind.ALLREDUCE, name=name, dtypes=("float32",), shapes=((extent,),), op=1)


def allgather(name: str) -> Description:
    return Description(kind=Kind.ALLGATHER, name=name, dtypes=("float32",), shapes=((2,),))


def names(steps: list) -> list[str]:
    return [step.description.name for step in steps]


A, B, C = (allreduce(name) for name in "abc")


def test_requests_of_all_ranks_run_in_the_order_of_the_first_rank() -> None:
    steps = plan_steps([[C, A, B], [A, C], [B, A, C]])
    assert names(steps) == ["c", "a"]
    assert all(step.error is None for step in steps)


def test_no_request_runs_if_none_is_common() -> None:
    assert plan_steps([[A], [B]]) == []
    assert missing_ranks([[A], [B]]) == {"a": [1], "b": [0]}


def test_a_name_with_two_descriptions_fails() -> None:
    [step] = plan_steps([[A], [allreduce("a", 3)]])
    assert step.error.startswith("Mismatched ALLREDUCE tensor shapes: ")
    assert "shape [2]" in step.error


def test_ranks_that_have_joined_are_not_waited_for() -> None:
    assert names(plan_steps([None, [A, B], [B]])) == ["b"]
    assert names(plan_steps([[C, JOIN], [A], [A]])) == ["a"]
    assert names(plan_steps([[A, JOIN], [A], None])) == ["a"]
    assert missing_ranks([None, [A, B], [B]]) == {"a": [2]}


def test_joined_ranks_are_not_missing() -> None:
    assert missing_ranks([[A, JOIN], [B], [A]]) == {"a": [1], "b": [2]}


def test_remaining_requests_of_joining_ranks_run_when_all_have_joined() -> None:
    assert names(plan_steps([[A, JOIN], None, [B, A, JOIN]])) == ["a", "b"]


def test_allgather_fails_while_some_ranks_have_joined() -> None:
    [step] = plan_steps([[allgather("g")], None])
    assert step.error.startswith("Allgather is not supported with Join at this time.")
    assert "rank 1" in step.error
    [step] = plan_steps([[allgather("g"), JOIN], [allgather("g")]])
    assert step.error is None


def test_any_requests_in_any_order_are_all_run_in_the_end() -> None:
    generator = random.Random(7)
    for _ in range(50):
        num_ranks = generator.randint(1, 4)
        requests = [allreduce(str(number)) for number in range(generator.randint(1, 8))]
        coming = [generator.sample(requests, len(requests)) for _ in range(num_ranks)]
        outstanding: list[list[Description]] = [[] for _ in range(num_ranks)]
        run: list[str] = []
        while any(coming):
            for rank in range(num_ranks):
                for _ in range(min(generator.randint(0, 3), len(coming[rank]))):
                    outstanding[rank].append(coming[rank].pop(0))
            done = names(plan_steps(outstanding))
            run += done
            outstanding = [[r for r in requests if r.name not in done] for requests in outstanding]
        assert sorted(run) == sorted(request.name for request in requests)
