"""Judges the facts about one machine. Makes no queries, except to the native core for the size of shared memory."""

from __future__ import annotations

from sparkdl.cores import in_threads
from sparkdl.doctor.finding import BAD, GOOD, NOTE, Finding
from sparkdl.doctor.machine_facts import MachineFacts
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
    return [
        _python(facts, where),
        *_threads(facts, where, num_ranks, num_threads),
        *([] if needs_java is None else [_java(facts, where, needs_java)]),
        _packages(facts, where),
        *_torchvision(facts, where),
        _native_core(facts, where),
        _shared_memory(facts, where, num_ranks),
        *_gpus(facts, where),
        _mpi(facts, where),
    ]


def judge_versions(here: MachineFacts, there: MachineFacts, *, where: str) -> Finding:
    """Return the finding on whether driver and machine have versions that can unpickle each other's objects."""
    conflicts = version_conflicts(_compared(here), _compared(there))
    if not conflicts:
        return Finding(check="versions", where=where, status=GOOD, found="go with those of the driver")
    return Finding(
        check="versions",
        where=where,
        status=BAD,
        found="; ".join(conflicts),
        advice="Install the same versions on both: what is pickled on the driver is unpickled there.",
    )


def _compared(facts: MachineFacts) -> dict[str, str]:
    packages = {name: facts.packages.get(name, "not installed") for name in COMPARED_PACKAGES}
    return {"python": ".".join(facts.python.split(".")[:2]), **packages}


def _python(facts: MachineFacts, where: str) -> Finding:
    is_old = tuple(map(int, facts.python.split(".")[:2])) < _OLDEST_PYTHON
    return Finding(
        check="Python",
        where=where,
        status=BAD if is_old else GOOD,
        found=f"{facts.python} at {facts.executable}; {facts.cores} cores, {in_bytes(facts.memory_bytes)} memory",
        advice=f"Use Python {'.'.join(map(str, _OLDEST_PYTHON))} or later." if is_old else "",
    )


def _threads(facts: MachineFacts, where: str, num_ranks: int, num_threads: int) -> list[Finding]:
    if not num_ranks:
        return []
    ranks = "1 rank" if num_ranks == 1 else f"each of {num_ranks} ranks"
    text = f"{in_threads(num_threads)} for {ranks}, and {facts.cores} core{'s' if facts.cores > 1 else ''}"
    if num_ranks * num_threads > facts.cores and num_threads > 1:
        advice = "Lower threadsPerWorker, OMP_NUM_THREADS or spark.task.cpus: threads that wait for cores are slow."
        return [Finding(check="threads", where=where, status=NOTE, found=text, advice=advice)]
    return [Finding(check="threads", where=where, status=GOOD, found=text)]


def _java(facts: MachineFacts, where: str, is_needed: bool) -> Finding:
    is_there, said = facts.java
    spark = facts.packages.get("pyspark", "4")
    oldest = _JAVA_OF_SPARK.get(int(spark.split(".")[0]), 17)
    advice = (
        f"Install Java {oldest} or later (apt-get install openjdk-17-jre-headless), or set JAVA_HOME to one."
    )
    if not is_there and not is_needed:
        return Finding(check="Java", where=where, status=NOTE, found="the executor's is not on its PATH")
    if not is_there:
        return Finding(check="Java", where=where, status=BAD, found=f"none: {said}", advice=advice)
    numbers = [int(part) for part in said.split(" ")[0].replace("-", ".").split(".") if part.isdigit()]
    major = numbers[1] if numbers[:1] == [1] and len(numbers) > 1 else numbers[0] if numbers else 0
    if major < oldest:
        return Finding(
            check="Java",
            where=where,
            status=BAD if is_needed else NOTE,
            found=f"{said}, too old for pyspark {spark}",
            advice=advice,
        )
    return Finding(check="Java", where=where, status=GOOD, found=said)


def _packages(facts: MachineFacts, where: str) -> Finding:
    missing = [package for package in _WANTED if package not in facts.packages]
    text = ", ".join(f"{package} {version}" for package, version in facts.packages.items())
    if not missing:
        return Finding(check="packages", where=where, status=GOOD, found=text)
    needed = [package for package in missing if package not in _MAY_BE_MISSING]
    why = [f"{package}: {_MAY_BE_MISSING[package]}" for package in missing if package in _MAY_BE_MISSING]
    notes = f" ({'; '.join(why)})" if why else ""
    return Finding(
        check="packages",
        where=where,
        status=BAD if needed else NOTE,
        found=f"{text}; missing: {', '.join(missing)}{notes}",
        advice=f"pip install {' '.join(_WANTED[package] for package in missing)}",
    )


def _torchvision(facts: MachineFacts, where: str) -> list[Finding]:
    if facts.torchvision is None:
        return []
    is_loaded, said = facts.torchvision
    if is_loaded:
        return [Finding(check="torchvision", where=where, status=GOOD, found=said)]
    return [
        Finding(
            check="torchvision",
            where=where,
            status=NOTE,
            found=f"its operators cannot be loaded: {said}. It is built for another version or build of torch. Its "
            "operators fail, and where the environment does not declare them, so does importing it, timm, torchmetrics "
            "and lightning",
            advice="Install torch and torchvision of one source: both of PyPI (pip install torch torchvision), or both "
            "for CPUs (pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu). Or uninstall "
            "torchvision, if nothing needs it.",
        )
    ]


def _native_core(facts: MachineFacts, where: str) -> Finding:
    is_there, said = facts.native
    return Finding(
        check="native core",
        where=where,
        status=GOOD if is_there else BAD,
        found=said,
        advice="" if is_there else "Install sparkdl from a wheel for this machine, or build it: make setup.",
    )


def _shared_memory(facts: MachineFacts, where: str, num_ranks: int) -> Finding:
    needed = _segment_bytes(num_ranks)
    advice = (
        f"Give it {in_bytes(needed)} at least, and as much again as a model's gradients take: docker run "
        "--shm-size=2g, an emptyDir of medium Memory on Kubernetes, or mount -o remount,size=2g /dev/shm."
    )
    slower = (
        f"; {num_ranks} ranks need {in_bytes(needed)}, and will use TCP among themselves, which is slower"
    )
    if facts.shm_bytes is None:
        text = f"no /dev/shm{slower if needed else ''}"
        return Finding(check="shared memory", where=where, status=NOTE, found=text, advice=advice)
    total, free = facts.shm_bytes
    text = f"{FOLDER} has {in_bytes(free)} free of {in_bytes(total)}"
    if free < needed:
        return Finding(check="shared memory", where=where, status=NOTE, found=text + slower, advice=advice)
    return Finding(check="shared memory", where=where, status=GOOD, found=text)


def _segment_bytes(num_ranks: int) -> int:
    """Return the bytes that the ranks of a host share; 0 without the native core, which is a finding of its own."""
    if num_ranks < 2:
        return 0
    try:
        from sparkdl import _native
    except ImportError:
        return 0
    return _native.segment_bytes(num_ranks)


def _gpus(facts: MachineFacts, where: str) -> list[Finding]:
    has_nccl, nccl = facts.nccl
    if not facts.gpus:
        return [Finding(check="GPUs", where=where, status=GOOD, found="none; ranks train on CPUs")]
    is_built, cuda = facts.torch_cuda
    usable = is_built and cuda != "none"
    about_torch = f"torch is built for CUDA {cuda}" if usable else f"torch cannot use them: {cuda}"
    return [
        Finding(
            check="GPUs",
            where=where,
            status=GOOD if usable else BAD,
            found=f"{len(facts.gpus)}: {'; '.join(dict.fromkeys(facts.gpus))}; {about_torch}",
            advice=""
            if usable
            else "Install a torch built for CUDA (https://pytorch.org/get-started/locally).",
        ),
        Finding(
            check="NCCL",
            where=where,
            status=GOOD if has_nccl else BAD,
            found=nccl if has_nccl else f"not to be loaded: {nccl}",
            advice=""
            if has_nccl
            else "pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for a driver of CUDA 13), or name a library in "
            "SPARKDL_NCCL_LIBRARY.",
        ),
    ]


def _mpi(facts: MachineFacts, where: str) -> Finding:
    is_there, said = facts.mpi
    return Finding(
        check="MPI",
        where=where,
        status=GOOD if is_there else NOTE,
        found=said if is_there else f"none, so transport='mpi' will not work: {said}",
        advice="" if is_there else "Needed for transport='mpi' alone: pip install mpi4py mpich",
    )
