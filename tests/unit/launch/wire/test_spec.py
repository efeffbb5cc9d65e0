from __future__ import annotations

import pickle

import pytest

from sparkdl.launch.wire.spec import HangLimits, LaunchSpec, installed_versions, version_conflicts
from sparkdl.rendezvous.addresses import Address

DRIVER = {
    "python": "3.11",
    "sparkdl": "0.1.0",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "cloudpickle": "3.1.2",
}


@pytest.mark.parametrize(
    ("driver", "executor", "conflicts"),
    [
        ({}, {}, []),
        ({}, {"torch": "2.13.1+cu130", "numpy": "2.4.0"}, []),
        ({}, {"sparkdl": "0.0.9"}, ["sparkdl is 0.1.0 on the driver and 0.0.9 on the executor"]),
        (
            {},
            {"torch": "not installed"},
            ["torch is 2.13.0+cpu on the driver and not installed on the executor"],
        ),
        ({"torch": "not installed"}, {}, []),
    ],
)
def test_packages_of_the_driver_conflict_with_other_releases_but_not_with_patches_or_builds(
    driver: dict[str, str], executor: dict[str, str], conflicts: list[str]
) -> None:
    assert version_conflicts({**DRIVER, **driver}, {**DRIVER, **executor}) == conflicts


def test_versions_of_this_process_are_found_without_importing() -> None:
    assert installed_versions()["numpy"][0].isdigit()


def test_secret_and_payload_stay_out_of_the_specs_text() -> None:
    spec = LaunchSpec(
        job="job",
        num_ranks=2,
        secret=b"very secret",
        payload=b"function",
        driver=Address(("127.0.0.1",), 1),
        transport="auto",
        wire="float32",
        gpus_per_rank=0,
        num_threads=None,
        mpi=False,
        environment=(),
        modules=(),
        versions=DRIVER,
        start_timeout_s=1.0,
        limits=HangLimits(hang_timeout_s=1.0, operation_timeout_s=1.0, silence_timeout_s=1.0),
    )
    assert "secret" not in repr(spec)
    assert "function" not in repr(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
