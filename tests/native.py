"""Builds and runs the C++ tests, or checks the C++ sources with clang-tidy.

Usage: python tests/native.py [--sanitize address|thread] [--tidy]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
PARALLEL = str(min(4, os.cpu_count() or 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", choices=("address", "thread"))
    parser.add_argument("--tidy", action="store_true")
    options = parser.parse_args()
    build = configure(options.sanitize)
    if options.tidy:
        return tidy(build)
    run("cmake", "--build", str(build), "--parallel", PARALLEL)
    # Address space layout randomization may place libraries where the thread sanitizer needs its shadow memory.
    prefix = ["setarch", "--addr-no-randomize"] if options.sanitize == "thread" else []
    run(
        *prefix,
        "ctest",
        "--test-dir",
        str(build),
        "--parallel",
        "2",
        "--output-on-failure",
        "--timeout",
        "240",
    )
    return 0


def configure(sanitize: str | None) -> Path:
    build = ROOT / "build" / f"native-tests-{sanitize or 'plain'}"
    run(
        "cmake",
        *("-S", str(ROOT / "native"), "-B", str(build), "-G", "Ninja"),
        "-DSPARKDL_BUILD_TESTS=ON",
        "-DSPARKDL_BUILD_PYTHON=OFF",
        f"-DSPARKDL_SANITIZE={sanitize or ''}",
        f"-DCMAKE_BUILD_TYPE={'RelWithDebInfo' if sanitize else 'Release'}",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
    )
    return build


def tidy(build: Path) -> int:
    """Check every source of the core and of its tests in parallel; the bindings need Python's own headers."""
    sources = [path for path in (ROOT / "native").rglob("*.cc") if "bindings" not in path.parts]
    with ThreadPoolExecutor(max_workers=int(PARALLEL)) as pool:
        checks = list(pool.map(lambda source: tidy_one(build, source), sorted(sources)))
    for check in checks:
        if check.returncode:
            print(check.stdout)
    return max(check.returncode for check in checks)


def tidy_one(build: Path, source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["clang-tidy", "--quiet", "-p", str(build), str(source)],
        env=ENVIRONMENT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # silences the counts of warnings in system headers
        text=True,
    )


def run(*command: str) -> None:
    quiet = command[0] == "cmake"
    done = subprocess.run(
        command, env=ENVIRONMENT, check=False, text=True, stdout=subprocess.PIPE if quiet else None
    )
    if done.returncode:
        print(done.stdout or "", file=sys.stderr)
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
