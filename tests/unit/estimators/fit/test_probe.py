from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparkdl.data import Column
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.fit.probe import TrialGradients, probe, trial_copy, try_optimizer, try_outputs
from sparkdl.model.heads import Head, LabelColumn
from sparkdl.model.inputs import ModelInputs
from sparkdl.model.losses import as_module, prediction_kind


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def probe_one(model, loss, features, label, optimizer=sgd, *, weighted_by=""):
    image, digit = np.array([features]), np.array([label])
    column = Column(name="image", dtype=str(image.dtype), shape=image.shape[1:])
    head = Head(label=LabelColumn(name="digit", shape=digit.shape[1:]), loss=loss)
    return probe(
        model,
        optimizer,
        inputs=ModelInputs(columns=(column,)),
        heads=[head],
        row={"image": image},
        labels={"digit": digit},
        pair={"image": np.concatenate([image, image])},
        weighted_by=weighted_by,
    )


def features_dtype(found):
    return getattr(torch, found.inputs.inputs[0].dtype)


def label_dtype(found):
    return getattr(torch, found.heads[0].label.dtype)


VECTOR = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
"""A model that returns one number per row, without a dimension for it."""


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).mean(dim=1)


def test_floats_become_the_dtype_of_the_parameters():
    found = probe_one(nn.Linear(2, 3), nn.CrossEntropyLoss(), [1.0, 2.0], 2)
    assert (features_dtype(found), label_dtype(found)) == (torch.float32, torch.int64)
    assert (found.num_classes[0], *found.prediction_shapes.values()) == (3, ())
    found = probe_one(nn.Linear(2, 3).double(), nn.MSELoss(), [1.0, 2.0], [1.0, 2.0, 3.0])
    assert (features_dtype(found), label_dtype(found)) == (torch.float64, torch.float64)
    assert (found.num_classes[0], *found.prediction_shapes.values()) == (None, (3,))


def test_integers_stay_integers_for_an_embedding_and_become_floats_for_a_linear_layer():
    assert features_dtype(probe_one(BagOfWords(), nn.CrossEntropyLoss(), [1, 2], 0)) == torch.int64
    assert features_dtype(probe_one(nn.Linear(2, 3), nn.CrossEntropyLoss(), [1, 2], 0)) == torch.float32


def test_scalars_enter_a_linear_layer_as_one_feature_and_an_embedding_as_they_are():
    table = nn.Sequential(nn.Embedding(10, 3))
    assert features_dtype(probe_one(nn.Linear(1, 3), nn.CrossEntropyLoss(), 0.5, 2)) == torch.float32
    assert features_dtype(probe_one(nn.Linear(1, 3), nn.CrossEntropyLoss(), 5, 2)) == torch.float32
    assert features_dtype(probe_one(table, nn.CrossEntropyLoss(), 5, 2)) == torch.int64


def test_parameters_without_a_gradient_are_noticed():
    assert probe_one(BagOfWords(), nn.CrossEntropyLoss(), [1, 2], 0).gradients.any_missing
    assert not probe_one(nn.Linear(2, 3), nn.CrossEntropyLoss(), [1, 2], 0).gradients.any_missing


def test_a_loss_gets_labels_of_the_dtype_that_it_can_use():
    def binary(outputs, labels):
        return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), labels)

    def entropy(outputs, labels):
        return F.cross_entropy(outputs, labels)

    assert label_dtype(probe_one(nn.Linear(2, 1), binary, [1.0, 2.0], 1)) == torch.float32
    for loss, label in ((entropy, 2), (nn.CrossEntropyLoss(), 2.0)):
        assert label_dtype(probe_one(nn.Linear(2, 3), loss, [1.0, 2.0], label)) == torch.int64


def test_the_model_does_not_change():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    probe_one(model, nn.CrossEntropyLoss(), [1.0, 2.0], 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model[0].weight.grad is None


@pytest.mark.parametrize(
    ("model", "loss", "error", "message"),
    [
        (
            nn.Linear(5, 3),
            nn.CrossEntropyLoss(),
            DataError,
            r"'image' does not fit the model Linear.*\(1, 2\)",
        ),
        (nn.Linear(2, 3), nn.MSELoss(), DataError, r"labels of shape \(\) per row.*output has \(3,\)"),
        (VECTOR, nn.NLLLoss(), ParamError, r"one score per class.*\(1,\)"),
        (nn.LSTM(2, 3), nn.MSELoss(), ParamError, "it returned a tuple of 2"),
        (nn.LazyLinear(3), nn.MSELoss(), ParamError, "lazy layers"),
        (nn.Flatten(), nn.MSELoss(), ParamError, "nothing to train"),
        (nn.Linear(2, 1), lambda outputs: outputs.sum(), DataError, "'digit' do not fit the loss.*TypeError"),
        (nn.Linear(2, 1), F.mse_loss, DataError, r"'digit' do not fit the loss.*\(1, 1\)"),
    ],
)
def test_model_loss_and_rows_that_do_not_fit_are_named(model, loss, error, message):
    with pytest.raises(error, match=message):
        probe_one(model, loss, [1.0, 2.0], 1.0)


@pytest.mark.parametrize("model", [nn.Sequential(BagOfWords(), nn.Linear(5, 3)), nn.Linear(5, 3)])
def test_error_for_integers_that_fit_in_no_dtype_names_the_differing_shapes(model):
    with pytest.raises(DataError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        probe_one(model, nn.CrossEntropyLoss(), [1, 2], 0)
    assert "shapes cannot be multiplied" in str(caught.value.__cause__)


class BadlyShaped(nn.Module):
    def forward(self, image):
        return image.reshape(7, 3)


def test_the_line_of_the_users_network_that_fails_is_named():
    with pytest.raises(
        DataError, match=r"It was raised at .*test_probe.py, line \d+, in forward: return image.reshape"
    ):
        probe_one(BadlyShaped(), nn.MSELoss(), [1.0, 2.0], 0.0)


def test_doubles_for_an_embedding_get_advice_to_cast():
    with pytest.raises(
        DataError, match="dtype float64, passed as float32, gave .* Long.* Cast whole numbers to bigint"
    ):
        probe_one(BagOfWords(), nn.CrossEntropyLoss(), [1.0, 2.0], 0)


def test_integers_beyond_an_embedding_are_named():
    with pytest.raises(DataError, match="dtype int64 gave IndexError: index out of range"):
        probe_one(BagOfWords(), nn.CrossEntropyLoss(), [1, 20], 0)


def scores(*values, head=()):
    """A model with these scores for any input."""
    linear = nn.Linear(2, len(values))
    nn.init.zeros_(linear.weight)
    linear.bias.data = torch.tensor(values)
    return nn.Sequential(linear, *head)


@pytest.mark.parametrize("loss", [nn.BCELoss(), as_module(F.binary_cross_entropy)])
@pytest.mark.parametrize("score", [-0.5, 1.5])
def test_bce_loss_of_an_output_outside_0_to_1_suggests_the_sigmoid(loss, score):
    with pytest.raises(ParamError, match=rf"first row is {score}, .*Sigmoid.*BCEWithLogitsLoss"):
        probe_one(scores(score), loss, [1.0, 2.0], 1.0)
    probe_one(scores(score, head=[nn.Sigmoid()]), loss, [1.0, 2.0], 1.0)


@pytest.mark.parametrize("values", [(0.5, 1.0, -2.0), (0.2, 0.3, 0.5), (-9.0, -9.0, -9.0)])
def test_nll_loss_of_outputs_that_are_no_log_probabilities_suggests_the_log_softmax(values):
    with pytest.raises(ParamError, match=r"whose sum is .*, not 1.*LogSoftmax.*CrossEntropyLoss"):
        probe_one(scores(*values), nn.NLLLoss(), [1.0, 2.0], 2)
    probe_one(scores(*values, head=[nn.LogSoftmax(dim=1)]), nn.NLLLoss(), [1.0, 2.0], 2)


def root_of_mean(outputs, labels):
    return torch.sqrt(((labels - outputs) ** 2).mean())


class OwnLoss(nn.Module):
    def forward(self, outputs, labels):
        return (outputs - labels).abs()


@pytest.mark.parametrize(
    ("loss", "weighted_by"),
    [
        (lambda outputs, labels: (outputs - labels) ** 2, ""),
        (lambda outputs, labels: (outputs - labels) ** 2, "weightCol"),
        (OwnLoss(), "weightCol"),
        (root_of_mean, ""),
    ],
)
def test_a_loss_that_compares_every_row_with_every_other_one_is_refused(loss, weighted_by):
    with pytest.raises(ParamError, match=r"Param loss compares outputs of shape \(N, 1\).*squeeze"):
        probe_one(nn.Linear(2, 1), loss, [1.0, 2.0], 1.0, weighted_by=weighted_by)
    probe_one(VECTOR, loss, [1.0, 2.0], 1.0, weighted_by=weighted_by)
    probe_one(nn.Linear(2, 1), lambda outputs, labels: loss(outputs[:, 0], labels), [1.0, 2.0], 1.0)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda parameters: 3, "it returned int"),
        (lambda: None, "failed when called.*TypeError"),
        (lambda _: torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), "SGD of other parameters"),
    ],
)
def test_invalid_optimizer_factory_is_named(factory, message):
    with pytest.raises(ParamError, match=f"Param optimizer.*{message}"):
        probe_one(nn.Linear(2, 1), nn.MSELoss(), [1.0, 2.0], 1.0, factory)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.CrossEntropyLoss(), lambda outputs, labels: (outputs[:, 0] - labels) ** 2]
)
def test_a_loss_with_a_value_per_row_takes_weights(loss):
    probe_one(nn.Linear(2, 1), loss, [1.0, 2.0], 0.0, weighted_by="weightCol")


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, labels: ((outputs[:, 0] - labels) ** 2).mean(),
        lambda outputs, labels: ((outputs[:, 0] - labels) ** 2).mean(dim=0, keepdim=True),
    ],
)
def test_a_loss_that_reduces_is_refused_with_weights(loss):
    probe_one(nn.Linear(2, 1), loss, [1.0, 2.0], 1.0)
    with pytest.raises(ParamError, match=r"weightCol needs one loss .*returned shape \(1?,?\) for 2"):
        probe_one(nn.Linear(2, 1), loss, [1.0, 2.0], 1.0, weighted_by="weightCol")


def test_functional_losses_are_treated_as_their_modules():
    assert prediction_kind(as_module(F.cross_entropy)) == "class"
    assert prediction_kind(as_module(F.binary_cross_entropy_with_logits)) == "binary_logit"
    assert prediction_kind(as_module(F.binary_cross_entropy)) == "binary_probability"
    assert prediction_kind(as_module(F.mse_loss)) == "value"
    assert prediction_kind(as_module(lambda outputs, labels: outputs)) == "value"


class Words(nn.Module):
    """An embedding, layers (one is unused), and a batch norm; the last layer is tied to the embedding."""

    def __init__(self, *, sparse: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 4, sparse=sparse)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, 4)
        self.unused = nn.Linear(30, 30)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 100, bias=False)
        if not sparse:
            self.last.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        found = self.frozen(self.norm(self.embedding(ids)))
        if self.reentrant:
            return self.last(checkpoint(self.hidden, found, use_reentrant=True))
        return self.last(self.hidden(found))


def trial_of(model: Words, copied_bytes: int) -> tuple[Words, list[nn.Parameter], TrialGradients]:
    trial, shared = trial_copy(model, model, copied_bytes)
    return trial, shared, TrialGradients(trial, shared)


def go_backward(trial: Words, gradients: TrialGradients) -> None:
    outputs = trial(torch.tensor([1, 2, 3]))
    gradients.backward(outputs.square().mean())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("copied_bytes", [0, 100, 1000, 1 << 20])
def test_gradients_are_known_whether_parameters_are_copied_or_shared(
    copied_bytes: int, sparse: bool, reentrant: bool
) -> None:
    model = Words(sparse=sparse, reentrant=reentrant)
    trial, shared, gradients = trial_of(model, copied_bytes)
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    assert [parameter.data_ptr() in mine for parameter in trial.parameters()].count(True) == len(shared)
    assert bool(shared) == (copied_bytes < 1 << 20)
    assert not gradients.found.any_found
    for _ in range(2):  # once for each of two heads
        go_backward(trial, gradients)
    assert gradients.found.any_found
    assert gradients.found.are_sparse == sparse
    assert gradients.found.any_missing
    assert all(parameter.grad is None for parameter in shared)
    trial.unused.requires_grad_(False)
    again = TrialGradients(trial, shared)
    go_backward(trial, again)
    assert not again.found.any_missing


def test_shared_parameters_never_get_a_gradient() -> None:
    trial, shared, gradients = trial_of(Words(), 0)
    outputs = trial(torch.tensor([1, 2, 3]))
    for parameter in shared:
        if parameter.requires_grad:
            parameter.register_hook(
                lambda gradient: pytest.fail(f"a gradient of {tuple(gradient.shape)} was computed")
            )
    gradients.backward(outputs.mean())
    assert gradients.found.any_found


def test_copy_keeps_tied_parameters_and_has_its_own_buffers() -> None:
    model = Words()
    (trial, again), shared = trial_copy((model, model), model, 0)
    assert trial is again
    assert trial.last.weight is trial.embedding.weight
    assert len(shared) == len(list(model.parameters()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trial.train()(torch.tensor([1, 2, 3]))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_trial_step_changes_only_copies() -> None:
    model = Words()
    trial, shared, gradients = trial_of(model, 1000)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(trial.parameters(), lr=1.0, weight_decay=1.0)
    go_backward(trial, gradients)
    for parameter in shared:  # even if they have gradients
        parameter.grad = torch.ones_like(parameter)
    try_optimizer(optimizer, shared)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert not torch.equal(trial.hidden.bias, model.hidden.bias)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(trial.parameters()))


def test_error_of_the_backward_pass_is_unchanged() -> None:
    trial, _, gradients = trial_of(Words(), 0)
    outputs = trial(torch.tensor([1, 2, 3]))
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients.backward(outputs.detach().mean())


def test_a_model_on_meta_is_tried_without_memory_for_its_weights():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1 << 40, 4), nn.Flatten(), nn.Linear(8, 3))  # 16 TiB
    trial, shared = trial_copy(model, model)
    assert [tuple(weight.shape) for weight in shared] == [(3,), (3, 8), (1 << 40, 4)]
    outputs = trial(torch.tensor([[0, (1 << 40) - 1]]))
    assert outputs.shape == (1, 3)
    assert torch.isfinite(outputs).all()
    assert all(parameter.is_meta for parameter in model.parameters())


class ScalesByType(nn.Module):
    """Brings whole numbers to 0 to 1 by the largest of their type, as torchvision's ConvertImageDtype does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 1)

    def forward(self, pixels: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        if not pixels.is_floating_point():
            pixels = pixels / torch.iinfo(pixels.dtype).max
        return self.last(pixels + shifts)


@pytest.mark.parametrize("more", [0, 4])
def test_what_a_function_has_prepared_enters_in_its_own_dtype_if_the_model_takes_it(more):
    def prepare(columns):
        rows = len(columns["x"])
        inputs = {"pixels": np.full((rows, 2), 255, np.uint8), "shifts": np.zeros((rows, 2))}
        return inputs | {f"mask {number}": np.ones(rows, bool) for number in range(more)}

    class Model(ScalesByType):
        def forward(self, pixels, shifts, *masks):
            return super().forward(pixels, shifts)

    column = Column(name="x", dtype="int64")
    row = {"x": np.array([1])}
    inputs, outputs, trial, _ = try_outputs(
        Model(), ModelInputs(columns=(column,), prepare=prepare), [], row, {"x": np.array([1, 2])}
    )
    dtypes = [entry.dtype for entry in inputs.inputs]
    assert dtypes == ["uint8", "float32", *["bool"] * more]
    torch.testing.assert_close(outputs["prediction"], trial.last(torch.ones(1, 2)))


def test_a_program_that_takes_doubles_alone_gets_them():
    class Double(nn.Module):
        def forward(self, features):
            if features.dtype != torch.float64:
                raise TypeError(f"Tensor dtype mismatch! Expected: Double, Got: {features.dtype}")
            return features.sum(dim=1)

    inputs = ModelInputs(columns=(Column(name="x", dtype="float64", shape=(2,)),))
    rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    tried, _, _, _ = try_outputs(Double(), inputs, [], {"x": rows[:1]}, {"x": rows})
    assert tried.inputs[0].dtype == "float64"
