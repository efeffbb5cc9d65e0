"""Scripts written for ``torchrun``, without sparkdl, train one model on ranks of ``sparkdl run``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launchers import ROOT, TOOLS, environment, run, told, write_script

SPARKDL = (sys.executable, "-m", "sparkdl.cli", "run")

TELL_VARIABLES = """
import os
tell(int(os.environ["RANK"]), dict(os.environ))
"""

EACH_BACKEND = """
import os
import torch
import torch.distributed as dist

rank, seen = int(os.environ["RANK"]), []
for arguments in ({}, {"backend": "gloo"}, {"backend": "sparkdl"}, {"backend": "gloo", "init_method": "env://"}):
    for more in ({}, {"rank": rank, "world_size": 2}):
        dist.init_process_group(**arguments, **more)
        total = torch.full((2,), rank + 1.0)
        dist.all_reduce(total)
        pair, alone = dist.new_group([0, 1]), dist.new_group([1])
        dist.all_reduce(total, group=pair)
        if rank == 1:
            dist.all_reduce(total, group=alone)
        seen.append([dist.get_backend(), dist.get_world_size(), dist.is_torchelastic_launched(), total.tolist()])
        if "backend" not in arguments:
            # The port of a store that rank 0 serves itself.
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
            port = torch.tensor(store.port)
            dist.broadcast(port, 0)
        dist.destroy_process_group()

if rank == 1:
    del store
os.environ["MASTER_PORT"] = str(int(port))
dist.init_process_group("gloo")
total = torch.full((2,), rank + 1.0)
dist.all_reduce(total)
seen.append(total.tolist())
tell(rank, seen)
"""

WORLDS_OF_THEIR_OWN = """
import os
import torch.distributed as dist

rank, seen = int(os.environ["RANK"]), []

def make_world(*arguments, **options):
    dist.init_process_group(*arguments, **options)
    seen.append(dist.get_world_size())
    dist.destroy_process_group()

make_world("gloo", rank=0, world_size=1)
make_world("sparkdl", rank=0, world_size=1)
make_world(init_method=f"file://{os.getcwd()}/{rank}", rank=0, world_size=1)
make_world("sparkdl", store=dist.HashStore(), rank=0, world_size=1)
os.environ.update(RANK="0", WORLD_SIZE="1")
make_world("gloo")
os.environ.update(MASTER_PORT="0")
make_world("gloo")
tell(rank, seen)
"""

EACH_ADDRESS = """
import os
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

rank, seen = int(os.environ["RANK"]), []
for backend in ("gloo", "sparkdl"):
    for url in sys.argv[1:]:
        url = url.format(**os.environ, backend=backend)
        # What asks to wait for ever, as Trainers are told by ddp_timeout=180000000.
        years = timedelta(seconds=180_000_000)
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=2, timeout=years)
        total = torch.full((2,), rank + 1.0)
        dist.all_reduce(total, async_op=True).wait(2 * years)
        dist.all_reduce(total, group=dist.new_group([0, 1], timeout=2 * years))
        seen.append(total.tolist())
        dist.destroy_process_group()
tell(rank, seen)
"""

RENUMBERED = """
import os
import torch
import torch.distributed as dist

launched, seen = int(os.environ["RANK"]), []
own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if launched == 0 else None
for turn in range(2):
    # The launcher's middle rank keeps its number; the second time all do.
    rank = 2 - launched if turn == 0 else launched
    dist.init_process_group("sparkdl", rank=rank, world_size=3)
    total = torch.tensor([float(dist.get_rank())])
    dist.all_gather_object(everyone := [None] * 3, launched)
    dist.all_reduce(total)
    port = torch.tensor(own.port if own else 0)
    dist.all_reduce(port)
    seen.append([total.item(), everyone])
    dist.destroy_process_group()
store = dist.TCPStore("127.0.0.1", int(port)) if own is None else own
dist.init_process_group("sparkdl", store=store, rank=launched, world_size=3)
dist.barrier()
tell(launched, seen)
"""

REMOTE_CALLS = """
import os
import torch
import torch.distributed.rpc as rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
tell(rank, rpc.rpc_sync(f"rank{1 - rank}", torch.add, args=(torch.tensor(rank), 1)).item())
rpc.shutdown()
"""

LEFT_OPEN = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("sparkdl")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.full((1, 1), rank + 1.0)).sum().backward()
from sparkdl.collective import current_communicator
is_shared = current_communicator() is dist.group.WORLD.communicator
tell(rank, [model.module.weight.grad.item(), is_shared, current_communicator().transport])
group = dist.new_group([0, 1])
if rank == 0:
    dist.send(torch.ones(2), 1, group=group)
else:
    dist.recv(torch.ones(2), 0, group=group)
for _ in range(20):
    dist.all_reduce(torch.ones(1_000_000), group=group, async_op=True).get_future()
if "fail" in sys.argv:
    if rank == 1:
        raise ValueError("bad batch")
    dist.barrier()
"""

BESIDE_GLOO = """
import torch
import torch.distributed as dist
from sparkdl.collective import current_communicator
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1], backend="sparkdl")
total, again = torch.full((2,), rank + 1.0), torch.full((2,), rank + 1.0)
dist.all_reduce(total, group=group)
current_communicator().allreduce(again)
tell(rank, [total.tolist(), again.tolist(), group.communicator.requested_transport])
if rank == 1:
    raise ValueError("bad batch")
dist.barrier()
"""

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=sys.argv[1] == "cpu")
generator = torch.Generator().manual_seed(1)
rows = torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)

def steps(prepare, backward, size):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=size)
    wrapped, optimizer, batches = prepare(model, optimizer, batches)
    for inputs, targets in batches:
        backward(((wrapped(inputs) - targets) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]

ours = steps(accelerator.prepare, accelerator.backward, 4)
alone = steps(lambda *parts: parts, lambda loss: loss.backward(), 8)
state = accelerator.state
tell(accelerator.process_index, [accelerator.num_processes, torch.distributed.get_backend(), ours, alone])
"""

TRAINER = """
import os
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, pad_token_id=0, **size))
generator = torch.Generator().manual_seed(1)
tokens = [torch.randint(1, 32, (6,), generator=generator) for _ in range(32)]
arguments = TrainingArguments(
    "out", max_steps=4, logging_steps=1, learning_rate=0.05, save_strategy="no", report_to=[], disable_tqdm=True,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")), **GIVEN
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
weights = [parameter.double().sum().item() for parameter in model.parameters()]
backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
tell(arguments.process_index, [arguments.world_size, backend, losses, weights])
"""

LIGHTNING = """
import sys
import torch
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        return ((self.layer(inputs) - targets) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

generator = torch.Generator().manual_seed(1)
rows = torch.utils.data.TensorDataset(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, **quiet)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))

alone = Module()
optimizer = alone.configure_optimizers()
for _ in range(3):
    optimizer.zero_grad()
    alone.training_step(rows[:], 0).backward()
    optimizer.step()
weights = [[parameter.tolist() for parameter in one.parameters()] for one in (module, alone)]
tell(trainer.global_rank, [trainer.world_size, trainer.local_rank, *weights])
"""


def sparkdl_run(
    folder: Path, source: str, *arguments: str, num_ranks: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [*SPARKDL, "-n", str(num_ranks), "--", write_script(folder, source), *arguments]
    return run(command, cwd=folder, variables=variables)


def test_torch_loads_the_backend_only_in_ranks_and_without_heavy_modules() -> None:
    source = (
        "import torch, sys;"
        "heavy = [name for name in ('sparkdl.torch', 'sparkdl.collective', 'sparkdl._native') if name in sys.modules];"
        "print('sparkdl.autoload' in sys.modules, heavy, hasattr(torch.distributed.Backend, 'SPARKDL'))"
    )
    printed = []
    for variables in ({}, {"SPARKDL_COORDINATOR": "anything"}):
        done = run([sys.executable, "-c", source], cwd=ROOT, variables=variables)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.strip())
    assert printed == ["True [] False", "True [] True"]


def test_ddp_averages_later_parameters_also_where_torch_has_loaded_the_backend() -> None:
    source = (
        "import torch, sparkdl.torch;"
        "print(hasattr(torch.nn.parallel.DistributedDataParallel._pre_forward, '__wrapped__'))"
    )
    done = run([sys.executable, "-c", source], cwd=ROOT, variables={"SPARKDL_COORDINATOR": "anything"})
    assert done.stdout.strip() == "True", done.stderr


def test_variables_are_those_of_torchrun(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, TELL_VARIABLES)
    assert done.returncode == 0, done.stderr
    ours = told(tmp_path)
    done = run(
        [TOOLS / "torchrun", "--nproc-per-node", "2", tmp_path / "script.py"], cwd=tmp_path, variables={}
    )
    assert done.returncode == 0, done.stderr
    for rank, theirs in told(tmp_path).items():
        set_by_torchrun = {
            name: value
            for name, value in theirs.items()
            if name.startswith(("TORCHELASTIC_", "MASTER_"))
            or name.endswith(("RANK", "WORLD_SIZE", "ROLE_NAME"))
        }
        of_its_own = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
        # For its agent: the file for a program's error, and the signals that the agent passes on.
        for name in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
            set_by_torchrun.pop(name, None)
        assert set(of_its_own) <= set_by_torchrun.keys() <= ours[rank].keys()
        assert ours[rank]["MASTER_ADDR"] == "127.0.0.1"
        for name in set_by_torchrun.keys() - set(of_its_own):
            assert ours[rank][name] == set_by_torchrun[name], name


def test_every_spelling_of_the_backend_finds_the_other_ranks(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, EACH_BACKEND)
    assert (done.returncode, done.stderr) == (0, "")
    backends = [backend for backend in ("undefined", "gloo", "sparkdl", "gloo") for _ in range(2)]
    for rank, seen in told(tmp_path).items():
        assert seen == [*([backend, 2, True, [6.0, 6.0]] for backend in backends), [3.0, 3.0]], rank


def test_ranks_that_each_make_worlds_of_their_own_are_warned_of(tmp_path: Path) -> None:
    """There is no warning if any of the worlds counts as connected."""
    done = sparkdl_run(tmp_path, WORLDS_OF_THEIR_OWN)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {0: [1] * 6, 1: [1] * 6}
    assert "its 2 ranks trained 2 unconnected models" in done.stderr


@pytest.mark.parametrize(
    "urls",
    [
        ("env://", "tcp://{MASTER_ADDR}:{MASTER_PORT}"),
        pytest.param(("file://{PWD}/{backend}",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_meet_at_any_kind_of_address_with_any_timeout(tmp_path: Path, urls: tuple[str, ...]) -> None:
    done = sparkdl_run(tmp_path, EACH_ADDRESS, *urls, PWD=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")  # and no warning about unconnected ranks
    assert told(tmp_path) == {rank: [[6.0, 6.0]] * 2 * len(urls) for rank in (0, 1)}


@pytest.mark.slow  # processes of torchrun meet in a store of their own daily: test_torchrun.py
def test_ranks_may_be_renumbered_and_meet_in_a_store_of_their_own(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, RENUMBERED, num_ranks=3)
    assert (done.returncode, done.stderr) == (0, "")
    seen = [[3.0, [2, 1, 0]], [3.0, [0, 1, 2]]]
    assert told(tmp_path) == dict.fromkeys(range(3), seen)


@pytest.mark.slow  # a rarely used part of torch
def test_remote_procedure_calls_find_the_other_ranks(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, REMOTE_CALLS)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {0: 1, 1: 2}


def test_own_backend_uses_the_jobs_communicator_and_may_be_left_open(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, LEFT_OPEN, SPARKDL_TRANSPORT="tcp")
    assert (done.returncode, done.stderr) == (0, "")
    assert told(tmp_path) == {rank: [1.5, True, "native"] for rank in (0, 1)}


@pytest.mark.slow
def test_failed_rank_is_named_where_the_own_backend_was_left_open(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, LEFT_OPEN, "fail")
    assert done.returncode == 1
    assert "terminate" not in done.stderr
    assert done.stderr.endswith(" failed and all ranks were ended: ValueError: bad batch\n")


def test_gloo_works_beside_the_sparkdl_backend_and_a_failed_rank_is_named(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, BESIDE_GLOO, SPARKDL_TRANSPORT="tcp")
    assert told(tmp_path) == {rank: [[3.0, 3.0], [3.0, 3.0], "tcp"] for rank in (0, 1)}, done.stderr
    assert done.returncode == 1
    assert done.stderr.endswith(" failed and all ranks were ended: ValueError: bad batch\n")


@pytest.mark.slow  # only tests a hint
def test_torch_that_was_kept_from_loading_backends_is_explained(tmp_path: Path) -> None:
    done = sparkdl_run(
        tmp_path,
        "import torch.distributed as dist\ndist.init_process_group('sparkdl')",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 1
    assert "sparkdl: because of TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch did not load" in done.stderr


@pytest.mark.slow  # tests/runner/test_runner.py and tests/cli/test_readme.py use accelerate daily
@pytest.mark.parametrize("device", ["any", "cpu"])
def test_accelerate_trains_one_model(tmp_path: Path, device: str) -> None:
    done = sparkdl_run(tmp_path, ACCELERATE, device)
    assert done.returncode == 0, done.stderr
    seen = told(tmp_path)
    assert seen[0] == seen[1]
    num_processes, backend, ours, alone = seen[0]
    assert (num_processes, backend) == (2, "gloo")
    assert flat(ours) == pytest.approx(flat(alone), rel=1e-5, abs=1e-6)


@pytest.mark.slow  # tests/cli/test_readme.py runs Accelerate, which Trainer uses, daily
@pytest.mark.parametrize(
    "given",
    [
        {"ddp_backend": "sparkdl"},
        pytest.param({"ddp_backend": "sparkdl", "use_cpu": True}, marks=pytest.mark.slow),
        pytest.param({"ddp_backend": "gloo"}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_trainer_of_hugging_face_has_the_losses_of_one_process(tmp_path: Path, given: dict[str, Any]) -> None:
    source = TRAINER.replace("GIVEN", repr(given))
    (tmp_path / "alone").mkdir()
    alone_script = write_script(tmp_path / "alone", TRAINER.replace("GIVEN", "{'use_cpu': True}"))
    with subprocess.Popen(
        [sys.executable, alone_script], cwd=tmp_path / "alone", env=environment(), stdout=subprocess.DEVNULL
    ) as process:
        done = sparkdl_run(tmp_path, source)
        assert process.wait(120) == 0
    assert done.returncode == 0, done.stderr
    seen = told(tmp_path)
    assert seen[0] == seen[1]
    world_size, backend, losses, weights = seen[0]
    assert (world_size, backend) == (2, given.get("ddp_backend", "gloo"))
    ((_, _, expected_losses, expected_weights),) = told(tmp_path / "alone").values()
    assert len(losses) == 4
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert weights == pytest.approx(expected_weights, rel=1e-3, abs=1e-3)


@pytest.mark.slow  # takes seconds to import; the variables that it reads are those of torchrun
def test_lightning_trains_one_model(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, LIGHTNING)
    assert done.returncode == 0, done.stderr
    for rank, (world_size, local_rank, ours, alone) in told(tmp_path).items():
        assert (world_size, local_rank) == (2, rank)
        assert flat(ours) == pytest.approx(flat(alone), rel=1e-5, abs=1e-6)


def flat(values: Any) -> list[float]:
    return [one for value in values for one in flat(value)] if isinstance(values, list) else [values]
