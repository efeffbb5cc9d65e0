"""A program on Spark Connect whose executors cannot reach it; it prints what its elastic runs return as JSON."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from pyspark.sql import SparkSession

from sparkdl import Runner
from sparkdl.collective import Coordinator
from sparkdl.errors import SparkdlError
from sparkdl.launch.elastic import coordinating_task
from sparkdl.rendezvous.addresses import Address
from sparkdl.runner import TrainingState

STEPS = 60


class UnreachableCoordinator(Coordinator):
    """A rendezvous that is said to be where no process listens."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with socket.create_server(("127.0.0.1", 0)) as closed_soon:
            self.address = Address(("127.0.0.1",), closed_soon.getsockname()[1])


def train(folder: str, what: str) -> dict[str, Any]:
    state = TrainingState(total=torch.zeros(1), step=0)
    began_with = state.step
    killed = Path(folder, "killed")
    while state.step < STEPS:
        # Wait until the coordinating task is lost, and then until the rank joins that is to be killed.
        is_early = dist.get_world_size() == 1 if began_with else state.step == STEPS // 2
        if what == "lose both" and is_early and not killed.exists():
            time.sleep(0.05)
            state.commit()
            continue
        ones = torch.ones(1)
        dist.all_reduce(ones)
        state.total += ones / dist.get_world_size()
        time.sleep(0.05)
        if dist.get_rank() == 1:
            if what == "lose both" and 0 < began_with < state.step and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raise" and state.step == STEPS // 2:
                raise ValueError("of the user")
        state.step += 1
        state.commit()
        Path(folder, "step").write_text(str(state.step))
    print("ends with", state.step)
    return {"began_with": began_with, "total": state.total.item(), "size": dist.get_world_size()}


def kill_coordinating_task(folder: Path) -> None:
    """Kill the process of the coordinating task, which listens at the address that the driver has learned."""
    step = folder / "step"
    while not (step.exists() and int(step.read_text() or 0) > STEPS // 6):
        time.sleep(0.05)
    (port,) = PORTS
    listening = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    for pid in listening:
        os.kill(pid, signal.SIGKILL)


PORTS: set[int] = set()


class KnownJob(coordinating_task._CoordinatingJob):
    """Notes the port of the coordinating task."""

    @property
    def address(self) -> Address | None:
        address = super().address
        if address is not None:
            PORTS.add(address.port)
        return address


def main(root: Path) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    coordinating_task.Coordinator = UnreachableCoordinator
    coordinating_task._CoordinatingJob = KnownJob
    builder = SparkSession.builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
    builder.remote("local[4]").getOrCreate()
    outcomes: dict[str, Any] = {}
    for what in tuple(sys.argv[2:]) or ("lose both", "raise"):
        folder = root / what
        folder.mkdir()
        PORTS.clear()
        if what == "lose both":
            threading.Thread(target=kill_coordinating_task, args=(folder,), daemon=True).start()
        runner = Runner(num_workers=2, elastic=True, min_workers=1, max_workers=2, max_restarts=3)
        try:
            outcomes[what] = runner.run_all(train, str(folder), what)
        except SparkdlError as error:
            outcomes[what] = [type(error).__name__, str(error), repr(error.__cause__)]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
