"""``sparkdl bench scaling`` end to end, on networks so small that it takes seconds, and its options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkdl.bench import scaling
from sparkdl.bench.contenders.scaling import AccuracyTrial
from sparkdl.bench.contenders.scaling_jobs import DECODERS, JOBS
from sparkdl.bench.libraries import split_missing
from sparkdl.bench.namespaces import why_impossible
from sparkdl.errors import DataError, ParamError, RankError
from tests.bench.parsed import parsed
from tests.run_ranks import RankEnvironment, run_ranks

SMALL_MODEL = """
import runpy
from sparkdl.bench.contenders import parallel, scaling_jobs
scaling_jobs.GPT = parallel.DecoderSize(width=32, num_layers=4, num_heads=4, vocabulary=64)
scaling_jobs.DECODERS["gpt"] = scaling_jobs.GPT
runpy.run_module("sparkdl.bench.contenders.rank", run_name="__main__")
"""


def report_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    path = tmp_path / "report.json"
    few = ("--seconds", "0.01", "--rounds", "1", "--json", str(path))
    assert scaling.run(parsed(scaling, *options, *few)) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there is a GPU for each rank")
def test_gpus_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ParamError, match="--device cuda needs a GPU for each of 2 ranks, and torch .* sees"):
        scaling.run(parsed(scaling, "--device", "cuda"))
    with pytest.raises(ParamError, match="uses the GPUs of this machine: leave out --master and --megabits"):
        scaling.run(parsed(scaling, "--device", "cuda", "--master", "local[2]"))


def test_contenders_on_gpus_use_nccl() -> None:
    arguments = parsed(scaling, "--device", "cuda", "--model", "gpt", "--strategies", "data,shard")
    missing = scaling.impossible_contenders(arguments, ["DDP on gloo", "hvd of Horovod"])
    assert list(missing) == ["DDP on gloo"]
    contenders = scaling.make_contenders(arguments, [1, 2], {})
    assert {contender.library for contender in contenders} == {"torch nccl"}
    assert [contender.way for contender in contenders] == ["alone", "alone", "DDP on nccl", ""]


def test_run_compares_rank_counts_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    plot = tmp_path / "plot.svg"
    options = ("--modes", "strong", "--against", "", "--batch", "16", "--accuracy", "0.15")
    rows = report_of(tmp_path, *options, "--plot", str(plot))
    strong = {row["contender"]: row for row in rows}
    assert list(strong) == ["one rank", "alone", "data"]
    assert {row["rows"] for row in rows} == {16}
    assert strong["one rank"]["speed_up"] == 1.0
    for row in rows:
        assert row["efficiency"] == pytest.approx(row["speed_up"] / row["ranks"])
        assert row["epoch_s"] == pytest.approx(50_000 / row["rows_per_s"])
        assert 0 < row["utilization"] <= row["speed_up"]
        assert 0 < row["processor"] <= 1.2
        assert row["memory_bytes"] > 50 << 20
    assert 0 < strong["data"]["communication_efficiency"] < 1
    assert 0 < strong["data"]["of_alone"] <= 1
    assert strong["one rank"]["communication_efficiency"] is strong["one rank"]["of_alone"] is None
    # The same rows in a step are the same steps, however many ranks share them.
    steps = [strong[name]["accuracy_s"] / strong[name]["median_s"] for name in ("one rank", "data")]
    assert steps[0] == pytest.approx(steps[1])
    assert plot.stat().st_size > 0
    shown = capsys.readouterr().out
    assert "to accuracy" in shown
    assert "measuring data on 2, 16 rows in a step ..." in shown


def train_to_an_accuracy(environment: RankEnvironment, limits: dict[str, float]) -> dict[str, Any]:
    case = {
        "model": "cnn",
        "rows": 8,
        "threads": 1,
        "data": "",
        "device": "cpu",
        "way": "alone",
        "sizes": None,
    }
    with environment.open() as communicator:
        trial = AccuracyTrial(communicator, {**case, "accuracy": 2.0, **limits})
        trial.run(1)
        return trial.result()


@pytest.mark.parametrize(("most_steps", "limit_s"), [(40, 500.0), (1 << 40, 0.5)])
def test_training_that_does_not_reach_its_accuracy_ends_by_steps_and_by_the_clock(
    most_steps: int, limit_s: float
) -> None:
    (result,) = run_ranks(1, train_to_an_accuracy, {"most_steps": most_steps, "limit_s": limit_s})
    assert result["steps"] == 40 or most_steps > 40
    assert result["steps"] > 0
    assert 0 < result["accuracy"] <= 1


@pytest.mark.slow  # four ranks that import torch
def test_accuracy_that_is_not_reached_is_said_for_each_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "_MOST_STEPS", 20)
    options = ("--modes", "weak", "--against", "", "--batch", "16", "--strategies", "shard")
    rows = {row["contender"]: row for row in report_of(tmp_path, *options, "--accuracy", "0.99")}
    assert {row["accuracy_s"] for row in rows.values()} == {rows["alone"]["accuracy"]} == {None}
    shown = capsys.readouterr().out
    for contender, number in (("one rank", 8), ("shard", 16)):
        best = rows[contender]["accuracy"]
        assert 0 < best < 0.99
        assert (
            f"cnn with {number} rows in a step did not reach 0.99 in 20 steps; the best was {best:.3g}."
            in shown
        )


@pytest.mark.slow  # four ranks that import torch
def test_measurements_are_shown_though_a_training_to_an_accuracy_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "_MOST_STEPS", None)  # its rank cannot compare a number with that
    options = ("--modes", "strong", "--against", "", "--batch", "16", "--accuracy", "0.5")
    with pytest.raises(RankError, match="TypeError"):
        report_of(tmp_path, *options)
    assert "efficiency" in capsys.readouterr().out
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["one rank", "alone", "data"]


def test_the_gap_to_a_perfect_speed_up_is_divided_into_what_ranks_share_and_communication() -> None:
    def row(contender: str, speed_up: float, of_alone: float | None) -> dict[str, Any]:
        return {
            "case": "cnn, strong",
            "contender": contender,
            "ranks": 4,
            "speed_up": speed_up,
            "of_alone": of_alone,
        }

    (text,) = scaling.explain([row("alone", 1.64, None), row("data", 1.34, 0.82), row("tensor=2", 1.2, None)])
    assert text == (
        "cnn, strong: data on 4 ranks has a speed-up of 1.34. Without communication the ranks reach 1.64: of the gap "
        "to 4, what they share makes 2.36, and communication 0.30."
    )


def test_strong_scaling_keeps_the_rows_of_a_step_and_weak_scaling_those_of_a_rank() -> None:
    arguments = parsed(scaling, "--batch", "16")
    rows = {
        mode: {
            (contender.name, contender.ranks): scaling._case(arguments, contender, mode, [1, 2])["rows"]
            for contender in scaling.make_contenders(arguments, [1, 2], {"DDP on gloo": "gloo"})
        }
        for mode in ("strong", "weak")
    }
    names = {
        ("one rank", 1): 8,
        ("alone", 2): 16,
        ("data", 2): 16,
        ("DDP on gloo", 2): 16,
    }
    assert rows == {"strong": dict.fromkeys(names, 16), "weak": names}


@pytest.mark.slow  # about twenty ranks that import torch
def test_both_modes_have_every_contender_and_their_numbers_of_rows(tmp_path: Path) -> None:
    rows = report_of(tmp_path, "--batch", "16")
    strong = {row["contender"]: row for row in rows if row["case"] == "cnn, strong"}
    weak = {row["contender"]: row for row in rows if row["case"] == "cnn, weak"}
    installed, _ = split_missing(dict(scaling.AGAINST.values()))
    assert list(strong) == list(weak) == ["one rank", "alone", "data", *installed]
    assert {row["rows"] for row in strong.values()} == {16}
    assert [weak[name]["rows"] for name in ("one rank", "data")] == [8, 16]


@pytest.mark.slow  # seven ranks that import torch
def test_every_strategy_and_hybrid_trains_the_same_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparkdl.bench.rank_group.RANK_ARGUMENTS", ("-c", SMALL_MODEL))
    strategies = "data,shard,tensor,context,pipeline,tensor=2+shard,pipeline=2+tensor,tensor=2"
    rows = report_of(
        tmp_path,
        *("--model", "gpt", "--ranks", "2,4", "--modes", "strong", "--against", ""),
        *("--strategies", strategies, "--batch", "8"),
    )
    on_four = {row["contender"]: row for row in rows if row["ranks"] == 4}
    assert list(on_four) == ["alone", *strategies.split(",")]
    assert [row["contender"] for row in rows if row["ranks"] == 2][-1] == "tensor=2"
    for name, row in on_four.items():
        assert row["tokens_per_s"] == pytest.approx(64 * row["rows_per_s"])
        assert name == "alone" or 0 < row["communication_efficiency"] < 1, name
    assert "so their speed-up is limited by that" in capsys.readouterr().out


@pytest.mark.slow  # seven ranks that import torch
@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "hosts can be made")
def test_hosts_with_slow_links_are_slower(tmp_path: Path) -> None:
    options = ("--ranks", "4", "--modes", "strong", "--batch", "16")
    fast = {row["contender"]: row for row in report_of(tmp_path, *options)}
    slow = {row["contender"]: row for row in report_of(tmp_path, *options, "--megabits", "20")}
    for name in ("data", "DDP on gloo"):
        assert slow[name]["median_s"] > 1.5 * fast[name]["median_s"]
        assert slow[name]["of_alone"] < 0.7
    assert slow["data"]["communication_efficiency"] < 0.5


@pytest.mark.slow  # Spark, and launches for each turn
def test_ranks_are_tasks_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report_of(tmp_path, "--master", "local[2]", "--modes", "strong", "--batch", "16")
    assert [row["contender"] for row in rows] == ["one rank", "alone", "data"]
    assert "DDP on gloo tuned is missing: the tasks of --master" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "impossible"),
    [
        ((), []),
        (("--megabits", "10"), ["DDP on gloo tuned", "DDP on mpi", "hvd of Horovod"]),
        (("--master", "local[2]"), ["DDP on gloo", "DDP on gloo tuned", "DDP on mpi", "hvd of Horovod"]),
    ],
)
def test_contenders_that_cannot_take_part_are_named(options: tuple[str, ...], impossible: list[str]) -> None:
    names = [name for name, _ in scaling.AGAINST.values()]
    assert list(scaling.impossible_contenders(parsed(scaling, *options), names)) == impossible


@pytest.mark.parametrize("model", list(JOBS))
def test_made_rows_can_be_learned(model: str) -> None:
    job = JOBS[model]
    inputs, labels = job.draw(2000, torch.Generator().manual_seed(0), "", False)
    if model in DECODERS:
        # Two tokens can follow each one.
        following = torch.stack([(5 * inputs + step) % 4096 for step in (1, 2)])
        assert (following == labels).any(0).all()
        return
    centers = torch.stack([inputs[labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(inputs.flatten(1), centers.flatten(1)).argmin(1)
    assert (nearest == labels).float().mean() > 0.9


def test_cifars_own_files_are_read(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (6, 3073), np.uint8)
    rows[:, 0] = np.arange(6)
    rows[:3].tofile(tmp_path / "data_batch_1.bin")
    rows[3:].tofile(tmp_path / "data_batch_2.bin")
    images, labels = JOBS["cnn"].draw(50, torch.Generator().manual_seed(0), str(tmp_path), False)
    assert set(labels.tolist()) == set(range(6))
    pixels = torch.from_numpy(rows[:, 1:].reshape(6, 3, 32, 32).astype(np.float32))
    expected = (pixels - pixels.mean()) / pixels.std()
    torch.testing.assert_close(images, expected[labels])
    rows[:2].tofile(tmp_path / "test_batch.bin")
    _, held_out = JOBS["cnn"].draw(50, torch.Generator().manual_seed(0), str(tmp_path), True)
    assert set(held_out.tolist()) == {0, 1}


def test_files_that_are_not_cifars_binary_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unpack the binary one, cifar-10-binary.tar.gz"):
        JOBS["cnn"].draw(1, torch.Generator(), str(tmp_path), False)
    (tmp_path / "data_batch_1.bin").write_bytes(b"0" * 100)
    with pytest.raises(DataError, match="100 bytes, which is not a multiple of 3073"):
        JOBS["cnn"].draw(1, torch.Generator(), str(tmp_path), False)


def test_a_folder_without_images_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").touch()
    for folder, options, missing in (
        ("nowhere", (), "data_batch_*.bin"),
        ("", ("--accuracy", "0.5"), "test_batch.bin"),
    ):
        with pytest.raises(
            DataError, match=re.escape(f"has no files {missing}. CIFAR-10 has several versions")
        ):
            scaling._check(parsed(scaling, "--data", str(tmp_path / folder), *options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "1"), "--ranks 1 shows no scaling"),
        (("--ranks", "many"), "--ranks many is not a list of numbers"),
        (("--ranks", "2,3"), "--batch 256 cannot be shared by 3 ranks alike"),
        (("--batch", "0"), "--batch 0 is too little"),
        (("--strategies", "tensor"), "cnn cannot be divided so; use --model gpt"),
        (("--model", "gpt", "--strategies", "tensor=0"), "--strategies tensor=0 is not understood"),
        (("--strategies", "fsdp"), "--strategies fsdp is not understood"),
        (("--strategies", "data+shard"), "has several parts without a size"),
        (("--strategies", "shard=4"), "fits none of the numbers of ranks, 1,2"),
        (("--against", "ray"), "--against ray is unknown"),
        (("--accuracy", "60"), "--accuracy 60 is not a share between 0 and 1"),
        (("--model", "gpt", "--accuracy", "0.9"), "--accuracy 0.9 is out of reach of gpt"),
        (("--model", "gpt", "--data", "images"), "gpt reads tokens, which are made"),
        (("--megabits", "10", "--master", "local[2]"), "choose one"),
    ],
)
def test_options_that_cannot_work_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        scaling.run(parsed(scaling, *options))
