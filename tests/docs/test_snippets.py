"""Every Python example of the documentation runs: here those that need no Spark session.

``tests/spark/docs`` has the pages whose examples do. Of the examples in docstrings, what they make is made, and of the
commands of sparkdl in the pages, the arguments are parsed.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkdl import cli, estimators, runner
from sparkdl.estimators import TorchEstimator
from sparkdl.parallel import Parallelism
from sparkdl.training import callbacks
from tests.docs.snippets import PAGES, ROOT, examples_of, run_examples
from tests.launchers import run
from tests.run_ranks import run_ranks
from tests.spark.docs.test_snippets_on_spark import PAGES_ON_SPARK

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment

RUN_BY_OTHER_TESTS = {"README.md", "accelerate.md", "deepspeed.md", "lightning.md", "transformers_trainer.md"}
"""Pages whose own tests, in ``tests/cli/test_readme.py`` and ``tests/clients``, run their examples."""

# Scripts: page, its examples that belong to the script, what it prints, and how many ranks `sparkdl run` starts,
# 0 for a script that starts its ranks itself.
SCRIPTS = (
    ("horovod.md", slice(0, 1), "loss", 2),
    ("parallelism.md", slice(1, 4), "loss", 2),
    ("runner.md", slice(0, 1), "30.0", 0),
    ("runner.md", slice(2, 3), "10.0", 0),
    ("torchdistributor.md", slice(0, 1), "loss:", 0),
)
IN_PROCESS = ("blending.md", "feed.md", "planner.md")


@pytest.mark.parametrize("page", [page for page in PAGES if examples_of(page)], ids=lambda page: page.name)
def test_examples_can_be_compiled_and_import_what_there_is(page: Path) -> None:
    for line, text in examples_of(page):
        tree = ast.parse("\n" * line + text, str(page))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparkdl"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}:{node.lineno}: {alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("sparkdl"):
                        importlib.import_module(alias.name)


def test_every_page_with_examples_is_run_by_a_test() -> None:
    with_examples = {page.name for page in PAGES if examples_of(page)}
    run_here = {*(name for name, *_ in SCRIPTS), *IN_PROCESS, "communication.md"}
    assert with_examples == RUN_BY_OTHER_TESTS | run_here | set(PAGES_ON_SPARK)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_examples_without_spark_run(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = {column: rng.random(3000, np.float32) for column in ("a", "b", "c", "x", "y")}
    for folder in ("bucket/rows", "data/web", "data/books", "data/tokens"):
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(pa.table(numbers), tmp_path / folder / "part-0.parquet", row_group_size=500)
    tokens = [rng.integers(1, 99, length).tolist() for length in rng.integers(5, 300, 500)]
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "data" / "tokens" / "part-0.parquet")
    names = {"TorchEstimator": TorchEstimator, "settings": {"model": torch.nn.Linear(4, 1)}}
    space = run_examples(name, tmp_path, names)
    if name == "planner.md":
        page = (ROOT / "docs" / name).read_text()
        assert f"\nbest: parallelism={space['best'].as_code()}, " in page, "what the command prints"


def test_estimator_of_the_page_about_parallelism_has_these_params(tmp_path: Path) -> None:
    page = next(page for page in PAGES if page.name == "parallelism.md")
    (_, text), *_ = examples_of(page)
    estimator = eval(
        text.replace("..., ", ""), {"TorchEstimator": TorchEstimator, "Parallelism": Parallelism}
    )
    assert estimator.getNumWorkers() == 8
    assert estimator.getParallelism() == Parallelism(shard=4, tensor=2)


def test_examples_of_docstrings_make_what_they_name() -> None:
    sources = [path for folder in ("sparkdl", "estimators") for path in (ROOT / folder).rglob("*.py")]
    named = {name: getattr(estimators, name) for name in estimators.__all__}
    named |= {**vars(callbacks), "distributed": runner.distributed, "torch": torch, "settings": {}}
    num_made = 0
    for path in dict.fromkeys(path.resolve() for path in sources):
        for found in re.finditer(r"^    Example::\n\n((?:     .*\n|\n)+)", path.read_text(), re.MULTILINE):
            tree = ast.parse(textwrap.dedent(found[1]))
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in named]
            assert made, f"{path}: {found[1]}"
            for call in made:
                call.args = [argument for argument in call.args if ast.unparse(argument) != "..."]
                eval(ast.unparse(call), named)
            num_made += 1
    assert num_made >= 9


def test_commands_of_sparkdl_have_arguments_that_it_takes() -> None:
    num_commands = 0
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in re.findall(r"^sparkdl (.*)$", block.replace("\\\n", ""), re.MULTILINE):
                try:
                    cli._parser().parse_args(shlex.split(line, comments=True))
                except SystemExit:
                    pytest.fail(f"{page.name}: sparkdl {line}")
                num_commands += 1
    assert num_commands > 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "examples", "printed", "num_ranks"), SCRIPTS)
def test_examples_that_are_scripts_run(
    name: str, examples: slice, printed: str, num_ranks: int, tmp_path: Path
) -> None:
    page = next(page for page in PAGES if page.name == name)
    source = "\n".join(text for _, text in examples_of(page)[examples])
    (tmp_path / "script.py").write_text(source.replace("/shared/", f"{tmp_path}/").replace("10_000", "500"))
    launcher = [sys.executable, "-m", "sparkdl.cli", "run", "-n", str(num_ranks), "--"] if num_ranks else []
    done = run([*launcher, sys.executable, "script.py"], cwd=tmp_path, variables={})
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_examples_of_a_communicator_run(tmp_path: Path) -> None:
    run_ranks(2, communicate, str(tmp_path))
    assert (tmp_path / "timeline.json").stat().st_size > 0


def communicate(environment: RankEnvironment, folder: str) -> Any:
    with environment.communicator() as communicator:
        communicator.allreduce(np.ones(4))
        changes = {"timeline.json": f"{folder}/timeline.json"}
        run_examples("communication.md", Path(folder), {"communicator": communicator}, changes)
