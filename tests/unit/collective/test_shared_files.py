from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from sparkdl.collective.shared_files import FOLDER, SharedFile, open_shared, remove_leftovers

OLD = 1_000_000_000


def test_file_is_for_this_user_alone_and_gone_after_use() -> None:
    with SharedFile("test") as file:
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        fd = open_shared(str(file.path), flags=os.O_RDWR)
        os.close(fd)
    assert not file.path.exists()


def test_descriptor_that_was_taken_outlives_the_file() -> None:
    with SharedFile("test") as file:
        fd = file.take_fd()
    os.write(fd, b"x")
    os.close(fd)


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/shm/../../etc/passwd", "/dev/shm/other", ""])
def test_only_own_files_are_opened(path: str) -> None:
    with pytest.raises(OSError):
        open_shared(path, flags=os.O_RDONLY)


def test_link_is_not_followed() -> None:
    link = FOLDER / f"sparkdl-{os.getuid()}-test-link"
    link.symlink_to("/etc/passwd")
    try:
        with pytest.raises(OSError):
            open_shared(str(link), flags=os.O_RDONLY)
    finally:
        link.unlink()


def test_leftover_of_a_killed_process_is_removed_and_a_live_file_is_not() -> None:
    script = (
        "import os, signal; from sparkdl.collective.shared_files import SharedFile;"
        "print(SharedFile('test').path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    leftover = FOLDER / killed.stdout.strip().rsplit("/", 1)[1]
    with SharedFile("test") as alive, SharedFile("test") as young:
        os.utime(alive.path, (OLD, OLD))
        assert leftover not in remove_leftovers()  # too young to be sure
        os.utime(leftover, (OLD, OLD))
        removed = remove_leftovers()
        assert leftover in removed
        assert alive.path.exists()
        assert young.path.exists()
    assert not leftover.exists()
