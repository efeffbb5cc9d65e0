"""One rank of a benchmark: ``python -m sparkdl.bench.rank``.

What it is and its turns come on standard input, a JSON object per line: nobody else can read the secret there.
Answers go to standard output, one per turn. It ends with its input.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sparkdl.bench.allreduce_trials import allreduce_trial
from sparkdl.bench.feed_trials import feed_trial
from sparkdl.bench.fit_trials import arithmetic_trial
from sparkdl.bench.measurement import Trial, take_turn
from sparkdl.bench.sessions import Session, open_session
from sparkdl.bench.step_trials import step_trial
from sparkdl.collective import Address, RendezvousClient

_CONNECT_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1

TRIALS: dict[str, Callable[[Session, str, dict[str, Any]], Trial]] = {
    "allreduce": allreduce_trial,
    "feed": feed_trial,
    "fit": arithmetic_trial,
    "step": step_trial,
}


def main() -> None:
    """Open the library that the first line names; take a turn for each further line."""
    # A rank that is stopped does not see its input end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print to standard output; only answers may go there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    secret = bytes.fromhex(task["secret"])
    address = Address(hosts=tuple(task["hosts"]), port=task["port"])
    with (
        RendezvousClient.connect(address, secret, _CONNECT_TIMEOUT_S) as rendezvous,
        open_session(task["library"], rendezvous, secret, task["rank"], task["world_size"]) as session,
    ):
        _say(answers, {})
        for line in sys.stdin:
            turn = json.loads(line)
            trial = TRIALS[turn["benchmark"]](session, turn["contender"], turn["case"])
            times = take_turn(session, trial, turn["repetitions"], turn["operations"])
            result = trial.result()
            # Gigabytes of a model and what refers to it in circles; before the answer, as the next contender has its
            # turn then, and this takes a core for a tenth of a second.
            del trial
            gc.collect()
            _say(answers, {"times": times, "result": result})


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
