"""The plan of a DataFrame as Spark prints it, and keys of the DataFrame's rows.

Runs on the *driver*, on classic Spark and on Spark Connect alike. Both print a plan as text (``df.explain``). The
analysis recognizes nodes and functions that are known to be repeatable; a plan that is not understood counts as
unknown, and a plan whose rows can differ from one run to the next has no key.

:func:`plan_key` is equal for DataFrames with the same rows within one Spark application. Spark's semantic hash of the
plan has 32 bits, and covers neither that a file was written again nor the value of a clock or a random number; the key
includes what the hash leaves out. Rows are shared only by this key, and therefore never across applications: the text
of a plan says too little for that, for example about rows in memory. :func:`lasting_key` is also valid in other
applications, but only for rows that a user named as a table, files or a query; with it a job determines whether it has
already been done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from sparkdl.data.spark.input_files import input_files
from sparkdl.data.spark.jobs import spark_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

_HEADING = re.compile(r"^== (.+) ==$", re.MULTILINE)
_TREE = re.compile(r"^[\s:|+\-]*(?=\S)")
_EXPRESSION_ID = re.compile(r"#(\d+)L?")
_MAX_FIELDS = "spark.sql.debug.maxToStringFields"
_setting = threading.Lock()
"""Held while :data:`_MAX_FIELDS` differs from the user's value, because a session has one value for all threads."""


@dataclass(frozen=True)
class PlanText:
    """The analyzed and the optimized plan, with one line per node, outermost first.

    Attributes:
        analyzed: nodes of the plan as the user wrote it, with names resolved.
        optimized: nodes of the plan after Spark's optimizer, with cached DataFrames in their places.
    """

    analyzed: tuple[str, ...]
    optimized: tuple[str, ...]

    @property
    def canonical(self) -> str:
        """The analyzed plan with its expressions numbered in their order, so that equal plans have the same text."""
        numbers: dict[str, int] = {}
        return _EXPRESSION_ID.sub(
            lambda match: f"#{numbers.setdefault(match[1], len(numbers))}", "\n".join(self.analyzed)
        )


def plan_text(df: DataFrame) -> PlanText | None:
    """Return the plans of a DataFrame; None if Spark prints them in an unknown form."""
    with _setting, _whole_lines(df.sparkSession):
        text = _explain(df)
    parts = _HEADING.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=False))
    try:
        # The first line of the analyzed plan is the schema.
        analyzed = _nodes(sections["Analyzed Logical Plan"])[1:]
        optimized = _nodes(sections["Optimized Logical Plan"])
    except KeyError:
        return None
    if any(re.search(r"\.\.\. \d+ more fields", node) for node in (*analyzed, *optimized)):
        return None
    return PlanText(analyzed, optimized)


def _nodes(section: str) -> tuple[str, ...]:
    return tuple(_TREE.sub("", line).rstrip() for line in section.splitlines() if line.strip())


def _explain(df: DataFrame) -> str:
    if hasattr(df, "_jdf"):
        # A thread of a CrossValidator may have no active session, without which Spark 3.5 cannot show a cached plan.
        session: Any = df._jdf.sparkSession()
        session.setActiveSession(session)
        return str(df._jdf.queryExecution().toString())
    # What df.explain prints on Spark Connect; standard output is shared by all threads.
    return str(cast("Any", df)._explain_string(mode="extended"))


@contextlib.contextmanager
def _whole_lines(spark: SparkSession) -> Iterator[None]:
    """Make Spark print all fields of a node rather than the first 25, if the setting can be changed."""
    before = spark.conf.get(_MAX_FIELDS, None)
    try:
        spark.conf.set(_MAX_FIELDS, str(1 << 20))
    except Exception:  # a cluster whose settings are locked; lines cut short are recognized
        yield
        return
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_MAX_FIELDS)
        else:
            spark.conf.set(_MAX_FIELDS, before)


_FILE_FORMATS = "parquet|orc|csv|json|text|avro|xml|binaryfile|image|libsvm"
_FILES = re.compile(rf"^Relation .*\] ({_FILE_FORMATS})$", re.IGNORECASE)
_CACHED = "InMemoryRelation"
# The files of a subquery are not among those of the plan.
_SUBQUERY = re.compile(r"(subquery|exists|list)#\d+ \[")
# RDDs that hold their rows, and what only computes on others; one of another kind may read files.
_RDDS = frozenset(
    {
        "CartesianRDD",
        "CoalescedRDD",
        "LocalCheckpointRDD",
        "MapPartitionsRDD",
        "ParallelCollectionRDD",
        "PartitionerAwareUnionRDD",
        "PythonRDD",
        "ReliableCheckpointRDD",
        "ShuffledRDD",
        "ShuffledRowRDD",
        "UnionRDD",
        "ZippedPartitionsRDD2",
        "ZippedWithIndexRDD",
    }
)
_RDD = re.compile(r"(\w+RDD\d*)\[\d+\]")
_CONTENT = re.compile(r"^(LocalRelation|Range \(|OneRowRelation)")
# The same rows within one application: objects, and choices that depend on how rows are partitioned.
_OF_APPLICATION = re.compile(r"^(LogicalRDD|Sample|GlobalLimit|LocalLimit)\b")
_INNER_NODES = re.compile(
    r"^(Project|Filter|Join|Aggregate|Union|SubqueryAlias|View|Sort|Distinct|Deduplicate|Window|Generate|Expand"
    r"|Repartition|RepartitionByExpression|RebalancePartitions|WithCTE|CTERelationDef|CTERelationRef"
    r"|ResolvedHint|UnresolvedHint|Intersect|Except|SubqueryColumnAliases)\b"
)
_FUNCTION = re.compile(r"([A-Za-z_]\w*)\(")
_SCALA_FUNCTION = "udf"  # made by pyspark.ml's transformers; its code does not change within an application
_ASSEMBLER = "_VectorAssembler_"
_PYTHON_FUNCTION = re.compile(r"\)#\d+")
# Names that Spark prints for expressions that are not functions of SQL.
_PRINTED = frozenset(
    {"cast", "ansi_cast", "try_cast", "named_struct", "lambdafunction", "namedlambdavariable", "in"}
)
# Functions whose results change between runs: clocks, random numbers, the current user, and external systems.
_VOLATILE = frozenset(
    {
        "ai_query",
        "curdate",
        "current_catalog",
        "current_database",
        "current_date",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "http_request",
        "input_file_block_length",
        "input_file_block_start",
        "input_file_name",
        "java_method",
        "localtimestamp",
        "monotonically_increasing_id",
        "now",
        "rand",
        "randn",
        "random",
        "randstr",
        "reflect",
        "session_user",
        "shuffle",
        "spark_partition_id",
        "try_reflect",
        "uniform",
        "user",
        "uuid",
    }
)
_SETTINGS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive")
_functions: WeakKeyDictionary[SparkSession, frozenset[str]] = WeakKeyDictionary()


def plan_key(df: DataFrame, options: Mapping[str, Any]) -> str | None:
    """Return the key of a DataFrame's rows, as 24 hexadecimal digits.

    It covers the Spark application, the plan, and the names, sizes and times of the files it reads (of a Delta table
    also its log).

    Args:
        df: DataFrame of the rows, with the columns that matter.
        options: other values that the written files depend on, of types that JSON takes.

    Returns:
        The key, or None if the plan can return other rows in another run, or holds parts for which that is not
        known: random numbers, clocks, samples, users' functions, tables of other systems.
    """
    try:
        rows = _repeatable_rows(df)
        if rows is None:
            return None
        return _digest(
            rows[1], semantic_hash=df.semanticHash(), application=_application(df), options=dict(options)
        )
    except Exception as error:  # sharing rows only saves work; without a key they are written for this fit
        logger.info("The rows are written for this fit alone: %s: %s", type(error).__name__, error)
        return None


def lasting_key(df: DataFrame, source: Sequence[str]) -> str | None:
    """Return a key of rows that a user named, which is also valid in other Spark applications.

    Args:
        df: DataFrame of the rows, with the columns that matter.
        source: the source that the user named: the kind and the name of a table, the files, or a query.

    Returns:
        The key of the source, the plan and the files; None as for :func:`plan_key`, and for rows in memory or a
        sample. Spark's semantic hash is not part of it, because it differs from one JVM to the next if files are read.
    """
    try:
        rows = _repeatable_rows(df)
        if rows is None or _belongs_to_application(rows[0]):
            return None
        return _digest(rows[1], source=list(source))
    except Exception as error:  # doing work again is better than not doing it
        logger.info("It is not known whether the rows have changed: %s: %s", type(error).__name__, error)
        return None


def _repeatable_rows(df: DataFrame) -> tuple[PlanText, dict[str, Any]] | None:
    """Return the plan of a DataFrame and what its rows depend on; None if the rows can differ in another run."""
    plan = plan_text(df)
    why = "Spark does not show their plan" if plan is None else _why_not_repeatable(df, plan)
    files = None
    if plan is not None and not why and any(_FILES.match(node) for node in plan.analyzed):
        files = input_files(df)
        why = "" if files and files.identity else "its files cannot be seen from the driver, or it is cached"
        if any(node.startswith(_CACHED) for node in plan.optimized):
            why = "the files of a cached part are not known"
    if plan is None or why:
        logger.info("The rows are written for this fit alone: %s.", why)
        return None
    return plan, {
        "plan": plan.canonical,
        "schema": df.schema.jsonValue(),
        "files": files.identity if files else "",
        "spark": df.sparkSession.version,
        "settings": [df.sparkSession.conf.get(name, None) for name in _SETTINGS],
    }


def _digest(content: Mapping[str, Any], **more: Any) -> str:
    return hashlib.sha256(json.dumps({**content, **more}, sort_keys=True).encode()).hexdigest()[:24]


def _why_not_repeatable(df: DataFrame, plan: PlanText) -> str:
    """Return what in a plan can differ from one run to the next; empty if nothing can."""
    known = (_FILES, _CONTENT, _OF_APPLICATION, _INNER_NODES)
    functions = _functions_of_spark(df.sparkSession) | _PRINTED | {_SCALA_FUNCTION}
    for node in plan.analyzed:
        if not any(pattern.match(node) for pattern in known):
            return f"it is not known whether {node[:60]!r} gives the same rows again"
        if _SUBQUERY.search(node):
            return "the files of a subquery are not known"
        for name in _FUNCTION.findall(node):
            if name.lower() in _VOLATILE:
                return f"{name}() can give something else each time"
            if name.lower() not in functions:
                return f"it is not known whether {name}() gives the same again"
        if _PYTHON_FUNCTION.search(_without_names(node)):
            return "a Python function can give something else each time"
    if not hasattr(df, "_jdf"):
        others = tuple(node for node in plan.analyzed if _ASSEMBLER not in node)
        return "it is not known what a function of the JVM does" if _calls_scala(others) else ""
    return _why_spark_cannot_repeat(df._jdf.queryExecution().analyzed())


def _why_spark_cannot_repeat(node: Any) -> str:
    """Return what in a plan of classic Spark can differ from one run to the next, as Spark sees it."""
    for child in _members(node.children()):
        why = _why_spark_cannot_repeat(child)
        if why:
            return why
    if node.nodeName() == "LogicalRDD":
        others = set(_RDD.findall(node.rdd().toDebugString())) - _RDDS
        if others:
            return f"it is not known whether the rows of {min(others)} change"
    if not node.deterministic():
        for expression in _members(node.expressions()):
            # Spark calls the assembler's function nondeterministic, though it is not.
            if not expression.deterministic() and _ASSEMBLER not in expression.toString():
                return "Spark says that it can give other rows each time"
    return ""


def _members(sequence: Any) -> Iterator[Any]:
    """Yield the members of a Scala sequence."""
    for index in range(sequence.size()):
        yield sequence.apply(index)


def _belongs_to_application(plan: PlanText) -> bool:
    """Whether the text of a plan does not identify its rows in another application."""
    return any(_OF_APPLICATION.match(node) or node.startswith("LocalRelation") for node in plan.analyzed) or (
        _calls_scala(plan.analyzed)
    )


def _calls_scala(nodes: Sequence[str]) -> bool:
    return any(_SCALA_FUNCTION in map(str.lower, _FUNCTION.findall(node)) for node in nodes)


def _functions_of_spark(spark: SparkSession) -> frozenset[str]:
    """Return the names of Spark's own functions, which are listed once per session."""
    if spark not in _functions:
        with spark_job(spark, "listing Spark's functions"):
            rows = spark.sql("SHOW SYSTEM FUNCTIONS").collect()
        _functions[spark] = frozenset(str(row[0]).rsplit(".", 1)[-1].lower() for row in rows)
    return _functions[spark]


def _without_names(node: str) -> str:
    """Return a node without the aliases of its expressions, which repeat the expressions' text."""
    return re.sub(r" AS .*?#\d+L?", "", node)


def _application(df: DataFrame) -> str:
    """Return the identity of the Spark application, on Connect of the session."""
    if hasattr(df, "_jdf"):
        return str(df.sparkSession.sparkContext.applicationId)
    return str(cast("Any", df.sparkSession).session_id)
