from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers import run, write_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def test_index_of_the_documentation_lists_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {page.name for page in PAGES} - {"index.md"}


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("library", "page"),
    [
        ("accelerate", "accelerate.md"),
        pytest.param("transformers", "transformers_trainer.md", marks=pytest.mark.slow),
        pytest.param("lightning", "lightning.md", marks=pytest.mark.slow),
    ],
)
def test_examples_of_the_pages_of_trainers_run_on_two_ranks(tmp_path: Path, library: str, page: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    script = write_script(tmp_path, example)
    done = run([sys.executable, script], cwd=tmp_path, variables={})
    assert done.returncode == 0, done.stderr
    assert "processes: 2" in done.stdout


@pytest.mark.slow  # the daily tests of sparkdl run cover the same path
def test_command_of_the_readme_starts_two_ranks(tmp_path: Path) -> None:
    (command,) = re.findall(r"^sparkdl (run .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    done = run([sys.executable, "-m", "sparkdl.cli", *words], cwd=tmp_path, variables={})
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"([01]) 2$", done.stdout, re.MULTILINE)) == ["0", "1"]


@pytest.mark.slow  # the daily tests of the demo cover the same path
@pytest.mark.timeout(300)
def test_examples_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    # The second example uses the session of the first; its last line has its output in a comment.
    accuracy = 'print("right:", model.transform(test).filter("digit = prediction").count() / test.count())\n'
    (tmp_path / "example.py").write_text(examples[0] + accuracy + examples[1])
    tools = Path(sys.executable).parent  # as after `source .venv/bin/activate`
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "|digit|prediction|" in done.stdout
    assert float(re.search(r"right: ([0-9.]+)", done.stdout)[1]) > 0.93
    shown = re.search(r"^print\(Runner.*  # (.*)$", examples[1], re.MULTILINE)[1]
    assert shown in done.stdout
    # Lines that ranks print alike within half a second are one line.
    assert re.search(r"\[(rank 1|ranks 0, 1)\] appears on the driver", done.stderr)
    assert (tmp_path / "digits-model").is_dir()
