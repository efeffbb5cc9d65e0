"""Uses the core of a copy of sparkdl without some of its guests; a program of :mod:`tests.unit.test_guests`.

Arguments: the folder with the copy, the folder of the tests, the folders of installed packages, and for each case the
names of the guests to remove, separated by commas. Every case is a process of its own, forked after the imports of
other libraries. The exit status is the number of cases that failed.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGES = (
    "sparkdl",
    "sparkdl.data",
    "sparkdl.estimators",
    "sparkdl.parallel",
    "sparkdl.runner",
    "sparkdl.torch",
)
"""Packages whose names users import."""


def main(copy: Path, tests: str, packages: str, cases: Sequence[str]) -> int:
    sys.path[:0] = [str(copy)]
    sys.path += [*packages.split(os.pathsep), tests]
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # it would import sparkdl
    for library in ("mlflow", "pandas", "pyarrow.parquet", "pyspark.ml", "torch.distributed.tensor"):
        importlib.import_module(library)
    return sum(not succeeds(copy, case.split(",")) for case in cases)


def succeeds(copy: Path, guests: Sequence[str]) -> bool:
    with removed(copy, guests):
        child = os.fork()
        if not child:
            status = 1
            try:
                use_core(copy)
                status = 0
            except BaseException:
                print(f"Without {', '.join(guests)}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1] == 0


@contextmanager
def removed(copy: Path, guests: Sequence[str]) -> Iterator[None]:
    """Move the folders or files of guests out of the copy."""
    moves = []
    for guest in guests:
        path = copy.joinpath(*guest.split("."))
        path = path if path.is_dir() else path.with_suffix(".py")
        moves.append((path, copy / f"removed-{guest}"))
    for path, elsewhere in moves:
        path.rename(elsewhere)
    try:
        yield
    finally:
        for path, elsewhere in moves:
            elsewhere.rename(path)


def use_core(copy: Path) -> None:
    import sparkdl

    assert Path(sparkdl.__file__).is_relative_to(copy), sparkdl.__file__
    use_names()
    import_core(copy)
    train(copy / f"rows-{os.getpid()}")


def use_names() -> None:
    """Use all names of the packages; those of guests that are not there have to say so."""
    from sparkdl.lazy import ENTRIES

    for page in PAGES:
        package = importlib.import_module(page)
        for name in package.__all__:
            try:
                getattr(package, name)
            except ImportError as error:
                if f"{page}.{name}" not in ENTRIES or "which was removed" not in str(error):
                    raise


def import_core(copy: Path) -> None:
    from tests.unit.guests import is_of_guest

    for path in sorted((copy / "sparkdl").rglob("*.py")):
        module = ".".join(path.relative_to(copy).with_suffix("").parts).removesuffix(".__init__")
        if not is_of_guest(module) and module != "sparkdl.cli.__main__":  # a program
            importlib.import_module(module)


def train(folder: Path) -> None:
    """Train in a world of one rank."""
    from sparkdl.collective import Coordinator, RendezvousClient, new_secret, open_communicator
    from sparkdl.training.trainer import train
    from tests.training.scenes.training_scenes import keep_module, make_spec, write_dataset

    secret = new_secret()
    with (
        Coordinator(secret=secret, world_size=1, host="127.0.0.1") as coordinator,
        RendezvousClient.connect(coordinator.address, secret, 20.0) as rendezvous,
        open_communicator(rendezvous=rendezvous, rank=0, world_size=1, secret=secret) as communicator,
    ):
        outcome = train(
            make_spec(),
            communicator=communicator,
            dataset=write_dataset(folder, 37),
            keep=partial(keep_module, folder=str(folder)),
        )
    first, last = (record.loss for record in outcome.history)
    assert last < first


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:4], sys.argv[4:]))
