"""Compiles the stand-ins for NCCL and the CUDA driver, once for every state of their sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
BUILD = SOURCES.parent.parent / "build"


@cache
def stand_ins() -> Path:
    """Folder of ``libcuda.so.1`` and ``libnccl.so.2``; ``old/`` has it without ``ncclCommSplit``."""
    content = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.is_file())
    folder = BUILD / f"nccl-stand-in-{hashlib.sha256(content).hexdigest()[:16]}"
    if not folder.exists():
        BUILD.mkdir(exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=BUILD))
        _compile("libcuda.cc", unfinished / "libcuda.so.1")
        driver = [f"-L{unfinished}", "-l:libcuda.so.1"]
        _compile("libnccl.cc", unfinished / "libnccl.so.2", *driver, "-Wl,-rpath,$ORIGIN")
        (unfinished / "old").mkdir()
        old = unfinished / "old" / "libnccl.so.2"
        _compile("libnccl.cc", old, *driver, "-Wl,-rpath,$ORIGIN/..", "-DNCCL_STAND_IN_WITHOUT_SPLIT")
        try:
            unfinished.rename(folder)
        except OSError:  # another test process was faster
            shutil.rmtree(unfinished)
    return folder


def stand_in_variables(files: Path, **more: str) -> dict[str, str]:
    """Environment variables that make ranks load the stand-ins instead of the real libraries.

    Args:
        files: empty folder through which the ranks find each other.
        more: further variables.
    """
    path = os.pathsep.join(filter(None, [str(stand_ins()), os.environ.get("LD_LIBRARY_PATH")]))
    # By its path: a build of torch for GPUs brings the real one, which is taken before the system's.
    library = str(stand_ins() / "libnccl.so.2")
    return {
        "LD_LIBRARY_PATH": path,
        "SPARKDL_NCCL_LIBRARY": library,
        "NCCL_STAND_IN_FOLDER": str(files),
        **more,
    }


def _compile(source: str, library: Path, *options: str) -> None:
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{library.name}"]
    subprocess.run(
        [compiler, *flags, str(SOURCES / source), "-o", str(library), *options], check=True, timeout=500
    )
