"""Checks, before the ranks start, whether a fit resumes from its checkpoints or is already finished.

Fits that run at the same time must not use the same ``checkpointDir``: a fit holds a lease of it alone.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.checkpoint.folder import DamagedCheckpointError
from sparkdl.checks import check_format
from sparkdl.data import Store
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import StoreError
from sparkdl.foreign_errors import store_errors
from sparkdl.launch import hold_place
from sparkdl.model.architecture import join_module, split_module
from sparkdl.training.checkpoint.fit_manifest import FitManifest, fit_folder
from sparkdl.training.checkpoint.identity import check_progress, fit_identity, model_files_identity
from sparkdl.training.checkpoint.state import set_buffers
from sparkdl.training.history import EpochRecord
from sparkdl.training.spec import CheckpointPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from sparkdl.checkpoint.folder import Checkpoint
    from sparkdl.data import ParquetDataset
    from sparkdl.data.files.lease import SoleLease
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.training.spec import TrainingSpec


_RUN = "mlflow_run.json"
_FORMAT = 1

MAX_BYTES_ON_DRIVER = 64 << 20
"""Maximum size of a model that the driver itself reads from a checkpoint, which takes memory for two copies."""


@dataclass(frozen=True)
class FinishedFit:
    """Result of a finished fit.

    Attributes:
        module: the trained module, on CPU.
        history: one record per epoch.
        model_epoch: number of the epoch that the module's weights are from.
    """

    module: nn.Module
    history: tuple[EpochRecord, ...]
    model_epoch: int


def hold_checkpoints(
    params: _TorchEstimatorParams, on_wait: Callable[[str], None]
) -> AbstractContextManager[SoleLease | None]:
    """Hold a fit's folder of checkpoints alone; None for no checkpoints.

    The folder is that of Param ``checkpointDir``; if it is not set and the fit may be restarted, a temporary folder in
    the Store.

    Args:
        params: Params of the fit.
        on_wait: function that is called with a text if the fit has to wait.

    Raises:
        CheckpointsInUseError: if another fit uses the folder, or may have used it before the end of this one.
        StoreError: if the folder cannot be written.
    """
    url = params.getCheckpointDir()
    if url is not None:
        store = Store(url)
        try:
            store.check_writable()
        except StoreError as error:
            raise StoreError(f"Param checkpointDir cannot be used. {error}") from error
        url = store.url
    temporary = partial(params.getStore().scratch_folder, "checkpoints") if params.getMaxRestarts() else None
    return hold_place(url, temporary, on_wait)


def with_checkpoints(spec: TrainingSpec, params: _TorchEstimatorParams, url: str | None) -> TrainingSpec:
    """Return the spec with checkpoints at a URL; unchanged if the URL is None.

    Raises:
        StoreError: if the files of the initial weights cannot be read.
    """
    if url is None:
        return spec
    initial = params._path_of_initial_weights()
    files = None if initial is None else model_files_identity(initial)
    plan = CheckpointPlan(
        url=Store(url).url,
        every_updates=params.getCheckpointEverySteps(),
        num_kept=params.getKeepCheckpoints(),
        num_ranks=params.getNumWorkers(),
    )
    return replace(spec, checkpoints=plan, initial_files=files)


def find_finished(spec: TrainingSpec, dataset: ParquetDataset) -> FinishedFit | None:
    """Return the result of a finished fit from its newest checkpoint; None if ranks have to start or to load it.

    Raises:
        CheckpointError: if the checkpoint is of another model, dataset or Params, or has more epochs than this fit.
        StoreError: if the checkpoint cannot be read.
    """
    if spec.checkpoints is None:
        return None
    folder = fit_folder(spec.checkpoints.url)
    checkpoint = folder.newest(is_look=True)
    if checkpoint is None:
        return None
    manifest = FitManifest.of(checkpoint)
    check_progress(folder.url, manifest, fit_identity(spec, dataset), spec.epochs)
    if not manifest.finished or manifest.epoch < spec.epochs:
        return None
    # In these cases rank 0 loads the model, without further training: the best weights are in another part of the
    # checkpoint, and of large weights the driver would hold copies.
    tensors = [*spec.model.parameters(), *spec.model.buffers()]
    num_bytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_sparse)
    is_on_meta = any(parameter.is_meta for parameter in spec.model.parameters())
    if spec.best is not None or is_on_meta or num_bytes > MAX_BYTES_ON_DRIVER:
        return None
    try:
        checkpoint.check()
        return _load(checkpoint, spec)
    except DamagedCheckpointError:
        return None  # the ranks will log this, and continue from the checkpoint before


def run_key_of(url: str) -> str:
    """Return the key of the MLflow run to which the fit with checkpoints at a URL is logged.

    If there are checkpoints, it is the key of the earlier attempt. Otherwise it is a new key, written beside them.

    Raises:
        StoreError: if the folder cannot be read or written, or a newer version of sparkdl wrote the file.
    """
    folder = fit_folder(url)
    location = open_location(folder.url)
    with store_errors(f"{folder.url}/{_RUN}, which names the MLflow run, cannot be read or written"):
        if folder.names():
            with (
                suppress(FileNotFoundError, ValueError, KeyError),
                location.filesystem.open(f"{location.path}/{_RUN}", "rb") as file,
            ):
                content = json.loads(file.read())
                check_format(f"{folder.url}/{_RUN}", content, _FORMAT, StoreError)
                return str(content["key"])
        key = uuid.uuid4().hex
        content = {"format": _FORMAT, "key": key}
        location.write_whole(_RUN, f"{json.dumps(content)}\n".encode())
    return key


def newest_position(spec: TrainingSpec) -> str:
    """Return a text that says from where a fit continues when its ranks are started again."""
    if spec.checkpoints is not None:
        checkpoint = fit_folder(spec.checkpoints.url).newest(is_look=True)
        if checkpoint is not None:
            return f"its checkpoint at {FitManifest.of(checkpoint).position}"
    return "the beginning, as no checkpoint was taken yet"


def _load(checkpoint: Checkpoint, spec: TrainingSpec) -> FinishedFit:
    from sparkdl.checkpoint.tensors import TrainingTensors  # only a finished fit needs it on the driver

    structure, parts = split_module(spec.model)
    module = join_module(structure, {name: tensor.to("cpu", copy=True) for name, tensor in parts.items()})
    state = checkpoint.load_state()
    tensors = TrainingTensors(module, is_divided=False)
    tensors.check(checkpoint, None)
    tensors.load(checkpoint, state["training"], None)
    set_buffers(dict(module.named_buffers()), state["fit"]["buffers"])
    history = tuple(EpochRecord.from_dict(record) for record in state["fit"]["history"])
    return FinishedFit(module.eval(), history, history[-1].epoch)
