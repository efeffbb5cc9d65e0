"""``hvd.elastic.ElasticSampler`` with more ranks than remaining indices."""

from __future__ import annotations

import sparkdl.horovod.torch as hvd


def check_all_ranks_have_as_many_indices_and_together_all() -> None:
    for length in range(1, 8):
        shares = hvd.allgather_object(list(hvd.elastic.ElasticSampler(range(length))))
        assert {len(share) for share in shares} == {-(-length // hvd.size())}
        assert {index for share in shares for index in share} == set(range(length))


def check_one_index_that_is_left_goes_to_all_ranks() -> None:
    sampler = hvd.elastic.ElasticSampler(range(7), shuffle=False)
    sampler.record_batch(0, 2)
    sampler.reset()
    assert hvd.allgather_object(list(sampler)) == [[6]] * 3


def check_an_epoch_that_is_used_up_has_no_indices() -> None:
    sampler = hvd.elastic.ElasticSampler(range(6))
    sampler.record_batch(0, 2)
    sampler.reset()
    assert list(sampler) == []
    assert len(sampler) == 0
