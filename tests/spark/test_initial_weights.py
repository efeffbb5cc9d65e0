"""Fits that begin with weights that ranks draw or read, each its part."""

from __future__ import annotations

import pytest
import safetensors.torch

from sparkdl.errors import ParamError, SavedModelError
from sparkdl.parallel import draw_weights, on_meta
from tests.spark.estimator_examples import make_estimator, make_model


@pytest.mark.any_spark_will_do
def test_a_model_on_meta_begins_with_weights_that_ranks_draw_or_read(frame, tmp_path):
    whole = make_model()
    draw_weights(whole, seed=7)  # the seed of the estimator
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with on_meta():
        meta = make_model()
    expected = {
        readers: make_estimator(tmp_path, model=whole, epochs=1, numWorkers=readers)
        .fit(frame)
        .history[0]
        .loss
        for readers in (1, 2)
    }
    folder = str(tmp_path)
    for given, sizes, readers in (
        ("drawn", None, 2),
        (folder, {"shard": 2}, 2),
        (folder, {"pipeline": 2}, 1),
    ):
        estimator = make_estimator(tmp_path, model=meta, epochs=1, initialWeights=given, parallelism=sizes)
        assert estimator.fit(frame).history[0].loss == pytest.approx(expected[readers], rel=1e-5), (
            given,
            sizes,
        )
    half = {"epochs": 1, "precision": "float16"}
    exact = make_estimator(tmp_path, model=whole, **half).fit(frame).history[0].loss
    drawn = make_estimator(tmp_path, model=meta, initialWeights="drawn", **half)
    assert drawn.fit(frame).history[0].loss == pytest.approx(exact, rel=1e-5)
    with pytest.raises(ParamError, match="precision is 'float16', whose gradients"):
        drawn.copy({drawn.parallelism: {"shard": 2}}).fit(frame)
    with pytest.raises(ParamError, match="on the device meta"):
        make_estimator(tmp_path, model=meta).fit(frame)
    with pytest.raises(SavedModelError, match="initialWeights cannot be used: .* in the model"):
        with on_meta():
            other = make_model(outputs=12)
        make_estimator(tmp_path, model=other, initialWeights=str(tmp_path)).fit(frame)
