"""Fits whose initial weights are drawn or read by the ranks, each its part."""

from __future__ import annotations

import pytest
import safetensors.torch

from sparkdl.errors import CheckpointError, ParamError, SavedModelError
from sparkdl.parallel import draw_weights, on_meta
from tests.spark.estimators.estimator_examples import make_estimator, make_model

pytestmark = pytest.mark.any_spark_will_do


@pytest.fixture(scope="module")
def whole():
    """A model with the weights that ranks draw from the seed of the estimator."""
    module = make_model()
    draw_weights(module, seed=7)
    return module


@pytest.fixture
def meta():
    with on_meta():
        return make_model()


@pytest.fixture
def folder(whole, tmp_path):
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "model.safetensors")
    return str(tmp_path)


def test_a_model_on_meta_begins_with_weights_that_ranks_draw_or_read(frame, whole, meta, folder, tmp_path):
    expected = make_estimator(tmp_path, model=whole, epochs=1).fit(frame).history[0].loss
    for weights, sizes in (("drawn", None), (folder, {"shard": 2})):
        estimator = make_estimator(tmp_path, model=meta, epochs=1, initialWeights=weights, parallelism=sizes)
        assert estimator.fit(frame).history[0].loss == pytest.approx(expected, rel=1e-5), (weights, sizes)


@pytest.mark.slow  # tests/unit/training/checkpoint/test_identity.py refuses them daily
def test_a_fit_does_not_resume_from_checkpoints_that_began_with_other_files(frame, meta, folder, tmp_path):
    estimator = make_estimator(
        tmp_path, model=meta, epochs=1, initialWeights=folder, checkpointDir=str(tmp_path / "run")
    )
    first = estimator.fit(frame).history
    assert [record.loss for record in estimator.fit(frame).history] == [record.loss for record in first]
    draw_weights(meta, seed=8)
    safetensors.torch.save_file(meta.state_dict(), f"{folder}/model.safetensors")
    with pytest.raises(CheckpointError, match="initial weights: model.safetensors was .* and is "):
        estimator.fit(frame)


@pytest.mark.slow
def test_pipeline_stages_read_their_part(frame, whole, meta, folder, tmp_path):
    expected = make_estimator(tmp_path, model=whole, epochs=1, numWorkers=1).fit(frame).history[0].loss
    staged = make_estimator(
        tmp_path, model=meta, epochs=1, initialWeights=folder, parallelism={"pipeline": 2}
    )
    assert staged.fit(frame).history[0].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_weights_of_half_precision_are_drawn_too(frame, whole, meta, tmp_path):
    half = {"epochs": 1, "precision": "float16"}
    exact = make_estimator(tmp_path, model=whole, **half).fit(frame).history[0].loss
    drawn = make_estimator(tmp_path, model=meta, initialWeights="drawn", **half)
    assert drawn.fit(frame).history[0].loss == pytest.approx(exact, rel=1e-5)


def test_invalid_combinations_with_initial_weights_are_refused(frame, meta, folder, tmp_path):
    half = make_estimator(tmp_path, model=meta, initialWeights="drawn", precision="float16")
    with pytest.raises(ParamError, match="precision is 'float16', whose loss scaling"):
        half.copy({half.parallelism: {"shard": 2}}).fit(frame)
    with pytest.raises(ParamError, match="on the device meta"):
        make_estimator(tmp_path, model=meta).fit(frame)
    with on_meta():
        other = make_model(outputs=12)
    with pytest.raises(SavedModelError, match="initialWeights cannot be used: .* in the model"):
        make_estimator(tmp_path, model=other, initialWeights=folder).fit(frame)
