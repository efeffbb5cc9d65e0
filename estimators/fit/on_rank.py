"""The function that a fit runs on every rank, the transfer of spec and module, and the load of the hosts.

Spec and trained module travel with their tensors in a folder of the Store, as a job can carry little: Spark Connect
refuses a plan above 128 MiB, and the server's JVM may run out of memory long before. The Store has room, and every
rank reaches it. Weights are transferred in pieces in both directions, and the driver maps those that come back into
memory: it holds no copy of them besides the user's own module.

:class:`HostWatch` runs on a *rank* and samples the load of a host while its ranks train, under the names that MLflow
uses. The first rank of each host reports for all of them, over the link to the driver, which passes the samples to
MLflow: no rank needs access to the server. The samples of the host come from psutil, of the extra ``mlflow``; without
it nothing is reported. The memory of a GPU comes from torch, its load from nvidia-ml-py.

:func:`fit_on_rank` is a module-level function with plain arguments.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from sparkdl.data.files.failures import explain_failure
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import SerializationError, StoreError
from sparkdl.model.architecture import join_module, join_tensors, split_module, split_tensors
from sparkdl.model.weights_file import HashingFile, map_weights, read_weights, write_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from sparkdl.collective import WorldReport
    from sparkdl.data import ParquetDataset
    from sparkdl.launch import RankContext
    from sparkdl.training.distribution import Replicas
    from sparkdl.training.history import EpochRecord
    from sparkdl.training.spec import TrainingSpec


_TENSORS = "_tensors.safetensors"
_TRAINED = "_trained.safetensors"
_PARTS = "trained"
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredSpec:
    """A spec without its tensors.

    Attributes:
        structure: the pickle without tensors.
        folder: URL of the folder with the tensors.
    """

    structure: bytes
    folder: str


@dataclass(frozen=True)
class StoredModule:
    """A trained module without its tensors.

    Attributes:
        structure: the pickle without tensors.
        weights: size and checksum of each file with tensors, by its path in the folder of the spec.
    """

    structure: bytes
    weights: Mapping[str, Mapping[str, Any]]


def store_spec(spec: TrainingSpec, folder: str) -> StoredSpec:
    """Write the tensors into a folder of the Store, given by its URL. Runs on the *driver*.

    Raises:
        StoreError: if the Store does not take them.
    """
    structure, tensors = split_tensors(spec, spec.model)
    _write(tensors, folder, _TENSORS)
    return StoredSpec(structure, folder)


def load_spec(stored: StoredSpec) -> TrainingSpec:
    """Return the spec with its tensors. Runs on a *rank*.

    Raises:
        StoreError: if the Store cannot be read here.
    """
    location = open_location(stored.folder)
    try:
        with location.filesystem.open(f"{location.path}/{_TENSORS}", "rb") as file:
            tensors = read_weights(file)
    except Exception as error:
        raise _unreadable(stored.folder, error) from error
    return cast("TrainingSpec", join_tensors(stored.structure, tensors))


def store_module(module: nn.Module, folder: str) -> StoredModule:
    """Write the tensors of a trained module into the folder of its spec. Runs on *rank* 0.

    Raises:
        StoreError: if the Store does not take them from here.
        SerializationError: if the module can no longer be pickled.
    """
    structure, tensors = split_module(module)
    return StoredModule(structure, {_TRAINED: _write(tensors, folder, _TRAINED)})


def store_trained(
    distribution: Replicas, folder: str, *, before: Callable[[], None] = lambda: None
) -> StoredModule | None:
    """Write a trained module into the folder of its spec; return it on *rank* 0, None elsewhere. Collective.

    Where each rank has a part of it, all ranks write, and none of them has all.

    Args:
        distribution: holds the module.
        folder: URL of the folder.
        before: called first.

    Raises:
        StoreError: if the Store does not take them from here.
        SerializationError: if the module can no longer be pickled.
    """
    before()
    if distribution.is_divided:
        from sparkdl.parallel.weights import saved_files  # on ranks only, as the training loop
        from sparkdl.training.distribution import Parts

        assert isinstance(distribution, Parts), "the only ones that are divided"
        distribution.save_parameters(f"{folder}/{_PARTS}")
        tensors = distribution.other_tensors()
        if distribution.rank != 0:
            return None
        others = {_TRAINED: _write(tensors, folder, _TRAINED)}
        parts = {f"{_PARTS}/{name}": each for name, each in saved_files(f"{folder}/{_PARTS}").items()}
        return StoredModule(distribution.structure, {**others, **parts})
    module = distribution.whole_module()
    return store_module(module, folder) if module is not None and distribution.rank == 0 else None


def fetch_module(stored: StoredModule, folder: str) -> nn.Module:
    """Return a trained module whose weights are mapped from files of its own, which go with it. On the *driver*.

    Raises:
        StoreError: if the Store cannot be read, or holds something else than the rank wrote.
        SavedModelError: if the module's classes are not installed here.
    """
    location = open_location(folder)
    tensors: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as own:
        path = Path(own) / _TRAINED
        for name, written in stored.weights.items():
            try:
                # Its own, as a Store's file may go while the module stays. What is mapped outlives the name.
                with (
                    location.filesystem.open(f"{location.path}/{name}", "rb") as there,
                    path.open("wb") as here,
                ):
                    copied = HashingFile(here)
                    while chunk := there.read(_CHUNK_BYTES):
                        copied.write(chunk)
            except Exception as error:
                raise _unreadable(folder, error) from error
            if copied.describe() != written:
                raise StoreError(
                    f"The trained weights in {folder}/{name} are not what a rank wrote: {copied.describe()} instead of "
                    f"{dict(written)}. Choose a Store that driver and executors see alike."
                )
            tensors |= map_weights(path)
            path.unlink()
        return join_module(stored.structure, tensors)


def _write(tensors: Mapping[str, Tensor], folder: str, name: str) -> dict[str, Any]:
    location = open_location(folder)
    try:
        with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
            return write_weights(tensors, file)
    except SerializationError:
        raise
    except Exception as error:
        raise StoreError(
            f"The model's weights cannot be written to {folder}: {explain_failure(error)}"
        ) from error


def _unreadable(folder: str, error: Exception) -> StoreError:
    return StoreError(f"The model's weights cannot be read from {folder}: {explain_failure(error)}")


INTERVAL_S = 10.0
"""From one sample to the next, as MLflow has it."""

_logger = logging.getLogger(__name__)


class HostWatch:
    """Reports samples of a host from a thread; a context manager. The last sample is taken at its end.

    Args:
        report: takes events of kind ``"system"`` with ``sample``, their number, and ``metrics``.
        interval_s: seconds from one sample to the next.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None], *, interval_s: float = INTERVAL_S) -> None:
        self._report, self._interval_s = report, interval_s
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkdl-host-watch", daemon=True)

    def __enter__(self) -> HostWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            probe = _Probe()
        except ImportError:
            _logger.info("psutil is not installed here, so MLflow is not told how busy the host is.")
            return
        number = 0
        while not self._has_ended.wait(self._interval_s if number else 0.0) or number == 0:
            self._sample(probe, number)
            number += 1
        if number:
            self._sample(probe, number)

    def _sample(self, probe: _Probe, number: int) -> None:
        metrics = probe.measure()
        if not metrics:
            return
        try:
            self._report({"kind": "system", "sample": number, "metrics": metrics})
        except OSError:
            self._has_ended.set()  # the task is gone, and with it the receiver


class _Probe:
    """Knows how busy this host is; traffic counts from its making.

    What cannot be measured here, as in a container without network interfaces, is left out and named once.
    """

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._prefix = f"system/{_as_name(socket.gethostname())}"
        self._failed: set[str] = set()
        self._traffic: Any = None
        self._try("processor", psutil.cpu_percent)  # the next one measures the time since
        self._try("network", self._network)

    def measure(self) -> dict[str, float]:
        """Return metrics by the names of MLflow, in megabytes and percent."""
        found: dict[str, float] = {}
        for name, measure in (
            ("processor", self._processor),
            ("memory", self._memory),
            ("disk", self._disk),
            ("network", self._network),
        ):
            found |= self._try(name, measure) or {}
        for number in range(self._try("gpus", _num_gpus) or 0):
            found |= self._try(f"memory of GPU {number}", partial(_gpu_memory, number)) or {}
            found |= self._try(f"load of GPU {number}", partial(_gpu_load, number)) or {}
        return {f"{self._prefix}/{name}": round(float(value), 3) for name, value in found.items()}

    def _try(self, what: str, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except Exception as error:  # of the kernel, of psutil, of NVML: none of them is worth a fit
            if what not in self._failed:
                self._failed.add(what)
                _logger.info(
                    "MLflow is not told of this host's %s, which cannot be measured: %s: %s",
                    what,
                    type(error).__name__,
                    error,
                )
            return None

    def _processor(self) -> dict[str, float]:
        return {"cpu_utilization_percentage": self._psutil.cpu_percent()}

    def _memory(self) -> dict[str, float]:
        memory = self._psutil.virtual_memory()
        return {
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
        }

    def _disk(self) -> dict[str, float]:
        disk = self._psutil.disk_usage("/")
        return {
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
        }

    def _network(self) -> dict[str, float]:
        traffic = self._psutil.net_io_counters()  # None without interfaces
        if traffic is None:
            return {}
        before = self._traffic = self._traffic or traffic
        return {
            "network_receive_megabytes": (traffic.bytes_recv - before.bytes_recv) / 1e6,
            "network_transmit_megabytes": (traffic.bytes_sent - before.bytes_sent) / 1e6,
        }


def _num_gpus() -> int:
    """How many GPUs this rank sees and uses."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0


def _gpu_memory(number: int) -> dict[str, float]:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    return {
        f"gpu_{number}_memory_usage_megabytes": (total - free) / 1e6,
        f"gpu_{number}_memory_usage_percentage": (total - free) / total * 100,
    }


def _gpu_load(number: int) -> dict[str, float]:
    """As nvidia-ml-py knows it; a part of a GPU (MIG) has none."""
    import torch

    return {f"gpu_{number}_utilization_percentage": torch.cuda.utilization(number)}


def _as_name(host: str) -> str:
    """A host's name in the signs that all of MLflow's stores take."""
    return "".join(sign if sign.isalnum() or sign in "_-. " else "_" for sign in host)


IMPORTED_FIRST = (__name__, "torch._dynamo")
"""Modules that every fit needs; the last one is imported by the first optimizer of a process."""


@dataclass(frozen=True)
class FitOutcome:
    """What rank 0 sends to the driver.

    Attributes:
        module: the trained module, whose weights lie in the Store.
        history: one record per epoch.
        model_epoch: number of the epoch that the module is from.
        communication: report of all ranks; None if it was not requested.
    """

    module: StoredModule
    history: tuple[EpochRecord, ...]
    model_epoch: int
    communication: WorldReport | None = None


def fit_on_rank(
    context: RankContext,
    stored: StoredSpec,
    dataset: ParquetDataset,
    *,
    tells_progress: bool = False,
    is_watched: bool = False,
) -> FitOutcome | None:
    """Train on this rank; rank 0 returns the outcome, every other rank None. Runs on a *rank*.

    Args:
        context: of this rank.
        stored: what to train and how.
        dataset: the rows.
        tells_progress: whether a step that takes longer than the time to a hang counts as one.
        is_watched: whether the driver wants to hear how busy hosts are, and how ranks communicated.
    """
    from sparkdl.training.trainer import train  # the driver does without the training loop

    spec = load_spec(stored)
    communicator = context.communicator
    reports_for_host = is_watched and context.topology.local_rank == 0
    with HostWatch(context.report) if reports_for_host else nullcontext():
        result = train(
            spec,
            communicator=communicator,
            dataset=dataset,
            report=context.report,
            on_step=context.progress if tells_progress else lambda: None,
            on_position=context.note_place,
            # To write the model takes as long as it takes.
            keep=partial(store_trained, folder=stored.folder, before=partial(context.progress, done=True)),
        )
    communication = communicator.gather_report() if is_watched else None
    if context.rank != 0:
        return None
    return FitOutcome(result.module, result.history, result.model_epoch, communication)
