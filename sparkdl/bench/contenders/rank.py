"""One rank of a benchmark, run as ``python -m sparkdl.bench.contenders.rank``, and the timing of an operation.

The rank reads its description and its turns from standard input, one JSON object per line, as no other process can
read the secret there. It writes answers to standard output, one per turn. It ends at the end of its input.

An operation is timed on all ranks. A repetition is a number of operations, on data that was rewritten outside the
measured time. All ranks begin a repetition at the same time, and take the same number of repetitions.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from sparkdl.bench.contenders.allreduce import allreduce_trial
from sparkdl.bench.contenders.arithmetic import arithmetic_trial
from sparkdl.bench.contenders.feed import feed_trial
from sparkdl.bench.contenders.link import link_trial
from sparkdl.bench.contenders.parallel import parallel_trial
from sparkdl.bench.contenders.scaling import scaling_trial
from sparkdl.bench.contenders.sessions import RankSession, open_session
from sparkdl.bench.contenders.step import step_trial
from sparkdl.collective import Address, RendezvousClient


class Trial(Protocol):
    """One contender at one case, on one rank. A trial is made for one turn.

    Attributes:
        num_warm_ups: number of repetitions at the beginning of every turn that do not count.
    """

    num_warm_ups: int

    def prepare(self, repetition: int, operations: int) -> None:
        """Rewrite the data that the next operations read; not timed."""

    def run(self, operations: int) -> None:
        """Run the operations that are timed."""

    def check(self) -> None:
        """Raise an ``AssertionError`` if the operations gave a wrong result; not timed."""

    def result(self) -> dict[str, Any]:
        """Return further results of the turn, as JSON can hold them."""


def take_turn(session: RankSession, trial: Trial, repetitions: int, operations: int) -> list[float]:
    """Return the average seconds per operation on this rank, for each repetition.

    Raises:
        AssertionError: if an operation gave a wrong result.
    """
    times = []
    for repetition in range(-trial.num_warm_ups, repetitions):
        trial.prepare(repetition + trial.num_warm_ups, operations)
        session.communicator.barrier()
        start = time.perf_counter()
        trial.run(operations)
        duration_s = time.perf_counter() - start
        trial.check()
        if repetition >= 0:
            times.append(duration_s / operations)
    return times


_CONNECT_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1

TRIALS: dict[str, Callable[[RankSession, str, dict[str, Any]], Trial]] = {
    "allreduce": allreduce_trial,
    "feed": feed_trial,
    "fit": arithmetic_trial,
    "link": link_trial,
    "parallel": parallel_trial,
    "scaling": scaling_trial,
    "step": step_trial,
}


def main() -> None:
    """Open the library that the first line names, and take a turn for each further line."""
    # A rank that is stopped by SIGSTOP does not see the end of its input.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print to standard output; only answers may go there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    secret = bytes.fromhex(task["secret"])
    address = Address(hosts=tuple(task["hosts"]), port=task["port"])
    with (
        RendezvousClient.connect(address, secret, _CONNECT_TIMEOUT_S) as rendezvous,
        open_session(
            task["library"], rendezvous, secret, task["rank"], task["world_size"], wire=task["wire"]
        ) as session,
    ):
        _say(answers, {})
        for line in sys.stdin:
            turn = json.loads(line)
            trial = TRIALS[turn["benchmark"]](session, turn["contender"], turn["case"])
            times = take_turn(session, trial, turn["repetitions"], turn["operations"])
            result = trial.result()
            # Frees gigabytes of a model and its reference cycles. Before the answer, as the next contender has its turn
            # after it, and collecting takes a core for a tenth of a second.
            del trial
            gc.collect()
            _say(answers, {"times": times, "result": result})


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
