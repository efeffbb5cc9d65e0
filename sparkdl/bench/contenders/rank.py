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
from typing import Any

from sparkdl.bench.contenders.allreduce import CONTENDERS, AllreduceTrial
from sparkdl.bench.contenders.feed import FeedTrial
from sparkdl.bench.contenders.fit_task import ArithmeticTrial
from sparkdl.bench.contenders.layers import LayerTrial, SumsTrial
from sparkdl.bench.contenders.link import LinkTrial
from sparkdl.bench.contenders.parallel import ParallelTrial
from sparkdl.bench.contenders.scaling import AccuracyTrial, ScalingTrial
from sparkdl.bench.contenders.sessions import Trial, open_session
from sparkdl.bench.contenders.step import WRAPPERS, StepTrial
from sparkdl.collective import Address, Communicator, RendezvousClient


def take_turn(communicator: Communicator, trial: Trial, repetitions: int, operations: int) -> list[float]:
    """Return the average seconds per operation on this rank, for each repetition.

    Raises:
        AssertionError: if an operation gave a wrong result.
    """
    times = []
    for repetition in range(-trial.num_warm_ups, repetitions):
        trial.prepare(repetition + trial.num_warm_ups, operations)
        communicator.barrier()
        start = time.perf_counter()
        trial.run(operations)
        duration_s = time.perf_counter() - start
        trial.check()
        if repetition >= 0:
            times.append(duration_s / operations)
    return times


_CONNECT_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1

TRIALS: dict[str, Callable[[Communicator, str, dict[str, Any]], Trial]] = {
    "allreduce": lambda world, contender, case: AllreduceTrial(world, CONTENDERS[contender](world), **case),
    "feed": lambda _, contender, case: FeedTrial(contender, case),
    "fit": lambda world, _, case: ArithmeticTrial(case, world.rank),
    "layers": lambda _, __, case: LayerTrial(case),
    "link": lambda world, _, case: LinkTrial(world, case),
    "parallel": ParallelTrial,
    "scaling": lambda world, _, case: (
        AccuracyTrial(world, case) if case.get("accuracy") else ScalingTrial(world, case)
    ),
    "step": lambda world, contender, case: StepTrial(world, WRAPPERS[contender], case),
    "sums": lambda _, __, case: SumsTrial(**case),
}
"""Functions that make the trial of a turn, from the ranks' communicator, the contender and the case."""


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
        ) as communicator,
    ):
        _say(answers, {})
        for line in sys.stdin:
            turn = json.loads(line)
            trial = TRIALS[turn["benchmark"]](communicator, turn["contender"], turn["case"])
            times = take_turn(communicator, trial, turn["repetitions"], turn["operations"])
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
