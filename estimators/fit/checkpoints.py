"""Checks, before the ranks start, whether a fit resumes from its checkpoints or is done, and locks their folder.

Fits that run at the same time must not use the same ``checkpointDir``. A fit keeps a lease in the folder as long as
it runs, and looks for the leases of others once it has its own: of two fits that begin at once, each may refuse, but
they never both continue. A fit whose process ended without removing its lease is detected at once on the same
machine, and elsewhere when its lease is no longer renewed. A fit that was only suspended, or cut off from the folder,
is treated as ended, too: it finds that out at the next renewal of its lease, and ends with an error.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data import Store
from sparkdl.data.files.failures import explain_failure, store_error
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.store.housekeeping import LEASE_S, Lease, file_names, modified, store_time
from sparkdl.errors import CheckpointError, CheckpointsInUseError, SparkdlError, StoreError
from sparkdl.model.architecture import join_module, split_module
from sparkdl.training.checkpoint.files import FIT, MODEL, DamagedFileError, Manifest, load_file
from sparkdl.training.checkpoint.folder import CheckpointFolder
from sparkdl.training.checkpoint.identity import check_progress, fit_identity
from sparkdl.training.checkpoint.state import load_module_state
from sparkdl.training.history import EpochRecord
from sparkdl.training.spec import CheckpointPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from sparkdl.data import ParquetDataset
    from sparkdl.data.files.filesystems import Location
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.training.spec import TrainingSpec


_PREFIX = "_fit-"
_INTERVAL_S = 0.5


@contextmanager
def held_alone(url: str, on_wait: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold the folder of checkpoints for one fit; give what raises once the fit holds it no longer, and costs nothing.

    Args:
        url: of the folder.
        on_wait: called with a text if the fit has to wait for a lease whose holder may have ended.

    Raises:
        CheckpointsInUseError: if another fit uses it, or may have used it before the end of this one.
        StoreError: if it cannot be written or read.
    """
    location = open_location(url)
    try:
        lease = Lease(location, f"{_PREFIX}{uuid.uuid4().hex}", json.dumps(_this_process()).encode())
    except Exception as error:
        raise store_error(f"The folder {url} cannot be written: {explain_failure(error)}") from error

    def check() -> None:
        if lease.is_lost:
            raise CheckpointsInUseError(
                f"Another fit may use the checkpointDir {url}: this one was suspended, or cut off from it, for more "
                f"than {LEASE_S:g} s, and was taken for ended. Wait until the other has ended and fit again, which "
                "continues from its checkpoints, or choose another checkpointDir."
            )

    try:
        _await_others(location, lease, url, on_wait)
        yield check
        lease.stop()
        lease.look()
        check()
    finally:
        lease.end()


def _await_others(location: Location, lease: Lease, url: str, on_wait: Callable[[str], None]) -> None:
    try:
        for name in file_names(location):
            if name.startswith(_PREFIX) and not lease.path.endswith(name):
                _await_end(location, name, url, on_wait)
    except SparkdlError:
        raise
    except Exception as error:
        raise store_error(
            f"Whether another fit uses {url} cannot be seen: {explain_failure(error)}"
        ) from error


def _await_end(location: Location, name: str, url: str, on_wait: Callable[[str], None]) -> None:
    """Return when a lease is over, and remove it; raise when it is renewed."""
    holder = _read(location, name)
    is_alive = _is_alive(holder)
    told = False
    pause = threading.Event()
    with suppress(FileNotFoundError):  # it ended meanwhile
        first = modified(location, name)
        while is_alive is None and store_time(location) - first < LEASE_S:
            if not told:
                on_wait(f"Waiting whether the fit of {_called(holder)} still uses {url}")
                told = True
            pause.wait(_INTERVAL_S)
            if modified(location, name) != first:
                is_alive = True
        if is_alive:
            raise CheckpointsInUseError(
                f"Another fit, of {_called(holder)}, uses the checkpointDir {url}. Wait until it has ended, or choose "
                "another checkpointDir."
            )
        location.filesystem.rm(f"{location.path}/{name}")


def _read(location: Location, name: str) -> dict[str, Any]:
    try:
        with location.filesystem.open(f"{location.path}/{name}", "rb") as file:
            content = json.loads(file.read())
    except (OSError, ValueError):  # it ended, or is being written
        return {}
    return content if isinstance(content, dict) else {}


def _called(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"


def _this_process() -> dict[str, Any]:
    """What tells this process from all others, of all machines and containers."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "where": _pids_from(),
        "began": _began(os.getpid()),
    }


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether a process of this machine lives; None where that cannot be told, as of one of another machine."""
    if not holder or holder["where"] is None or holder["where"] != _pids_from():
        return None
    pid = int(holder["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    return bool(holder["began"] == _began(pid))


def _pids_from() -> str | None:
    """What all processes have alike that see each other by their numbers; None where Linux does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _began(pid: int) -> str | None:
    """When a process was started, in ticks of its machine; None if there is none, or only what is left of it."""
    try:
        # After the name, which may hold brackets itself.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


MAX_BYTES_ON_DRIVER = 64 << 20
"""How large a model may be for the driver itself to read it from a checkpoint, for which it takes it in twice."""


@dataclass(frozen=True)
class FinishedFit:
    """What a fit left that had no epoch left to do.

    Attributes:
        module: the trained module, on CPU.
        history: one record per epoch.
        model_epoch: number of the epoch that the module is from.
    """

    module: nn.Module
    history: tuple[EpochRecord, ...]
    model_epoch: int


@contextmanager
def checkpoints_of(
    params: _TorchEstimatorParams, on_wait: Callable[[str], None]
) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """Give the URL where a fit has its checkpoints, alone, or None for none; and what raises once it is not alone.

    The URL is as the Param says, or in the Store until the fit ends if it may be restarted.

    Args:
        params: of the fit.
        on_wait: is told what the fit has to wait for.

    Raises:
        CheckpointsInUseError: if another fit uses the folder, or may have used it before the end of this one.
        StoreError: if it cannot be written.
    """
    url = params.getCheckpointDir()
    if url is None:
        scratch = params.getStore().scratch_folder("checkpoints")
        with scratch if params.getMaxRestarts() else nullcontext() as temporary:
            yield temporary, _do_nothing
        return
    store = Store(url)
    try:
        store.check_writable()
    except StoreError as error:
        raise StoreError(f"Param checkpointDir cannot be used. {error}") from error
    with held_alone(store.url, on_wait) as check_alone:
        yield store.url, check_alone


def _do_nothing() -> None:
    """A folder that is made for one fit is not shared."""


def with_checkpoints(spec: TrainingSpec, params: _TorchEstimatorParams, url: str | None) -> TrainingSpec:
    """Return the spec with checkpoints at a URL; without any for None."""
    if url is None:
        return spec
    plan = CheckpointPlan(
        url=Store(url).url,
        every_updates=params.getCheckpointEverySteps(),
        num_kept=params.getKeepCheckpoints(),
        num_ranks=params.getNumWorkers(),
    )
    return replace(spec, checkpoints=plan)


def find_finished(spec: TrainingSpec, dataset: ParquetDataset) -> FinishedFit | None:
    """Look at the newest checkpoint: return the model of a fit that is done, None where ranks have to say more.

    Raises:
        CheckpointError: if it is of another model, of another dataset or of other Params, or has come further.
        StoreError: if it cannot be read.
    """
    if spec.checkpoints is None:
        return None
    folder = CheckpointFolder(spec.checkpoints.url)
    identity = fit_identity(spec, dataset)
    for name, manifest in folder.newest_first():
        if isinstance(manifest, Manifest):
            check_progress(folder.url, manifest, identity, spec.epochs)
            if not manifest.finished or manifest.epoch < spec.epochs:
                return None
            # Rank 0 puts the best weights in, which lie elsewhere, and large ones, of which the driver would hold
            # copies; it trains no further either.
            is_on_meta = any(each.is_meta for each in spec.model.parameters())
            if spec.best is not None or is_on_meta or _num_bytes(spec.model) > MAX_BYTES_ON_DRIVER:
                return None
            try:
                folder.check(name, manifest)
                return _load(folder, name, spec, is_divided=manifest.is_divided)
            except DamagedFileError:
                return None  # rank 0 will say so, and continue from the one before
    return None


def newest_place(spec: TrainingSpec) -> str:
    """Return in words from where a fit continues when its ranks are started again."""
    if spec.checkpoints is not None:
        for _, manifest in CheckpointFolder(spec.checkpoints.url).newest_first():
            if isinstance(manifest, Manifest):
                return f"its checkpoint at {manifest.position}"
    return "the beginning, as no checkpoint was taken yet"


def _num_bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()) if not each.is_sparse)


def _load(folder: CheckpointFolder, name: str, spec: TrainingSpec, *, is_divided: bool) -> FinishedFit:
    location = folder.location(name)
    structure, tensors = split_module(spec.model)
    module = join_module(structure, {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
    if is_divided:
        from sparkdl.parallel import load_whole  # otherwise the driver does without parallelism

        try:
            load_whole(f"{folder.url}/{name}", module)
        except CheckpointError as error:
            raise DamagedFileError(str(error)) from error
    else:
        load_module_state(module, load_file(location, MODEL))
    history = tuple(EpochRecord.from_dict(record) for record in load_file(location, FIT)["history"])
    return FinishedFit(module.eval(), history, history[-1].epoch)
