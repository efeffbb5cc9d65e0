"""Pages of the site that are made from the code: estimators with their Params, packages, commands, jobs, errors."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import sys
from importlib import import_module
from typing import Any
from unittest.mock import patch

from docstring_roles import plain_roles

from sparkdl import cli, estimators
from sparkdl.estimators.params.table import Entry, default_values, entries_of
from sparkdl.jobs.schema import job_schema

ESTIMATORS = (
    "TorchEstimator",
    "TorchClassifier",
    "TorchRegressor",
    "ImageClassifier",
    "TextClassifier",
    "LanguageModel",
)

METHODS = ("fit", "fit_on_parquet", "fitMultiple", "find_learning_rate", "setParams", "write", "read")
"""Methods of estimators that users call, besides the getters and setters of Params."""

PACKAGES = {
    "sparkdl.runner": "Functions and scripts on ranks",
    "sparkdl.mlflow": "Logging, loading and saving models with MLflow",
    "sparkdl.data": "Stores, rows and feeds",
    "sparkdl.torch": "The backend of torch.distributed, and what works on it",
    "sparkdl.parallel": "Models that do not fit into one rank",
    "sparkdl.planner": "Layouts of a model on a cluster",
    "sparkdl.monitor": "Speed, waiting and memory while a training runs",
    "sparkdl.doctor": "Checks of machines and clusters",
    "sparkdl.collective": "Communicators",
    "sparkdl.launch": "Starting ranks",
    "sparkdl.horovod": "Horovod's entries",
    "sparkdl.horovod.torch": "Horovod's API",
    "sparkdl.horovod.spark": "Horovod's functions for Spark",
}
"""Packages whose public names the site documents."""

GROUPS = {
    "Data": (
        "HasFeatureColumns HasLabelColumns HasLabels HasRowColumns HasScoredColumns HasPrediction HasModelInputs "
        "HasRows HasCorpora HasImages HasTexts _ReadyMadeParams _ReadyMadeClassifierParams"
    ),
    "Model and optimizer": (
        "HasObjective HasAdamW HasAdapters HasDropout HasTable HasBackbone HasTransformer HasDecoder HasGeneration"
    ),
    "Training": "HasFunctions HasTraining",
    "Ranks": "HasRanks",
    "Checkpoints and restarts": "HasCheckpoints",
    "MLflow and progress": "HasTracking",
}
"""The groups of the table of Params: for each the classes that define its entries."""


def reference_pages() -> dict[str, str]:
    """Return the pages: Markdown by path on the site."""
    names = [name for name in estimators.__all__ if name not in ESTIMATORS]
    pages = {f"reference/estimators/{name}.md": _estimator_page(name) for name in ESTIMATORS}
    pages["reference/estimators/models.md"] = "# Models, summaries and callbacks\n\n" + "\n".join(
        _documented(f"sparkdl.estimators.{name}", _methods(getattr(estimators, name))) for name in names
    )
    for package, title in PACKAGES.items():
        pages[f"reference/packages/{package}.md"] = _package_page(package, title)
    schema = json.dumps(job_schema(), indent=1)
    pages["reference/job.schema.json"] = schema
    pages["reference/job_file.md"] = _job_page()
    pages["reference/command_line.md"] = _command_page()
    pages["reference/errors.md"] = _errors_page()
    pages["reference/index.md"] = _index()
    return pages


def groups_of(owner: type) -> dict[str, list[Entry[Any]]]:
    """Return the Params of a class by group.

    Raises:
        ValueError: if no class that defines a Param is in a group.
    """
    group_of = {name: group for group, names in GROUPS.items() for name in names.split()}
    groups: dict[str, list[Entry[Any]]] = {group: [] for group in GROUPS}
    for entry in entries_of(owner):
        defining = [base.__name__ for base in owner.__mro__ if isinstance(vars(base).get(entry.name), Entry)]
        (group, *_) = [group_of[name] for name in defining if name in group_of]
        groups[group].append(entry)
    return groups


def _estimator_page(name: str) -> str:
    owner = getattr(estimators, name)
    path = f"sparkdl.estimators.{name}"
    lines = [f"# {name}", "", _documented(path, [], show_signature="false", show_root_heading="false")]
    lines += [f"`from sparkdl.estimators import {name}`", "", "## Params", ""]
    lines += [
        "Arguments of the constructor. Each Param also has a getter and a setter, such as `setEpochs`.",
        "",
    ]
    defaults = default_values(owner)
    for group, entries in groups_of(owner).items():
        if entries:
            lines += [f"### {group}", "", '<div class="params" markdown>', ""]
            lines += ["| Param | default | meaning |", "|---|---|---|"]
            lines += [_row(entry, defaults.get(entry.name)) for entry in entries] + ["", "</div>", ""]
    lines += ["## Methods", ""]
    lines += [_documented(f"{path}.{method}", [], heading_level="3") for method in METHODS]
    return "\n".join(lines)


def _row(entry: Entry[Any], default: Any) -> str:
    meaning = plain_roles(entry.explanation(None)).replace("|", "\\|")
    return f"| `{entry.name}` | {'' if default is None else f'`{json.dumps(default)}`'} | {meaning} |"


def _methods(owner: type) -> list[str]:
    """Return the public methods and properties of a class that sparkdl defines, without those that Params bring."""
    accessors = {entry.accessor(verb) for entry in entries_of(owner) for verb in ("get", "set")}
    names = []
    for name, member in inspect.getmembers_static(owner):
        kind = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        is_ours = str(getattr(kind, "__module__", "")).startswith("sparkdl")
        if not name.startswith("_") and name not in accessors and callable(kind) and is_ours:
            names.append(name)
    return names


def _documented(path: str, members: list[str], **options: str) -> str:
    """Return the block for an object, with the options of mkdocstrings."""
    shown = {
        "members": json.dumps(members or False),
        "inherited_members": json.dumps(bool(members)),
        **options,
    }
    lines = [f"      {name}: {value}" for name, value in shown.items()]
    return "\n".join([f"::: {path}", "    options:", *lines, ""])


def _package_page(package: str, title: str) -> str:
    module = import_module(package)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == package
    ]
    names = [name for name in names if not name.startswith("_")]
    block = _documented(package, names, show_root_heading="false", show_root_toc_entry="false")
    # What has the name of its module is found there alone.
    hidden = [
        f"{package}.{name}.{name}" for name in names if hasattr(sys.modules.get(f"{package}.{name}"), name)
    ]
    return "\n".join([f"# {package}\n\n{title}.\n\n{block}", *(_documented(path, []) for path in hidden)])


def _command_page() -> str:
    parts = [f"# Command line\n\n`pip install sparkdl-torch` installs the command `sparkdl`.\n\n{_help()}"]
    commands = [[name] for name in cli._COMMANDS]
    commands += [["bench"], *(["bench", name] for name in cli._BENCHMARKS)]
    parts += [f"## sparkdl {' '.join(command)}\n\n{_help(*command)}" for command in commands]
    return "\n".join(parts)


def _help(*command: str) -> str:
    printed = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS="88"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        cli.main([*command, "--help"])
    return f"```text\n{printed.getvalue().strip()}\n```\n"


def _job_page() -> str:
    properties = job_schema()["properties"]
    rows = "\n".join(f"| `{name}` | {value['description']} |" for name, value in properties.items())
    return f"""# Job file

The keys of the YAML file that `sparkdl train` reads. [Jobs](../jobs.md) explains them, with examples.

| key | meaning |
|---|---|
{rows}

The [JSON Schema](job.schema.json) has all keys, with the Params of each estimator. `sparkdl job-schema` prints it for
the installed version. Editors that know YAML complete and check a job that names it in its first line:

```yaml
# yaml-language-server: $schema=job.schema.json
```
"""


def _errors_page() -> str:
    errors = import_module("sparkdl.errors")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    names = [value.__name__ for value in classes if value.__module__ == "sparkdl.errors"]
    tree = "\n".join(_tree(errors.SparkdlError))
    block = _documented(
        "sparkdl.errors",
        names,
        show_root_heading="false",
        show_root_toc_entry="false",
        show_signature="false",
        merge_init_into_class="false",
        inherited_members="false",
        filters='["!^_", "!^at$", "!^about$"]',
    )
    return f"""# Errors

All exceptions that sparkdl raises on purpose are in `sparkdl.errors`. Each says here what to do about it; the message
has the names and values of the case. Catch all of them as `SparkdlError`.

```text
{tree}
```

{block}"""


def _tree(kind: type, depth: int = 0) -> list[str]:
    lines = ["  " * depth + kind.__name__]
    for below in kind.__subclasses__():
        if below.__module__ == "sparkdl.errors" and below.__bases__[0] is kind:
            lines += _tree(below, depth + 1)
    return lines


def _index() -> str:
    lines = ["# Reference", "", "## Estimators", "", "| class | |", "|---|---|"]
    for name in ESTIMATORS:
        first = inspect.cleandoc(getattr(estimators, name).__doc__).split("\n", 1)[0]
        lines.append(f"| [`{name}`](estimators/{name}.md) | {plain_roles(first)} |")
    lines.append("| [Models, summaries, callbacks](estimators/models.md) | What `fit` returns and takes. |")
    lines += ["", "## Packages", "", "| package | |", "|---|---|"]
    lines += [f"| [`{name}`](packages/{name}.md) | {title} |" for name, title in PACKAGES.items()]
    others = {
        "command_line.md": "all commands and their options",
        "job_file.md": "the keys of a job file, and its JSON Schema",
        "errors.md": "all exceptions, with remedies",
        "../environment.md": "environment variables",
        "../versions.md": "supported versions",
        "../glossary.md": "the words of this documentation",
    }
    lines += ["", "## Others", "", "| page | |", "|---|---|"]
    for path, text in others.items():
        name = path.rpartition("/")[2].removesuffix(".md").replace("_", " ")
        lines.append(f"| [{name}]({path}) | {text} |")
    return "\n".join(lines) + "\n"
