"""Checkpoints of models that are divided among ranks; they can be loaded in any layout of the ranks.

The planners of ``torch.distributed.checkpoint`` decide which rank writes or reads which part of each tensor, so that a
checkpoint of one layout can be loaded into another. This module adds names and optimizer state that do not depend on
the layout, random state, and checks of the model before anything is overwritten;
:mod:`sparkdl.parallel.checkpoint_files` adds the files.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sparkdl.data.files.threads import DaemonThreads
from sparkdl.errors import CheckpointError, ParamError, SparkdlError, StoreError
from sparkdl.meanings import explain_failure, store_error
from sparkdl.parallel.checkpoint_files import (
    CheckpointFolder,
    Reader,
    Report,
    Writer,
    check_files,
    newest_checkpoint,
    read_small_file,
)
from sparkdl.parallel.context import WholeSequences
from sparkdl.parallel.parallelism import DIMENSIONS
from sparkdl.random_state import random_state, rank_seed, seed_generators, set_random_state
from sparkdl.torch.process_group import BACKEND_NAME, SparkdlProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import NoReturn

    from torch.optim import Optimizer

    from sparkdl.data.files.filesystems import Location
    from sparkdl.parallel.parallelism import RankLayout

Result = TypeVar("Result")

_DEFAULT_TIMEOUT_S = 1800.0
_FAILURE_TIMEOUT_S = 5.0
"""How long failed training waits for a checkpoint that is still being written."""

_REPORT_TIMEOUT_S = 2.0
"""How much longer than the ranks for each other one waits for a checkpoint: so it learns which rank was missing."""

_MODEL, _OPTIMIZER, _NUMBER, _OTHER = "model", "optimizer", "number", "other"
"""Prefixes of tensor names: ``model/name``, ``optimizer/key/name``, ``number/key/name``, ``other/name``."""

_FORMS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that do not change its results, or that depend on the layout; they are not saved."""

_WRAPPERS = re.compile(r"\.(_orig_mod|_checkpoint_wrapped_module)(?=\.)")
"""Names of the wrapper modules of torch.compile and of activation checkpointing."""


class ShardedCheckpoints:
    """Saves and loads divided models, with optimizer, scheduler, random state and the position in the data.

    Use it as a context manager: it waits for the last checkpoint at the end. All ranks call its methods together::

        with ShardedCheckpoints("/shared/run-7", layout) as checkpoints:
            state = checkpoints.load(model, optimizer, scheduler) or {"step": 0}
            for step in range(state["step"], steps):
                ...
                if step % 500 == 499:
                    checkpoints.save(step + 1, model, optimizer, scheduler, state={"step": step + 1})

    It opens a process group of its own, so that a checkpoint can be written while training uses the other groups. Only
    one job at a time may use a folder.

    Args:
        folder: path or URL that all ranks can reach, as a Store takes it.
        layout: layout of the ranks.
        num_kept: number of the newest checkpoints to keep.
        timeout_s: seconds that ranks wait for each other in these methods, and that :meth:`save` waits for the
            previous checkpoint. None for the timeout of the default process group if that is sparkdl's, else 1800.

    Raises:
        ParamError: if ``num_kept`` is not positive or the folder's name is empty.
        StoreError: if the folder's filesystem cannot be opened.
    """

    def __init__(
        self, folder: str, layout: RankLayout, *, num_kept: int = 2, timeout_s: float | None = None
    ) -> None:
        if num_kept < 1:
            raise ParamError(f"num_kept must be positive, got {num_kept}.")
        world = dist.group.WORLD
        is_ours = isinstance(world, SparkdlProcessGroup)
        if timeout_s is None:
            timeout_s = world.timeout_s if isinstance(world, SparkdlProcessGroup) else _DEFAULT_TIMEOUT_S
        self._folder = CheckpointFolder(folder, num_kept)
        self._layout = layout
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        self._device = torch.device(layout.mesh.device_type)
        self._group = dist.new_group(
            timeout=timedelta(seconds=timeout_s), backend=BACKEND_NAME if is_ours else "gloo"
        )
        self._threads = DaemonThreads(1, "sparkdl-sharded-checkpoints")
        self._writing: futures.Future[None] | None = None

    def save(
        self,
        step: int,
        module: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        state: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        folder: str | None = None,
    ) -> futures.Future[None]:
        """Copy the state to host memory, and write it in a thread while training continues. Collective.

        The call waits for the previous checkpoint, so that at most one copy is in memory. Where ranks hold the same
        part of the model and a buffer of it differs between them, the value of one of these ranks is saved.

        Args:
            step: number of completed steps, the same on all ranks.
            module: this rank's part of the model; with a pipeline, the stages of this rank.
            optimizer: optimizer of the parameters of ``module``; None if there is none to save.
            scheduler: anything with a ``state_dict``, the same on all ranks; None if there is none to save.
            state: further values to save, the same on all ranks: numbers, strings, tensors, and lists and dicts of
                them.
            tensors: further tensors to save, by name; they may be divided among ranks. Give them to :meth:`load` too.
            folder: folder to save to in place of the constructor's; it keeps one checkpoint.

        Returns:
            A future that is done when the checkpoint is complete; it holds the error if writing failed.

        Raises:
            CheckpointError: if a value cannot be stored in a checkpoint.
            StoreError: if the previous checkpoint could not be written, or not in time.
        """
        self.wait()
        part = _Part(module, optimizer, tensors)
        copies = {name: _copied(tensor) for name, tensor in part.tensors_to_save().items()}
        shared = {
            "state": None if state is None else dict(state),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "optimizer": None if optimizer is None else _options_of(optimizer),
        }
        for name, value in shared.items():
            _encoded(value, f"the {name} given to save()")
        small = {"random": random_state(self._device), **(shared if self._rank == 0 else {})}
        writer = Writer(
            self._folder if folder is None else CheckpointFolder(folder, num_kept=1),
            rank=self._rank,
            small=_encoded(small, "the random state"),
            report=Report(step, self._layout.row_reader[0], part.groups(), {}, []),
            sizes=_sizes_of(self._layout),
        )
        self._writing = self._threads.submit(self._write, step, copies, writer)
        return self._writing

    def load(
        self,
        module: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        step: int | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        folder: str | None = None,
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint, written in any layout. Collective.

        Before anything is overwritten, the files are compared with their checksums, and the model with the model of
        the checkpoint. In the same layout, each rank continues with its own random state. In another layout, each rank
        takes the random state of a rank that read the same share of the rows; ranks whose share did not exist are
        seeded anew.

        Args:
            module: this rank's part of the model, as for :meth:`save`; its tensors are overwritten in place.
            optimizer: optimizer of the parameters of ``module``; None to leave the saved state of the optimizer out.
            scheduler: scheduler as for :meth:`save`; None to leave its saved state out.
            step: step whose newest checkpoint is loaded; the newest checkpoint of all if None.
            tensors: the tensors that were given to :meth:`save`; they are overwritten in place.
            folder: folder to load from in place of the constructor's.

        Returns:
            The ``state`` given to :meth:`save`, or ``{}`` if none was given; None if the folder holds no checkpoint.

        Raises:
            CheckpointError: if the checkpoint is of another model or optimizer, a file is damaged, or there is no
                checkpoint of that step.
            ParamError: if the module has tensors on the meta device.
            StoreError: if the folder cannot be read.
        """
        self.wait()
        checkpoints = self._folder if folder is None else CheckpointFolder(folder, num_kept=1)
        found = self._on_all_ranks(lambda: checkpoints.find(step) if self._rank == 0 else None)[0]
        if found is None:
            return None
        name, manifest = found
        location = checkpoints.location(name)
        url = f"{checkpoints.url}/{name}"
        part = _Part(module, optimizer, tensors)
        _check_same_model(manifest, self._on_all_ranks(part.describe), url)

        def read_small_files() -> tuple[dict[str, Any], dict[str, Any]]:
            check_files(location, manifest, self._rank, dist.get_world_size())
            own = self._source_of_random_state(manifest)
            shared = read_small_file(location, 0)
            _check_given(shared, optimizer, scheduler, url)
            return shared, read_small_file(location, own)

        small: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._on_all_ranks(lambda: small.append(read_small_files()))
        (shared, own) = small[0]
        part.load(location, manifest, url, shared["optimizer"], process_group=self._group)
        if scheduler is not None:
            scheduler.load_state_dict(shared["scheduler"])
        set_random_state(own["random"], self._device)
        readers = set(manifest["readers"])
        if not self._is_same_layout(manifest) and self._layout.row_reader[0] not in readers:
            seed_generators(
                rank_seed(int(torch.randint(2**62, (), device="cpu")), self._layout.row_reader[0])
            )
        return shared["state"] or {}

    def steps(self) -> list[int]:
        """Return the step of each complete checkpoint in the folder, the oldest checkpoint first.

        Raises:
            StoreError: if the folder cannot be listed.
        """
        return [step for _, step, _ in self._folder.complete()]

    def wait(self) -> None:
        """Wait until the checkpoint of the last :meth:`save` is written.

        Raises:
            StoreError: if it could not be written, or not in time.
            CommunicatorError: if a rank has failed, or has not called :meth:`save` in time; the message names it. With
                a backend of torch, an error of torch that may not name it.
        """
        if self._writing is None:
            return
        if futures.wait([self._writing], self._timeout_s + _REPORT_TIMEOUT_S).not_done:
            raise StoreError(
                f"A checkpoint was still being written to {self._folder.url} after {self._timeout_s:g} s. Save less "
                "often, choose a faster store, or give ShardedCheckpoints a larger timeout_s."
            )
        writing, self._writing = self._writing, None
        writing.result()

    def close(self) -> None:
        """Wait for the last checkpoint, and end the thread and the process group. Collective.

        Raises:
            StoreError: if the checkpoint could not be written, or not in time.
        """
        try:
            self.wait()
        except BaseException as error:
            self._abandon(error, 0.0)
            raise
        self._threads.stop()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> ShardedCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon(error, _FAILURE_TIMEOUT_S)

    def _abandon(self, error: BaseException | None, timeout_s: float) -> None:
        """End without the other ranks, which may have failed or may be waiting for this one."""
        self._threads.stop()
        if self._writing is not None:
            with suppress(Exception):  # the error that ends training is the one to raise
                self._writing.result(timeout_s)
        if isinstance(self._group, SparkdlProcessGroup):
            self._group.abort(f"{type(error).__name__}: {error}" if error is not None else None)
        self._writing = self._group = None

    def _write(self, step: int, tensors: dict[str, Any], writer: Writer) -> None:
        try:
            save(
                tensors,
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group,
            )
        except CheckpointException as error:
            _raise_first(error, f"The checkpoint of step {step} in {self._folder.url} could not be written")

    def _on_all_ranks(self, work: Callable[[], Result]) -> list[Result]:
        """Call ``work`` on every rank and return the result of each; an error on one rank is raised on all."""
        own: tuple[Result | None, Exception | None]
        try:
            own = work(), None
        except Exception as error:
            own = None, error
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self._group)
        for _, failure in everyone:
            if failure is not None:
                raise failure
        return [result for result, _ in everyone]

    def _is_same_layout(self, manifest: Mapping[str, Any]) -> bool:
        return bool(manifest["sizes"] == _sizes_of(self._layout))

    def _source_of_random_state(self, manifest: Mapping[str, Any]) -> int:
        """The rank of the checkpoint whose random state this rank takes."""
        if self._is_same_layout(manifest):
            return self._rank
        readers: list[int] = manifest["readers"]
        return readers.index(self._layout.row_reader[0] % (max(readers) + 1))


def load_whole(
    folder: str,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Load the newest sharded checkpoint into a process that has the whole model. No communication.

    Random numbers stay as they are.

    Args:
        folder: path or URL, as :class:`ShardedCheckpoints` takes it.
        module: the whole model; its tensors are overwritten in place.
        optimizer: optimizer of the parameters of ``module``; None to leave the saved state of the optimizer out.
        tensors: the tensors that were given to :meth:`ShardedCheckpoints.save`; they are overwritten in place.

    Raises:
        CheckpointError: if there is no checkpoint, it is of another model or optimizer, or a file is damaged.
        StoreError: if the folder cannot be read.
    """
    location, manifest = newest_checkpoint(folder)
    url = location.name_of(location.path)
    part = _Part(module, optimizer, tensors)
    _check_same_model(manifest, [part.describe()], url)
    check_files(location, manifest)
    shared = read_small_file(location, 0)
    _check_given(shared, optimizer, None, url)
    part.load(location, manifest, url, shared["optimizer"], no_dist=True)


class _Part:
    """The tensors of this rank's part of a model and of its optimizer, under their names in the whole model."""

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None,
        others: Mapping[str, Tensor] | None,
    ) -> None:
        self._others = {f"{_OTHER}/{name}": tensor.detach() for name, tensor in (others or {}).items()}
        modules = [module] if isinstance(module, nn.Module) else list(module)
        self._tensors: dict[str, list[Tensor]] = defaultdict(list)
        self._names: dict[int, str] = {}
        for each in modules:
            while isinstance(each, DistributedDataParallel | WholeSequences):
                each = each.module  # noqa: PLW2901 - the module inside
            # This also makes FSDP reshard, so that parameters are DTensors afterwards.
            for given, tensor in each.state_dict(keep_vars=True).items():
                name = _WRAPPERS.sub("", f".{given}").removeprefix(".")
                if not isinstance(tensor, Tensor):
                    raise CheckpointError(
                        f"The state of the model has {name!r}, a {type(tensor).__name__}; sharded checkpoints hold "
                        "tensors only. Keep it in a buffer, or give it to save() as state."
                    )
                if id(tensor) not in self._names:  # of tied weights, only the first name is saved
                    self._names[id(tensor)] = name
                    self._tensors[name].append(tensor)
        self._optimizer = optimizer
        self._parameters: dict[str, Tensor] = {}
        for group in [] if optimizer is None else optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise ParamError(
                        f"The optimizer has a parameter of shape {tuple(parameter.shape)} that the module does not "
                        "have. Make the optimizer of the parameters of what is saved, after shard() and divide()."
                    )
                self._parameters[self._names[id(parameter)]] = parameter

    def groups(self) -> dict[str, int] | None:
        """Index of the optimizer's group of each parameter, by its name; None without an optimizer."""
        if self._optimizer is None:
            return None
        return {
            self._names[id(parameter)]: number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }

    def describe(self) -> tuple[dict[str, tuple[list[int], str]], dict[str, int] | None]:
        """Shape and dtype of each tensor of the model, and :meth:`groups`."""
        for name, (first, *_) in self._tensors.items():
            if first.is_meta:
                raise ParamError(
                    f"{name!r} is on the meta device. Call module.to_empty(device=...) before a checkpoint is loaded."
                )
        shapes = {
            name: (list(first.shape), _dtype_name(first)) for name, (first, *_) in self._tensors.items()
        }
        return shapes, self.groups()

    def tensors_to_save(self) -> dict[str, Tensor]:
        """The tensors of the model and the optimizer, and the further ones, by their names in a checkpoint."""
        found = {f"{_MODEL}/{name}": tensors[0] for name, tensors in self._tensors.items()} | self._others
        states = {} if self._optimizer is None else self._optimizer.state
        for parameter, state in states.items():
            name = self._names[id(parameter)]
            for key, value in state.items():
                if isinstance(value, bool | int | float):
                    dtype = None if isinstance(value, bool | int) else torch.float64
                    found[f"{_NUMBER}/{key}/{name}"] = torch.tensor(value, dtype=dtype, device="cpu")
                elif value is not None:
                    _check_optimizer_state(name, parameter, key, value)
                    found[f"{_OPTIMIZER}/{key}/{name}"] = value
        return found

    def load(
        self,
        location: Location,
        manifest: Mapping[str, Any],
        url: str,
        options: Mapping[str, Any] | None,
        **how: Any,
    ) -> None:
        """Overwrite the tensors and the optimizer's state with those of a checkpoint.

        Args:
            location: folder of the checkpoint.
            manifest: manifest of the checkpoint.
            url: URL of the checkpoint, used in error messages.
            options: class and parameter groups of the checkpoint's optimizer; None if it has no optimizer.
            how: arguments by which ``torch.distributed.checkpoint`` knows the ranks that load together.
        """
        tensors = self._tensors_to_load(manifest, url)
        try:
            load(
                tensors,
                storage_reader=Reader(location, manifest),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                **how,
            )
        except CheckpointException as error:
            _raise_first(error, f"The checkpoint {url} cannot be loaded")
        self._take(tensors, options)

    def _tensors_to_load(self, manifest: Mapping[str, Any], url: str) -> dict[str, Any]:
        """The model's and the further tensors, and empty tensors for the optimizer's state in a checkpoint."""
        if missing := sorted(self._others.keys() - manifest["tensors"].keys()):
            raise CheckpointError(f"The checkpoint {url} lacks {_listed(missing)}.")
        found: dict[str, Any] = {f"{_MODEL}/{name}": tensors[0] for name, tensors in self._tensors.items()}
        found |= self._others
        for full_name, entry in manifest["tensors"].items():
            section, _, rest = full_name.partition("/")
            parameter = self._parameters.get(rest.partition("/")[2])
            if section in (_MODEL, _OTHER) or parameter is None:
                continue
            dtype = getattr(torch, entry["dtype"])
            if section == _OPTIMIZER and entry["shape"] == list(parameter.shape):
                found[full_name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                found[full_name] = torch.empty(entry["shape"], dtype=dtype, device="cpu")
        return found

    def _take(self, tensors: Mapping[str, Any], options: Mapping[str, Any] | None) -> None:
        """Copy loaded buffers to the other stages that have them, and load the optimizer's state."""
        with torch.no_grad():
            for first, *others in self._tensors.values():
                for other in others:  # buffers that several stages have
                    other.copy_(first)
        if self._optimizer is None:
            return
        assert options is not None, "checked before"
        states: dict[str, dict[str, Any]] = defaultdict(dict)
        for full_name, tensor in tensors.items():
            section, _, rest = full_name.partition("/")
            key, _, name = rest.partition("/")
            if section not in (_MODEL, _OTHER):
                states[name][key] = tensor.item() if section == _NUMBER else tensor
        packed = self._optimizer.state_dict()["param_groups"]
        numbered: dict[int, dict[str, Any]] = {}
        for group, indices in zip(self._optimizer.param_groups, packed, strict=True):
            for parameter, index in zip(group["params"], indices["params"], strict=True):
                if (state := states.get(self._names[id(parameter)])) is not None:
                    # Cloned, because several stages of this rank may have copies of a parameter.
                    numbered[index] = {key: _cloned(value) for key, value in state.items()}
        groups = [{**own, **saved} for own, saved in zip(packed, options["groups"], strict=True)]
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _check_optimizer_state(name: str, parameter: Tensor, key: str, value: object) -> None:
    """Refuse optimizer state that could not be divided among the ranks of another layout."""
    if isinstance(value, Tensor):
        if not isinstance(parameter, DTensor) or value.numel() == 1:
            return
        if isinstance(value, DTensor) and value.shape == parameter.shape:
            return
    what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"The optimizer's {key!r} of {name!r} is {what}; sharded checkpoints hold numbers, and tensors that are "
        f"divided as the parameter, of shape {tuple(parameter.shape)}. Use an optimizer such as AdamW or SGD."
    )


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {key: value for key, value in group.items() if key not in _FORMS}
            for group in optimizer.param_groups
        ],
    }


def _check_given(shared: Mapping[str, Any], optimizer: Optimizer | None, scheduler: object, url: str) -> None:
    """Check that the checkpoint holds the state of the given optimizer and scheduler."""
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        if given is not None and shared[name] is None:
            raise CheckpointError(
                f"The checkpoint {url} has no state of the {name}, as none was given to save(). Call load() without it."
            )
    if optimizer is not None:
        kind, groups = shared["optimizer"]["class"], shared["optimizer"]["groups"]
        if (kind, len(groups)) != (type(optimizer).__name__, len(optimizer.param_groups)):
            raise CheckpointError(
                f"The checkpoint {url} has the state of a {kind} with {len(groups)} parameter groups, and the "
                f"optimizer is a {type(optimizer).__name__} with {len(optimizer.param_groups)}. Use the same optimizer."
            )


def _check_same_model(manifest: Mapping[str, Any], described: Sequence[Any], url: str) -> None:
    """Check names, shapes and dtypes of all ranks' tensors, and the groups of the optimizer, against a checkpoint."""
    here: dict[str, Any] = {}
    for shapes, _ in described:
        here.update(shapes)
    there = {
        name.removeprefix(f"{_MODEL}/"): (entry["shape"], entry["dtype"])
        for name, entry in manifest["tensors"].items()
        if name.startswith(f"{_MODEL}/")
    }
    problems = []
    if missing := sorted(here.keys() - there.keys()):
        problems.append(f"it lacks {_listed(missing)}")
    if superfluous := sorted(there.keys() - here.keys()):
        problems.append(f"it has {_listed(superfluous)}, which the model does not have")
    if others := [name for name in here if name in there and here[name] != there[name]]:
        shown = [f"{name} ({_shown(*there[name])} there, {_shown(*here[name])} here)" for name in others]
        problems.append(f"tensors differ: {_listed(shown)}")
    if problems:
        raise CheckpointError(
            f"The checkpoint {url} is of another model: {'; '.join(problems)}. Nothing was loaded. Build the model as "
            "it was, or choose another folder."
        )
    own_groups = [groups for _, groups in described if groups is not None]
    saved_groups = manifest["groups"]
    if own_groups and saved_groups is not None:
        groups = {name: number for each in own_groups for name, number in each.items()}
        differ = sorted(
            name for name in groups.keys() | saved_groups.keys() if groups.get(name) != saved_groups.get(name)
        )
        if differ:
            raise CheckpointError(
                f"The optimizer in the checkpoint {url} has other parameters, or other groups of them: "
                f"{_listed(differ)}. Nothing was loaded. Make the optimizer as it was."
            )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _shown(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sizes_of(layout: RankLayout) -> dict[str, int]:
    return {name: layout.size(name) for name in DIMENSIONS}


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _copied(tensor: Tensor) -> Tensor:
    """A copy in host memory; the copy of a DTensor holds this rank's part. No communication."""
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.to("cpu")


def _encoded(value: object, what: str) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"No checkpoint can be written: {what} must hold numbers, strings, tensors, and lists and dicts of them. "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    return file.getvalue()


def _raise_first(error: Any, what: str) -> NoReturn:
    """Raise the error of the lowest of the failed ranks."""
    rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(first, SparkdlError):
        raise first from error
    what = f"{what} by rank {rank}"
    if isinstance(first, OSError):
        raise store_error(what, first) from error
    raise CheckpointError(f"{what}: {explain_failure(first)}") from error
