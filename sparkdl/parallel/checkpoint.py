"""Checkpoints of models that ranks share, which any layout of the ranks can load.

Runs on the *rank*, over ``torch.distributed.checkpoint``: its planners decide which rank writes or reads which part of
each tensor, so that a checkpoint of one layout can be loaded into another. This module adds names and optimizer state
that do not depend on the layout, random state, and checks of the model before anything is overwritten;
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

from sparkdl.data.files.failures import explain_failure, store_error
from sparkdl.data.files.threads import DaemonThreads
from sparkdl.errors import CheckpointError, ParamError, SparkdlError, StoreError
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
"""How long training that failed waits for a checkpoint that is being written."""

_MODEL, _OPTIMIZER, _NUMBER, _OTHER = "model", "optimizer", "number", "other"
"""What the names of tensors begin with: ``model/name``, ``optimizer/key/name``, ``number/key/name``, ``other/name``."""

_FORMS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that do not change what it computes, or belong to a layout; they are not loaded."""

_WRAPPERS = re.compile(r"\.(_orig_mod|_checkpoint_wrapped_module)(?=\.)")
"""Modules that torch.compile and activation checkpointing put around others."""


class ShardedCheckpoints:
    """Saves and loads models that ranks share, with optimizer, scheduler, random state and the position in the data.

    Use it as a context manager: it waits for the last checkpoint in the end. All ranks call its methods together::

        with ShardedCheckpoints("/shared/run-7", layout) as checkpoints:
            state = checkpoints.load(model, optimizer, scheduler) or {"step": 0}
            for step in range(state["step"], steps):
                ...
                if step % 500 == 499:
                    checkpoints.save(step + 1, model, optimizer, scheduler, state={"step": step + 1})

    Its ranks communicate in a process group of their own, so that a checkpoint can be written while training uses the
    other groups. One job at a time may use a folder.

    Args:
        folder: path or URL that all ranks reach, as a Store takes it.
        layout: of the ranks.
        num_kept: how many of the newest checkpoints stay.
        timeout_s: how long ranks wait for each other here, and :meth:`save` for the checkpoint before; as long as the
            default process group does if None.

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
        """Copy the state to host memory, and have a thread write it while training continues. Collective.

        The call waits for the checkpoint before, so that at most one copy is in memory. Buffers that differ on ranks
        with the same part of the model are saved as one of these ranks has them.

        Args:
            step: how many steps are done, the same on all ranks.
            module: this rank's part of the model; of a pipeline, the stages of this rank.
            optimizer: of all of its parameters.
            scheduler: anything with a ``state_dict``, the same on all ranks.
            state: what else to save, the same on all ranks: numbers, strings, tensors and lists and dicts of them.
            tensors: other tensors by name, of which ranks may have parts; to :meth:`load` give them again.
            folder: where to save in place of the folder given at first; it holds one checkpoint then.

        Returns:
            What is done when the checkpoint is complete, and has the error if it could not be written.

        Raises:
            CheckpointError: if something holds what no checkpoint can.
            StoreError: if the checkpoint before could not be written, or not in time.
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
        """Load the newest checkpoint, of whatever layout. Collective.

        The files are compared with their checksums and the model with that of the checkpoint before anything is
        overwritten. Random numbers continue as on the same rank of the same layout; on another layout, each rank takes
        the random state of a rank that read the same share of the rows, and shares that did not exist are seeded anew.

        Args:
            module: as for :meth:`save`; its tensors are overwritten in place.
            optimizer: of all of its parameters; None to leave its state in the files.
            scheduler: likewise.
            step: load the newest checkpoint of this step instead.
            tensors: given to :meth:`save`; they are overwritten in place.
            folder: where to look in place of the folder given at first.

        Returns:
            The ``state`` given to :meth:`save`, ``{}`` if none was; None if the folder has no checkpoint.

        Raises:
            CheckpointError: if the checkpoint is of another model or optimizer, a file is damaged, or there is none of
                that step.
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
            check_files(location, manifest, range(self._rank, manifest["ranks"], dist.get_world_size()))
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
            seed_generators(rank_seed(int(torch.randint(2**62, ())), self._layout.row_reader[0]))
        return shared["state"] or {}

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in the folder, the oldest checkpoint first.

        Raises:
            StoreError: if the folder cannot be listed.
        """
        return [step for _, step, _ in self._folder.complete()]

    def wait(self) -> None:
        """Wait until the checkpoint that was given to :meth:`save` is written.

        Raises:
            StoreError: if it could not be written, or not in time.
        """
        if self._writing is None:
            return
        if futures.wait([self._writing], self._timeout_s).not_done:
            raise StoreError(
                f"A checkpoint was still being written to {self._folder.url} after {self._timeout_s:g} s. Save less "
                "often, choose a faster store, or give ShardedCheckpoints a larger timeout_s."
            )
        writing, self._writing = self._writing, None
        writing.result()

    def close(self) -> None:
        """Wait for the last checkpoint and end thread and process group; raises what :meth:`wait` does. Collective."""
        try:
            self.wait()
        except BaseException:
            self._abandon(0.0)
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
            self._abandon(_FAILURE_TIMEOUT_S)

    def _abandon(self, timeout_s: float) -> None:
        """End without the other ranks, which may have failed or wait for this one."""
        self._threads.stop()
        if self._writing is not None:
            with suppress(Exception):  # the error that ends training is the one to raise
                self._writing.result(timeout_s)
        if isinstance(self._group, SparkdlProcessGroup):
            self._group.abort()
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
        """Return what the work returns on each rank; an error of one rank is raised on all."""
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
        module: its tensors are overwritten in place.
        optimizer: of all of its parameters; None to leave its state in the files.
        tensors: given to :meth:`ShardedCheckpoints.save`; they are overwritten in place.

    Raises:
        CheckpointError: if there is none, it is of another model or optimizer, or a file is damaged.
        StoreError: if the folder cannot be read.
    """
    location, manifest = newest_checkpoint(folder)
    url = location.name_of(location.path)
    part = _Part(module, optimizer, tensors)
    _check_same_model(manifest, [part.describe()], url)
    check_files(location, manifest, range(manifest["ranks"]))
    shared = read_small_file(location, 0)
    _check_given(shared, optimizer, None, url)
    part.load(location, manifest, url, shared["optimizer"], no_dist=True)


class _Part:
    """The tensors of this rank's part of a model and of its optimizer, under the names of the whole model."""

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None,
        others: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._others = {f"{_OTHER}/{name}": tensor.detach() for name, tensor in (others or {}).items()}
        modules = [module] if isinstance(module, nn.Module) else list(module)
        self._tensors: dict[str, list[Tensor]] = defaultdict(list)
        self._names: dict[int, str] = {}
        for each in modules:
            while isinstance(each, DistributedDataParallel | WholeSequences):
                each = each.module  # noqa: PLW2901 - the module inside
            # This also has FSDP reshard: parameters are DTensors afterwards.
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
        """The number of each parameter's group in the optimizer."""
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
        """The tensors by the names that they have in a checkpoint."""
        found = {f"{_MODEL}/{name}": tensors[0] for name, tensors in self._tensors.items()} | self._others
        states = {} if self._optimizer is None else self._optimizer.state
        for parameter, state in states.items():
            name = self._names[id(parameter)]
            for key, value in state.items():
                if isinstance(value, bool | int | float):
                    dtype = None if isinstance(value, bool | int) else torch.float64
                    found[f"{_NUMBER}/{key}/{name}"] = torch.tensor(value, dtype=dtype)
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
        """Overwrite the tensors and the optimizer's state by those of a checkpoint.

        Args:
            location: of the checkpoint.
            manifest: of it.
            url: of it, for errors.
            options: of its optimizer.
            how: with which ranks ``torch.distributed.checkpoint`` loads it.
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
        """The tensors of the model and others, and empty ones for the optimizer's state in a checkpoint."""
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
                found[full_name] = torch.empty(entry["shape"], dtype=dtype)
        return found

    def _take(self, tensors: Mapping[str, Any], options: Mapping[str, Any] | None) -> None:
        """Complete the model, and give the optimizer its state."""
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
                    numbered[index] = state
        groups = [{**own, **saved} for own, saved in zip(packed, options["groups"], strict=True)]
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _check_optimizer_state(name: str, parameter: Tensor, key: str, value: object) -> None:
    """Refuse what could not be divided among other ranks."""
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
    """Check that the checkpoint has the state of what is to be loaded."""
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


def _copied(tensor: Tensor) -> Tensor:
    """A copy in host memory; of a DTensor, of this rank's part. No communication."""
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
    """Raise what the first of the failed ranks has raised."""
    rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(first, SparkdlError):
        raise first from error
    why = f"{what}: {explain_failure(first)} (rank {rank})"
    raise (store_error(why) if isinstance(first, OSError) else CheckpointError(why)) from error
