from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=500, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "sparkdl, sparkdl.collective, sparkdl.cli.demo, sparkdl.cli.run, sparkdl.runner, sparkdl.doctor.command, "
            "sparkdl.jobs.command, sparkdl.monitor.top, sparkdl.planner.command, sparkdl.bench.fit, sparkdl.bench.step",
            {"torch", "pyspark", "mlflow"},
        ),
        ("sparkdl.launch", {"torch"}),
    ],
)
def test_import_brings_neither_torch_nor_pyspark(modules: str, absent: set[str]) -> None:
    run_python(f"import sys, {modules}; assert not {absent} & sys.modules.keys()")


def test_completion_lists_the_public_names_of_packages_that_load_them_on_first_use() -> None:
    files = [
        path.parent.relative_to(ROOT)
        for path in ROOT.glob("sparkdl/**/__init__.py")
        if "__getattr__" in path.read_text()
    ]
    packages = sorted({".".join(folder.parts) for folder in files} | {"sparkdl.estimators"})
    assert {"sparkdl", "sparkdl.data", "sparkdl.horovod", "sparkdl.runner"} <= set(packages)
    run_python(
        "import importlib\n"
        f"for name in {packages}:\n"
        "    package = importlib.import_module(name)\n"
        "    missing = set(package.__all__) - set(dir(package))\n"
        "    assert not missing, (name, missing)\n"
        "    assert '__doc__' in dir(package) and package.__all__, name\n"
    )


def test_serving_needs_neither_pyspark_nor_petastorm_nor_the_extension() -> None:
    hidden = "('pyspark', 'petastorm', 'mlflow', 'mpi4py', 'sparkdl._native')"
    run_python(f"import sys; sys.modules.update(dict.fromkeys({hidden})); import sparkdl.model.served_model")


def test_stub_equals_the_generated_stub_of_the_extension(tmp_path: Path) -> None:
    generated = tmp_path / "_native.pyi"
    run_python(
        "import sys, runpy;"
        f"sys.argv = ['stubgen', '-q', '-m', 'sparkdl._native', '-o', {str(generated)!r}];"
        "runpy.run_module('nanobind.stubgen', run_name='__main__')"
    )
    assert generated.read_text() == (ROOT / "sparkdl" / "_native.pyi").read_text()
