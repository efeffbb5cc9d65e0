"""Param classWeights, and sampling that repeats the rows of rarer classes; on rows in a folder."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sparkdl.data import ParquetFeed, scan_dataset
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators import TorchClassifier
from sparkdl.estimators.fit.inputs import prepare_fit
from sparkdl.model.losses import compute_loss
from tests.unit.estimators.fit_examples import learn, make_estimator

COUNTS = {"common": 70, "rare": 12, "unusual": 18}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """100 rows of three classes of 70, 12 and 18 rows in five row groups."""
    rng = np.random.default_rng(4)
    names = np.repeat(list(COUNTS), list(COUNTS.values()))[rng.permutation(100)]
    table = pa.table(
        {
            "row": np.arange(100.0),
            "dense": pa.array(rng.normal(size=(100, 4)).astype(np.float32).tolist(), pa.list_(pa.float32())),
            "kind": names,
            "number": np.searchsorted(list(COUNTS), names),
            "is rare": names == "rare",
            "weight": rng.uniform(0, 2, 100),
        }
    )
    folder = tmp_path_factory.mktemp("rows")
    pq.write_table(table, folder / "part-0.parquet", row_group_size=20)
    return scan_dataset(str(folder))


class Focal(nn.CrossEntropyLoss):
    """A loss of the user that takes the mean itself."""

    def forward(self, outputs, labels):
        loss = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def head_of(dataset, **changes):
    (head,) = prepare_fit(make_estimator(**changes), dataset).spec.heads
    return head


def test_balanced_weights_are_those_of_scikit_learn(unequal):
    weights = head_of(unequal, labelCol="kind", classWeights="balanced").class_weights
    assert weights == pytest.approx([100 / (3 * count) for count in COUNTS.values()])


def test_balanced_weights_make_the_sums_of_row_weights_equal(unequal):
    weights = head_of(unequal, labelCol="number", weightCol="weight", classWeights="balanced").class_weights
    table = pq.read_table(unequal.url.removeprefix("file://"))
    numbers, rows = table["number"].to_numpy(), table["weight"].to_numpy()
    assert np.bincount(numbers, rows) * weights == pytest.approx([rows.sum() / 3] * 3)


@pytest.mark.parametrize(
    ("label", "given", "weights"),
    [
        ("kind", {"rare": 5}, (1.0, 5.0, 1.0)),
        ("number", {np.int64(2): 3, 0: 0.5}, (0.5, 1.0, 3.0)),
        ("kind", [1, 2, 3], (1.0, 2.0, 3.0)),
    ],
)
def test_given_weights_belong_to_labels(unequal, label, given, weights):
    assert head_of(unequal, labelCol=label, classWeights=given).class_weights == weights


BINARY = {"labelCol": "is rare", "model": nn.Linear(4, 1), "loss": nn.BCEWithLogitsLoss()}


def test_weighted_loss_is_that_of_torch(unequal):
    torch.manual_seed(0)
    outputs, targets = torch.randn(9, 3), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 0])
    weighted = head_of(unequal, labelCol="number", classWeights=[1, 2, 3])
    term = compute_loss(nn.CrossEntropyLoss(), outputs, targets, weighted.row_weights(targets, None))
    torch.testing.assert_close(
        term.mean, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))(outputs, targets)
    )
    binary = head_of(unequal, **BINARY, classWeights={True: 4.0})
    logits, flags = torch.randn(9, 1), (targets == 1).float().unsqueeze(1)
    term = compute_loss(nn.BCEWithLogitsLoss(), logits, flags, binary.row_weights(flags, None))
    expected = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0), reduction="sum")(logits, flags)
    torch.testing.assert_close(term.mean * term.weight, expected)


def test_soft_labels_are_refused_where_rows_are_weighted_or_repeated(tmp_path):
    table = pa.table({"dense": [[0.0] * 4] * 4, "share": [0.0, 1.0, 0.7, 1.0]})
    pq.write_table(table, tmp_path / "part-0.parquet")
    dataset = scan_dataset(str(tmp_path))
    binary = {"labelCol": "share", "model": nn.Linear(4, 1).double(), "loss": nn.BCEWithLogitsLoss()}
    for balancing in ({"classWeights": "balanced"}, {"sampling": "balanced"}):
        with pytest.raises(DataError, match="'share' holds 0.7, .* need the labels 0 and 1"):
            head_of(dataset, **binary, **balancing)
    given = head_of(dataset, **binary, classWeights=[1, 3])
    with pytest.raises(DataError, match="'share' holds 0.7"):
        given.encode(np.array([1.0, 0.7]))
    assert given.row_weights(torch.tensor([0.0, 1.0, 0.5]), None).tolist() == [1, 3, 2]
    assert head_of(dataset, **binary).encode(np.array([0.7])).tolist() == [0.7]


def test_ignored_labels_have_no_weight(unequal):
    head = head_of(
        unequal, labelCol="number", classWeights=[1, 2, 3], loss=nn.CrossEntropyLoss(ignore_index=-1)
    )
    targets = torch.tensor([-1, 2])
    term = compute_loss(head.loss, torch.zeros(2, 3), targets, head.row_weights(targets, None))
    assert term.weight == 3


@pytest.mark.parametrize("label", ["kind", "number"])
@pytest.mark.parametrize("validation", [None, 0.3])
def test_balanced_sampling_repeats_rows_of_rarer_classes_and_weights_make_the_rest(
    unequal, label, validation
):
    params = make_estimator(labelCol=label, sampling="balanced", validationFraction=validation, numWorkers=3)
    spec = prepare_fit(params, unequal).spec
    shards = []
    for rank in range(3):
        with ParquetFeed(
            unequal,
            columns=["row", label],
            batch_size=9,
            rank=rank,
            world_size=3,
            row_filter=spec.training_rows,
        ) as feed:
            shards += [
                (row, value) for batch in feed.epoch(1) for row, value in zip(*batch.values(), strict=True)
            ]
    times = Counter(shards)
    numbers = spec.heads[0].label.encode(
        np.array([value for _, value in times], dtype=object if label == "kind" else int)
    )
    of_class = [Counter() for _ in COUNTS]
    for number, count in zip(numbers, times.values(), strict=True):
        of_class[number][count] += 1
    assert all(len(counts) == 1 for counts in of_class)  # all rows of a class come equally often
    rows_of_class = [sum(counts.values()) for counts in of_class]
    total = [sum(n * c for n, c in counts.items()) for counts in of_class]
    largest = max(rows_of_class)
    assert np.multiply(total, spec.heads[0].class_weights) == pytest.approx([largest] * 3)
    assert sum(rows_of_class) == (100 if validation is None else 70)
    assert spec.heads[0].class_weights == pytest.approx([1, 1, 1], abs=0.34)
    # Validation rows come once, so that all of the balance is in their weights.
    assert np.multiply(rows_of_class, spec.heads[0].for_validation().class_weights) == pytest.approx(
        [largest] * 3
    )


def test_ready_made_classifiers_take_class_weights(unequal):
    spec = learn(TorchClassifier(featuresCol="dense", labelCol="kind", classWeights="balanced"), unequal).spec
    assert spec.heads[0].class_weights[1] == pytest.approx(100 / 36)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"classWeights": {"rae": 2}, "labelCol": "kind"},
            "names 'rae', and the classes are 'common', 'rare', 'un",
        ),
        ({"classWeights": [1, 2]}, r"has 2 weights, and there are 3 classes: 0, 1, 2"),
        ({"classWeights": "balanced", "sampling": "balanced"}, "both set"),
        (
            {
                "classWeights": "balanced",
                "labelCol": "weight",
                "loss": nn.MSELoss(),
                "model": nn.Linear(4, 1),
            },
            "one class",
        ),
        ({"classWeights": "balanced", "loss": Focal()}, "^Param classWeights needs one loss value per row"),
        ({"sampling": "balanced", "loss": Focal()}, "^Param sampling needs one loss value per row"),
    ],
)
def test_weights_that_fit_no_class_are_refused(unequal, changes, message):
    with pytest.raises(ParamError, match=message):
        prepare_fit(make_estimator(**{"labelCol": "number", **changes}), unequal)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, -1], "at least 0"),
        ([0, 0], "not all 0"),
        ("equal", "'equal' is none of 'balanced'"),
        (3, "classWeights"),
    ],
)
def test_weights_that_cannot_work_are_refused_before_rows_are_read(given, message):
    with pytest.raises((ParamError, TypeError), match=message):
        make_estimator(classWeights=given)._check_values()


def test_step_of_the_user_weighs_rows_itself():
    with pytest.raises(ParamError, match="Params sampling and trainStep are both set"):
        make_estimator(loss=None, trainStep=lambda model, batch: 0, sampling="balanced")._check_values()


def test_weights_are_saved_with_the_estimator(tmp_path):
    TorchClassifier(classWeights={3: 2.0, 5: 1.0}, sampling="balanced").save(str(tmp_path / "saved"))
    loaded = TorchClassifier.load(str(tmp_path / "saved"))
    assert loaded.getClassWeights() == {3: 2.0, 5: 1.0}
