"""The structure of the package: at most fifteen modules per folder, few small modules, and no import cycles."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import grimp
import pytest

import sparkdl
from sparkdl import estimators

MOST_MODULES = 15
LEAST_LINES = 60

BEGINNING = re.compile(r"\b[Bb]egin (with|there)\b")
"""How the page of a package names the module to read first."""

ONE_SIDE = re.compile(r"\bRuns on (the |an? |every )?\*?(rank|driver|executor)s?\*?\.")
"""A sentence for the page of a package. A module may say more: "Runs on the *driver*, and where it is served."."""

SMALL_FOR_A_REASON = {
    "sparkdl.autoload": "the entry point that torch loads by itself",
    "sparkdl.bench.contenders.fit_clock": "imports torch, which the command line must not",
    "sparkdl.cli.__main__": "python -m sparkdl.cli",
    "sparkdl.horovod.torch.mpi_ops": "Horovod's own module name",
    "sparkdl.horovod.torch.sync_batch_norm": "Horovod's own module name",
    "sparkdl.patches.collate": "changes to other libraries' insides stand in one folder",
    "sparkdl.patches.meta_parameters": "likewise",
    "sparkdl.tracking.model_loader": "copied into every logged model",
}
"""Modules of less than 60 lines with only one importer, and the reason why each is a separate file."""

LAYERS = {
    "spark": "jobs, failures, session",
    "rendezvous": "client, coordinator, listener | pmi, dialing | hosts, handshake, frames | store, "
    "addresses | deadline | protocol",
    "collective": "current, job | torchrun_variables, opening, mpi | native, communicator, messages, "
    "nccl | telemetry, buffers | byte_exchange | operation_queue, watch | error_origin",
    "torch": "registration, gpu, process_group, movements | reductions | objects, local_updates, submission | "
    "data_parallel, averaging, replicas | compression, buffers | sync_batch_norm | futures, work",
    "data": "blend | petastorm, feed, megatron | spark, store, dataset, files",
    "checkpoint": "training_state | writer, tensors | commit_place | parts, held, folder | values",
    "parallel": "checkpoint | parallelize | weights, context, attention | pipeline, "
    "sequence | tensor, sharding, verify, parallelism | collectives, replaced_parameters",
    "training": "remote, trainer, callbacks | balance, stages, step | validation, checkpoint, history | "
    "distribution, objective | device_batches | learning_rate | metrics | spec | update | precision",
    "monitor": "settings | top, exports | sampler, board | trace, communication | flops | memory",
    "launch": "spark_launch | local_launch, ranks, elastic, spark_job | local_stage, supervision, failures, "
    "stage, task, forkserver | hangs, rank | restarts, slots | wire | lines",
    "loaders": "converter, feed_dataset",
    "horovod": "spark, runner, torch",
    "horovod.torch": "elastic | optimizer, functions | sync_batch_norm, basics, gradient_reduction | session, "
    "operations, handles | process_sets, current_session | engine, compression | mpi_ops | names",
    "model": "served_model, predictor, independent_rows, named_metrics, export | saved_model | decisions, heads, "
    "losses | served_columns | signature, architecture | inputs | program | weights_file",
    "networks": "trained | language_folder, language, generation, logits | adapters | pretrained, backbones | "
    "decoder | images | standardization | tabular | text | folder_tokens",
    "tracking": "fit_run, kept_runs, sender, mlflow_model, logged_model, model_code | "
    "model_loader | torch_model | start",
    "mlflow": "flavor | pyfunc",
    "runner": "horovod_runner, runner, on_rank, rank_logging | script",
    "jobs": "command, schema, predict, run_job, make_estimator, imports, job, identity | output | plan | yaml_tree",
    "doctor": "command, examination, network, cluster_facts | machine_checks, finding | machine_facts",
    "planner": "command, report | published | comparison, measure | on_ranks, layouts, counting | cost, memory, "
    "cluster | shape | sums",
    "cli": "demo, __main__ | local_session | run, elastic_run",
    "bench": "allreduce | feed | fit | launch | link | parallel | scaling | step | transform, contest, rank_group, "
    "contenders | libraries | namespaces | options | report",
    "estimators": "ready_made, torch_estimator, torch_model, given_module, fit | persistence | importances, "
    "evaluation, learning_rate_search, params | summary, scoring | summary_plot",
}
"""The modules and folders of a floor, from the top: at run time a layer only imports later ones."""

ROOT = Path(sparkdl.__file__).parent


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("sparkdl", exclude_type_checking_imports=True)


def path_of(module: str) -> Path:
    """The file of a module; for a package its ``__init__``."""
    folder = ROOT.joinpath(*module.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def modules_of(graph: grimp.ImportGraph) -> set[str]:
    """All modules that are Python files, not packages."""
    return {name for name in graph.modules if path_of(name).is_file() and path_of(name).name != "__init__.py"}


def test_a_folder_has_at_most_fifteen_modules(graph: grimp.ImportGraph) -> None:
    counts = Counter(name.rpartition(".")[0] for name in modules_of(graph))
    counts.update(str(path.parent) for path in Path(__file__).parents[1].rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_a_small_module_has_two_importers_or_a_reason(graph: grimp.ImportGraph) -> None:
    small = set()
    for name in modules_of(graph):
        if len(path_of(name).read_text().splitlines()) < LEAST_LINES:
            importers = {
                importer
                for importer in graph.find_modules_that_directly_import(name)
                if path_of(importer).name != "__init__.py"
            }
            if len(importers) < 2:
                small.add(name)
    assert small == set(SMALL_FOR_A_REASON)


def test_imports_have_no_cycle(graph: grimp.ImportGraph) -> None:
    modules = modules_of(graph)
    imports = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    TopologicalSorter(imports).prepare()  # raises an error that names a cycle


@pytest.mark.parametrize("floor", LAYERS)
def test_layer_of_a_floor_imports_only_lower_layers(graph: grimp.ImportGraph, floor: str) -> None:
    package = f"sparkdl.{floor}"
    level_of = {
        f"{package}.{name}": level
        for level, layer in enumerate(LAYERS[floor].split(", "))
        for name in layer.split(" | ")
    }
    assert graph.find_children(package) == set(level_of), "place the new module in LAYERS"
    upward = []
    for module in graph.find_descendants(package):
        part = part_of(module, package)
        for imported in graph.find_modules_directly_imported_by(module):
            other = part_of(imported, package)
            if other in level_of and other != part and level_of[other] <= level_of[part]:
                upward.append((module, imported))
    assert upward == []


def part_of(module: str, package: str) -> str:
    """The module or folder of a package that contains a module."""
    return ".".join(module.split(".")[: package.count(".") + 2])


@pytest.mark.parametrize("package", ["sparkdl", "sparkdl.data", "sparkdl.launch", "sparkdl.estimators"])
def test_names_that_a_package_loads_on_first_use_are_in_current_modules(
    graph: grimp.ImportGraph, package: str
) -> None:
    imported = importlib.import_module(package)
    modules = {resolve_name(module, package) for module in imported._MODULES.values()}
    assert modules <= graph.modules
    assert set(imported._MODULES) <= set(imported.__all__)


def test_page_of_a_package_says_where_to_begin_and_its_modules_do_not_repeat_where_they_run() -> None:
    roots = [Path(next(iter(package.__path__))).resolve() for package in (sparkdl, estimators)]
    paths = [path for root in roots for path in root.rglob("*.py")]
    pages = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}
    packages = {path for path in pages if path.name == "__init__.py"}
    assert [path for path in packages if not BEGINNING.search(pages[path])] == []
    assert [path for path in pages.keys() - packages if ONE_SIDE.search(pages[path])] == []
