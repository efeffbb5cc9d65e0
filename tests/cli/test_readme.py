from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # the demo goes the same way every day
@pytest.mark.timeout(300)
def test_examples_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    # The second takes the session of the first; its last line shows its value in a comment.
    accuracy = 'print("right:", model.transform(test).filter("digit = prediction").count() / test.count())\n'
    second = re.sub(r"^Runner\(.*?\)(?=  #)", r"print(\g<0>)", examples[1], flags=re.MULTILINE)
    (tmp_path / "example.py").write_text(examples[0] + accuracy + second)
    tools = Path(sys.executable).parent  # as `source .venv/bin/activate` has it
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "|digit|prediction|" in done.stdout
    assert float(re.search(r"right: ([0-9.]+)", done.stdout)[1]) > 0.93
    shown = re.search(r"^Runner.*  # (.*)$", examples[1], re.MULTILINE)[1]
    assert shown in done.stdout
    assert "[rank 1] appears on the driver" in done.stderr
    assert (tmp_path / "digits-model").is_dir()
