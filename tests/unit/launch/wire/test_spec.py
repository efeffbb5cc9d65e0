from __future__ import annotations

import pickle

from sparkdl.launch.wire.spec import LaunchSpec, installed_versions, version_conflicts
from sparkdl.rendezvous.addresses import Address

DRIVER = {
    "python": "3.11",
    "sparkdl": "0.1.0",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "cloudpickle": "3.1.2",
}


def test_equal_versions_do_not_conflict() -> None:
    assert version_conflicts(DRIVER, DRIVER) == []


def test_patch_releases_and_builds_of_torch_may_differ() -> None:
    assert version_conflicts(DRIVER, {**DRIVER, "torch": "2.13.1+cu130", "numpy": "2.4.0"}) == []


def test_other_sparkdl_on_an_executor_is_named_with_both_versions() -> None:
    conflicts = version_conflicts(DRIVER, {**DRIVER, "sparkdl": "0.0.9"})
    assert conflicts == ["sparkdl is 0.1.0 on the driver and 0.0.9 on the executor"]


def test_package_that_only_the_driver_has_is_a_conflict() -> None:
    assert version_conflicts(DRIVER, {**DRIVER, "torch": "not installed"}) == [
        "torch is 2.13.0+cpu on the driver and not installed on the executor"
    ]


def test_package_that_only_an_executor_has_is_no_conflict() -> None:
    assert version_conflicts({**DRIVER, "torch": "not installed"}, DRIVER) == []


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
        mpi=False,
        environment=(),
        modules=(),
        versions=DRIVER,
        operation_timeout_s=1.0,
        start_timeout_s=1.0,
        hang_timeout_s=1.0,
        silence_timeout_s=1.0,
    )
    assert "secret" not in repr(spec)
    assert "function" not in repr(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
