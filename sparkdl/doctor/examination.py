"""Runs all checks in order: those of this machine and, if there is a session, of the cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkdl.collective import Deadline, new_secret
from sparkdl.cores import threads_of_local_rank, threads_of_task
from sparkdl.doctor.cluster_facts import look_at_executors
from sparkdl.doctor.finding import BAD, GOOD, NOTE, Finding
from sparkdl.doctor.machine_checks import judge_machine, judge_versions
from sparkdl.doctor.machine_facts import MachineFacts, look_around
from sparkdl.doctor.network import judge_network, survey_network
from sparkdl.errors import LaunchError, SparkdlError, count_of
from sparkdl.launch import check_cluster, run_on_local_ranks, run_on_ranks, wait_for_slots
from sparkdl.spark.failures import executor_python_problem, spark_words
from sparkdl.spark.jobs import jobs_of
from sparkdl.spark.session import is_connect, setting, task_cpus, threads_by_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = "this machine"
CLUSTER = "the cluster"

_TRANSFER_S = 0.3
_LOOK_S = 0.5
_EQUAL_LOOKS = 6
"""Number of polls without a new slot after which all executors count as registered; they register one by one."""

_RANKS_UNLESS_KNOWN = 2


def examine(
    spark: SparkSession | None = None,
    *,
    num_ranks: int | None = None,
    timeout_s: float = 60.0,
    on_step: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Check this machine and, with a session, every executor, and return the findings.

    Args:
        spark: classic or Connect session; None to check only this machine.
        num_ranks: number of ranks that are to run at once; None for the number of slots of the cluster, or for two if
            Spark does not report it or only this machine is checked.
        timeout_s: maximal seconds of each check of a cluster; a query to this machine takes at most a third of that.
        on_step: function that is called with the name of the next step.
    """
    report = on_step or (lambda _: None)
    report("Looking at this machine")
    here = look_around(timeout_s=timeout_s / 3)
    on_driver = (num_ranks or _RANKS_UNLESS_KNOWN) if spark is None else 0
    needs_java = True if spark is None or not is_connect(spark) else None
    threads = threads_of_local_rank(max(1, on_driver))
    findings = judge_machine(
        here, where=HERE, num_ranks=on_driver, num_threads=threads, needs_java=needs_java
    )
    if spark is None:
        num_ranks = num_ranks or _RANKS_UNLESS_KNOWN
        return findings + _survey_here(num_ranks, timeout_s, report)
    with jobs_of("doctor"):
        return findings + _examine_cluster(spark, num_ranks, here, timeout_s, report)


def _examine_cluster(
    spark: SparkSession,
    num_ranks: int | None,
    here: MachineFacts,
    timeout_s: float,
    report: Callable[[str], None],
) -> list[Finding]:
    report("Counting the slots of the cluster")
    slots, findings = _slots(spark, num_ranks, timeout_s)
    if not slots:
        return findings
    report("Looking at the executors")
    findings += _executors(spark, slots, here, timeout_s)
    if any(finding.status == BAD and finding.where == CLUSTER for finding in findings):
        return findings
    report("Measuring the network")
    has_gpus = any(finding.check == "NCCL" for finding in findings)  # which executors with GPUs have
    with jobs_of("measuring the network"):
        return findings + _survey_cluster(spark, slots, timeout_s, has_gpus)


def _survey_here(num_ranks: int, timeout_s: float, report: Callable[[str], None]) -> list[Finding]:
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    report(f"Starting {ranks}")
    try:
        surveys = run_on_local_ranks(
            survey_network,
            new_secret(),
            seconds=_TRANSFER_S,
            timeout_s=timeout_s,
            num_ranks=num_ranks,
            operation_timeout_s=timeout_s,
            on_log=lambda *_: None,  # notices about transports are part of the findings
        )
    except SparkdlError as error:
        return [_describe_failed_ranks(HERE, error)]
    text = f"{ranks} ran on this machine"
    names = dict.fromkeys(surveys[0]["host_of_rank"], HERE)
    return [Finding(check="ranks", where=HERE, status=GOOD, found=text), *judge_network(surveys, names)]


def _describe_failed_ranks(where: str, error: SparkdlError) -> Finding:
    first, _, rest = str(error).strip().partition("\n")
    last = rest.strip().splitlines()[-1] if rest.strip() else ""
    return Finding(
        check="ranks", where=where, status=BAD, found=f"{first} {last}".strip(), advice="See the message."
    )


def _slots(spark: SparkSession, num_ranks: int | None, timeout_s: float) -> tuple[int, list[Finding]]:
    slots = _final_slots(spark, num_ranks, timeout_s)
    wanted = num_ranks or slots or _RANKS_UNLESS_KNOWN
    try:
        check_cluster(spark, num_ranks=wanted, start_timeout_s=0.0)
    except SparkdlError as error:
        finding = Finding(check="slots", where=CLUSTER, status=BAD, found=str(error))
        is_dynamic = setting(spark, "spark.dynamicAllocation.enabled").lower() == "true"
        return (0 if is_dynamic or not slots else slots), [finding]
    said = f"not known over Spark Connect; {wanted} tasks are tried"
    if slots is not None:
        said = count_of(slots, "slot")
    version = f"Spark {spark.version}"
    return wanted, [Finding(check="slots", where=CLUSTER, status=GOOD, found=f"{said}, {version}")]


def _final_slots(spark: SparkSession, num_ranks: int | None, timeout_s: float) -> int | None:
    """Return the number of slots; None if Spark does not report it.

    Waits at most ``timeout_s``, until there are ``num_ranks`` slots or, if that is None, no more executors register.
    """
    if num_ranks is not None:
        return wait_for_slots(spark, num_ranks, timeout_s=timeout_s)
    deadline, pause = Deadline(timeout_s), threading.Event()
    slots, num_alike = wait_for_slots(spark, 1, timeout_s=timeout_s), 0
    while slots is not None and num_alike < _EQUAL_LOOKS and not deadline.expired:
        pause.wait(_LOOK_S)
        before, slots = slots, wait_for_slots(spark, 1, timeout_s=0.0)
        num_alike = num_alike + 1 if slots == before else 0
    return slots


def _executors(spark: SparkSession, slots: int, here: MachineFacts, timeout_s: float) -> list[Finding]:
    try:
        executors = look_at_executors(spark, slots, timeout_s=timeout_s)
    except LaunchError as error:
        advice = "Wait for the other jobs, ask for fewer ranks, or look at the executors' logs."
        return [Finding(check="executors", where=CLUSTER, status=BAD, found=str(error), advice=advice)]
    except Exception as error:
        problem = executor_python_problem(error, spark) or f"Spark could not run tasks: {spark_words(error)}"
        return [Finding(check="executors", where=CLUSTER, status=BAD, found=problem)]
    findings: list[Finding] = []
    chosen, cpus = threads_by_settings(spark), task_cpus(spark)
    hosts = [facts.host for facts, _ in executors]
    for number, (facts, _) in enumerate(executors):
        where = host = facts.host
        if hosts.count(host) > 1:
            where = f"{host} #{hosts[:number].count(host) + 1}"
        findings += judge_machine(
            facts,
            where=where,
            num_ranks=sum(num_tasks for other, num_tasks in executors if other.host == host),
            num_threads=threads_of_task(chosen, cpus, facts.cores),
            needs_java=False,
        )
        findings.append(judge_versions(here, facts, where=where))
    return findings


def _survey_cluster(spark: SparkSession, slots: int, timeout_s: float, has_gpus: bool) -> list[Finding]:
    heard: set[int] = set()
    options: dict[str, Any] = {"seconds": _TRANSFER_S, "timeout_s": timeout_s}
    try:
        surveys = run_on_ranks(
            _survey_and_report,
            new_secret(),
            **options,
            num_ranks=slots,
            spark=spark,
            start_timeout_s=timeout_s,
            operation_timeout_s=timeout_s,
            on_log=lambda *_: None,  # notices about transports are part of the findings
            on_event=lambda rank, _: heard.add(rank),
        )
    except SparkdlError as error:
        return [_describe_failed_ranks(CLUSTER, error)]
    names = {
        survey["host_of_rank"][rank]: survey["host"] for rank, survey in reversed(list(enumerate(surveys)))
    }
    if len(set(names.values())) < len(names):
        names = {host: f"{name} ({host})" for host, name in names.items()}
    text = f"{slots} ran on {count_of(len(names), 'host')}"
    findings = [Finding(check="ranks", where=CLUSTER, status=GOOD, found=text)]
    if not heard:
        advice = (
            "Log lines arrive with the result, progress not at all. Open the driver's ports to the executors."
        )
        text = "executors cannot reach it"
        findings.append(Finding(check="driver", where=CLUSTER, status=NOTE, found=text, advice=advice))
    return findings + judge_network(surveys, names, has_gpus=has_gpus)


def _survey_and_report(context: Any, secret: bytes, **options: Any) -> dict[str, Any]:
    """Report to the driver, survey the network, and return the survey with the host name. Runs on the *rank*."""
    import socket

    context.report({"here": context.rank})
    return {**survey_network(context, secret, **options), "host": socket.gethostname()}
