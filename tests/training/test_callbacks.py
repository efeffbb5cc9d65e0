"""Ranks stop together, and a fit returns the weights of its best epoch."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from sparkdl.errors import RankError
from sparkdl.parallel import Parallelism
from sparkdl.training.callbacks import Callback, FitContext, Patience, TensorBoard, TorchProfiler
from sparkdl.training.spec import Goal
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import assert_same_weights, make_spec, train_all, write_dataset
from tests.training.test_validation import with_split


class StopsOnOneRank(Callback):
    def on_step_end(self, context):
        if (context.rank, context.epoch, context.step) == (1, 2, 3):
            context.stop()


class FailsOnOneRank(Callback):
    def on_epoch_end(self, context):
        if context.rank == 1:
            raise KeyError(f"loss {context.record.loss:.1f}")


class KeepsWeights(Callback):
    """Saves weights to files, because attributes of the callback stay on the rank."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_epoch_end(self, context):
        torch.save(context.module.state_dict(), f"{self.folder}/{context.rank}-{context.epoch}.pt")

    def on_fit_end(self, context):
        torch.save(context.module.state_dict(), f"{self.folder}/{context.rank}-end.pt")


diverging = partial(torch.optim.SGD, lr=4.0, momentum=0.9)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), 75)


def test_stop_request_of_one_rank_stops_all_and_patience_restores_the_best_weights(dataset, tmp_path):
    one_wish = make_spec(callbacks=(StopsOnOneRank(),), epochs=4)
    goal = Goal(metric="val_loss")
    impatient = make_spec(
        optimizer=diverging,
        callbacks=(KeepsWeights(tmp_path),),
        epochs=12,
        best=goal,
        watched=goal,
        patience=Patience(epochs=2),
    )
    cases = [(one_wish, dataset), (with_split(impatient, dataset, 0.3), dataset)]
    for rank, (stopped, best) in enumerate(run_ranks(2, train_all, cases)):
        assert [record.epoch for record in stopped.history] == [1, 2]
        assert stopped.model_epoch == 2
        losses = [record.metrics["val_loss"] for record in best.history]
        assert best.model_epoch == losses.index(min(losses)) + 1
        assert len(losses) == best.model_epoch + 2 < 12
        # Rank 0 returns the best model; the other rank keeps its last weights.
        source = torch.load(tmp_path / f"{rank}-{len(losses) if rank else best.model_epoch}.pt")
        at_end = torch.load(tmp_path / f"{rank}-end.pt")
        assert_same_weights(best.weights, source)
        assert_same_weights(best.weights, at_end)


def test_a_callback_that_fails_on_one_rank_ends_all(dataset):
    with pytest.raises(RankError, match="FailsOnOneRank .* on_epoch_end, epoch 1 on rank 1: Key"):
        run_ranks(2, train_all, [(make_spec(callbacks=(FailsOnOneRank(),)), dataset)])


def test_tensorboard_has_losses_and_metrics_of_each_epoch_and_the_profiler_a_file_per_rank(dataset, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board, profile = tmp_path / "board", tmp_path / "profile"
    callbacks = (
        TensorBoard(str(board), every_steps=2, weights=True),
        TorchProfiler(str(profile), skip=1, steps=2, record_shapes=True),
    )
    cases = [(make_spec(callbacks=callbacks, epochs=2), dataset)]
    records = run_ranks(2, train_all, cases)[0][0].history
    events = event_accumulator.EventAccumulator(str(board)).Reload()
    losses = events.Scalars("epoch/loss")
    assert [event.value for event in losses] == pytest.approx([record.loss for record in records])
    assert losses[1].step == 2 * losses[0].step
    assert {"epoch/learning_rate", "step/loss"} <= set(events.Tags()["scalars"])
    assert events.Tags()["histograms"]
    files = sorted(path.name for path in profile.iterdir())
    assert [name.split(".")[0] for name in files] == ["rank_0", "rank_1"]
    events_of_rank = json.loads((profile / files[0]).read_text())["traceEvents"]
    assert any(str(event.get("name")).startswith("aten::") for event in events_of_rank)


@pytest.mark.parametrize(("num_steps", "recorded"), [(2, "0 of 2"), (4, "1 of 2"), (5, None)])
def test_profiler_warns_if_the_fit_has_fewer_steps_than_it_is_to_record(
    tmp_path, caplog, num_steps, recorded
):
    module = torch.nn.Linear(1, 1)
    context = FitContext(
        rank=0,
        world_size=1,
        epochs=1,
        steps_per_epoch=num_steps,
        module=module,
        optimizer=torch.optim.SGD(module.parameters()),
    )
    profiler = TorchProfiler(str(tmp_path), skip=3, steps=2)
    profiler.on_fit_start(context)
    for _ in range(num_steps):
        profiler.on_step_end(context)
    profiler.on_fit_end(context)
    wanted = f"recorded {recorded} steps: the fit took {num_steps}, and skip=3" if recorded else ""
    assert wanted in caplog.text
    assert bool(caplog.text) == bool(recorded)


def test_tensorboard_has_the_whole_of_sharded_weights(dataset, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    spec = make_spec(
        callbacks=(TensorBoard(str(tmp_path), weights=True),), epochs=1, parallelism=Parallelism(shard=2)
    )
    run_ranks(2, train_all, [(spec, dataset)])
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    sizes = {
        name: sum(events.Histograms(name)[0].histogram_value.bucket) for name in events.Tags()["histograms"]
    }
    assert sizes == {name: parameter.numel() for name, parameter in spec.model.named_parameters()}
