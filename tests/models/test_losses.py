"""Losses: chunked as plain, in parts as whole, smoothed as torch does."""

import itertools

import pytest
import torch
from torch import nn

from splitstep import SplitstepConfig
from splitstep.models import losses
from splitstep.models.labels import IGNORED
from splitstep.models.losses import chunked_token_loss, label_loss, token_loss
from splitstep.solver.errors import UserError

VOCABULARY, SIZE = 11, 5
EVERY = list(itertools.product([True, False], [0.0, 0.1]))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 4 * VOCABULARY)  # four rows at a time


def layer(dtype=torch.float64, bias=True):
    return (
        torch.randn(2, 7, SIZE, dtype=dtype, requires_grad=True),
        torch.randn(VOCABULARY, SIZE, dtype=dtype, requires_grad=True),
        torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if bias else None,
    )


def some_labels():
    labels = torch.randint(VOCABULARY, (2, 7))
    labels[0, 2:5] = IGNORED
    return labels


def plain(states, weight, bias, *rest):
    return token_loss(nn.functional.linear(states, weight, bias), *rest)


def gradients(loss, tensors):
    return torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_smoothed_loss_is_the_formula_and_what_torch_computes(smoothing):
    logits, labels = torch.randn(2, 7, VOCABULARY), some_labels()
    log_p = logits.log_softmax(-1)[labels != IGNORED]
    y = labels[labels != IGNORED]
    nll, uniform = -log_p[torch.arange(len(y)), y], -log_p.sum(-1)
    expected = ((1 - smoothing) * nll + smoothing / VOCABULARY * uniform).mean()
    torch.testing.assert_close(token_loss(logits, labels, None, smoothing), expected)
    of_torch = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(token_loss(logits, labels, None, smoothing), of_torch)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothing_over_the_other_words_is_ours_with_a_little_more_of_it(smoothing):
    """TransEvolve's release: 1 - eps for the word itself, eps / (V - 1) for each other. Ours: eps V / (V - 1)."""
    logits, labels = torch.randn(2, 7, VOCABULARY), some_labels()
    log_p, y = logits.log_softmax(-1)[labels != IGNORED], labels[labels != IGNORED]
    targets = torch.full_like(log_p, smoothing / (VOCABULARY - 1)).scatter(-1, y[:, None], 1 - smoothing)
    released = -(targets * log_p).sum(-1).mean()
    ours = token_loss(logits, labels, None, smoothing * VOCABULARY / (VOCABULARY - 1))
    torch.testing.assert_close(ours, released)
    assert (token_loss(logits, labels, None, smoothing) - released).abs() > 1e-4


@pytest.mark.parametrize(("bias", "smoothing"), EVERY)
@pytest.mark.parametrize("num_items", [None, 23, torch.tensor(23)])
def test_the_chunked_loss_is_the_plain_one_with_its_gradients(bias, smoothing, num_items):
    tensors, labels = layer(bias=bias), some_labels()
    found, expected = (loss(*tensors, labels, num_items, smoothing) for loss in (chunked_token_loss, plain))
    torch.testing.assert_close(found, expected)
    force = torch.tensor(-1.7, dtype=torch.float64)  # whatever stands behind the loss
    torch.testing.assert_close(gradients(found * force, tensors), gradients(expected * force, tensors))


@pytest.mark.parametrize(("bias", "smoothing"), EVERY)
def test_the_gradient_of_the_chunked_loss_is_its_derivative(bias, smoothing):
    tensors, labels = layer(bias=bias), some_labels()
    assert torch.autograd.gradcheck(lambda *given: chunked_token_loss(*given, labels, 5, smoothing), tensors)


def test_frozen_weights_change_nothing_for_the_states():
    states, weight, bias = layer()
    labels = some_labels()
    (found,) = torch.autograd.grad(chunked_token_loss(states, weight.detach(), bias.detach(), labels), states)
    torch.testing.assert_close(found, gradients(plain(states, weight, bias, labels), [states])[0])


def test_the_chunked_loss_is_the_same_without_gradients():
    tensors, labels = layer(), some_labels()
    with torch.no_grad():
        found = chunked_token_loss(*tensors, labels)
    assert not found.requires_grad
    torch.testing.assert_close(found, plain(*tensors, labels).detach())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_chunked_loss_under_autocast_is_near_the_exact_one(smoothing):
    tensors, labels = layer(torch.float32), some_labels()
    exact = plain(*tensors, labels, None, smoothing)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = chunked_token_loss(*tensors, labels, None, smoothing)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact, atol=0, rtol=0.02)
    for found, expected in zip(gradients(mixed, tensors), gradients(exact, tensors), strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_the_chunked_loss_of_a_model_in_bf16_has_gradients_in_bf16():
    tensors, labels = layer(torch.bfloat16), some_labels()
    found, expected = chunked_token_loss(*tensors, labels), plain(*tensors, labels)
    torch.testing.assert_close(found, expected, atol=0, rtol=0.02)
    for ours, theirs in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("loss", [plain, chunked_token_loss])
def test_a_batch_without_labels_adds_nothing_to_its_update(loss):
    tensors, labels = layer(), torch.full((2, 7), IGNORED)
    found = loss(*tensors, labels, 9)
    assert found == 0
    assert all((gradient == 0).all() for gradient in gradients(found, tensors))


PROBLEMS = {
    "one of many": (3, None, torch.tensor([0, 2, IGNORED, 1, 1, 2])),
    "soft targets": (3, "single_label_classification", torch.softmax(torch.linspace(-2, 2, 18).view(6, 3), -1)),
    "several at once": (3, None, (torch.arange(18) % 4 == 0).float().view(6, 3)),
    "several at once, some unknown": (
        2,
        "multi_label_classification",
        torch.tensor([[0, 1], [1, IGNORED]] * 3).float(),
    ),
    "one value": (1, None, torch.linspace(-1, 3, 6)),
    "several values": (2, "regression", torch.linspace(-1, 3, 12).view(6, 2)),
}


def of_labels(logits, labels, problem, *rest):
    return label_loss(logits, labels, SplitstepConfig(num_labels=logits.shape[-1], problem_type=problem), *rest)


@pytest.mark.parametrize(("width", "problem", "labels"), PROBLEMS.values(), ids=PROBLEMS)
def test_micro_batches_of_any_size_add_up_to_the_update(width, problem, labels):
    logits = torch.randn(6, width, dtype=torch.float64)
    count = labels.ne(IGNORED).sum()  # as the Trainer counts
    parts = [of_labels(logits[a:b], labels[a:b], problem, count) for a, b in ((0, 1), (1, 4), (4, 6))]
    torch.testing.assert_close(sum(parts), of_labels(logits, labels, problem))


@pytest.mark.parametrize(
    ("width", "problem", "labels"),
    [
        (3, None, torch.full((4,), IGNORED)),
        (3, "multi_label_classification", torch.full((4, 3), -100.0)),
        (1, None, torch.full((4,), -100.0)),
    ],
)
def test_examples_without_a_label_add_nothing_to_their_update(width, problem, labels):
    logits = torch.randn(4, width, requires_grad=True)
    found = of_labels(logits, labels, problem, 9)
    assert found == 0
    assert (torch.autograd.grad(found, logits)[0] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_hard_labels_are_soft_targets_of_one_and_zeros(smoothing):
    logits, labels = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 1, 2])
    hard = of_labels(logits, labels, None, None, smoothing)
    targets = nn.functional.one_hot(labels, 3).float()
    torch.testing.assert_close(of_labels(logits, targets, "single_label_classification", None, smoothing), hard)
    torch.testing.assert_close(hard, nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing))


def test_soft_targets_mix_the_losses_of_their_labels():
    """Mixup (Zhang et al. 2018): the loss of a mixture is the mixture of the losses."""
    logits, first, second = torch.randn(6, 3), torch.randint(3, (6,)), torch.randint(3, (6,))
    share = 0.3
    mixed = share * nn.functional.one_hot(first, 3) + (1 - share) * nn.functional.one_hot(second, 3)
    apart = share * of_labels(logits, first, None) + (1 - share) * of_labels(logits, second, None)
    torch.testing.assert_close(of_labels(logits, mixed, "single_label_classification"), apart)


@pytest.mark.parametrize(
    ("width", "problem", "labels", "smoothing", "complaint"),
    [
        (3, None, torch.tensor([0, 3]), 0.0, "label 3 is none of the 3 labels 0 to 2"),
        (3, None, torch.tensor([-1, 0]), 0.0, "label -1 is none of the 3 labels 0 to 2"),
        (3, "single_label_classification", torch.ones(2), 0.0, r"for each label, \(2, 3\); got \(2,\)"),
        (1, None, torch.ones(2), 0.1, "label smoothing is for one label of many, not for problem_type 'regression'"),
        (3, None, torch.ones(2, 3), 0.1, "not for problem_type 'multi_label_classification'"),
    ],
)
def test_labels_that_cannot_be_are_refused(width, problem, labels, smoothing, complaint):
    with pytest.raises(UserError, match=complaint):
        of_labels(torch.randn(2, width), labels, problem, None, smoothing)
