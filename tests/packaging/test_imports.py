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
