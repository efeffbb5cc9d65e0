"""The content of a job file, checked as far as possible without Spark and torch.

:class:`Section` reads the values of a section of the file. Its errors name line and key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparkdl.errors import JobFileError
from sparkdl.jobs.yaml_tree import (
    ARGUMENTS,
    IMPORT,
    SECTIONS,
    SHORT_FORMS,
    SOURCES,
    JobEntry,
    Override,
    apply_overrides,
    read_tree,
    suggestion,
)

T = TypeVar("T")


class Section:
    """A mapping of a job file.

    Args:
        entry: entry of the mapping; None if it is missing.
        path: keys that lead to the mapping, joined by dots.
        known: keys that the mapping may have; None for any keys.
        position: position for errors if the mapping is missing.

    Attributes:
        entries: the entries by key, without those that are null.

    Raises:
        JobFileError: if the entry is not a mapping, or has unknown keys; names file, line and key.
    """

    def __init__(self, entry: JobEntry | None, path: str, known: Sequence[str] | None, position: str) -> None:
        self.path = path
        self.position = entry.position if entry is not None else position
        value = entry.value if entry is not None else None
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(f"takes a mapping of keys to values, got {describe(value)}.")
        self.entries: dict[str, JobEntry] = {
            key: inner for key, inner in value.items() if inner.value is not None
        }
        for key, inner in value.items():
            if known is not None and key not in known:
                where = self.path or "a job"
                raise JobFileError(f"{inner.position}: {where} has no key {key!r}. {suggestion(key, known)}")

    def plain(self) -> dict[str, Any]:
        """Return the values without positions."""
        return {key: entry.plain() for key, entry in self.entries.items()}

    def string(self, key: str) -> str | None:
        """Return the text of a key; None if it is missing."""
        text: str | None = self._read(
            key, lambda value: isinstance(value, str) and bool(value.strip()), "a text"
        )
        return text

    def strings(self, key: str) -> tuple[str, ...]:
        """Return the list of texts of a key; empty if it is missing. A single text counts as a list of one."""

        def fits(value: Any) -> bool:
            return isinstance(value, str | list) and all(
                isinstance(text, str) and text.strip()
                for text in ([value] if isinstance(value, str) else value)
            )

        texts: Any = self._read(key, fits, "a text or a list of texts")
        if texts is None:
            return ()
        return (texts,) if isinstance(texts, str) else tuple(texts)

    def error(self, message: str, key: str | None = None) -> JobFileError:
        """Return an error about the section, or about one of its keys."""
        entry = self.entries.get(key) if key is not None else None
        position = entry.position if entry is not None else self.position
        name = ".".join(part for part in (self.path, key) if part)
        return JobFileError(f"{position}: {name}: {message}" if name else f"{position}: {message}")

    def _read(self, key: str, fits: Callable[[Any], bool], takes: str) -> Any:
        entry = self.entries.get(key)
        if entry is None:
            return None
        value = entry.plain()
        if not fits(value):
            raise self.error(f"takes {takes}, got {describe(value)}.", key)
        return value


def describe(value: Any) -> str:
    """Return a short description of a value of the file, for errors."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return "an empty text" if value == "" else repr(value)


READY_MADE = ("TorchClassifier", "TorchRegressor", "ImageClassifier", "TextClassifier", "LanguageModel")
"""Estimators that make their own model. A job may give such a name as its model."""

PARAMS_OF_TRACKING = {"mode": "tracking", "experiment": "experiment", "runName": "runName"}
PARAMS_OF_REGISTRY = {"name": "registeredModelName", "alias": "registeredModelAlias"}
_TRACKING_MODES = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The source of the rows.

    Attributes:
        kind: ``table``, ``parquet`` or ``sql``.
        value: name of the table, paths or URLs of the Parquet files, or text of the query.
        section: section of the job that names it, such as ``data``.
        position: position of the source in the job.
    """

    kind: str
    value: str | tuple[str, ...]
    section: str
    position: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value if isinstance(self.value, str) else ', '.join(self.value)}"


@dataclass(frozen=True, kw_only=True)
class SparkChoice:
    """The session that ``sparkdl train`` starts.

    Attributes:
        master: URL of the Spark master; None for a local master with a slot for each rank.
        config: settings of Spark, by name.
    """

    master: str | None
    config: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The checked content of a job file.

    Attributes:
        file: path of the job file.
        data: source of the rows.
        test: source of the rows on which the model is tested after the training; None without a test.
        model: an import path with arguments, or the name of an estimator that makes its own model.
        params: Params of the estimator, by name, including those that other sections set.
        params_position: position of the section ``params``, for errors about missing Params.
        spark: session that ``sparkdl train`` starts.
        tracking_uri: URI of the MLflow server; None if the job does not set one.
        output: path or URL of the folder for model and result.
        code: files and folders of Python code that driver and ranks import from.
        content: the whole job, as JSON can hold it, without ``spark`` and ``predict``, in which equal jobs may differ.
        estimator: name of the estimator's class.
        log_format: format of the job's log, ``json`` or ``text``, before the estimator has checked it.
        entries: entries that may name objects by import paths.
    """

    file: Path
    data: DataSource
    test: DataSource | None
    model: JobEntry
    params: dict[str, JobEntry]
    params_position: str
    spark: SparkChoice
    tracking_uri: str | None
    output: str
    code: tuple[Path, ...]
    content: dict[str, Any]
    estimator: str
    log_format: str
    entries: tuple[JobEntry, ...]


WRITE_MODES = ("error", "overwrite", "append")
"""What happens to an output of predictions that exists, by Spark's names."""


@dataclass(frozen=True, kw_only=True)
class PredictionJob:
    """The checked content of a job file, as far as a prediction needs it.

    Attributes:
        file: path of the job file.
        data: source of the rows.
        model: path or URL of the output of a training job, or MLflow's URI of a model.
        output: path or URL of a folder of Parquet files, or name of a table.
        is_table: whether ``output`` is a table.
        mode: one of :data:`WRITE_MODES`.
        columns: columns of the rows that are written beside the predictions; empty for all.
        params: Params of the model, by name.
        params_position: position of these Params.
        spark: session that ``sparkdl predict`` starts.
        tracking_uri: URI of the MLflow server; None if the job does not set one.
        code: files and folders of Python code that driver and executors import from.
        entries: entries of the training that may name objects by import paths.
    """

    file: Path
    data: DataSource
    model: str
    output: str
    is_table: bool
    mode: str
    columns: tuple[str, ...]
    params: dict[str, Any]
    params_position: str
    spark: SparkChoice
    tracking_uri: str | None
    code: tuple[Path, ...]
    entries: tuple[JobEntry, ...]


def read_prediction_job(file: Path, overrides: Sequence[Override] = ()) -> PredictionJob:
    """Read a job file for ``sparkdl predict``, and apply overrides.

    Raises:
        JobFileError: if the job is not valid, or has no section ``predict``; names file, line and key.
    """
    job = _read_sections(file, overrides)
    if "predict" not in job.entries:
        raise job.error(
            "predict is missing; give the rows and where to write, as predict: {parquet: rows, output: scored}."
        )
    predict = _section(job, "predict", (*SOURCES, "model", "output", "mode", "columns", "params"))
    params = Section(predict.entries.get("params"), "predict.params", None, predict.position)
    entry = predict.entries.get("output")
    if entry is not None and isinstance(entry.value, str):
        entry = JobEntry({"parquet": entry}, entry.position)
    output = Section(entry, "predict.output", ("parquet", "table"), predict.position)
    if len(output.entries) != 1:
        raise output.error("takes the path of a folder of Parquet files, or a table: NAME.")
    (kind,) = output.entries
    mode = predict.string("mode") or WRITE_MODES[0]
    if mode not in WRITE_MODES:
        raise predict.error(f"takes {', '.join(WRITE_MODES)}, got {mode!r}.", "mode")
    model = predict.string("model") or job.string("output")
    of_training = Section(job.entries.get("params"), "params", None, job.position)
    return PredictionJob(
        file=file,
        data=_source(predict, "predict"),
        model=_require(
            model, predict, "model", "give the output of a training job, or MLflow's URI of a model"
        ),
        output=_require(output.string(kind), output, kind, "give a path or a name"),
        is_table=kind == "table",
        mode=mode,
        columns=predict.strings("columns"),
        params=params.plain(),
        params_position=params.position,
        spark=_spark(_section(job, "spark", ("master", "config"))),
        tracking_uri=_section(job, "tracking", (*PARAMS_OF_TRACKING, "uri")).string("uri"),
        code=tuple(file.parent / path for path in job.strings("code")),
        entries=tuple(
            entry for entry in (job.entries.get("model"), *of_training.entries.values()) if entry is not None
        ),
    )


def read_job(file: Path, overrides: Sequence[Override] = ()) -> TrainingJob:
    """Read a job file, and apply overrides.

    Raises:
        JobFileError: if the job is not valid; names file, line and key.
    """
    job = _read_sections(file, overrides)
    data = _section(job, "data", (*SOURCES, "validation", "test"))
    params = _section(job, "params", None)
    tracking = _section(job, "tracking", (*PARAMS_OF_TRACKING, "uri"))
    registry = _section(job, "registry", tuple(PARAMS_OF_REGISTRY))
    source, test, model = _source(data, "data"), _test(data), _model(job)
    values = _params(params, data, tracking, registry)
    is_json = "logFormat" in values and values["logFormat"].value == "json"
    return TrainingJob(
        file=file,
        data=source,
        test=test,
        model=model,
        params=values,
        params_position=params.position,
        spark=_spark(_section(job, "spark", ("master", "config"))),
        tracking_uri=tracking.string("uri"),
        output=_require(job.string("output"), job, "output", "give a path or URL for model and result"),
        code=tuple(file.parent / path for path in job.strings("code")),
        content={key: value for key, value in job.plain().items() if key not in ("spark", "predict")},
        estimator=model.value if isinstance(model.value, str) else "TorchEstimator",
        log_format="json" if is_json else "text",
        entries=(model, *values.values()),
    )


def _read_sections(file: Path, overrides: Sequence[Override]) -> Section:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise JobFileError(f"The job {file} cannot be read: {why}.") from error
    tree = read_tree(text, str(file))
    if not isinstance(tree.value, dict):
        raise JobFileError(
            f"{tree.position}: a job is a mapping with the keys {', '.join(SECTIONS)}, got {describe(tree.value)}."
        )
    return Section(apply_overrides(tree, overrides), "", SECTIONS, tree.position)


def _section(job: Section, name: str, known: Sequence[str] | None) -> Section:
    entry = job.entries.get(name)
    if entry is not None and name in SHORT_FORMS and isinstance(entry.value, str):
        entry = JobEntry({SHORT_FORMS[name]: entry}, entry.position)
    return Section(entry, name, known, job.position)


def _require(value: str | None, section: Section, key: str, what: str) -> str:
    if value is None:
        raise section.error(f"{key} is missing; {what}.")
    return value


def _test(data: Section) -> DataSource | None:
    """Return the source of the test rows; a plain value is of the kind of the rows."""
    entry = data.entries.get("test")
    if entry is None:
        return None
    if not isinstance(entry.value, dict):
        kind = next(kind for kind in SOURCES if kind in data.entries)
        entry = JobEntry({kind: entry}, entry.position)
    return _source(Section(entry, "data.test", SOURCES, data.position), "data.test")


def _source(data: Section, section: str) -> DataSource:
    named = [kind for kind in SOURCES if kind in data.entries]
    if len(named) != 1:
        got = f"got {' and '.join(named)}" if named else "got none"
        raise data.error(f"takes one of {', '.join(SOURCES)}, {got}.", named[-1] if named else None)
    (kind,) = named
    value = data.strings(kind) if kind == "parquet" else data.string(kind)
    if not value:
        raise data.error("is empty.", kind)
    return DataSource(kind=kind, value=value, section=section, position=data.entries[kind].position)


def _model(job: Section) -> JobEntry:
    """Return the entry with ``import`` and ``arguments``, or with the name of an estimator."""
    entry = job.entries.get("model")
    if entry is None:
        raise job.error(
            "model is missing; give an import path such as my_models:make_net, or one of "
            + ", ".join(READY_MADE)
            + "."
        )
    if isinstance(entry.value, str) and ":" not in entry.value:
        if entry.value not in READY_MADE:
            raise job.error(
                f"{entry.value!r} is neither an import path, as my_models:make_net, nor an estimator. "
                f"{suggestion(entry.value, READY_MADE)}",
                "model",
            )
        return entry
    section = _section(job, "model", (IMPORT, ARGUMENTS))
    name = _require(
        section.string(IMPORT), section, IMPORT, "give the import path of the model, as my_models:make_net"
    )
    if ":" not in name:
        hint = f" For the estimator {name} write model: {name}." if name in READY_MADE else ""
        raise section.error(f"takes MODULE:NAME, as my_models:make_net, got {name!r}.{hint}", IMPORT)
    return JobEntry(section.entries, entry.position)


def _params(params: Section, data: Section, tracking: Section, registry: Section) -> dict[str, JobEntry]:
    """Return the Params, including those that other sections set; each may be set only once."""
    entries = dict(params.entries)
    if "model" in entries:
        raise params.error("is set by the section model of the job.", "model")
    for section, key, name in _keys_of_params(data, tracking, registry):
        entry = section.entries[key]
        if name in entries:
            raise params.error(f"is set twice, also by {section.path}.{key} at {entry.position}.", name)
        entries[name] = entry
    return entries


def _keys_of_params(data: Section, tracking: Section, registry: Section) -> list[tuple[Section, str, str]]:
    """Return the keys of other sections that set Params: the section, its key and the name of the Param."""
    settings = []
    validation = data.entries.get("validation")
    if validation is not None:
        is_share = isinstance(validation.value, int | float) and not isinstance(validation.value, bool)
        if not is_share and data.string("validation") is None:
            raise data.error("takes a share of the rows, or a column of booleans.", "validation")
        settings.append((data, "validation", "validationFraction" if is_share else "validationIndicatorCol"))
    mode = tracking.entries.get("mode")
    if mode is not None and mode.value not in _TRACKING_MODES:
        raise tracking.error(f"takes {', '.join(_TRACKING_MODES)}, got {describe(mode.plain())}.", "mode")
    settings += [(tracking, key, name) for key, name in PARAMS_OF_TRACKING.items() if key in tracking.entries]
    settings += [(registry, key, name) for key, name in PARAMS_OF_REGISTRY.items() if key in registry.entries]
    if "alias" in registry.entries and "name" not in registry.entries:
        raise registry.error("is for a version of a registered model, and registry.name is missing.", "alias")
    return settings


def _spark(section: Section) -> SparkChoice:
    config = Section(section.entries.get("config"), "spark.config", None, section.position)
    settings = {}
    for name, entry in config.entries.items():
        if isinstance(entry.value, dict | list):
            raise config.error(f"takes a plain value, got {describe(entry.value)}.", name)
        is_switch = isinstance(entry.value, bool)
        settings[name] = str(entry.value).lower() if is_switch else str(entry.value)
    if "spark.master" in settings:
        raise config.error("is set by spark.master of the job.", "spark.master")
    return SparkChoice(master=section.string("master"), config=settings)
