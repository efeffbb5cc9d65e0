"""Builds the release artifacts, the sdist and the wheel made from it, and environments to install packages into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path = ROOT, timeout_s: float = 420, **variables: str) -> str:
    """Run a program with this Python first on the path; return its output."""
    # Tests with Spark set PYTHONPATH, which would make this checkout importable in every environment.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **variables,
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build_sdist(folder: Path) -> Path:
    """Build the sdist into a folder."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder)
    (path,) = folder.glob("*.tar.gz")
    return path


def build_wheel(sdist: Path, folder: Path, *, with_extension: bool = True) -> Path:
    """Build the wheel of an sdist into a folder; without the extension it takes seconds instead of minutes."""
    shutil.unpack_archive(sdist, folder)
    (source,) = folder.glob("sparkdl_torch-*")
    options = () if with_extension else ("-Cwheel.cmake=false", "-Cwheel.platlib=true")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", *options, "--outdir", folder, source)
    (path,) = folder.glob("*.whl")
    return path


def make_environment(
    folder: Path, *install: str | Path, has_pth_files: bool = False, **variables: str
) -> Path:
    """Make an environment that borrows the packages of this one, and install others, which precede those.

    Args:
        folder: folder of the environment, which does not exist.
        install: arguments of ``pip install``; dependencies are not installed.
        has_pth_files: whether the .pth files of this environment count, such as that of an editable sparkdl.
        variables: variables of the environment for pip.

    Returns:
        The path of its Python.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        *install,
        **variables,
    )
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    paths = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    lines = [f"import site; site.addsitedir({path!r})" if has_pth_files else path for path in paths]
    (site / "lent.pth").write_text("\n".join([*lines, ""]))
    return python
