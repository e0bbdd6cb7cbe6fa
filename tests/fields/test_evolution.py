"""Evolved attention: the forms agree with what was published, and with each other."""

import math

import pytest
import torch

from splitstep.fields.evaluation import Evaluation, Sight
from splitstep.fields.evolution import (
    EVOLUTIONS,
    FORMS,
    Operator,
    PublishedAttention,
    PublishedCondition,
    attend,
    waves,
)
from splitstep.fields.noise import Noise

SILENT = Noise(training=False)
N, M, HEADS, LAYERS = 6, 6, 3, 3


def padding(n=N, m=M):
    mask = torch.ones(2, 1, 1, m, dtype=torch.bool)
    mask[1, ..., m - 2 :] = False
    return mask


SIGHTS = {
    "everything": lambda: Sight(),
    "padding": lambda: Sight(mask=padding()),
    "causal": lambda: Sight(causal=True),
    "causal and padding": lambda: Sight(mask=padding() & torch.ones(N, M, dtype=torch.bool).tril()),
    "blind rows": lambda: Sight(mask=padding() & (torch.arange(N) != 2)[:, None]),
}


def leaves(dtype=torch.float64, m=M, spread=1.0):
    shapes = {"query": (2, HEADS, N, 8), "key": (2, HEADS, m, 8), "bias": (2, LAYERS, HEADS, m)}
    made = {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}
    with torch.no_grad():
        made["bias"].mul_(spread)
    return made | {"value": torch.randn(2, LAYERS, HEADS, m, 4, dtype=dtype, requires_grad=True)}


def segment(form, sight, query, key, bias, value):
    """All layers of a segment with one operator."""
    operator = Operator(query, key, sight=sight)
    operator.factor()
    return torch.stack([FORMS[form](operator, bias[:, layer], value[:, layer]) for layer in range(LAYERS)])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("form", ["factored", "channel"])
def test_the_forms_agree_outputs_and_gradients(form, sight, dtype, tolerance):
    tensors = leaves(dtype)
    found = []
    for name in ("literal", form):
        out = segment(name, SIGHTS[sight](), **tensors)
        found.append((out, *torch.autograd.grad((out**2).sum(), tuple(tensors.values()))))
    for plain, fast in zip(*found, strict=True):
        assert (plain - fast).norm() <= tolerance * plain.norm()


@pytest.mark.parametrize("form", FORMS)
def test_a_particle_that_sees_nobody_feels_no_force(form):
    out = segment(form, SIGHTS["blind rows"](), **leaves())
    assert out[:, :, :, 2].abs().max() == 0


def test_cross_attention_with_another_length():
    tensors = leaves(m=4)
    sight = Sight(source=torch.empty(0), mask=padding(m=4))
    torch.testing.assert_close(segment("factored", sight, **tensors), segment("literal", sight, **tensors))


@pytest.mark.parametrize("sight", ["everything", "causal"])
def test_the_gathered_gradient_is_that_of_finite_differences(sight):
    tensors = leaves()
    assert torch.autograd.gradcheck(lambda *t: segment("factored", SIGHTS[sight](), *t), tuple(tensors.values()))


@pytest.mark.parametrize("compiled", [False, True])
def test_biases_too_far_apart_take_the_other_form_by_themselves(compiled, monkeypatch):
    """-80 then +80 under a causal mask: the factored form alone would give rows of NaN or 0."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    tensors = leaves(torch.float32)
    with torch.no_grad():
        tensors["bias"][..., : M // 2] = -80.0
        tensors["bias"][..., M // 2 :] = 80.0
    operator = Operator(tensors["query"], tensors["key"], sight=Sight(causal=True))
    operator.factor()
    bias, value = tensors["bias"][:, 0], tensors["value"][:, 0]
    found = attend(operator, bias, value, sight=Sight())
    assert found.isfinite().all()
    torch.testing.assert_close(found, FORMS["literal"](operator, bias, value), atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(found.square().sum(), (tensors["query"], tensors["value"]))
    assert all(gradient.isfinite().all() for gradient in gradients)


def published(time_dim=5, *, seed=0):
    torch.manual_seed(seed)
    condition = PublishedCondition(12, HEADS, time_dim=time_dim).double()
    layers = [PublishedAttention(12, HEADS, time_dim=time_dim).double() for _ in range(LAYERS)]
    for parameter in [p for module in (condition, *layers) for p in module.parameters()]:
        torch.nn.init.normal_(parameter, std=0.4)
    return condition, layers


def literal_formula(condition, layer, start, source, z, depth):
    """Every term of the released operator, those that cancel included (the four of the paper's derivation)."""
    heads, tau = HEADS, condition.time_dim
    query, key = start @ condition.query.weight.T, source @ condition.key.weight.T
    width = query.shape[-1] // heads
    split = lambda x: x.unflatten(-1, (heads, -1)).transpose(1, 2)  # noqa: E731
    a0 = split(query) @ split(key).transpose(-1, -2) / math.sqrt(width)
    query_time, key_time = (w.view(-1, heads, tau) for w in (condition.query_time, condition.key_time))
    a1q = torch.einsum("bnc,cht->bhnt", query, key_time)
    a1k = torch.einsum("bmc,cht->bhmt", key, query_time)
    a2 = (query_time * key_time).sum(0)
    p = torch.arange(heads * tau // 2, dtype=torch.float64)
    phase = depth * math.pi / 64 * p
    time = (layer.coefficients * torch.cat((phase.sin(), phase.cos()))).view(heads, tau)
    scores = a0 + torch.einsum("bhnt,ht->bhn", a1q, time)[..., None]
    scores = scores + torch.einsum("bhmt,ht->bhm", a1k, time)[:, :, None] + (a2 * time**2).sum(-1)[:, None, None]
    mixed = scores.softmax(-1) @ split(z)
    return mixed.transpose(1, 2).flatten(2) @ layer.out_proj.weight.T


@pytest.mark.parametrize("depth", [0.0, 1.0, 2.5, 5.0])
def test_the_published_operator_is_its_literal_formula(depth):
    condition, layers = published(time_dim=4)
    start, z = torch.randn(2, N, 12, dtype=torch.float64), torch.randn(2, N, 12, dtype=torch.float64)
    sight = Sight()
    sight.operator = condition(start, sight)
    found = layers[0](z, Evaluation(0.0, SILENT, sight, depth))
    expected = literal_formula(condition, layers[0], start, start, z, depth)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_without_coefficients_attention_is_the_same_at_every_depth():
    condition, (layer, *_) = published(time_dim=4)
    torch.nn.init.zeros_(layer.coefficients)
    sight, z = Sight(), torch.randn(2, N, 12, dtype=torch.float64)
    sight.operator = condition(z, sight)
    found = [layer(z, Evaluation(0.0, SILENT, sight, depth)) for depth in (0.0, 1.0, 5.0)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_bilinear_evolution_depends_on_the_query():
    """Its change of the scores between two times is no function of the key alone, so a softmax does not cancel it."""
    condition_class, attention_class = EVOLUTIONS["bilinear"]
    condition, layer = condition_class(12, HEADS, time_dim=4).double(), attention_class(12, HEADS, time_dim=4).double()
    for parameter in (*condition.parameters(), *layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    z = torch.randn(1, N, 12, dtype=torch.float64)
    logs = []
    for depth in (1.0, 4.0):
        sight = Sight(record=[])
        sight.operator = condition(z, sight)
        layer(z, Evaluation(0.0, SILENT, sight, depth))
        logs.append(sight.record[0].log())
    change = logs[1] - logs[0]
    change = change - change[..., :1]  # up to the normalisation of each row
    assert (change - change[:, :, :1]).abs().max() > 1e-3


def test_waves_have_the_released_period():
    found = waves(3.0, 8, like=torch.zeros(1, dtype=torch.float64))
    phase = 3 * math.pi / 64 * torch.arange(4, dtype=torch.float64)
    torch.testing.assert_close(found, torch.cat((phase.sin(), phase.cos())), atol=1e-6, rtol=0)
