"""Machine facts for the tests of the doctor's findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparkdl.doctor.machine_facts import MachineFacts

GOOD_MACHINE = MachineFacts(
    host="node-1",
    python="3.11.7",
    executable="/opt/python",
    packages={
        "sparkdl": "0.1.0",
        "torch": "2.13.0",
        "numpy": "2.4.6",
        "cloudpickle": "3.1.2",
        "pyspark": "4.0.1",
        "pyarrow": "25.0.1",
        "petastorm": "0.12.1",
        "pandas": "2.3.3",
        "mlflow": "3.1.0",
    },
    java=(True, "17.0.15 at /usr/bin/java"),
    native=(True, "loaded"),
    cores=8,
    memory_bytes=64 << 30,
    shm_bytes=(32 << 30, 32 << 30),
    gpus=(),
    torch_cuda=(False, "not asked"),
    nccl=(False, "NCCL is not available"),
    mpi=(True, "MPICH 5.0"),
    torchvision=(True, "0.28.0"),
)


def machine(**changes: Any) -> MachineFacts:
    """The facts of a healthy machine, with changes."""
    return replace(GOOD_MACHINE, **changes)


def without(*packages: str, **others: str) -> dict[str, str]:
    """The packages of that machine without some, and with other versions of others."""
    kept = {name: version for name, version in GOOD_MACHINE.packages.items() if name not in packages}
    return {**kept, **others}
