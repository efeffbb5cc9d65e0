from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import sparkdl
from sparkdl.tracking.model_code import DISTRIBUTION
from tests.packaging.building import ROOT, build_sdist, build_wheel, make_environment, run


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def python_wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without the extension, whose compilation takes more than a minute."""
    return build_wheel(sdist, tmp_path_factory.mktemp("python-wheel"), with_extension=False)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a user builds it for whose platform there is no released wheel."""
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow  # builds a distribution, as make release does before each release
def test_sdist_carries_the_estimators_once_and_as_files(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {"/".join(member.name.split("/")[1:]): member for member in archive.getmembers()}
    assert members["sparkdl/estimators/torch_estimator.py"].isfile()
    assert not [name for name in members if name.startswith("estimators")]


@pytest.mark.slow  # builds a distribution, as make release does before each release
def test_wheel_carries_the_estimators_as_files(python_wheel: Path) -> None:
    with zipfile.ZipFile(python_wheel) as archive:
        names = {info.filename: info for info in archive.infolist()}
    assert names["sparkdl/estimators/torch_estimator.py"].file_size > 1000
    assert "sparkdl/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "native/", "estimators/"))]


def metadata_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(metadata).decode().splitlines()


@pytest.mark.slow  # builds a distribution, as make release does before each release
def test_wheel_has_its_own_distribution_name_and_the_version_of_the_package(python_wheel: Path) -> None:
    lines = metadata_of(python_wheel)
    assert f"Name: {DISTRIBUTION}" in lines
    assert f"Version: {sparkdl.__version__}" in lines
    own = {line.split("[")[0] for line in lines if line.startswith("Requires-Dist: sparkdl")}
    assert own == {f"Requires-Dist: {DISTRIBUTION}"}, "extras that name others are of this package"


def test_wheel_requires_no_package_that_a_cluster_provides(python_wheel: Path) -> None:
    lines = metadata_of(python_wheel)
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required
    assert not [
        line for line in required if any(name in line for name in ("pyspark", "torch", "mlflow", "pandas"))
    ]


def test_package_index_takes_the_metadata(sdist: Path, python_wheel: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, python_wheel)
    classifiers = [line for line in metadata_of(python_wheel) if line.startswith("Classifier: ")]
    assert "Classifier: Programming Language :: Python :: 3.13" in classifiers


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_wheel_differs_from_the_python_wheel_only_by_the_extension(wheel: Path, python_wheel: Path) -> None:
    (extension,) = files_of(wheel) - files_of(python_wheel)
    assert extension.startswith("sparkdl/_native.")
    assert extension.endswith(".so")
    assert files_of(python_wheel) < files_of(wheel)


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel, and borrows only the wheel's dependencies."""
    return make_environment(tmp_path_factory.mktemp("clean") / "environment", "--no-index", wheel)


def files_of(wheel: Path) -> set[str]:
    """Names of the files of the package, without folders, which only some tools list."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name}


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_auditwheel_makes_a_manylinux_wheel_without_adding_libraries(wheel: Path, tmp_path: Path) -> None:
    run("auditwheel", "repair", "--wheel-dir", tmp_path, wheel)
    (path,) = tmp_path.glob("*.whl")
    assert "-manylinux_2_" in path.name
    assert files_of(path) == files_of(wheel), "no library had to be added"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_wheel_built_from_the_sdist_runs_ranks_in_a_clean_environment(
    clean_python: Path, tmp_path: Path
) -> None:
    where = run(
        clean_python, "-c", "import sparkdl._native; print(sparkdl._native.__file__)", cwd=tmp_path
    ).strip()
    assert Path(where).is_relative_to(clean_python.parents[1]), where
    (tmp_path / "reduce.py").write_text(
        "import numpy\n"
        "from sparkdl.collective import current_communicator\n"
        "array = numpy.ones(3)\n"
        "current_communicator().allreduce(array)\n"
        "print(array.tolist())\n"
    )
    printed = run(
        clean_python, "-m", "sparkdl.cli", "run", "-n", "2", "--", clean_python, "reduce.py", cwd=tmp_path
    )
    assert sorted(printed.splitlines()) == ["[rank 0] [2.0, 2.0, 2.0]", "[rank 1] [2.0, 2.0, 2.0]"]


@pytest.mark.slow  # the tests run in this environment, too
@pytest.mark.timeout(900)
def test_wheel_built_from_the_sdist_passes_the_unit_tests_in_a_clean_environment(
    clean_python: Path, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    run(
        clean_python,
        *("-m", "pytest", "-q", "-x", "--import-mode=importlib", "-o", "pythonpath=."),
        *("-m", "not slow", "tests/unit"),
        cwd=tmp_path,
        timeout_s=840,
        # mpi4py looks for the MPI library in its own environment.
        LD_LIBRARY_PATH=str(Path(sys.prefix) / "lib"),
    )
