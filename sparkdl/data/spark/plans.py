"""What a DataFrame reads, and whether its plan gives the same rows again, from the classes of the plan's nodes.

Runs on the *driver*. On classic Spark the nodes are those of the JVM, and Spark itself tells whether an expression is
deterministic. A client of Spark Connect has only the unresolved plan that it sends, in which a name of a table, view or
function can mean something else at the next call; there, everything but reads of files, rows of the client, ranges and
plain expressions of their columns counts as unknown.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sparkdl.data.spark.columns import quote
from sparkdl.spark.session import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

_SPARK = "org.apache.spark."
_IN_MEMORY = frozenset({"LocalRelation", "Range", "OneRowRelation", "CTERelationRef"})
_PATTERNS = {
    "CURRENT_LIKE": "it depends on the time or the user",
    "PYTHON_UDF": "a Python function can give something else each time",
    "PLAN_EXPRESSION": "the files of a subquery are not known",
}
# The lineage of spark.createDataFrame(list): a Python function that returns its argument, over rows of the driver.
_OF_LIST = ["MapPartitionsRDD"] * 3 + ["PythonRDD", "ParallelCollectionRDD"]
_IDENTITY_FUNCTION = "RDD._reserialize.<locals>.<lambda>"


class UnknownRowsError(Exception):
    """The rows of a DataFrame may differ when Spark computes them again, or sparkdl cannot rule that out.

    The text says why.
    """


@dataclass(frozen=True)
class Leaves:
    """The leaves of a plan that gives the same rows again while they stay the same.

    Attributes:
        num_reads: number of reads of files.
        has_files_only: whether all rows come from files, and no view or function of a JVM stands between, so that files
            and the text of a query also say in another application which rows they are.
    """

    num_reads: int
    has_files_only: bool


def leaves_of(df: DataFrame) -> Leaves:
    """Return the leaves of a DataFrame's plan.

    Raises:
        UnknownRowsError: if the plan has other leaves than files, ranges and rows that the driver holds, reads files
            partly from a cache, or is not deterministic.
    """
    if is_connect(df.sparkSession):
        return _leaves_of_connect(df)
    execution: Any = cast("Any", df)._jdf.queryExecution()
    plan = execution.analyzed()
    patterns: Any = cast("Any", df.sparkSession)._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    for name, why in _PATTERNS.items():
        if plan.containsPattern(getattr(patterns, name)()):
            raise UnknownRowsError(why)
    if not _is_deterministic(plan):
        raise UnknownRowsError("Spark says that it can give other rows each time")
    leaves = list(_members(plan.collectLeaves()))
    others = [leaf for leaf in leaves if not _is_file_read(leaf)]
    for leaf in others:
        if not _is_held(leaf):
            raise UnknownRowsError(f"it is not known whether {leaf.nodeName()} gives the same rows again")
    num_reads = len(leaves) - len(others)
    cached = map(_name, _members(execution.withCachedData().collectLeaves()))
    if num_reads and "InMemoryRelation" in cached:
        raise UnknownRowsError("the files of a cached part are not known")
    defined = plan.containsPattern(patterns.SCALA_UDF()) or _has_definition(plan)
    return Leaves(num_reads=num_reads, has_files_only=not others and not defined)


def is_parquet_read(df: DataFrame) -> bool:
    """Whether a DataFrame reads Parquet files once and at most leaves columns out; false if that is not known."""
    if is_connect(df.sparkSession):
        return _is_parquet_read_of_connect(df)
    plan: Any = cast("Any", df)._jdf.queryExecution().optimizedPlan()
    leaf = plan
    if _name(plan) == "Project":
        leaf = plan.child()
    return (
        _is_file_read(leaf)
        and leaf.relation().toString() == "parquet"
        and _name(leaf.relation().location()) == "InMemoryFileIndex"
        and leaf.catalogTable().isEmpty()
        # By the numbers of expressions: nothing was computed, cast or renamed.
        and plan.outputSet().subsetOf(leaf.outputSet())
        and len(files := list(leaf.relation().location().inputFiles())) == len(set(files))
    )


def plain_parquet_reads(df: DataFrame) -> Iterator[list[str]]:
    """Yield the URLs of the files of each read of Parquet for which Spark lists the files itself, also below a cache.

    Spark Connect does not say which files are whose: there, a plan that only has such reads counts as one read. In
    other plans, and of what is cached, only the paths are known that the client names.
    """
    if is_connect(df.sparkSession):
        yield from _plain_parquet_reads_of_connect(df)
        return
    plan: Any = cast("Any", df)._jdf.queryExecution().analyzed()
    for part in (plan, *_members(plan.subqueriesAll())):
        for leaf in _members(part.collectLeaves()):
            if _is_file_read(leaf) and leaf.relation().toString() == "parquet":
                yield list(leaf.relation().location().inputFiles())
            elif _name(leaf) == "DataSourceV2Relation" and _name(leaf.table()) == "ParquetTable":
                yield list(leaf.table().fileIndex().inputFiles())


def _members(sequence: Any) -> Iterator[Any]:
    """Yield the members of a Scala sequence."""
    for index in range(sequence.size()):
        yield sequence.apply(index)


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _is_file_read(leaf: Any) -> bool:
    """Whether a leaf reads files with Spark's own listing; the log of a table system can say other rows are valid."""
    return (
        _name(leaf) == "LogicalRelation"
        and leaf.relation().getClass().getName() == f"{_SPARK}sql.execution.datasources.HadoopFsRelation"
        and leaf.relation().location().getClass().getName().startswith(f"{_SPARK}sql.execution.datasources.")
    )


def _is_held(leaf: Any) -> bool:
    if _name(leaf) != "LogicalRDD":
        return _name(leaf) in _IN_MEMORY
    lineage = [leaf.rdd()]
    while len(lineage) <= len(_OF_LIST) and lineage[-1].dependencies().size() == 1:
        lineage.append(lineage[-1].dependencies().apply(0).rdd())
    return list(map(_name, lineage)) == _OF_LIST and _has_identity_function(lineage[-2])


def _has_identity_function(rdd: Any) -> bool:
    """Whether an RDD's Python function returns its rows unchanged, as for the rows of a list that pyspark sends."""
    from pyspark.serializers import CPickleSerializer

    (field,) = (field for field in rdd.getClass().getDeclaredFields() if field.getName() == "func")
    field.setAccessible(True)
    numbers = field.get(rdd).command().mkString(",").split(",")  # of signed bytes
    serializer: Any = CPickleSerializer()
    function = serializer.loads(bytes(int(number) & 255 for number in numbers))[0]
    inner = [cell.cell_contents for cell in function.__closure__]
    return len(inner) == 1 and all(
        part.__module__.startswith("pyspark.")
        and part.__qualname__ in ("RDD.map.<locals>.func", _IDENTITY_FUNCTION)
        for part in (function, *inner)
    )


def _is_deterministic(plan: Any) -> bool:
    if plan.deterministic():
        return True
    expressions, children = _members(plan.expressions()), _members(plan.children())
    return all(expression.deterministic() or _assembles(expression) for expression in expressions) and all(
        map(_is_deterministic, children)
    )


def _assembles(expression: Any) -> bool:
    """Whether an expression is a VectorAssembler's, which is deterministic although Spark marks it nondeterministic."""
    if _name(expression) != "Alias" or _name(expression.child()) != "ScalaUDF":
        return False
    function = expression.child()
    return str(function.function().getClass().getName()).startswith(
        f"{_SPARK}ml.feature.VectorAssembler$"
    ) and all(child.deterministic() for child in _members(function.children()))


def _has_definition(plan: Any) -> bool:
    """Whether a view or a function of SQL, which can be redefined, is part of a plan."""
    return (
        _name(plan) == "View"
        or "SQLFunction" in _name(plan)
        or any(map(_has_definition, _members(plan.children())))
    )


# Names of the messages of Spark Connect that mean the same at each call.
_MESSAGES = {
    *(
        "Relation",
        "RelationCommon",
        "LocalRelation",
        "CachedLocalRelation",
        "ChunkedCachedLocalRelation",
        "Range",
    ),
    *("Read", "Read.DataSource", "ToDF", "Project", "Filter", "WithColumns", "Drop", "WithColumnsRenamed"),
    *("WithColumnsRenamed.Rename", "SetOperation", "Repartition", "Sample", "Expression", "Expression.Alias"),
    *("Expression.UnresolvedAttribute", "Expression.UnresolvedStar", "Expression.ExpressionString"),
    *("Expression.Cast", "Expression.UnresolvedFunction", "ExpressionCommon", "Origin", "PythonOrigin"),
}
_VALUES = ("DataType", "Expression.Literal")
_FILE_FORMATS = frozenset({"parquet", "orc", "csv", "json", "text"})
_OPERATOR = re.compile(r"\W+|and|or|not")
_PLAIN_TEXT = re.compile(r"([\w\s`.*+/%<>=!-]+?)(\s+as\s+(\w+|`[^`]+`))?", re.IGNORECASE)
_TEXTS = {
    "Expression.UnresolvedAttribute": "unparsed_identifier",
    "Expression.ExpressionString": "expression",
}
_WORDS = frozenset({"and", "or", "not", "is", "null", "true", "false"})


def _leaves_of_connect(df: DataFrame) -> Leaves:
    client = cast("Any", df.sparkSession).client
    messages = list(_messages(cast("Any", df)._plan.to_proto(client).root))
    for message in messages:
        kind = _kind(message)
        if kind not in _MESSAGES and not kind.startswith(_VALUES):
            raise UnknownRowsError(
                f"it is not known whether {kind} of Spark Connect gives the same rows again"
            )
        if kind == "Read.DataSource" and (message.format.lower() not in _FILE_FORMATS or not message.paths):
            raise UnknownRowsError(f"it is not known what the source {message.format!r} reads")
        if kind == "Sample" and not message.HasField("seed"):
            raise UnknownRowsError("the server draws another sample each time")
        if kind == "Expression.UnresolvedFunction" and not _OPERATOR.fullmatch(message.function_name):
            raise UnknownRowsError(f"it is not known whether {message.function_name}() gives the same again")
    for message in messages:
        if _kind(message) == "Relation":
            _check_names(client, message)
    kinds = list(map(_kind, messages))
    num_reads = kinds.count("Read")
    if num_reads > 1:  # Spark Connect does not say which of them is cached
        raise UnknownRowsError("it reads files more than once")
    in_memory = {"LocalRelation", "CachedLocalRelation", "ChunkedCachedLocalRelation", "Range"}
    return Leaves(num_reads=num_reads, has_files_only=num_reads == 1 and not in_memory & set(kinds))


def _kind(message: Any) -> str:
    return str(message.DESCRIPTOR.full_name).removeprefix("spark.connect.")


def _messages(message: Any) -> Iterator[Any]:
    """Yield a message of protobuf and all messages in it."""
    yield message
    for inner in _inner_messages(message):
        yield from _messages(inner)


def _inner_messages(message: Any) -> Iterator[Any]:
    for _, value in message.ListFields():
        # A field holds one message, several, or something else, such as text.
        for item in [value] if hasattr(value, "DESCRIPTOR") else value if hasattr(value, "append") else ():
            if hasattr(item, "DESCRIPTOR"):
                yield item


def _check_names(client: Any, relation: Any) -> None:
    """Check that the expressions of a relation name columns of what it reads.

    Spark looks other names up at each call: as variables of the session, and as functions such as ``current_date``.
    """
    from pyspark.sql.connect.proto import Plan

    inner = list(_inner_messages(getattr(relation, relation.WhichOneof("rel_type"))))
    relations = [message for message in inner if _kind(message) == "Relation"]
    named = [message for part in inner if _kind(part) != "Relation" for message in _messages(part)]
    texts = [getattr(message, _TEXTS[_kind(message)]) for message in named if _kind(message) in _TEXTS]
    columns = {name.lower() for below in relations if texts for name in client.schema(Plan(root=below)).names}
    for text in texts:
        matched = _PLAIN_TEXT.fullmatch(text)
        words = re.findall(r"[A-Za-z_]\w*", matched[1].lower()) if matched else ["?"]
        if text.strip("`").lower() not in columns and not columns | _WORDS >= set(words):
            raise UnknownRowsError(f"it is not known what {text!r} means at each call")


def _is_parquet_read_of_connect(df: DataFrame) -> bool:
    relation = cast("Any", df)._plan.to_proto(cast("Any", df.sparkSession).client).root
    names = df.columns
    while relation.HasField("project"):
        for expression, name in zip(relation.project.expressions, names, strict=False):
            if expression.HasField("unresolved_star") and len(relation.project.expressions) == 1:
                break
            # A name with a dot that is not in quotes is that of a field in a struct.
            if expression.unresolved_attribute.unparsed_identifier not in (name, quote(name)):
                return False
        relation = relation.project.input
    source = relation.read.data_source
    folders = sorted(f"{path.rstrip('/')}/" for path in source.paths)
    are_apart = not any(inner.startswith(outer) for outer, inner in itertools.pairwise(folders))
    has_pattern = len(folders) > 1 and any(set(path) & set("*?[{") for path in folders)
    return bool(source.format.lower() == "parquet" and folders and are_apart and not has_pattern)


_INDEX = re.compile(r"Location: (\w+)")
_OWN_INDEXES = frozenset({"InMemoryFileIndex", "CatalogFileIndex"})


def _plain_parquet_reads_of_connect(df: DataFrame) -> Iterator[list[str]]:
    text = _explanation(df)
    if _has_own_indexes(text):
        yield df.inputFiles()
        if "InMemoryRelation" not in text:  # what is cached has no files
            return
    spark: Any = df.sparkSession
    for message in _messages(cast("Any", df)._plan.to_proto(spark.client).root):
        if _kind(message) == "Read.DataSource" and message.format.lower() == "parquet":
            for path in message.paths:
                # With an option of its own, so that Spark does not find the read in its cache.
                read = spark.read.option("sparkdl.reads", "files").parquet(path)
                if _has_own_indexes(_explanation(read)):
                    yield read.inputFiles()


def _explanation(df: DataFrame) -> str:
    return str(cast("Any", df)._explain_string(extended=True))


def _has_own_indexes(explanation: str) -> bool:
    """Whether all files of a plan are listed by Spark, and none by the log of a table."""
    indexes = set(_INDEX.findall(explanation))
    return bool(indexes) and indexes <= _OWN_INDEXES
