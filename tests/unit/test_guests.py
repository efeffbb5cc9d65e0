"""The core without its guests: it reaches them by one table, and works when their folders are removed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import grimp
import pytest

import sparkdl
from sparkdl import _native, data
from sparkdl.lazy import ENTRIES, load_entry
from tests.unit.guests import CORE, GUESTS, ROOT, is_of_guest

PAGES = ("sparkdl", "sparkdl.data", "sparkdl.estimators")
"""Packages that hold parts of the core and guests."""

MODULE = re.compile(r"sparkdl(\.\w+)+\.?")
"""A string that names a module, or in an f-string begins to name one."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("sparkdl", exclude_type_checking_imports=True)


def test_a_part_is_of_the_core_or_a_guest(graph: grimp.ImportGraph) -> None:
    parts = {part for page in PAGES for part in graph.find_children(page)} - {*PAGES, "sparkdl._native"}
    assert parts == {*CORE, *GUESTS}
    assert not {*CORE} & {*GUESTS}


def test_pages_of_packages_import_no_guest(graph: grimp.ImportGraph) -> None:
    for page in PAGES:
        assert not {module for module in graph.find_modules_directly_imported_by(page) if is_of_guest(module)}


def test_strings_of_the_core_name_guests_in_one_table_alone(graph: grimp.ImportGraph) -> None:
    """A module that ``import_module`` takes is a string, which import-linter does not see."""
    named = {}
    for module in sorted(graph.modules - {"sparkdl._native"}):
        names = (
            set()
            if is_of_guest(module)
            else {name for name in modules_in_strings(module) if is_of_guest(name)}
        )
        if names:
            named[module] = names
    assert named == {"sparkdl.lazy": {module for module in ENTRIES.values() if is_of_guest(module)}}


def modules_in_strings(module: str) -> set[str]:
    """The modules that the strings of a module name, docstrings left out."""
    path = Path(sparkdl.__file__).parent.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text())
    bare = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value.rstrip(".")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in bare
        and MODULE.fullmatch(node.value)
    }


def test_entries_lead_to_modules_that_exist(graph: grimp.ImportGraph) -> None:
    assert set(ENTRIES.values()) <= graph.modules


def test_entry_of_a_removed_guest_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparkdl.data.blend.mixture", None)
    with pytest.raises(
        ImportError, match=r"sparkdl\.data\.Mixture needs sparkdl\.data\.blend\.mixture, which was"
    ):
        data.__getattr__("Mixture")
    monkeypatch.setitem(sys.modules, "sparkdl.monitor", None)
    with pytest.raises(ImportError, match=r"Param monitor needs sparkdl\.monitor, which was removed"):
        load_entry("Param monitor")


@pytest.fixture(scope="module")
def use_core(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], None]:
    """A function that uses the core of a copy of the package without some guests, in each of several cases."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(sparkdl.__file__).parent, copy / "sparkdl", copy_function=os.symlink)
    native = Path(_native.__file__)
    if not (copy / "sparkdl" / native.name).exists():
        (copy / "sparkdl" / native.name).symlink_to(native)
    program = [sys.executable, "-S", str(Path(__file__).with_name("core_alone.py"))]
    packages = os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})

    def use(cases: Sequence[str]) -> None:
        command = [*program, str(copy), str(ROOT), packages, *cases]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr

    return use


def test_core_is_imported_and_trains_without_any_guest(use_core: Callable[[Sequence[str]], None]) -> None:
    use_core([",".join(GUESTS)])


@pytest.mark.slow
def test_core_is_imported_and_trains_without_each_guest(use_core: Callable[[Sequence[str]], None]) -> None:
    use_core(GUESTS)
