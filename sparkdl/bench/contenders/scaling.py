"""The training steps that ``sparkdl bench scaling`` times: one job, divided among ranks by one strategy."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.parallel import DividedStep, WholeStep
from sparkdl.bench.contenders.scaling_jobs import JOBS, Batch
from sparkdl.bench.contenders.sessions import Trial
from sparkdl.bench.contenders.step import WRAPPERS, Trainee
from sparkdl.collective import Communicator, Deadline
from sparkdl.host_memory import host_memory
from sparkdl.monitor import monitor_communication
from sparkdl.monitor.memory import gpu_load, used_gpus

if TYPE_CHECKING:
    import torch

HELD_OUT_ROWS = 500
_EVALUATE_EVERY = 20


class ScalingTrial(Trial):
    """Training steps of one contender; with every contender, all ranks together train on the same rows."""

    # The first backward pass of DistributedDataParallel finds the order of the gradients, the second one uses it.
    num_warm_ups = 2

    def __init__(self, communicator: Communicator, case: Mapping[str, Any]) -> None:
        import torch

        from sparkdl.parallel import Parallelism

        torch.set_num_threads(case["threads"])
        self._case, self._job = case, JOBS[case["model"]]
        self._device = torch.device(case["device"])  # the rank's GPU is the current one
        torch.manual_seed(0)  # all contenders begin with the same weights
        _forget_peak_memory()
        before = _bytes_in_use()
        self._step: WholeStep
        if case["sizes"] is None:  # every rank has the whole model and its share of the rows
            self._module = self._job.make_model().to(self._device)
            optimizer = self._job.make_optimizer(list(self._module.parameters()))
            wrap = _average_by_mpi if case["way"] == "DDP on mpi" else WRAPPERS[case["way"]]
            model, self._optimizer = wrap(self._module, optimizer, communicator)
            self._step = WholeStep(model)
            self._reader, self._readers = communicator.rank, communicator.world_size
        else:
            module = self._job.make_model().to(self._device)
            step = self._step = DividedStep(module, Parallelism(**case["sizes"]), case["rows"])
            del module  # it does not count as memory of this rank
            self._optimizer = self._job.make_optimizer(list(step.module.parameters()))
            self._reader, self._readers = step.reader, step.readers
        self._batches: list[Batch] = []
        self._loss = self._first_loss()
        self._used_bytes = _most_in_use(self._first_loss) - before if case.get("watches_memory") else None
        self._cpu_s = self._kernel_s = self._wall_s = self._exposed_s = 0.0
        self._communicates = False
        self._gpu_load: float | None = None

    def _first_loss(self) -> float:
        (batch,) = self._draw(1, first=0)
        return self._train(*batch)

    def _train(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        self._optimizer.zero_grad()
        loss = self._step.backward(inputs, labels)
        self._optimizer.step()
        return loss.item()

    def _draw(self, number: int, first: int) -> list[Batch]:
        """The rows of this rank in some steps. All ranks draw all rows, so that these are the same for any number."""
        import torch

        batches = []
        for step in range(first, first + number):
            generator = torch.Generator().manual_seed(step)
            inputs, labels = self._job.draw(self._case["rows"], generator, self._case["data"], False)
            share = len(labels) // self._readers
            rows = slice(self._reader * share, (self._reader + 1) * share)
            batches.append((inputs[rows].to(self._device), labels[rows].to(self._device)))
        return batches

    def prepare(self, repetition: int, operations: int) -> None:
        """Draw the rows of the next steps."""
        self._batches = self._draw(operations, first=1 + repetition * operations)
        if repetition == self.num_warm_ups:
            self._cpu_s = self._kernel_s = self._wall_s = self._exposed_s = 0.0

    def run(self, operations: int) -> None:
        """Run this number of steps."""
        assert operations == len(self._batches)
        monitor_communication()  # the operations before these steps
        used, wall_s = getrusage(RUSAGE_SELF), time.perf_counter()
        for batch in self._batches:
            self._train(*batch)  # which reads the loss, and so waits for a GPU
        self._gpu_load = _gpu_load()
        self._wall_s += time.perf_counter() - wall_s
        now = getrusage(RUSAGE_SELF)
        self._kernel_s += now.ru_stime - used.ru_stime
        self._cpu_s += now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        figures = monitor_communication()
        self._exposed_s += figures.exposed_s
        self._communicates |= figures.count > 0

    def result(self) -> dict[str, Any]:
        """Return the first loss on this rank's rows, and what the rank used.

        ``processor`` is the share of its threads' time in which it used a core, and ``kernel`` the share in which the
        kernel worked for it there. ``waits`` is the share of the time in which it waited for a collective of sparkdl
        (None for others), ``gpu`` the load of its GPU (None without one, or where NVML does not tell),
        ``memory_bytes`` the most memory that it held, and ``used_bytes``, where the case asks for it, the most memory
        that was in use in a step, beyond what was before the model was made, without the holes that the allocator
        keeps.
        """
        threads_s = self._wall_s * self._case["threads"]
        return {
            "loss": self._loss,
            "processor": self._cpu_s / threads_s if threads_s else 0.0,
            "kernel": self._kernel_s / threads_s if threads_s else 0.0,
            "waits": self._exposed_s / self._wall_s if self._communicates else None,
            "gpu": self._gpu_load,
            "memory_bytes": _peak_memory(),
            "used_bytes": self._used_bytes,
        }


class AccuracyTrial(ScalingTrial):
    """Trains on one rank until a share of held-out rows is predicted right, and counts the steps that it takes.

    It ends without that after ``most_steps`` of its case, or ``limit_s`` seconds.
    """

    num_warm_ups = 0

    def prepare(self, repetition: int, operations: int) -> None:
        """Do nothing: rows are drawn while it trains."""

    def run(self, operations: int) -> None:  # noqa: ARG002 - the signature of all trials
        """Train."""
        import torch

        case, generator = self._case, torch.Generator().manual_seed(1 << 40)
        inputs, labels = self._job.draw(HELD_OUT_ROWS, generator, case["data"], True)
        self._steps, self._accuracy = 0, 0.0
        deadline = Deadline(case["limit_s"])
        while self._accuracy < case["accuracy"] and self._steps < case["most_steps"] and not deadline.expired:
            for batch in self._draw(_EVALUATE_EVERY, first=1 + self._steps):
                self._train(*batch)
                self._steps += 1
                if deadline.expired:
                    break
            with torch.no_grad():
                outputs = self._module(inputs.to(self._device))
            right = (outputs.argmax(-1).cpu() == labels).float().mean().item()
            self._accuracy = max(self._accuracy, right)

    def result(self) -> dict[str, Any]:
        """Return the number of steps, and the best accuracy."""
        return {"steps": self._steps, "accuracy": self._accuracy}


def _average_by_mpi(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, communicator: Communicator
) -> Trainee:
    """Wrap the model in torch's ``DistributedDataParallel``, whose buckets MPI sums."""
    import torch
    from mpi4py import MPI

    model = torch.nn.parallel.DistributedDataParallel(module)

    def sum_bucket(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer.numpy())
        summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        summed.set_result(buffer.div_(communicator.world_size))
        return summed

    sum_bucket.__annotations__.clear()  # torch compares them with classes, and these are texts
    model.register_comm_hook(None, sum_bucket)
    return model, optimizer


def _gpu_load() -> float | None:
    try:
        return gpu_load()
    except Exception:  # of NVML, which measures no load for a part of a GPU
        return None


def _forget_peak_memory() -> None:
    gc.collect()
    import torch

    for gpu in used_gpus():
        torch.cuda.reset_peak_memory_stats(gpu)
    with suppress(AttributeError):  # glibc keeps what an earlier turn has freed
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # some kernels have no such file
        Path("/proc/self/clear_refs").write_text("5")


class _Allocated(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns: the fifth number is the bytes of mapped, the eighth of other allocations."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def _bytes_in_use() -> int:
    """Bytes that this process has allocated, and its share of memory that ranks share."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    allocated = mallinfo()
    shared = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            shared = int(line.split()[1]) * 1024
    return int(allocated.numbers[4] + allocated.numbers[7] + shared)


def _most_in_use(work: Callable[[], object]) -> int:
    """The most bytes in use while a function works, as a thread sees them."""
    most, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.002):
            most = max(most, _bytes_in_use())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_done.set()
        watcher.join()
    return most


def _peak_memory() -> int:
    """The most bytes that this process has held since :func:`_forget_peak_memory`, on its GPU if it has one."""
    import torch

    if gpus := used_gpus():
        return sum(map(torch.cuda.max_memory_allocated, gpus))
    return host_memory().peak_bytes
