"""Judges the facts about one machine. Makes no queries, except to the native core for the size of shared memory."""

from __future__ import annotations

from sparkdl.doctor.finding import BAD, GOOD, NOTE, Finding
from sparkdl.doctor.machine_facts import MachineFacts
from sparkdl.errors import count_of
from sparkdl.host_memory import in_bytes
from sparkdl.launch.wire.spec import COMPARED_PACKAGES, version_conflicts
from sparkdl.rendezvous.hosts import FOLDER

_OLDEST_PYTHON = (3, 10)
_JAVA_OF_SPARK = {3: 8, 4: 17}
"""Oldest supported Java, by major version of Spark."""

_WANTED = {
    "torch": "torch",
    "pyarrow": "pyarrow",
    "pandas": "pandas",
    "petastorm": "petastorm==0.12.1",
    "pyspark": "pyspark",
    "mlflow": "mlflow",
}
"""Requirement for pip to install a missing package, by name of the package."""

_MAY_BE_MISSING = {
    "mlflow": "fits are not tracked",
    "pyspark": "without it there are only local ranks",
}

_Verdict = tuple[str, str, str]
"""Status, what was found, and advice."""


def judge_machine(
    facts: MachineFacts, *, where: str, num_ranks: int, num_threads: int, needs_java: bool | None
) -> list[Finding]:
    """Return the findings about a machine.

    Args:
        facts: facts about the machine.
        where: name of the machine in the findings.
        num_ranks: number of ranks that are to run on the machine.
        num_threads: number of threads of each of these ranks.
        needs_java: whether the machine starts Spark itself, so that missing Java is bad. If False, it is an executor,
            whose Java is reported but never bad, as it already runs. None leaves Java out.
    """
    verdicts = {
        "Python": _python(facts),
        "threads": _threads(facts, num_ranks, num_threads) if num_ranks else None,
        "Java": None if needs_java is None else _java(facts, needs_java),
        "packages": _packages(facts),
        "torchvision": None if facts.torchvision is None else _torchvision(*facts.torchvision),
        "native core": _native_core(*facts.native),
        "shared memory": _shared_memory(facts, num_ranks),
        "GPUs": _gpus(facts),
        "NCCL": _nccl(*facts.nccl) if facts.gpus else None,
        "MPI": _mpi(*facts.mpi),
    }
    return [
        Finding(check=check, where=where, status=verdict[0], found=verdict[1], advice=verdict[2])
        for check, verdict in verdicts.items()
        if verdict is not None
    ]


def judge_versions(here: MachineFacts, there: MachineFacts, *, where: str) -> Finding:
    """Return the finding on whether driver and machine have versions that can unpickle each other's objects."""
    on_driver, on_executor = (
        {
            "python": ".".join(facts.python.split(".")[:2]),
            **{name: facts.packages.get(name, "not installed") for name in COMPARED_PACKAGES},
        }
        for facts in (here, there)
    )
    conflicts = version_conflicts(on_driver, on_executor)
    if not conflicts:
        return Finding(check="versions", where=where, status=GOOD, found="go with those of the driver")
    return Finding(
        check="versions",
        where=where,
        status=BAD,
        found="; ".join(conflicts),
        advice="Install the same versions on both: what is pickled on the driver is unpickled there.",
    )


def _python(facts: MachineFacts) -> _Verdict:
    text = f"{facts.python} at {facts.executable}; {facts.cores} cores, {in_bytes(facts.memory_bytes)} memory"
    if tuple(map(int, facts.python.split(".")[:2])) < _OLDEST_PYTHON:
        return BAD, text, f"Use Python {'.'.join(map(str, _OLDEST_PYTHON))} or later."
    return GOOD, text, ""


def _threads(facts: MachineFacts, num_ranks: int, num_threads: int) -> _Verdict:
    ranks = "1 rank" if num_ranks == 1 else f"each of {num_ranks} ranks"
    text = f"{count_of(num_threads, 'thread')} for {ranks}, and {count_of(facts.cores, 'core')}"
    if num_ranks * num_threads > facts.cores and num_threads > 1:
        advice = "Lower threadsPerWorker, OMP_NUM_THREADS or spark.task.cpus: threads that wait for cores are slow."
        return NOTE, text, advice
    return GOOD, text, ""


def _java(facts: MachineFacts, is_needed: bool) -> _Verdict:
    is_there, said = facts.java
    spark = facts.packages.get("pyspark", "4")
    oldest = _JAVA_OF_SPARK.get(int(spark.split(".")[0]), 17)
    advice = (
        f"Install Java {oldest} or later (apt-get install openjdk-17-jre-headless), or set JAVA_HOME to one."
    )
    if not is_there:
        return (
            (BAD, f"none: {said}", advice) if is_needed else (NOTE, "the executor's is not on its PATH", "")
        )
    numbers = [int(part) for part in said.split(" ")[0].replace("-", ".").split(".") if part.isdigit()]
    major = numbers[1] if numbers[:1] == [1] and len(numbers) > 1 else numbers[0] if numbers else 0
    if major < oldest:
        return BAD if is_needed else NOTE, f"{said}, too old for pyspark {spark}", advice
    return GOOD, said, ""


def _packages(facts: MachineFacts) -> _Verdict:
    missing = [package for package in _WANTED if package not in facts.packages]
    text = ", ".join(f"{package} {version}" for package, version in facts.packages.items())
    if not missing:
        return GOOD, text, ""
    why = [f"{package}: {_MAY_BE_MISSING[package]}" for package in missing if package in _MAY_BE_MISSING]
    notes = f" ({'; '.join(why)})" if why else ""
    return (
        NOTE if len(why) == len(missing) else BAD,
        f"{text}; missing: {', '.join(missing)}{notes}",
        f"pip install {' '.join(_WANTED[package] for package in missing)}",
    )


def _torchvision(is_loaded: bool, said: str) -> _Verdict:
    if is_loaded:
        return GOOD, said, ""
    return (
        NOTE,
        f"its operators cannot be loaded: {said}. It is built for another version or build of torch. Its operators "
        "fail, and where the environment does not declare them, so does importing it, timm, torchmetrics and lightning",
        "Install torch and torchvision of one source: both of PyPI (pip install torch torchvision), or both for CPUs "
        "(pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu). Or uninstall torchvision, "
        "if nothing needs it.",
    )


def _native_core(is_there: bool, said: str) -> _Verdict:
    if is_there:
        return GOOD, said, ""
    return BAD, said, "Install sparkdl from a wheel for this machine, or build it: make setup."


def _shared_memory(facts: MachineFacts, num_ranks: int) -> _Verdict:
    needed = _segment_bytes(num_ranks)
    advice = (
        f"Give it {in_bytes(needed)} at least, and as much again as a model's gradients take: docker run "
        "--shm-size=2g, an emptyDir of medium Memory on Kubernetes, or mount -o remount,size=2g /dev/shm."
    )
    slower = (
        f"; {num_ranks} ranks need {in_bytes(needed)}, and will use TCP among themselves, which is slower"
    )
    if facts.shm_bytes is None:
        return NOTE, f"no /dev/shm{slower if needed else ''}", advice
    total, free = facts.shm_bytes
    text = f"{FOLDER} has {in_bytes(free)} free of {in_bytes(total)}"
    return (NOTE, text + slower, advice) if free < needed else (GOOD, text, "")


def _segment_bytes(num_ranks: int) -> int:
    """Return the bytes that the ranks of a host share; 0 without the native core, which is a finding of its own."""
    if num_ranks < 2:
        return 0
    try:
        from sparkdl import _native
    except ImportError:
        return 0
    return _native.segment_bytes(num_ranks)


def _gpus(facts: MachineFacts) -> _Verdict:
    if not facts.gpus:
        return GOOD, "none; ranks train on CPUs", ""
    is_built, cuda = facts.torch_cuda
    gpus = f"{len(facts.gpus)}: {'; '.join(dict.fromkeys(facts.gpus))}"
    if is_built and cuda != "none":
        return GOOD, f"{gpus}; torch is built for CUDA {cuda}", ""
    advice = "Install a torch built for CUDA (https://pytorch.org/get-started/locally)."
    return BAD, f"{gpus}; torch cannot use them: {cuda}", advice


def _nccl(is_there: bool, said: str) -> _Verdict:
    if is_there:
        return GOOD, said, ""
    advice = (
        "pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for a driver of CUDA 13), or name a library in "
        "SPARKDL_NCCL_LIBRARY."
    )
    return BAD, f"not to be loaded: {said}", advice


def _mpi(is_there: bool, said: str) -> _Verdict:
    if is_there:
        return GOOD, said, ""
    advice = "Needed for transport='mpi' alone: pip install mpi4py mpich"
    return NOTE, f"none, so transport='mpi' will not work: {said}", advice
