"""Reversible schemes: the gradients of plain backpropagation, without what it keeps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import splitstep
from splitstep import preset
from splitstep.fields.probe import measured_orders
from splitstep.models.accounting import flops_per_token
from splitstep.models.trunk import Pass
from splitstep.solver import reversible
from splitstep.solver.errors import UserError

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MODELS = {
    "encoder": "SplitstepForMaskedLM",
    "causal": "SplitstepForCausalLM",
    "seq2seq": "SplitstepForConditionalGeneration",
}


def build(kind="causal", name="transformer", **settings):
    torch.manual_seed(1)
    config = preset(name, kind, **{**SIZES, "reversible": True, "num_hidden_layers": 2, **settings})
    return getattr(splitstep, MODELS[kind])(config)


def plainly(x, march):
    """The same map, through which autograd finds its own way back."""
    y = z = x
    for now in march.schedule.steps:
        y = reversible.COUPLING * y + (1 - reversible.COUPLING) * z + march.ahead(z, now)
        z = z - march.back(y, now)
    return y


def gradients(model, ids):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("encoder", "transformer", {}),
        ("causal", "transformer", {"attention_dropout": 0.1, "drop_path": 0.1}),
        ("seq2seq", "transformer", {}),
        ("seq2seq", "macaron", {}),
        ("causal", "parallel-rk4", {"num_independent_layers": 6}),
        ("causal", "transformer", {"feed_forward": "random", "integrator": "midpoint"}),
    ],
)
def test_gradients_are_those_of_plain_backpropagation(kind, name, settings, monkeypatch):
    model = build(kind, name, num_hidden_layers=24, dropout=0.1, **settings).train()
    ids = torch.randint(3, 50, (3, 9))
    loss, found = gradients(model, ids)
    monkeypatch.setattr(reversible, "integrate_reversibly", plainly)
    plain_loss, expected = gradients(model, ids)
    assert torch.equal(loss, plain_loss)
    _agree(found, expected, relative=1e-4)


def _agree(found, expected, *, relative):
    """Gradient by gradient; that of a key's bias is zero but for round-off, so it is held against all of them."""
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for parameter, gradient in expected.items():
        allowed = relative * (gradient.norm() + 1e-2 * whole)
        assert (found[parameter] - gradient).norm() <= allowed, parameter


def _kept(model, ids):
    """The bytes that autograd keeps for the backward pass."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return sum(size for pointer, size in kept.items() if pointer not in own)


def test_what_is_kept_does_not_grow_with_depth():
    ids = torch.randint(3, 50, (4, 16))
    shallow, deep = (_kept(build(num_hidden_layers=layers).train(), ids) for layers in (12, 48))
    assert deep == shallow
    plain = _kept(build(num_hidden_layers=12, reversible=False).train(), ids)
    assert plain > 5 * shallow


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
@pytest.mark.parametrize("integrator", ["euler", "heun"])
def test_cached_generation_is_uncached_generation(kind, integrator):
    model = build(kind, integrator=integrator, tie_word_embeddings=False).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    ids = torch.randint(3, 50, (3, 6))
    greedy = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, use_cache=True, **greedy), model.generate(ids, use_cache=False, **greedy))


# Where two errors of odd order compete, the limit lies at thousands of steps.
ORDERS = [("strang", "heun"), ("parallel", "rk4"), ("suzuki4", "rk4")]
LATE = [("lie_trotter", "euler"), ("parallel", "kutta3")]


@pytest.mark.parametrize("names", [*ORDERS, *(pytest.param(names, marks=pytest.mark.slow) for names in LATE)])
def test_the_order_is_that_of_the_scheme(names):
    ((*_, derived, measured),) = measured_orders([("encoder", *names)], reversible=True)
    assert measured.order == pytest.approx(derived, abs=0.1)


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_operations_are_those_that_torch_counts(kind):
    model = build(kind, attn_implementation="eager", max_position_embeddings=16).eval()
    ids = torch.randint(3, 50, (1, 16))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "seq2seq" else {})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    assert counter.get_total_flops() == pytest.approx(16 * flops_per_token(model.config), rel=0.02)


def test_in_half_precision_the_way_back_is_in_half_precision():
    model = build(num_hidden_layers=4).train()
    ids = torch.randint(3, 50, (3, 9))
    _, expected = gradients(model, ids)
    first = next(module for module in model.model.modules() if type(module).__name__ == "FeedForward")
    precisions = []
    first.register_forward_hook(lambda module, inputs, output: precisions.append(output.dtype))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()  # outside, as a Trainer does
    assert precisions == [torch.bfloat16] * 4  # there and back, both ways
    _agree({name: p.grad for name, p in model.named_parameters()}, expected, relative=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "post"},
        {"integrator": "dopri5"},
        {"halting": "act"},
        {"time_embedding": "state"},
        {"attention": "evolved"},
    ],
)
def test_what_cannot_be_run_backwards_is_refused(settings):
    with pytest.raises(UserError, match="reversible needs a scheme of fixed steps and pre-norm: "):
        preset("transformer", "encoder", reversible=True, **settings)


def test_a_graph_that_is_retained_gives_the_same_gradients_again():
    model = build(dropout=0.1, attention_dropout=0.1).train()
    ids = torch.randint(3, 50, (3, 9))
    loss = model(input_ids=ids, labels=ids).loss
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_second_derivatives_are_refused():
    model = build().train()
    ids = torch.randint(3, 50, (3, 9))
    gradients = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(gradient.square().sum() for gradient in gradients).backward()


def test_weights_that_the_steps_do_not_use_as_they_are_do_not_go_without_a_gradient(monkeypatch):
    """Sharded weights are shards before the steps and whole in them, so a gradient by the shards is none."""
    model = build(num_hidden_layers=3).train()
    shards = {}

    def inputs(current, step):
        own = current.stack.layer(step).parameters()
        return [shards.setdefault(id(p), torch.zeros(p.shape, requires_grad=True)) for p in own]

    monkeypatch.setattr(Pass, "inputs", inputs)
    ids = torch.randint(3, 50, (3, 9))
    loss = model(input_ids=ids, labels=ids).loss
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"have no gradient for (\d+) of their \1 weights, the first of shape"):
        loss.backward()


@pytest.mark.parametrize("integrator", ["euler", "heun"])
@pytest.mark.parametrize("kind", MODELS)
def test_as_many_states_and_attentions_are_shown_as_by_the_scheme_itself(kind, integrator):
    reversible, plain = (
        build(kind, num_hidden_layers=3, integrator=integrator, reversible=way).eval() for way in (True, False)
    )
    ids = torch.randint(3, 50, (2, 5))
    inputs = {"input_ids": ids, "use_cache": False} | ({"decoder_input_ids": ids} if kind == "seq2seq" else {})
    shown = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        found, expected = (model(**inputs, **shown) for model in (reversible, plain))
        torch.testing.assert_close(found.logits, reversible(**inputs).logits, atol=1e-5, rtol=0)
    for name, records in expected.items():
        if isinstance(records, tuple):
            assert len(found[name]) == len(records)
            if "states" in name:
                assert torch.equal(found[name][0], records[0])
    for name in shown:
        with pytest.raises(UserError, match=r"only under torch.no_grad\(\)"):
            reversible(**inputs, **{name: True})


def test_checkpointing_what_keeps_nothing_is_refused():
    with pytest.raises(UserError, match="nothing to checkpoint"):
        build().gradient_checkpointing_enable()


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_do_not_depend_on_the_mode_or_on_the_cache(kind):
    """What attention keeps for generation is nothing that a gradient comes back through."""
    model = build(kind).double().eval()
    ids = torch.randint(3, 50, (2, 8))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "seq2seq" else {})
    found = []
    for kept in (None, False):
        model.zero_grad()
        model(**inputs, use_cache=kept).logits.pow(2).mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])
    with torch.no_grad():
        kept = model(**inputs).past_key_values
    assert (kept is None) == (kind == "encoder")
    if kept is not None:
        with pytest.raises(UserError, match=r"keeps keys and values only under torch.no_grad\(\)"):
            model(**inputs, past_key_values=kept)
