"""Functions that the tests of the runners run on ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import sparkdl.horovod.torch as hvd
from sparkdl.collective import current_communicator
from sparkdl.horovod import log_to_driver


def see_everything(first: int, *, second: int) -> dict[str, Any]:
    hvd.init()
    ones = torch.ones(2)
    dist.all_reduce(ones)
    communicator = current_communicator()
    return {
        "given": (first, second),
        "backend": dist.get_backend(),
        "sum": ones.tolist(),
        "horovod": (hvd.rank(), hvd.size()),
        "communicator": (communicator.rank, communicator.world_size),
        "variables": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
    }


def value_of_a_module_of_this_process() -> Any:
    module = sys.modules["only_here"] = ModuleType("only_here")
    exec("class Value: pass", vars(module))
    return module.Value()


def initialize_torch_in_every_way() -> list[Any]:
    """Initialize torch.distributed as programs for torchrun do, with one backend after another."""
    assert not dist.is_initialized()
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "TORCHELASTIC_RESTART_COUNT",
    )
    seen: list[Any] = [[os.environ[name] for name in names]]
    for backend in ("sparkdl", "gloo", None):
        dist.init_process_group(backend, init_method="env://")
        total = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(total)
        seen.append([dist.get_backend(), dist.get_world_size(), total.tolist()])
        dist.destroy_process_group()
    return seen


def rank_in_accelerate() -> list[Any]:
    from accelerate import PartialState

    state = PartialState()
    state.wait_for_everyone()  # Gloo fails on a rank that is still connecting to one that has ended
    return [state.process_index, state.num_processes, state.backend, dist.get_backend()]


def make_worlds_of_one_rank() -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)


def do_nothing() -> bool:
    return dist.is_initialized()


def rank_in_mpi() -> tuple[int, int]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1)


def keywords_of_the_launch(**kwargs: Any) -> dict[str, Any]:
    """Return the keyword arguments; the tests use names that the launch uses, too."""
    return kwargs


def look_in(file: str) -> None:
    raise LookupError(f"no row in {file}")


def fail_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise LookupError(f"rank {culprit} looked in vain")
    dist.barrier()


def fail_once(marker: Path, how: str) -> str:
    """Have rank 1 raise, die, hang or lose its connections the first time, when the file does not exist yet."""
    if dist.get_rank() == 1 and not marker.exists():
        marker.touch()
        if how == "raise":
            raise LookupError("the first time")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "cut":
            cut_connections()
        else:
            threading.Event().wait(600)
    dist.barrier()
    return "done"


def cut_connections() -> None:
    """Shut down all TCP connections of this process, except those with the coordinator."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family == socket.AF_INET and str(sock.getpeername()[1]) != os.environ["MASTER_PORT"]:
                sock.shutdown(socket.SHUT_RDWR)


def look_around() -> dict[str, Any]:
    communicator = current_communicator()
    # In bfloat16 the next number after 1 is 1 + 2**-7.
    nearly_one = np.full(1 << 12, 1 + 2**-12, np.float32)
    communicator.allreduce(nearly_one)
    return {
        "variable": os.environ.get("OF_MINE"),
        "is_imported": "wave" in sys.modules,
        "timeout_s": communicator.timeout_s,
        "sum": float(nearly_one[0]),
    }


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def log_and_print() -> None:
    if dist.get_rank() == 1:
        return
    print("printed")
    logging.getLogger("of.mine").warning("warned of\ntwo lines")
    logging.getLogger("of.mine").info("informed")
    print("printed to standard error", file=sys.stderr)
    log_to_driver("meant for the driver" + "!" * 5000)


def configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="MINE %(message)s")
    logging.getLogger("of.mine").info("informed")


def print_last_words_and_die() -> None:
    logging.getLogger("of.mine").warning("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def many_bytes(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def initialize_again() -> None:
    dist.init_process_group("gloo")


def wrapped_model() -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))


class NeverPickledError(Exception):
    """An exception whose pickling takes longer than the others need to fail because of it."""

    def __reduce__(self) -> Any:
        threading.Event().wait(600)
        return NeverPickledError, ()


class WithoutMessageError(Exception):
    """An exception whose message cannot be computed."""

    def __str__(self) -> str:
        raise AttributeError("none")


def disagree() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def disagree_under_horovod() -> None:
    hvd.init()
    hvd.allreduce(torch.ones(2 + dist.get_rank()), name="of two sizes")


def return_early() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def raise_what_is_never_pickled() -> None:
    if dist.get_rank() == 1:
        raise NeverPickledError("on rank 1")
    dist.barrier()


def raise_without_a_message() -> None:
    if dist.get_rank() == 1:
        raise WithoutMessageError
    dist.barrier()


def clean_up_together_after_an_error() -> None:
    try:
        if dist.get_rank() == 1:
            raise LookupError("the first error")
        dist.all_reduce(torch.ones(3))
    finally:
        dist.barrier()


def fail_in_what_horovod_runs() -> None:
    hvd.init()
    if dist.get_rank() == 1:
        raise hvd.HorovodInternalError("Horovod has been shut down.") from TypeError("no such tensor")
    hvd.barrier()


def fail_in_a_hook_of_torch() -> None:
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    def reduce(_, bucket):  # torch checks annotations, which are strings in this module
        if dist.get_rank() == 1:
            raise LookupError("in the hook")
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    module.register_comm_hook(None, reduce)
    module(torch.ones(1, 2)).sum().backward()


def note_attempt(folder: str, name: str) -> None:
    """Write a file for this rank's attempt, then run a function of this module."""
    (Path(folder) / f"{dist.get_rank()}-{os.getpid()}").touch()
    globals()[name]()
