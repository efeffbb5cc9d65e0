"""The tensors of a model and its optimizer in a checkpoint, by names that do not depend on the layout of the ranks.

The planners of ``torch.distributed.checkpoint`` decide which rank writes or reads which part of each tensor, so that a
checkpoint of one layout can be loaded into another. A model that is not divided has one part, which one process writes
and every process can read by itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from sparkdl.checkpoint.folder import (
    Checkpoint,
    CheckpointFolder,
    Manifest,
    open_file,
    tensor_file,
    write_files,
)
from sparkdl.checkpoint.held import HeldCheckpoint
from sparkdl.checkpoint.values import copy_to_host
from sparkdl.collective.byte_exchange import agree
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import CheckpointError, ParamError, SparkdlError, list_names
from sparkdl.foreign_errors import store_error
from sparkdl.model.weights_file import can_be_written, read_header, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
    from torch.optim import Optimizer

Result = TypeVar("Result")

_MODEL, _OPTIMIZER, _NUMBER, _OTHER = "model", "optimizer", "number", "other"
"""Prefixes of tensor names: ``model/name``, ``optimizer/key/name``, ``number/key/name``, ``other/name``."""

_FORMS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that do not change its results, or that depend on the layout; they are not saved."""

_WRAPPERS = re.compile(r"\.(_orig_mod|_checkpoint_wrapped_module)(?=\.)")
"""Names of the wrapper modules of torch.compile and of activation checkpointing."""


@dataclass(frozen=True)
class StoredState:
    """The content of :class:`TrainingTensors`.

    Attributes:
        tensors: tensors by their names in a checkpoint; in a copy in host memory, of a DTensor this rank's part.
        values: what is not a tensor that a file of tensors can hold: state of the module and of the optimizer.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class TrainingTensors:
    """The tensors of a model and its optimizer on this rank, by their names in the whole model.

    Args:
        module: the model, or this rank's part of it; with a pipeline, the stages of this rank. Several models by the
            names that distinguish their tensors.
        optimizer: optimizer of the parameters of ``module``; None if there is none.
        others: further tensors, by name; they may be divided among ranks.
        is_divided: whether other ranks have other parts of the model. Each value has to be a tensor then.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer | None = None,
        others: Mapping[str, Tensor] | None = None,
        *,
        is_divided: bool,
    ) -> None:
        self._others = {f"{_OTHER}/{name}": tensor.detach() for name, tensor in (others or {}).items()}
        if isinstance(module, nn.Module):
            module = [module]
        named = module.items() if isinstance(module, Mapping) else [("", part) for part in module]
        self._modules = [(f"{name}." if name else "", part) for name, part in named]
        self._is_divided = is_divided
        self._tensors: dict[str, list[Tensor]] = defaultdict(list)
        self._values: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        for prefix, part in self._modules:
            # This also makes FSDP reshard, so that parameters are DTensors afterwards.
            for key, value in part.state_dict(keep_vars=True).items():
                name = _WRAPPERS.sub("", f".{prefix}{key}").removeprefix(".")
                is_new = id(value) not in self._names  # of tied weights, only the first name is saved
                self._names.setdefault(id(value), name)
                if not can_be_written(value):
                    self._values[f"{prefix}{key}"] = value
                elif is_new:
                    self._tensors[name].append(value)
        if is_divided and self._values:
            name, value = next(iter(self._values.items()))
            raise CheckpointError(
                f"The state of the model has {name!r}, a {type(value).__name__}; checkpoints of divided models hold "
                "dense tensors only. Keep it in a buffer, or save it as another value."
            )
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
        """Return the index of the optimizer's group of each parameter, by its name; None without an optimizer."""
        if self._optimizer is None:
            return None
        return {
            self._names[id(parameter)]: number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }

    def _describe(self) -> tuple[dict[str, str], dict[str, int] | None]:
        """Dtype and shape of each tensor of the model, as text, and :meth:`groups`."""
        shapes = {}
        for name, (tensor, *_) in self._tensors.items():
            if tensor.is_meta:
                raise ParamError(
                    f"{name!r} is on the meta device. Call module.to_empty(device=...) before a checkpoint is loaded."
                )
            shapes[name] = f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
        return shapes, self.groups()

    def copy(self) -> StoredState:
        """Copy everything to host memory. No communication.

        Raises:
            CheckpointError: if a value cannot be stored in a checkpoint.
        """
        content = self.collect()
        return StoredState(  # the copy of a DTensor holds this rank's part
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in content.tensors.items()},
            {name: copy_to_host(value, f"the {name}'s state") for name, value in content.values.items()},
        )

    def collect(self) -> StoredState:
        """Return everything as :meth:`copy` does, without a copy, to be written before training continues."""
        tensors = {f"{_MODEL}/{name}": copies[0] for name, copies in self._tensors.items()} | self._others
        values: dict[str, Any] = {"module": self._values, "optimizer": None}
        if self._optimizer is not None:
            values["optimizer"] = self._collect_optimizer(tensors)
        return StoredState(tensors, values)

    def _collect_optimizer(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Add the tensors and numbers of the optimizer's state to ``tensors``, and return what else it holds."""
        assert self._optimizer is not None
        content = self._optimizer.state_dict()
        names = self._names_of_numbers(content)
        state: dict[Any, Any] = {}
        for number, entries in content["state"].items():
            name = names.get(number)
            if name is None or not isinstance(entries, dict):
                state[number] = entries
                continue
            for key, value in entries.items():
                if isinstance(value, bool | int | float):
                    dtype = None if isinstance(value, bool | int) else torch.float64
                    tensors[f"{_NUMBER}/{key}/{name}"] = torch.tensor(value, dtype=dtype, device="cpu")
                elif self._is_divisible(self._parameters[name], value):
                    tensors[f"{_OPTIMIZER}/{key}/{name}"] = value
                elif not self._is_divided:
                    state.setdefault(number, {})[key] = value
                elif value is not None:
                    self._refuse(name, key, value)
        others = {key: value for key, value in content.items() if key not in ("state", "param_groups")}
        if self._is_divided and (state or others):
            raise CheckpointError(
                f"The state_dict() of the {type(self._optimizer).__name__} has entries that belong to no parameter, "
                "which cannot be divided among ranks. Use an optimizer such as AdamW or SGD."
            )
        options = [
            {key: value for key, value in group.items() if key not in _FORMS}
            for group in content["param_groups"]
        ]
        return {
            "class": type(self._optimizer).__name__,
            "groups": options,
            "state": state,
            "others": others,
        }

    def _names_of_numbers(self, content: Mapping[str, Any]) -> dict[Any, str]:
        """The names of the parameters, by their numbers in the optimizer's state_dict()."""
        assert self._optimizer is not None
        return {
            number: self._names[id(parameter)]
            for group, numbers in zip(self._optimizer.param_groups, content["param_groups"], strict=True)
            for parameter, number in zip(group["params"], numbers["params"], strict=True)
        }

    def _is_divisible(self, parameter: Tensor, value: object) -> bool:
        """Whether a value of the optimizer's state can be loaded in another layout."""
        if not isinstance(value, Tensor) or not can_be_written(value):
            return False
        if not isinstance(parameter, DTensor) or value.numel() == 1:
            return True
        return isinstance(value, DTensor) and value.shape == parameter.shape

    def _refuse(self, name: str, key: str, value: object) -> NoReturn:
        what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise CheckpointError(
            f"The optimizer's {key!r} of {name!r} is {what}; checkpoints of divided models hold numbers, and tensors "
            f"that are divided as the parameter, of shape {tuple(self._parameters[name].shape)}. Use an optimizer "
            "such as AdamW or SGD."
        )

    def check(self, checkpoint: Checkpoint | HeldCheckpoint, group: dist.ProcessGroup | None) -> None:
        """Check that a checkpoint is of this model and optimizer. Collective over the group.

        Args:
            checkpoint: the checkpoint.
            group: process group of all ranks, which load together; None if this process loads by itself.

        Raises:
            CheckpointError: if it is of another model or optimizer; the message names the differences.
            ParamError: if a tensor is on the meta device.
        """
        _check_same_model(checkpoint, call_on_all_ranks(self._describe, group))
        if missing := sorted(self._others.keys() - checkpoint.manifest.tensors.keys()):
            raise CheckpointError(f"The checkpoint {checkpoint.url} lacks {list_names(missing, 5)}.")

    def check_optimizer(self, values: Mapping[str, Any], url: str) -> None:
        """Check that the values of a checkpoint have the state of such an optimizer.

        Raises:
            CheckpointError: if they do not.
        """
        if self._optimizer is None:
            return
        saved = values["optimizer"]
        if saved is None:
            raise CheckpointError(
                f"The checkpoint {url} has no state of the optimizer, as none was given to save(). Call load() without "
                "it."
            )
        kind, num_groups = type(self._optimizer).__name__, len(self._optimizer.param_groups)
        if (saved["class"], len(saved["groups"])) != (kind, num_groups):
            raise CheckpointError(
                f"The checkpoint {url} has the state of a {saved['class']} with {len(saved['groups'])} parameter "
                f"groups, and the optimizer is a {kind} with {num_groups}. Use the same optimizer."
            )

    def load(
        self,
        checkpoint: Checkpoint | HeldCheckpoint,
        values: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Overwrite the tensors and the optimizer's state with those of a checkpoint.

        Args:
            checkpoint: the checkpoint, which has passed :meth:`check` and :meth:`check_optimizer`.
            values: ``StoredState.values`` of the checkpoint.
            group: process group of all ranks, which load together; None if this process loads by itself.

        Raises:
            CheckpointError: if the checkpoint cannot be loaded.
            StoreError: if it cannot be read.
        """
        tensors = self._tensors_to_load(checkpoint.manifest)
        try:
            if isinstance(checkpoint, HeldCheckpoint):
                checkpoint.copy_into(tensors)
            else:
                _load(tensors, _PartReader(checkpoint), group)
        except CheckpointException as error:
            _raise_first(error, f"The checkpoint {checkpoint.url} cannot be loaded")
        with torch.no_grad():
            for first, *others in self._tensors.values():
                for other in others:  # buffers that several stages have
                    other.copy_(first)
        self._load_module(values["module"])
        if self._optimizer is not None:
            self._load_optimizer(tensors, values["optimizer"])

    def _tensors_to_load(self, manifest: Manifest) -> dict[str, Any]:
        """The model's and the further tensors, and empty tensors for the optimizer's state in a checkpoint."""
        targets: dict[str, Any] = {
            f"{_MODEL}/{name}": copies[0] for name, copies in self._tensors.items()
        } | self._others
        for full_name, entry in manifest.tensors.items():
            section, _, rest = full_name.partition("/")
            parameter = self._parameters.get(rest.partition("/")[2])
            if section in (_MODEL, _OTHER) or parameter is None:
                continue
            dtype = getattr(torch, entry["dtype"])
            if section == _OPTIMIZER and entry["shape"] == list(parameter.shape):
                targets[full_name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                targets[full_name] = torch.empty(entry["shape"], dtype=dtype, device="cpu")
        return targets

    def _load_module(self, values: Mapping[str, Any]) -> None:
        """Pass the state to ``load_state_dict``, as a module may do more there than copy tensors to itself."""
        if self._is_divided:
            return
        for prefix, module in self._modules:
            state = module.state_dict(keep_vars=True)
            module.load_state_dict({key: values.get(f"{prefix}{key}", value) for key, value in state.items()})

    def _load_optimizer(self, tensors: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        assert self._optimizer is not None
        states: dict[str, dict[str, Any]] = defaultdict(dict)
        for full_name, tensor in tensors.items():
            section, _, rest = full_name.partition("/")
            key, _, name = rest.partition("/")
            if section not in (_MODEL, _OTHER):
                states[name][key] = tensor.item() if section == _NUMBER else tensor
        content = self._optimizer.state_dict()
        state = dict(saved["state"])
        for number, name in self._names_of_numbers(content).items():
            if name in states:
                # Cloned, because several stages of this rank may have copies of a parameter.
                copies = tree_map_only(Tensor, torch.clone, states[name])
                state[number] = {**copies, **state.get(number, {})}
        groups = [
            {**group, **options}
            for group, options in zip(content["param_groups"], saved["groups"], strict=True)
        ]
        self._optimizer.load_state_dict({**saved["others"], "state": state, "param_groups": groups})


def call_on_all_ranks(work: Callable[[], Result], group: dist.ProcessGroup | None) -> list[Result]:
    """Call ``work`` on every rank of a group and return all results; an error on one rank is raised on all. Collective.

    Without a group, ``work`` is called in this process alone.
    """
    if group is None:
        return [work()]

    def exchange(outcome: Any) -> list[Any]:
        outcomes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcome, group=group)
        return outcomes

    return agree(exchange, work, lambda failures: failures[min(failures)], describe=lambda error: error)


def _check_same_model(checkpoint: Checkpoint | HeldCheckpoint, described: Sequence[Any]) -> None:
    """Check names, shapes and dtypes of all ranks' tensors, and the groups of the optimizer, against a checkpoint."""
    url, manifest = checkpoint.url, checkpoint.manifest
    here: dict[str, Any] = {}
    for shapes, _ in described:
        here.update(shapes)
    there = {
        name.removeprefix(f"{_MODEL}/"): f"{entry['dtype']}{entry['shape']}"
        for name, entry in manifest.tensors.items()
        if name.startswith(f"{_MODEL}/")
    }
    problems = []
    if missing := sorted(here.keys() - there.keys()):
        problems.append(f"it lacks {list_names(missing, 5)}")
    if superfluous := sorted(there.keys() - here.keys()):
        problems.append(f"it has {list_names(superfluous, 5)}, which the model does not have")
    if others := [name for name in here if name in there and here[name] != there[name]]:
        pairs = [f"{name} ({there[name]} there, {here[name]} here)" for name in others]
        problems.append(f"tensors differ: {list_names(pairs, 5)}")
    if problems:
        raise CheckpointError(
            f"The checkpoint {url} is of another model: {'; '.join(problems)}. Nothing was loaded. Build the model as "
            "it was, or choose another folder."
        )
    own_groups = [groups for _, groups in described if groups is not None]
    if own_groups and manifest.groups is not None:
        groups = {name: number for part in own_groups for name, number in part.items()}
        differ = sorted(
            name
            for name in groups.keys() | manifest.groups.keys()
            if groups.get(name) != manifest.groups.get(name)
        )
        if differ:
            raise CheckpointError(
                f"The optimizer in the checkpoint {url} has other parameters, or other groups of them: "
                f"{list_names(differ, 5)}. Nothing was loaded. Make the optimizer as it was."
            )


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a rank writes of a checkpoint, in host memory, where training no longer changes it.

    Attributes:
        label: text that tells people where training was, the same on all ranks.
        tensors: tensors by their names.
        state: content of the rank's ``.pt`` file.
        groups: index of the optimizer's group of each parameter; None without an optimizer.
        about: description of the checkpoint, of types of JSON; rank 0's counts.
        rank_about: description of this rank, of types of JSON.
        is_best: whether the checkpoint is kept until there is a better one; rank 0's counts.
    """

    label: str
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    groups: dict[str, int] | None = None
    about: dict[str, Any]
    rank_about: dict[str, Any] = field(default_factory=dict)
    is_best: bool = False


def write_checkpoint(
    folder: CheckpointFolder, content: Content, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint. Collective over the group.

    Args:
        folder: folder of the checkpoints.
        content: what this rank writes.
        rank: number of this rank.
        group: process group of all ranks; None if this process writes all of the checkpoint.

    Raises:
        StoreError: if it cannot be written by one of the ranks.
        CheckpointError: if the ranks have different labels.
    """
    writer = _PartWriter(folder, content, rank)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        if group is not None:
            save(cast("Any", content.tensors), storage_writer=writer, planner=planner, process_group=group)
            return
        planner.set_up_planner(cast("Any", content.tensors), None, is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = writer.prepare_global_plan(plans)
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
    except CheckpointException as error:
        writer.remove_unfinished()
        _raise_first(error, f"The checkpoint {content.label} in {folder.url} could not be written")
    except SparkdlError:
        writer.remove_unfinished()
        raise
    except Exception as error:
        writer.remove_unfinished()
        raise store_error(
            f"The checkpoint {content.label} in {folder.url} could not be written", error
        ) from error


@dataclass(frozen=True)
class _Report:
    """A rank's report of the files that it has written.

    Attributes:
        content: what it has written, without tensors and state.
        files: size and SHA-256 of each file, by its name.
        parts: name and offsets of each part of a tensor that was written.
    """

    content: Content
    files: dict[str, dict[str, Any]]
    parts: list[tuple[str, tuple[int, ...]]]


class _OneCheckpoint:
    """The methods of torch's storage that have nothing to do, as an object is made for one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - torch passes it
        """Return False: torch must not choose this class by the name of a folder."""
        return False

    def set_up(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the constructor has set everything up."""

    reset = set_up

    def prepare_local_plan(self, plan: Any) -> Any:
        """Leave the planner's plan as it is, or those of all ranks."""
        return plan

    prepare_global_plan = prepare_local_plan


class _PartWriter(_OneCheckpoint, StorageWriter):
    """Writes one checkpoint for ``torch.distributed.checkpoint``. Runs on the checkpoint thread of each rank."""

    set_up_storage_writer = _OneCheckpoint.set_up

    def __init__(self, folder: CheckpointFolder, content: Content, rank: int) -> None:
        self._folder, self._content, self._rank = folder, content, rank
        self._name = ""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: begin the checkpoint and put its name in the plans of all ranks."""
        self._name = self._folder.begin(self._content.label)
        return [replace(plan, storage_data=self._name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the files of this rank."""
        parts = [(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items]
        tensors = {
            _entry(*part): planner.resolve_data(item) for part, item in zip(parts, plan.items, strict=True)
        }
        files = write_files(
            self._folder.location(plan.storage_data),
            self._rank,
            cast("dict[str, Tensor]", tensors),
            self._content.state,
        )
        future: Future[Any] = Future()
        future.set_result(_Report(replace(self._content, tensors={}, state={}), files, parts))
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, after all ranks have written: commit the checkpoint."""
        reports: list[_Report] = results
        if len(labels := {report.content.label for report in reports}) > 1:
            raise CheckpointError(f"The ranks save different checkpoints: {', '.join(sorted(labels))}.")
        writers = {part: rank for rank, report in enumerate(reports) for part in report.parts}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), "nothing else is saved"
            tensors[name] = {
                "dtype": str(stored.properties.dtype).removeprefix("torch."),
                "shape": list(stored.size),
                "parts": [
                    [list(chunk.offsets), list(chunk.sizes), writers[name, tuple(chunk.offsets)]]
                    for chunk in stored.chunks
                ],
            }
        groups = [report.content.groups for report in reports if report.content.groups is not None]
        manifest = Manifest(
            about=self._content.about,
            is_best=self._content.is_best,
            ranks=[report.content.rank_about for report in reports],
            groups={name: number for part in groups for name, number in part.items()} if groups else None,
            tensors=tensors,
            files={name: entry for report in reports for name, entry in report.files.items()},
        )
        self._folder.commit(self._name, manifest)
        self._name = ""  # complete: another rank may still fail before all ranks know of it

    def remove_unfinished(self) -> None:
        """Remove what was written, if this rank has begun the checkpoint."""
        if self._name:
            self._folder.remove(self._name)


def _entry(name: str, offsets: Sequence[int]) -> str:
    """The name of a tensor's part in a file."""
    return f"{name}@{','.join(map(str, offsets))}"


def _load(tensors: dict[str, Any], reader: _PartReader, group: dist.ProcessGroup | None) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if group is not None:
        load(tensors, storage_reader=reader, planner=planner, process_group=group)
        return
    planner.set_up_planner(tensors, reader.read_metadata(), is_coordinator=True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(planner.finish_plan(plan), planner)


class _PartReader(_OneCheckpoint, StorageReader):
    """Reads one checkpoint for ``torch.distributed.checkpoint``."""

    set_up_storage_reader = _OneCheckpoint.set_up

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._location = open_location(checkpoint.url)
        self._tensors = checkpoint.manifest.tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch passes them
        """Shapes and parts of the tensors, from the manifest."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, entry["dtype"])),
                    torch.Size(entry["shape"]),
                    [
                        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                        for offsets, sizes, _ in entry["parts"]
                    ],
                )
                for name, entry in self._tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts of tensors that this rank needs: of each saved part, the rows that its own part overlaps."""
        writers = {
            _entry(name, offsets): rank
            for name, entry in self._tensors.items()
            for offsets, _, rank in entry["parts"]
        }
        items_of: dict[int, list[tuple[str, Any]]] = defaultdict(list)
        for item in plan.items:
            entry = _entry(item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            items_of[writers[entry]].append((entry, item))
        for rank, items in sorted(items_of.items()):
            with open_file(self._location, tensor_file(rank)) as file:
                header = read_header(file)
                for entry, item in sorted(items, key=lambda pair: header[pair[0]].begin):
                    stored = header[entry]
                    first, *others = item.storage_offsets or (0,)
                    count, *lengths = item.lengths or (1,)
                    if not stored.shape:
                        stored = replace(stored, shape=(1,))
                    part = read_rows(file, stored, first, count)
                    for dim, (offset, length) in enumerate(zip(others, lengths, strict=True), start=1):
                        part = part.narrow(dim, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part.view(target.shape) if target.ndim == 0 else part)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _raise_first(error: Any, what: str) -> NoReturn:
    """Raise the error of the lowest of the failed ranks."""
    rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(first, SparkdlError):
        raise first from error
    raise store_error(f"{what} by rank {rank}", first) from error
