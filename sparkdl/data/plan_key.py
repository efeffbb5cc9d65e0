"""The key of a DataFrame's content: equal for DataFrames that give the same rows. Runs on the *driver*.

Spark's semantic hash of the plan has 32 bits and sees neither that a file was written again nor what a clock or a
random number will say; the key holds what it leaves out, and there is none for a plan whose rows can differ
from one run to the next.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from sparkdl.data.input_files import input_files
from sparkdl.data.plan_text import PlanText, plan_text
from sparkdl.data.spark_jobs import spark_job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

_FILE_FORMATS = "parquet|orc|csv|json|text|avro|xml|binaryfile|image|libsvm"
_FILES = re.compile(rf"^Relation .*\] ({_FILE_FORMATS})$", re.IGNORECASE)
_IN_MEMORY = re.compile(r"^LocalRelation", re.MULTILINE)  # whose rows the text of a plan does not show
_CONTENT = re.compile(r"^(LocalRelation|Range \(|OneRowRelation)")
# The same rows while the application lasts: hashes of objects, and choices that hang on how rows are partitioned.
_OF_APPLICATION = re.compile(r"^(LogicalRDD|Sample|GlobalLimit|LocalLimit)\b")
_INNER_NODES = re.compile(
    r"^(Project|Filter|Join|Aggregate|Union|SubqueryAlias|View|Sort|Distinct|Deduplicate|Window|Generate|Expand"
    r"|Repartition|RepartitionByExpression|RebalancePartitions|WithCTE|CTERelationDef|CTERelationRef"
    r"|ResolvedHint|UnresolvedHint|Intersect|Except|SubqueryColumnAliases)\b"
)
_FUNCTION = re.compile(r"([A-Za-z_]\w*)\(")
_SCALA_FUNCTION = (
    "udf"  # as pyspark.ml's transformers make them; their code stays while the application lasts
)
_ASSEMBLER = "_VectorAssembler_"
_PYTHON_FUNCTION = re.compile(r"\)#\d+")
# How Spark prints expressions that no function of SQL has the name of.
_PRINTED = frozenset(
    {"cast", "ansi_cast", "try_cast", "named_struct", "lambdafunction", "namedlambdavariable", "in"}
)
# What says something else another time: clocks, random numbers, who asks, and the world outside.
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

    It covers the plan, the names, sizes and times of the files it reads (of a Delta table also its log), Spark's
    version, and, where the rows lie in memory, the Spark application.

    Args:
        df: the rows, with the columns that matter.
        options: what else the written files depend on; values that JSON takes.

    Returns:
        The key, or None if the plan can give other rows another time, or holds parts of which that is not
        known: random numbers, clocks, samples, users' functions, tables of other systems.
    """
    content = _content(df)
    return None if content is None else _digest({**content, "options": dict(options)})


def lasting_key(df: DataFrame) -> str | None:
    """Return a key of a DataFrame's rows that another application of Spark finds, too.

    Spark's semantic hash, which differs from one JVM to the next where files are read, is not part of it: the plan's
    text is, with the names, sizes and times of the files. None as for :func:`plan_key`, and where rows lie in memory.
    """
    content = _content(df)
    if content is None or content["application"] or _IN_MEMORY.search(content["plan"]):
        return None
    return _digest({key: content[key] for key in ("plan", "schema", "files", "settings")})


def _content(df: DataFrame) -> dict[str, Any] | None:
    """What the rows of a DataFrame hang on; None if they can be others another time."""
    try:
        plan = plan_text(df)
        why = "Spark does not show it" if plan is None else _why_not_repeatable(df, plan)
        files = None
        if plan is not None and not why and any(_FILES.match(node) for node in plan.analyzed):
            files = input_files(df)
            why = "" if files else "its files cannot be seen from the driver, or it is cached"
        if plan is None or why:
            logger.info("The rows are written for this fit alone: of their plan %s.", why)
            return None
        return {
            "semantic_hash": df.semanticHash(),
            "plan": plan.canonical,
            "schema": df.schema.jsonValue(),
            "files": files.identity if files else "",
            "application": _application(df) if _belongs_to_application(plan) else "",
            "spark": df.sparkSession.version,
            "settings": [df.sparkSession.conf.get(name, None) for name in _SETTINGS],
        }
    except Exception as error:  # sharing rows is a saving; a plan that resists is written as it is
        logger.info("The rows are written for this fit alone: %s: %s", type(error).__name__, error)
        return None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _why_not_repeatable(df: DataFrame, plan: PlanText) -> str:
    """Return what in a plan can differ from one run to the next; empty if nothing can."""
    known = (_FILES, _CONTENT, _OF_APPLICATION, _INNER_NODES)
    functions = _functions_of_spark(df.sparkSession) | _PRINTED | {_SCALA_FUNCTION}
    for node in plan.analyzed:
        if not any(pattern.match(node) for pattern in known):
            return f"it is not known whether {node[:60]!r} gives the same rows again"
        for name in _FUNCTION.findall(node):
            if name.lower() in _VOLATILE:
                return f"{name}() can give something else each time"
            if name.lower() not in functions:
                return f"it is not known whether {name}() gives the same again"
        if _PYTHON_FUNCTION.search(_without_names(node)):
            return "a Python function can give something else each time"
    if _ASSEMBLER in plan.canonical:  # whose function Spark calls indeterminate, though it is not
        return ""
    if not hasattr(df, "_jdf"):
        return "nobody knows what a function of the JVM does" if _calls_scala(plan) else ""
    if not df._jdf.queryExecution().analyzed().deterministic():
        return "Spark says that it can give other rows each time"
    return ""


def _belongs_to_application(plan: PlanText) -> bool:
    return any(_OF_APPLICATION.match(node) for node in plan.analyzed) or _calls_scala(plan)


def _calls_scala(plan: PlanText) -> bool:
    return any(_SCALA_FUNCTION in map(str.lower, _FUNCTION.findall(node)) for node in plan.analyzed)


def _functions_of_spark(spark: SparkSession) -> frozenset[str]:
    """Return the names of Spark's own functions; asked once a session."""
    if spark not in _functions:
        with spark_job(spark, "listing Spark's functions"):
            rows = spark.sql("SHOW SYSTEM FUNCTIONS").collect()
        _functions[spark] = frozenset(str(row[0]).rsplit(".", 1)[-1].lower() for row in rows)
    return _functions[spark]


def _without_names(node: str) -> str:
    """Return a node without the names that its expressions are given, which repeat the expressions' text."""
    return re.sub(r" AS .*?#\d+L?", "", node)


def _application(df: DataFrame) -> str:
    """Return the identity of the Spark application, or on Connect of the session, that holds rows in memory."""
    if hasattr(df, "_jdf"):
        return str(df.sparkSession.sparkContext.applicationId)
    return str(cast("Any", df.sparkSession).session_id)
