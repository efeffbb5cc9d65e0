from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.cores import (
    THREADS,
    chosen_threads,
    thread_variables,
    threads_of_local_rank,
    threads_of_task,
    usable_cores,
)
from sparkdl.launch.rank.environment import rank_environment

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv(THREADS, raising=False)


def process(folder: Path, *, groups: str, mounts: str) -> Path:
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_least_quota_of_nested_cgroups_v2_counts(tmp_path: Path, many_cores: None) -> None:
    top = tmp_path / "sys"
    group(top, cpu__max="max 100000\n")
    group(top / "kube pods" / "one", cpu__max="350000 100000\n")
    group(top / "kube pods", cpu__max="800000 100000\n")
    proc = process(
        tmp_path, groups="0::/kube pods/one/main\n", mounts=f"30 20 0:1 / {top} rw - cgroup2 cgroup2 rw\n"
    )
    assert usable_cores(proc) == 3
    group(top / "kube pods", cpu__max="50000 100000\n")
    assert usable_cores(proc) == 1


def test_a_quota_of_cgroups_v1_counts_beside_the_other_controllers(tmp_path: Path, many_cores: None) -> None:
    top = tmp_path / "cpu,cpuacct"
    group(top, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    group(top / "spark", cpu__cfs_quota_us="100000\n", cpu__cfs_period_us="50000\n")
    group(tmp_path / "cpuset" / "spark", cpu__cfs_quota_us="1\n", cpu__cfs_period_us="1\n")
    proc = process(
        tmp_path,
        groups="5:cpuset:/spark\n4:cpu,cpuacct:/spark/worker\n0::/elsewhere\n",
        mounts=f"31 20 0:1 / {tmp_path}/cpuset rw - cgroup cgroup rw,cpuset\n"
        f"30 20 0:2 / {top} rw shared:3 - cgroup cgroup rw,cpu,cpuacct\n",
    )
    assert usable_cores(proc) == 2


def test_a_container_whose_own_cgroup_is_mounted_has_the_quota_of_that(
    tmp_path: Path, many_cores: None
) -> None:
    top = tmp_path / "sys"
    group(top, cpu__cfs_quota_us="400000\n", cpu__cfs_period_us="100000\n")
    mounts = f"30 20 0:2 /docker/abc {top} rw - cgroup cgroup rw,cpu\n"
    assert usable_cores(process(tmp_path, groups="4:cpu:/docker/abc\n", mounts=mounts)) == 4
    assert usable_cores(process(tmp_path, groups="4:cpu:/somewhere/else\n", mounts=mounts)) == 4


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == CORES
    assert 1 <= usable_cores() <= CORES


def test_threads_are_those_of_the_slot_within_the_cores_unless_the_user_chose(many_cores: None) -> None:
    assert [threads_of_task(None, cpus, 4) for cpus in (1, 3, 9)] == [1, 3, 4]
    assert threads_of_task(8, 1, 4) == 8


def test_local_ranks_share_the_cores_unless_the_user_chose(
    many_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = usable_cores() // 3
    assert threads_of_local_rank(3) == max(1, share)
    assert threads_of_local_rank(1000) == 1
    monkeypatch.setenv(THREADS, "5,2")
    assert threads_of_local_rank(3) == 5


@given(st.one_of(st.text(alphabet="0123456789,- x", max_size=6), st.integers(1, 99).map(str)))
def test_any_text_of_omp_num_threads_is_a_number_or_none(text: str) -> None:
    chosen = chosen_threads({THREADS: text})
    assert chosen is None or (chosen > 0 and int(text.split(",", maxsplit=1)[0]) == chosen)


def test_a_users_variables_precede_those_of_the_slot_and_these_those_of_the_worker() -> None:
    of_worker = {"OMP_NUM_THREADS": "7", "RAYON_NUM_THREADS": "1"}  # Spark and scoring tasks set them
    variables = rank_environment({}, gpus=None, num_threads=2, inherited=of_worker)
    assert {name: variables[name] for name in thread_variables(1)} == thread_variables(2)
    assert rank_environment({THREADS: "4"}, gpus=None, num_threads=2, inherited={})[THREADS] == "4"
