"""What is imported on first use: names of packages, and the guests that the core calls.

A guest is a part of sparkdl that the core imports nowhere, and that can be removed by removing its folder.
:data:`ENTRIES` has each place at which the core calls one. Without the guest, the entry alone fails.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

ENTRIES: Mapping[str, str] = {
    # Commands, also the two of the command line itself.
    "sparkdl bench allreduce": "sparkdl.bench.allreduce",
    "sparkdl bench feed": "sparkdl.bench.feed",
    "sparkdl bench fit": "sparkdl.bench.fit",
    "sparkdl bench launch": "sparkdl.bench.launch",
    "sparkdl bench link": "sparkdl.bench.link",
    "sparkdl bench parallel": "sparkdl.bench.parallel",
    "sparkdl bench scaling": "sparkdl.bench.scaling",
    "sparkdl bench step": "sparkdl.bench.step",
    "sparkdl bench transform": "sparkdl.bench.transform",
    "sparkdl demo": "sparkdl.cli.demo",
    "sparkdl doctor": "sparkdl.doctor.command",
    "sparkdl job-schema": "sparkdl.jobs.schema",
    "sparkdl job-script": "sparkdl.jobs.command",
    "sparkdl plan": "sparkdl.planner.command",
    "sparkdl predict": "sparkdl.jobs.command",
    "sparkdl run": "sparkdl.cli.run",
    "sparkdl top": "sparkdl.monitor.top",
    "sparkdl train": "sparkdl.jobs.command",
    # Names of packages.
    "sparkdl.data.BlendedFeed": "sparkdl.data.blend.blending",
    "sparkdl.data.Mixture": "sparkdl.data.blend.mixture",
    "sparkdl.data.PackedBatch": "sparkdl.data.blend.packing",
    "sparkdl.data.SequencePacker": "sparkdl.data.blend.packing",
    "sparkdl.data.SparkDatasetConverter": "sparkdl.loaders.converter",
    "sparkdl.data.make_spark_converter": "sparkdl.loaders.converter",
    "sparkdl.estimators.ImageClassifier": "sparkdl.estimators.ready_made.images",
    "sparkdl.estimators.LanguageModel": "sparkdl.estimators.ready_made.language",
    "sparkdl.estimators.LanguageModelModel": "sparkdl.estimators.ready_made.language",
    "sparkdl.estimators.PerplexityEvaluator": "sparkdl.estimators.ready_made.language_evaluator",
    "sparkdl.estimators.TextClassifier": "sparkdl.estimators.ready_made.text",
    "sparkdl.estimators.TorchClassificationModel": "sparkdl.estimators.ready_made.estimator",
    "sparkdl.estimators.TorchClassifier": "sparkdl.estimators.ready_made.tabular",
    "sparkdl.estimators.TorchRegressionModel": "sparkdl.estimators.ready_made.estimator",
    "sparkdl.estimators.TorchRegressor": "sparkdl.estimators.ready_made.tabular",
    # Params and arguments.
    "Param monitor": "sparkdl.monitor",
    "Param parallelism with the value 'auto'": "sparkdl.planner.on_ranks",
    "imageTransform": "sparkdl.networks.images",
    "TorchModel.from_pretrained": "sparkdl.networks.trained",
    "TorchModel.from_pretrained for text generation": "sparkdl.estimators.ready_made.language",
    # Kinds of data.
    "a TransformSpec of Petastorm": "sparkdl.data.petastorm.transform",
    "a folder with a Unischema of Petastorm": "sparkdl.data.petastorm.unischema",
    "a predicate of Petastorm": "sparkdl.data.petastorm.transform",
}
"""The module behind each entry, as errors name the entry. There is no other way from the core to a guest, but
for saved objects, which name their class."""


def load_entry(entry: str) -> Any:
    """Import the module behind an entry, and return it.

    Raises:
        ImportError: if the guest was removed; the message names the entry.
    """
    return _import(ENTRIES[entry], entry)


def guest_names(package: str) -> dict[str, str]:
    """Return the modules of a package's names that guests define, by name."""
    return {
        entry.removeprefix(f"{package}."): module
        for entry, module in ENTRIES.items()
        if entry.startswith(f"{package}.")
    }


def attributes(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package (PEP 562); the latter is what editors complete.

    Args:
        package: name of the package.
        modules: module of each attribute, by the attribute's name; a leading dot stands for the package.
    """

    def load_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.util.resolve_name(modules[name], package)
        return getattr(_import(module, f"{package}.{name}"), name)

    return load_attribute, lambda: sorted({*vars(importlib.import_module(package)), *modules})


def _import(module: str, entry: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if entry not in ENTRIES or not str(error.name).startswith("sparkdl."):
            raise
        raise ImportError(
            f"{entry} needs {error.name}, which was removed from this installation of sparkdl. Install "
            "sparkdl-torch again.",
            name=error.name,
        ) from error
