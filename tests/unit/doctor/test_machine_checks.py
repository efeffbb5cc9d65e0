"""The doctor's findings about a machine, given its facts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from sparkdl.doctor.finding import BAD, GOOD, NOTE, Finding, is_healthy
from sparkdl.doctor.machine_checks import judge_machine, judge_versions
from sparkdl.doctor.machine_facts import MachineFacts
from sparkdl.host_memory import in_bytes
from tests.unit.doctor.machines import GOOD_MACHINE, machine, without


def judged(facts: MachineFacts, *, num_ranks: int = 2, num_threads: int = 1) -> dict[str, Finding]:
    findings = judge_machine(
        facts, where="node-1", num_ranks=num_ranks, num_threads=num_threads, needs_java=True
    )
    assert all(finding.where == "node-1" for finding in findings)
    assert all(finding.advice for finding in findings if finding.status != GOOD), "it says how to fix it"
    return {finding.check: finding for finding in findings}


def test_healthy_machine_has_only_good_findings() -> None:
    findings = judged(GOOD_MACHINE)
    assert {finding.status for finding in findings.values()} == {GOOD}
    assert is_healthy(findings.values())


@pytest.mark.parametrize(
    ("facts", "check", "status", "found", "advice"),
    [
        (machine(python="3.9.1"), "Python", BAD, "3.9.1", "3.10 or later"),
        (machine(java=(False, "java: No such file or directory")), "Java", BAD, "none", "Install Java 17"),
        (machine(java=(True, "11.0.2 at /x")), "Java", BAD, "too old for pyspark 4.0.1", "Java 17"),
        (machine(packages=without("torch")), "packages", BAD, "missing: torch", "pip install torch"),
        (machine(packages=without("mlflow")), "packages", NOTE, "not tracked", "pip install mlflow"),
        (machine(native=(False, "GLIBC_2.34 not found")), "native core", BAD, "GLIBC_2.34", "wheel"),
        (machine(shm_bytes=None), "shared memory", NOTE, "no /dev/shm", "shm-size"),
        (
            machine(shm_bytes=(64 << 10, 64 << 10)),
            "shared memory",
            NOTE,
            "64.0 KiB free.*will use TCP",
            "shm-size",
        ),
        (
            machine(mpi=(False, "no module mpi4py")),
            "MPI",
            NOTE,
            "no module mpi4py",
            "pip install mpi4py mpich",
        ),
        (machine(gpus=("H100",)), "GPUs", BAD, "torch cannot use them", "built for CUDA"),
        (machine(gpus=("H100",), torch_cuda=(True, "none")), "GPUs", BAD, "cannot use them: none", "CUDA"),
        (machine(gpus=("H100", "H100")), "NCCL", BAD, "not to be loaded", "nvidia-nccl-cu12"),
        (
            machine(torchvision=(False, "0.28.0, beside torch 2.13.0+cpu: libc10_cuda.so: cannot open")),
            "torchvision",
            NOTE,
            r"cannot be loaded: 0.28.0, beside torch 2.13.0\+cpu.*another version or build of torch",
            "pip install torch torchvision --index-url",
        ),
    ],
)
def test_finding_about_a_fault_says_how_to_fix_it(
    facts: MachineFacts, check: str, status: str, found: str, advice: str
) -> None:
    finding = judged(facts)[check]
    assert finding.status == status
    assert re.search(found, finding.found), finding.found
    assert re.search(advice, finding.advice), finding.advice
    assert is_healthy([finding]) == (status != BAD)


def test_threads_of_the_ranks_are_said_and_too_many_are_noted() -> None:
    few = judged(machine(cores=8), num_threads=4)["threads"]
    assert (few.status, few.found) == (GOOD, "4 threads for each of 2 ranks, and 8 cores")
    assert judged(machine(cores=4), num_threads=4)["threads"].status == NOTE
    assert "threads" not in judged(machine(), num_ranks=0)


def test_java_8_is_enough_for_spark_3() -> None:
    old = machine(packages=without(pyspark="3.5.1"), java=(True, "1.8.0_402 at /usr/bin/java"))
    assert judged(old)["Java"].status == GOOD
    assert judged(machine(java=(True, "1.8.0_402 at /usr/bin/java")))["Java"].status == BAD


def test_java_of_an_executor_is_a_note_and_no_failure():
    for java in ((False, "No such file"), (True, "1.8.0_402 at /usr/bin/java")):
        (found,) = (
            finding
            for finding in judge_machine(
                machine(java=java), where="node-1", num_ranks=2, num_threads=1, needs_java=False
            )
            if finding.check == "Java"
        )
        assert found.status == NOTE
    unasked = judge_machine(machine(), where="client", num_ranks=2, num_threads=1, needs_java=None)
    assert "Java" not in [finding.check for finding in unasked]


def test_torchvision_that_is_not_installed_gives_no_finding() -> None:
    assert "torchvision" not in judged(machine(torchvision=None))


def test_gpus_that_torch_and_nccl_can_use_are_fine() -> None:
    findings = judged(
        machine(gpus=("H100, 80 GB",) * 8, torch_cuda=(True, "12.8"), nccl=(True, "2.27.6 from x"))
    )
    assert findings["GPUs"].status == findings["NCCL"].status == GOOD
    assert findings["GPUs"].found.startswith("8: H100, 80 GB; torch is built for CUDA 12.8")


def test_one_rank_needs_no_shared_memory() -> None:
    assert judged(machine(shm_bytes=(1024, 1024)), num_ranks=1)["shared memory"].status == GOOD


def test_versions_that_do_not_go_together_are_named() -> None:
    other = machine(python="3.12.1", packages=without("torch", numpy="1.26.4"))
    finding = judge_versions(GOOD_MACHINE, other, where="node-2")
    assert finding.status == BAD
    differences = (
        r"python is 3\.11 .* 3\.12 .*torch is 2\.13\.0 .* not installed .*numpy is 2\.4\.6 .* 1\.26\.4"
    )
    assert re.search(differences, finding.found), finding.found
    assert judge_versions(GOOD_MACHINE, GOOD_MACHINE, where="node-2").status == GOOD


def test_facts_survive_json() -> None:
    facts = machine(gpus=("H100", "H100"))
    assert MachineFacts.from_fields(json.loads(json.dumps(asdict(facts)))) == facts


def test_sizes_are_readable() -> None:
    sizes = [in_bytes(n) for n in (12, 65536, 64 << 20, 24 << 30, 3 << 40)]
    assert sizes == ["12 B", "64.0 KiB", "64.0 MiB", "24.0 GiB", "3.0 TiB"]
