"""What Spark tells of a DataFrame's plan, on classic Spark and on Spark Connect alike. Runs on the *driver*.

Both print a plan as text (``df.explain``). Whoever reads it here recognizes what is known to be harmless; a plan
that is not understood counts as one of which nothing is known.
"""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

_HEADING = re.compile(r"^== (.+) ==$", re.MULTILINE)
_TREE = re.compile(r"^[\s:|+\-]*(?=\S)")
_EXPRESSION_ID = re.compile(r"#(\d+)L?")
_MAX_FIELDS = "spark.sql.debug.maxToStringFields"
_setting = threading.Lock()
"""Held while :data:`_MAX_FIELDS` is not what the user set it to: a session has one value for all threads."""


@dataclass(frozen=True)
class PlanText:
    """The analyzed and the optimized plan, one node a line, outermost first.

    Attributes:
        analyzed: as the user wrote it, with names resolved.
        optimized: after Spark's optimizer, with cached DataFrames in their places.
    """

    analyzed: tuple[str, ...]
    optimized: tuple[str, ...]

    @property
    def canonical(self) -> str:
        """The analyzed plan with its expressions numbered in their order, the same for the same plan."""
        numbers: dict[str, int] = {}
        return _EXPRESSION_ID.sub(
            lambda match: f"#{numbers.setdefault(match[1], len(numbers))}", "\n".join(self.analyzed)
        )


def plan_text(df: DataFrame) -> PlanText | None:
    """Return the plans of a DataFrame; None if Spark shows them in no form known here."""
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
    """Have Spark print all fields of a node rather than the first 25, where it lets us."""
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
