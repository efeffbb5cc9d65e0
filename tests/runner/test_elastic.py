"""Training states that survive killed ranks and exceptions."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch

from sparkdl.errors import CheckpointError, ProcessesLostError, RankDiedError, RankError
from tests.runner import elastic_functions as functions
from tests.runner.local_runner import make_runner


@pytest.mark.parametrize(
    "train",
    [
        functions.train_for_horovod,
        *(
            pytest.param(function, marks=pytest.mark.slow)
            for function in (functions.train, functions.train_sharded, functions.train_pipeline)
        ),
    ],
)
def test_run_restarts_from_its_last_commit_after_a_killed_rank_and_ends_with_the_same_weights(
    train, tmp_path, caplog
):
    undisturbed = make_runner().run(train, None)
    assert undisturbed["began_with"] == 0
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        restarted = make_runner(max_restarts=1).run(train, str(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert restarted["began_with"] == 3
    torch.testing.assert_close(restarted["weight"], undisturbed["weight"], rtol=0, atol=0)
    assert "2 of 2 ranks from commit 3 " in caplog.text


def test_shards_and_other_values_that_no_state_can_keep_are_refused_with_their_names(tmp_path):
    make_runner(checkpoint_dir=tmp_path).run(functions.keep_what_no_state_can)


@pytest.mark.slow  # the next test loads them in another layout, too
def test_sharded_commits_are_loaded_by_any_number_of_ranks_in_any_layout(tmp_path):
    folder, marker = tmp_path / "commits", str(tmp_path / "killed")
    with pytest.raises(RankDiedError, match="Rank 1"):
        make_runner(checkpoint_dir=folder).run(functions.train_sharded, marker)
    assert len(list(folder.glob("state-0-00000003-*/rank-*.safetensors"))) == 2
    for name, num_workers, options in (("fewer", 1, {}), ("other", 2, {"mesh_name": "other"})):
        shutil.copytree(folder, tmp_path / name)
        add_damaged_commit(tmp_path / name, "rank-00001.safetensors")
        runner = make_runner(num_workers=num_workers, checkpoint_dir=tmp_path / name)
        assert runner.run(functions.train_sharded, None, **options)["began_with"] == 3
    runner = make_runner(checkpoint_dir=folder, max_restarts=3)
    with pytest.raises(RankError, match="is of another model: it lacks model.bias, model.weight; ") as caught:
        runner.run(functions.train, None)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert not isinstance(caught.value, ProcessesLostError)
    again = make_runner(checkpoint_dir=folder).run_all(functions.train_sharded, None)
    assert [value["began_with"] for value in again] == [3, 3]
    torch.testing.assert_close(again[0]["weight"], again[1]["weight"], rtol=0, atol=0)


def add_damaged_commit(folder, file):
    (third,) = folder.glob("state-0-00000003-*")
    fourth = folder / third.name.replace("-00000003-", "-00000004-")
    shutil.copytree(third, fourth)
    (fourth / file).write_bytes((third / file).read_bytes()[:-1])


def test_run_whose_rank_was_killed_continues_on_fewer_ranks_in_another_layout(tmp_path):
    folder, train = str(tmp_path / "checkpoints"), functions.train_in_layout
    with pytest.raises(RankDiedError, match="Rank 3"):
        make_runner(num_workers=4).run(train, folder, str(tmp_path / "killed"), shard=2, tensor=2)
    continued = make_runner().run(train, folder, None, shard=2)
    assert continued["began_with"] in (2, 3)  # the third may still have been unfinished
    undisturbed = make_runner().run(train, str(tmp_path / "others"), None, shard=2)
    torch.testing.assert_close(continued["weight"], undisturbed["weight"], rtol=1e-5, atol=1e-6)


def test_later_run_on_fewer_ranks_continues_from_the_commits_of_an_earlier_run(tmp_path):
    folder = tmp_path / "commits"
    with pytest.raises(RankDiedError, match="Rank 1"):
        make_runner(checkpoint_dir=folder).run(functions.train, str(tmp_path / "killed"))
    add_damaged_commit(folder, "rank-00000.pt")
    value = make_runner(num_workers=1, checkpoint_dir=folder).run(functions.train, None)
    assert value["began_with"] == 3
    assert value["losses"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    torch.testing.assert_close(
        value["weight"], make_runner(num_workers=1).run(functions.train, None)["weight"]
    )
    again = make_runner(num_workers=1, checkpoint_dir=folder).run(functions.train, None)
    assert again["began_with"] == functions.NUM_EPOCHS


def test_each_state_of_a_function_finds_its_own_commits(tmp_path):
    options = {"num_workers": 1, "checkpoint_dir": str(tmp_path)}
    with pytest.raises(RankError, match="on purpose"):
        make_runner(max_retries=2, **options).run(functions.commit_two_states, True)
    assert make_runner(**options).run(functions.commit_two_states, False) == (1, 13)
