"""One rank of a benchmark: ``python -m sparkdl.bench.rank``.

The task comes on standard input, where no one else can read the secret; the times go to standard output.
"""

from __future__ import annotations

import json
import sys

from sparkdl.bench.contenders import CONTENDERS
from sparkdl.bench.measurement import measure
from sparkdl.collective import Address, RendezvousClient

_CONNECT_TIMEOUT_S = 60.0


def main() -> None:
    """Measure what the task names; print ``{size: [seconds, ...]}`` as the last line."""
    task = json.loads(sys.stdin.read())
    secret = bytes.fromhex(task["secret"])
    address = Address(hosts=tuple(task["hosts"]), port=task["port"])
    with RendezvousClient.connect(address, secret, _CONNECT_TIMEOUT_S) as rendezvous:
        contender = CONTENDERS[task["contender"]]
        with contender(rendezvous, secret, task["rank"], task["world_size"]) as (ranks, operation, wrap):
            times = {
                size: measure(
                    ranks, size, operation, wrap, seconds=task["seconds"], sums=task["contender"] != "copy"
                )
                for size in task["sizes"]
            }
    print(json.dumps(times))


if __name__ == "__main__":
    main()
