"""The site builds without a warning, and what its pages list is what the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import pytest

from tests.unit.estimators.public_classes import ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]

ENDINGS = ("py", "cc", "h")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-f",
            "docs/site/mkdocs.yml",
            "-d",
            str(folder),
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_site_builds_without_warnings_and_documents_params_commands_and_errors(site: Path) -> None:
    estimator = (site / "reference" / "estimators" / "TorchClassifier.html").read_text()
    for group in ("Data", "Model and optimizer", "Training", "Ranks", "Checkpoints and restarts"):
        assert f">{group}<" in estimator
    assert re.search(r"<code>epochs</code></td>\s*<td><code>20</code>", estimator)
    assert "sparkdl bench transform" in (site / "reference" / "command_line.html").read_text()
    assert "CheckpointsInUseError" in (site / "reference" / "errors.html").read_text()
    assert (site / "reference" / "job.schema.json").stat().st_size > 10_000


@pytest.mark.parametrize("name", ESTIMATORS)
def test_help_explain_param_and_the_reference_page_say_the_same_about_a_param(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("griffe", reason="mkdocstrings is not installed")
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    pages = import_module("reference_pages")
    estimator = ESTIMATORS[name]()
    documented = " ".join((type(estimator).__doc__ or "").split())
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)", pages._estimator_page(name), flags=re.MULTILINE))
    assert set(rows) == {param.name for param in estimator.params}
    for param in estimator.params:
        text = f"{param.doc}{f'. {param.more}' if param.more else ''}"
        assert f" {param.name}: {param.doc}" in documented
        assert estimator.explainParam(param).startswith(f"{param.name}: {text} (")
        assert pages.plain_roles(text).replace("|", "\\|") in rows[param.name]


def test_links_of_the_site_lead_to_its_files_and_references_are_not_left_as_text(site: Path) -> None:
    broken = []
    for page in site.rglob("*.html"):
        text = page.read_text()
        body = text[text.index("<article") : text.index("</article>")] if "<article" in text else ""
        without_code = re.sub(r"<pre.*?</pre>", "", body, flags=re.DOTALL)
        broken += [(page.name, role) for role in re.findall(r":(?:class|func|mod|meth):", without_code)]
        for target in re.findall(r'(?:href|src)="([^"#]+)', body):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                broken.append((page.name, target))
    assert broken == []


def test_page_of_environment_variables_has_all_that_the_code_names() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    files = [path for folder in ("sparkdl", "native/src") for path in (ROOT / folder).rglob("*")]
    text = "\n".join(path.read_text() for path in files if path.suffix[1:] in ENDINGS)
    ours = set(re.findall(r'"(SPARKDL_[A-Z_]+)"', text)) - {
        "SPARKDL_BENCH_CONTENDER"
    }  # of a benchmark's own process
    others = set(re.findall(r'environ\.get\(\s*"([A-Z_]+)"', text)) - {"SPARK_LOCAL_DIRS", "PYTHONPATH"}
    assert ours
    assert {name for name in ours | others if f"`{name}`" not in page} == set()


class OnePage(BaseHTTPRequestHandler):
    """A server with the page ``/there`` alone, which refuses ``/refused``."""

    def do_GET(self) -> None:
        self.send_response({"/there": 200, "/refused": 403}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def test_links_to_other_sites_are_told_apart_by_what_their_servers_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    links = import_module("links")
    assert any(address.startswith("https://arxiv.org/") for address in links.addresses())
    with ThreadingHTTPServer(("127.0.0.1", 0), OnePage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_port}"
        states = [links.state_of(f"{site}/{page}") for page in ("there", "gone", "refused")]
        server.shutdown()
    assert states == ["good", "wrong: HTTP 404", "not checked: HTTP 403"]
    assert links.state_of(f"{site}/there").startswith("not checked: "), "no server"
