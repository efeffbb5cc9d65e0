from __future__ import annotations

import sys

import pytest

from sparkdl.errors import JobFileError
from sparkdl.jobs.imports import checksums, code_files, importable, loggable
from tests.unit.jobs.job_files import JOB, read


def test_modules_beside_the_job_that_it_imports_are_its_code(tmp_path):
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "__init__.py").touch()
    (tmp_path / "unused.py").touch()
    job = read(tmp_path, "loss=losses.soft:soft_loss", "params.metrics={m: 'torch.nn:L1Loss'}")
    assert code_files(job) == [tmp_path / "my_nets.py", tmp_path / "losses"]


def test_code_paths_are_relative_to_the_job_file(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "shared.zip").touch()
    job = read(tmp_path, "code=lib/shared.zip")
    assert code_files(job) == [tmp_path / "lib" / "shared.zip", tmp_path / "my_nets.py"]
    assert loggable(code_files(job)) == [tmp_path / "my_nets.py"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py", "does not exist. Paths are relative to the job's file"),
        ("job.yaml", "is not a .*.py, "),
    ],
)
def test_invalid_code_paths_are_named(tmp_path, name, message):
    with pytest.raises(JobFileError, match=message):
        code_files(read(tmp_path, f"code=[{name}]"))


def test_two_files_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared.py").touch()
    with pytest.raises(
        JobFileError, match=r"a/shared.py and .*b/shared.py are both code .* Rename one of them"
    ):
        code_files(read(tmp_path, "code=[a/shared.py, b/shared.py]"))
    job = read(tmp_path, "code=[my_nets.py, a/shared.py, a/../a/shared.py]")
    assert code_files(job) == [tmp_path / "my_nets.py", tmp_path / "a" / "shared.py"]


def test_another_version_of_the_code_has_another_digest(tmp_path):
    job = read(tmp_path)
    folder = tmp_path / "losses"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    files = [*code_files(job), folder]
    before = checksums(files)
    assert checksums(files) == before
    (folder / "a.py").write_text("x = 2\n")
    after = checksums(files)
    assert after["my_nets.py"] == before["my_nets.py"]
    assert after["losses"] != before["losses"]
    (folder / "a.py").rename(folder / "b.py")
    moved = checksums(files)
    assert moved["losses"] not in (before["losses"], after["losses"])
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "b.pyc").write_bytes(b"compiled")
    assert checksums(files) == moved
    (folder / "names.json").write_text("[1]")
    assert checksums(files)["losses"] != moved["losses"]


def test_code_of_the_job_precedes_installed_packages_only_inside_the_block(tmp_path):
    before = list(sys.path)
    with importable(code_files(read(tmp_path, text=JOB))):
        assert sys.path == [str(tmp_path), *before]
    assert sys.path == before
