"""Functions that ranks run for the tests of :mod:`sparkdl.monitor`'s figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.monitor import compute_throughput, monitor_communication
from tests.collective.late_join import joined_last
from tests.run_ranks import RankEnvironment

ELEMENTS = 250_000
LATE_S = 0.5


def compare_figures(environment: RankEnvironment) -> dict[str, Any]:
    """Sum arrays on the world and on a process set, and let rank 2 come late to a sum."""
    with environment.communicator() as communicator:
        array = np.ones(ELEMENTS, np.float32)
        monitor_communication()
        for _ in range(4):
            communicator.allreduce(array)
        summed = monitor_communication()
        with joined_last(communicator, "allreduce", late_rank=2, key="late", wait_s=LATE_S):
            communicator.allreduce(array)
        late = monitor_communication()
        nothing = monitor_communication()
        pair = communicator.split([0, 1], "pair")
        if pair.is_member:
            pair.allreduce(array)
            pair.close()
        of_pair = monitor_communication([0, 1])
        communicator.report(reset=True)
        communicator.barrier()
        communicator.allreduce(array)
        after_reset = monitor_communication()
        return {
            "summed": summed.as_dict(),
            "late": late.as_dict(),
            "nothing": nothing.as_dict(),
            "pair": of_pair.as_dict(),
            "after reset": after_reset.as_dict(),
            "rows": compute_throughput(32, 0.5),
        }


def use_horovods_names(environment: RankEnvironment) -> dict[str, Any]:
    """Sum by Horovod's API in a process set, and read the figures under ``hvd``."""
    with environment.communicator():
        evens = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[evens])
        hvd.monitor_communication(process_set=evens)
        hvd.monitor_communication(process_set=hvd.global_process_set)
        if evens.included():
            hvd.allreduce(torch.ones(ELEMENTS), process_set=evens)
        of_evens = hvd.monitor_communication(process_set=evens)
        hvd.allreduce(torch.ones(2 * ELEMENTS))
        of_all = hvd.monitor_communication(process_set=hvd.global_process_set)
        result = {
            "evens": of_evens.as_dict(),
            "all": of_all.as_dict(),
            "rows": hvd.compute_throughput(batch_size=10, iteration_time=0.1),
            "memory": asdict(hvd.get_gpu_memory_stats().host),
        }
        hvd.shutdown()
        return result
