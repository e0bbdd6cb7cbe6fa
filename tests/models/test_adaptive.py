"""Vocabularies in bands: a true distribution, torch's adaptive softmax, and a model like any other."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from splitstep import SplitstepForCausalLM, SplitstepForSequenceClassification, preset
from splitstep.models import losses
from splitstep.models.accounting import account, parameters
from splitstep.models.adaptive import AdaptiveInput, AdaptiveSoftmax
from splitstep.models.labels import IGNORED
from splitstep.models.losses import token_loss
from splitstep.solver.errors import UserError

CUTOFFS = [8, 20]
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "adaptive_cutoffs": CUTOFFS,
}
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def configured(**more):
    return preset("macaron", "causal", **SIZES | more)


def build(**more):
    return SplitstepForCausalLM(configured(**more)).eval()


def softmax(dtype=torch.float64, **more):
    made = AdaptiveSoftmax(configured(**more)).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def some_labels(rows=40):
    labels = torch.arange(rows) % 50  # from every band
    labels[5:9] = IGNORED
    return labels


def batch():
    ids = torch.stack((torch.arange(12), torch.arange(49, 37, -1)))
    labels = ids.clone()
    labels[0, 3:5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def test_the_probabilities_of_all_tokens_sum_to_one():
    log_p = softmax()(torch.randn(3, 4, 32, dtype=torch.float64))
    assert log_p.shape == (3, 4, 50)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("cutoffs", [[8, 20], [1], [10, 20, 30], [49]])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_is_the_adaptive_softmax_of_torch(cutoffs, factor):
    ours = softmax(adaptive_cutoffs=cutoffs, adaptive_factor=factor)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(32, 50, cutoffs, div_value=factor, head_bias=False, dtype=torch.float64)
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat((ours.tables[0], ours.clusters)))
        for tail, projection, table in zip(theirs.tail, ours.projections, list(ours.tables)[1:], strict=True):
            tail[0].weight.copy_(projection)
            tail[1].weight.copy_(table)
    x, labels = torch.randn(40, 32, dtype=torch.float64), torch.arange(40)
    torch.testing.assert_close(ours(x), theirs.log_prob(x))
    torch.testing.assert_close(ours.loss(x, labels), theirs(x, labels).loss)


@pytest.mark.parametrize("num_items", [None, 17])
def test_the_loss_is_that_of_all_probabilities_with_its_gradients(num_items):
    made, x, labels = softmax(), torch.randn(40, 32, dtype=torch.float64, requires_grad=True), some_labels()
    log_p = made(x)
    counted = labels != IGNORED
    picked = -log_p[counted, labels[counted]].sum() / (num_items or counted.sum())
    losses = (picked, token_loss(log_p, labels, num_items), made.loss(x, labels, num_items))
    gradients = [torch.autograd.grad(loss, (x, *made.parameters()), retain_graph=True) for loss in losses]
    for loss, gradient in zip(losses, gradients, strict=True):
        torch.testing.assert_close(loss, picked)
        torch.testing.assert_close(gradient, gradients[0])


def test_the_gradient_of_the_loss_is_its_derivative():
    made = softmax(hidden_size=8, adaptive_factor=2)
    x = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: made.loss(x, torch.arange(0, 48, 4)), (x, *made.parameters()))


def test_under_autocast_the_loss_is_near_and_its_gradients_are_finite():
    made, x, labels = softmax(torch.float32), torch.randn(40, 32, requires_grad=True), some_labels()
    exact = made.loss(x, labels)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, plain = made.loss(x, labels), token_loss(made(x), labels)
    for found in (mixed, plain):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, atol=0, rtol=0.01)
    gradients = (torch.autograd.grad(loss, (x, *made.parameters())) for loss in (mixed, exact))
    for found, expected in zip(*gradients, strict=True):
        assert found.isfinite().all()
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_dropout_acts_on_rare_tokens_in_training_alone():
    made, x = softmax(adaptive_dropout=0.5), torch.randn(4, 32, dtype=torch.float64)
    quiet = made.eval()(x)
    noisy = made.train()(x)
    torch.testing.assert_close(noisy[:, : CUTOFFS[0]], quiet[:, : CUTOFFS[0]])
    assert not torch.allclose(noisy[:, CUTOFFS[0] :], quiet[:, CUTOFFS[0] :])
    torch.testing.assert_close(noisy.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(made.eval()(x), quiet)


def test_a_token_is_its_row_in_its_band_projected():
    made = AdaptiveInput(configured(adaptive_factor=2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
        found = made(torch.tensor([[0, 7, 8], [19, 20, 49]]))
    expected = [
        made.tables[band][row] @ made.projections[band]
        for band, row in ((0, 0), (0, 7), (1, 0), (1, 11), (2, 0), (2, 29))
    ]
    torch.testing.assert_close(found.flatten(0, 1), torch.stack(expected))


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_outside_the_vocabulary_is_refused_as_an_embedding_does(token):
    with pytest.raises(IndexError):
        AdaptiveInput(configured())(torch.tensor([3, token]))


def test_a_label_outside_the_vocabulary_is_refused():
    with pytest.raises(RuntimeError, match="out of bounds"):
        softmax().loss(torch.randn(2, 32, dtype=torch.float64), torch.tensor([3, 50]))


@TIED
def test_without_logits_loss_and_gradients_are_the_same(tied):
    made, found = build(tie_word_embeddings=tied).double(), []
    for skip in (False, True):
        made.zero_grad()
        out = made(**batch(), skip_logits=skip)
        assert (out.logits is None) == skip
        out.loss.backward()
        found.append([out.loss.detach(), *(parameter.grad for parameter in made.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_every_parameter_has_a_gradient_whatever_bands_occur():
    made = build(tie_word_embeddings=False)
    ids = torch.tensor([[1, 2, 3]])  # of the first band alone
    made(ids, labels=ids, skip_logits=True).loss.backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_label_smoothing_needs_the_logits():
    assert build()(**batch(), label_smoothing=0.1).loss.isfinite()
    with pytest.raises(UserError, match="label smoothing needs every probability"):
        build()(**batch(), label_smoothing=0.1, skip_logits=True)


@pytest.mark.parametrize("cutoffs", [None, CUTOFFS], ids=["linear", "adaptive"])
@pytest.mark.parametrize("chunk", [losses.CHUNK, 200])  # all tokens together, one or a few at a time
def test_the_losses_of_the_tokens_are_those_of_the_logits(cutoffs, chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", chunk)
    made, inputs = build(adaptive_cutoffs=cutoffs).double(), batch()
    found = made.token_losses(**inputs)
    logits, labels = made(inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(found, expected[labels != IGNORED])
    torch.testing.assert_close(found.mean(), made(**inputs, skip_logits=True).loss)


@TIED
def test_a_model_trains_under_autocast(tied):
    made = build(tie_word_embeddings=tied, dropout=0.1, adaptive_dropout=0.2).train()
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    history = []
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16):
            loss = made(**batch(), skip_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < history[0] / 2


@TIED
def test_saved_and_loaded_through_the_auto_class_is_bit_equal(tied, tmp_path):
    made = build(tie_word_embeddings=tied)
    made.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.adaptive_cutoffs == CUTOFFS
    assert parameters(loaded) == parameters(made)
    given = batch()
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**given).logits, made(**given).logits)
        assert torch.equal(loaded(**given, skip_logits=True).loss, made(**given, skip_logits=True).loss)


@TIED
def test_a_classifier_reads_the_saved_body(tied, tmp_path):
    made = build(tie_word_embeddings=tied)
    made.save_pretrained(tmp_path)
    loaded = SplitstepForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).last_hidden_state, made(ids).last_hidden_state)


def test_a_missing_table_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.encoder.embeddings.tokens.tables.1")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"tokens\.tables\.1: missing"):
        SplitstepForCausalLM.from_pretrained(tmp_path)


def test_tied_weights_are_one_and_counted_once():
    made = build()
    tokens, head = made.get_input_embeddings(), made.get_output_embeddings()
    assert all(ours is theirs for ours, theirs in zip(head.tables, tokens.tables, strict=True))
    assert all(ours is theirs for ours, theirs in zip(head.projections, list(tokens.projections)[1:], strict=True))
    d, widths, sizes = 32, (32, 8, 2), (8, 12, 30)
    vectors = sum(size * width for size, width in zip(sizes, widths, strict=True))
    found = parameters(made)
    assert found.embeddings == vectors + d * sum(widths) + 32 * d  # learned positions
    assert found.head == 2 * d  # a vector for each rare band
    untied = parameters(build(tie_word_embeddings=False))
    assert untied.embeddings == found.embeddings
    assert untied.head == found.head + vectors + d * sum(widths[1:])
    report = account(made.config)
    assert (report["embeddings"], report["head"]) == (found.embeddings, found.head)


@TIED
def test_weights_start_as_in_fairseq(tied):
    sizes = {"hidden_size": 256, "vocab_size": 3000, "adaptive_cutoffs": [500, 1000], "num_hidden_layers": 1}
    made = build(**sizes, tie_word_embeddings=tied)
    tokens, head = made.get_input_embeddings(), made.get_output_embeddings()
    for table in tokens.tables:
        assert table.std().item() == pytest.approx(table.shape[1] ** -0.5, rel=0.05)
    uniform = [*tokens.projections, head.clusters] + ([] if tied else [*head.tables, *head.projections])
    for matrix in uniform:
        limit = (6 / sum(matrix.shape)) ** 0.5
        assert matrix.abs().max() <= limit
        assert matrix.std().item() == pytest.approx(limit / 3**0.5, rel=0.1)


@TIED
@pytest.mark.parametrize("settings", [{"use_cache": True}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_generates_with_a_cache_as_without(tied, settings):
    made = build(tie_word_embeddings=tied).double()
    ids = torch.tensor([[3, 21, 9], [30, 4, 12]])
    limits = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "attention_mask": torch.ones_like(ids)}
    plain = made.generate(ids, **limits, **settings | {"use_cache": False, "cache_implementation": None})
    assert torch.equal(made.generate(ids, **limits, **settings), plain)


def test_the_same_weights_under_another_solver():
    made = build()
    finer = made.with_solver(steps_per_layer=1)
    given = batch()
    with torch.no_grad():
        assert torch.equal(finer(**given).logits, made(**given).logits)
    assert parameters(finer) == parameters(made)


def test_the_vocabulary_cannot_be_resized():
    made = build()
    assert made.resize_token_embeddings() is made.get_input_embeddings()
    with pytest.raises(UserError, match="an adaptive vocabulary cannot be resized"):
        made.resize_token_embeddings(60)
    with pytest.raises(UserError, match="cannot be exchanged"):
        made.set_input_embeddings(nn.Embedding(50, 32))


def test_a_copy_keeps_its_ties():
    made = copy.deepcopy(build())
    assert made.lm_head.tables[0] is made.model.encoder.embeddings.tokens.tables[0]
