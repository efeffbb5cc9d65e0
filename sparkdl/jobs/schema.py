"""The JSON Schema of a job file, made from the table of Params; editors complete and check jobs with it.

It describes the file as it is written. What depends on rows, on imports or on several Params together is checked by
``sparkdl train`` alone.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkdl import estimators
from sparkdl.estimators.params.base import OneOf
from sparkdl.estimators.params.table import Entry, default_values, entries_of
from sparkdl.jobs.job import PARAMS_OF_REGISTRY, PARAMS_OF_TRACKING, READY_MADE, WRITE_MODES
from sparkdl.jobs.yaml_tree import ARGUMENTS, IMPORT, SHORT_FORMS, SOURCES

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
_TYPES: dict[Any, dict[str, Any]] = {
    TypeConverters.toInt: {"type": "integer"},
    TypeConverters.toFloat: {"type": "number"},
    TypeConverters.toString: {"type": "string"},
    TypeConverters.toBoolean: {"type": "boolean"},
    TypeConverters.toListString: {"type": "array", "items": {"type": "string"}},
    TypeConverters.toListFloat: {"type": "array", "items": {"type": "number"}},
    TypeConverters.toListInt: {"type": "array", "items": {"type": "integer"}},
}
"""Schemas of values by the converter of their Param. Other converters take several forms, which they check."""


def print_schema(_options: argparse.Namespace) -> int:
    """Run ``sparkdl job-schema``: print the JSON Schema of job files."""
    print(json.dumps(job_schema(), indent=2))
    return 0


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file."""
    params = {name: _params_schema(getattr(estimators, name)) for name in ("TorchEstimator", *READY_MADE)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sparkdl job",
        "type": "object",
        "properties": _sections(),
        "anyOf": [_require("data", "model", "output"), _require("predict")],
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"properties": {"model": {"const": name}}}
                if name in READY_MADE
                else {"properties": {"model": {"not": {"enum": list(READY_MADE)}}}},
                "then": {"properties": {"params": {"$ref": f"#/$defs/{name}"}}},
            }
            for name in params
        ],
        "$defs": params,
    }


def _sections() -> dict[str, Any]:
    imported = {"type": "string", "pattern": ".:."}
    sources: dict[str, Any] = {name: _TEXTS if name == "parquet" else _TEXT for name in SOURCES}
    one_source = _one_of(*SOURCES)
    tracking: dict[str, Any] = dict.fromkeys((*PARAMS_OF_TRACKING, "uri"), _TEXT)
    registry: dict[str, Any] = dict.fromkeys(PARAMS_OF_REGISTRY, _TEXT)
    tracking["mode"] = {"enum": ["auto", "on", "off"]}
    sections = {
        "data": (
            "rows: one of table, parquet and sql; validation is a share of the rows, or a column of booleans; test "
            "names further rows",
            _mapping(
                sources
                | {
                    "validation": {"anyOf": [{"type": "number"}, _TEXT]},
                    "test": {"anyOf": [*_TEXTS["anyOf"], _mapping(sources) | one_source]},
                }
            )
            | one_source,
        ),
        "model": (
            "import path of a network, with arguments, or the name of an estimator that makes its own",
            {
                "anyOf": [
                    {"enum": list(READY_MADE)},
                    imported,
                    _mapping({IMPORT: imported, ARGUMENTS: {"type": "object"}}, IMPORT),
                ]
            },
        ),
        "params": ("Params of the estimator", {"type": "object"}),
        "spark": (
            "master and config of the session that sparkdl train starts",
            _mapping(
                {
                    "master": _TEXT,
                    "config": {
                        "type": "object",
                        "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
                    },
                }
            ),
        ),
        "tracking": ("MLflow: mode, experiment, runName and uri of the server", _mapping(tracking)),
        "registry": (
            "name and alias of the registered model",
            _mapping(registry) | {"if": _require("alias"), "then": _require("name")},
        ),
        "output": ("path or URL of the folder for model and result", _TEXT),
        "code": ("files and folders of Python code, relative to the file of the job", _TEXTS),
        "predict": (
            "rows, model and output of sparkdl predict",
            _mapping(
                sources
                | {
                    "model": _TEXT,
                    "output": {
                        "anyOf": [
                            _TEXT,
                            _mapping({"parquet": _TEXT, "table": _TEXT}) | _one_of("parquet", "table"),
                        ]
                    },
                    "mode": {"enum": list(WRITE_MODES)},
                    "columns": _TEXTS,
                    "params": {"type": "object"},
                },
                "output",
            )
            | one_source,
        ),
    }
    return {
        name: {"description": text, **_or_null(_with_short_form(name, schema))}
        for name, (text, schema) in sections.items()
    }


def _mapping(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: _or_null(schema) for name, schema in properties.items()},
        "additionalProperties": False,
        **({"allOf": [_require(*required)]} if required else {}),
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value that may also be null, which counts as missing."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else schema


def _require(*names: str) -> dict[str, Any]:
    """Return the schema of a mapping in which keys have a value."""
    values = {name: {"not": {"type": "null"}} for name in names}
    return {"required": list(names), "properties": values}


def _one_of(*names: str) -> dict[str, Any]:
    """Return the schema of a mapping in which one of several keys has a value, or of null."""
    return {"oneOf": [{"type": "null"}, *({"type": "object", **_require(name)} for name in names)]}


def _with_short_form(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section that may also be a plain value, which sets one of its keys."""
    key = SHORT_FORMS.get(name)
    return schema if key is None or "anyOf" in schema else {"anyOf": [schema["properties"][key], schema]}


def _params_schema(estimator: type) -> dict[str, Any]:
    defaults = default_values(estimator)
    return {
        "type": ["object", "null"],
        "properties": {
            entry.name: _schema_of(entry, defaults.get(entry.name))
            for entry in entries_of(estimator)
            if entry.name != "model"
        },
        "additionalProperties": False,
    }


def _schema_of(entry: Entry[Any], default: Any) -> dict[str, Any]:
    converter: Any = entry.typeConverter
    kind = {"enum": list(converter.choices)} if isinstance(converter, OneOf) else _TYPES.get(converter, {})
    return {"description": entry.explanation(default), **_or_null(kind)}
