"""Checks, before the ranks start, whether a fit resumes from its checkpoints or is done.

Fits that run at the same time must not use the same ``checkpointDir``: :mod:`.checkpoint_lease` locks it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdl.data import Store
from sparkdl.errors import CheckpointError, StoreError
from sparkdl.estimators.fit.checkpoint_lease import held_alone
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
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.training.spec import TrainingSpec


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
        on_wait: is called with what the fit has to wait for.

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
