"""How the ranks of a process set tell each other which requests they have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparkdl.collective import Communicator
from sparkdl.errors import MismatchError
from sparkdl.horovod.torch.engine.report import Report, parse_report


def exchange_reports(communicator: Communicator, report: Callable[[], Report]) -> list[Report | None]:
    """Gather the reports of all ranks; None for a rank that has joined.

    A rank may begin this while others are still at an operation of their own: that one then fails as a mismatch on
    all ranks, which brings them here too.

    Args:
        communicator: of the process set; a rank that has joined gives zeros, so says that it sends nothing.
        report: gives what this rank has to say.
    """
    while True:
        sent = report().text.encode()
        sizes = np.zeros(communicator.world_size, np.int64)
        try:
            communicator.allgather(np.array([len(sent)]), sizes, name="sizes of the lists of requests")
            break
        except MismatchError:
            continue
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(sent)] = np.frombuffer(sent, np.uint8)
    received = np.zeros((communicator.world_size, padded.size), np.uint8)
    communicator.allgather(padded, received, name="lists of requests")
    return [
        parse_report(row[:size].tobytes().decode()) if size else None
        for row, size in zip(received, sizes.tolist(), strict=True)
    ]
