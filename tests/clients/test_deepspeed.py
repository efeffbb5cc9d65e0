"""DeepSpeed's ZeRO on ranks of sparkdl, in an environment of its own: its releases pin packages, and pip builds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.snippets import PAGES, examples_of
from tests.launchers import run, told, write_script
from tests.packaging.building import make_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

SCRIPT = """
import sys
import deepspeed
import torch

stage, backend = int(sys.argv[1]), sys.argv[2]
deepspeed.init_distributed(**({} if backend == "default" else {"dist_backend": backend}))
generator = torch.Generator().manual_seed(1)
inputs, targets = (torch.randn(6, 8, width, generator=generator) for width in (4, 1))


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def loss_of(model, step, rows):
    return ((model(inputs[step, rows]) - targets[step, rows]) ** 2).mean()


model = make_model()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=make_optimizer(model),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0,
    },
)
rank = engine.global_rank
for step in range(6):
    engine.backward(loss_of(engine, step, slice(4 * rank, 4 * rank + 4)))
    engine.step()
alone = make_model()
optimizer = make_optimizer(alone)
for step in range(6):
    optimizer.zero_grad()
    loss_of(alone, step, slice(None)).backward()
    optimizer.step()
engine.save_checkpoint("checkpoint")
weights = [[value for weight in one.parameters() for value in weight.flatten().tolist()] for one in (model, alone)]
tell(rank, [engine.world_size, engine.zero_optimization_stage(), torch.distributed.get_backend(), *weights])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def python(folder: Path) -> Path:
    packages = Path(__file__).with_name("deepspeed.txt")
    options = ("--requirement", packages)
    return make_environment(folder / "environment", *options, has_pth_files=True, DS_BUILD_OPS="0")


@pytest.fixture(scope="module")
def variables(folder: Path) -> dict[str, str]:
    """DeepSpeed compiles an extension when it is first used."""
    return {"TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(("stage", "backend"), [(1, "sparkdl"), (2, "sparkdl"), (2, "default")])
def test_deepspeed_trains_one_model_whose_optimizer_is_sharded(
    python: Path, variables: dict[str, str], tmp_path: Path, stage: int, backend: str
) -> None:
    script = write_script(tmp_path, SCRIPT)
    ranks = [python, "-m", "sparkdl.cli", "run", "-n", "2", "--", python, script]
    done = run([*ranks, str(stage), backend], cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    seen = told(tmp_path)
    assert seen[0] == seen[1]
    world_size, stage_seen, backend_seen, ours, alone = seen[0]
    assert (world_size, stage_seen) == (2, stage)
    assert backend_seen == ("gloo" if backend == "default" else backend)
    assert ours == pytest.approx(alone, rel=1e-4, abs=1e-6)
    states = [path.name for path in (tmp_path / "checkpoint").rglob("*optim_states.pt")]
    assert len(states) == 2, "each rank has saved its shard of the optimizer"


def test_the_example_of_the_docs_runs_on_two_ranks(
    python: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    (example,) = [text for page in PAGES for _, text in examples_of(page) if "import deepspeed" in text]
    (tmp_path / "script.py").write_text(example)
    done = run([python, "script.py"], cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    assert "processes: 2" in done.stdout
