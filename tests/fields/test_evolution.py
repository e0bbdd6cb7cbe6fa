"""Evolved attention: the forms agree with what was published, and with each other."""

import math

import pytest
import torch

from splitstep.fields import evolution
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


@pytest.mark.parametrize("spread", [1.0, 8.0, 30.0, 59.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_underflows_in_a_precision_takes_the_other_form(dtype, spread):
    """All that the first query sees lies `spread` below the maximum."""
    tensors = {name: tensor.detach().to(dtype) for name, tensor in leaves().items()}
    bias, value = torch.zeros_like(tensors["bias"][:, 0]), tensors["value"][:, 0]
    bias[..., -1] = spread
    operator = Operator(tensors["query"], tensors["key"], sight=Sight(causal=True))
    operator.factor()
    exact = Operator(operator.query.double(), operator.key.double(), sight=operator.sight)
    found = attend(operator, bias, value, sight=Sight()).double()
    expected = FORMS["literal"](exact, bias.double(), value.double())
    assert (found - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


def as_on_cuda(monkeypatch):
    """CUDA's autocast, which computes these in float32 where that of a CPU does not."""
    for name in ("softmax", "exp", "sum"):
        plain = getattr(torch.Tensor, name)

        def precise(x, *args, plain=plain, **kwargs):
            mixed = torch.is_autocast_enabled("cpu") and x.dtype == torch.bfloat16
            return plain(x.float() if mixed else x, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, precise)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("sight", SIGHTS)
def test_evolved_attention_trains_under_autocast(sight, inside, monkeypatch):
    condition, layers = published(time_dim=4)
    condition, layers = condition.float(), [layer.float() for layer in layers]
    weights = [w for module in (condition, *layers) for w in module.parameters() if w.requires_grad]
    x = torch.randn(2, N, 12)

    def force():
        seen = SIGHTS[sight]()
        seen.operator = condition(x, seen)
        z = x
        for depth, layer in enumerate(layers):
            z = z + layer(z, Evaluation(0.0, SILENT, seen, float(depth)))
        return z.square().mean()

    expected = torch.autograd.grad(force(), weights)
    as_on_cuda(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = force()
        found = torch.autograd.grad(loss, weights) if inside else None
    found = found or torch.autograd.grad(loss, weights)
    for mixed, exact in zip(found, expected, strict=True):
        assert mixed.dtype == torch.float32
        assert (mixed - exact).norm() <= 0.1 * exact.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wide", ["query", "key", "bias", "value"])
def test_tensors_of_other_precisions_are_taken_in_that_of_the_queries(form, wide):
    tensors = {name: tensor.detach().bfloat16() for name, tensor in leaves().items()}
    exact = segment("literal", Sight(), **{name: tensor.double() for name, tensor in tensors.items()})
    tensors = {name: tensor.float() if name == wide else tensor for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.requires_grad_()
    out = segment(form, Sight(), **tensors)
    assert (out - exact).norm() <= 0.02 * exact.norm()
    found = torch.autograd.grad(out.sum(), tuple(tensors.values()))
    assert [gradient.dtype for gradient in found] == [tensor.dtype for tensor in tensors.values()]


@pytest.mark.parametrize("sight", SIGHTS)
def test_a_backward_pass_sees_nothing_of_another(sight):
    """One that wants the first layer's values alone never comes to E; its parts are not those of the next."""
    tensors = leaves()
    values = [value.detach().requires_grad_() for value in tensors.pop("value").unbind(1)]

    def loss():
        operator = Operator(tensors["query"], tensors["key"], sight=SIGHTS[sight]())
        operator.factor()
        total = torch.ones((), dtype=torch.float64)
        for layer, value in enumerate(values):
            out = FORMS["factored"](operator, tensors["bias"][:, layer], value)
            total = total + (out * total).square().mean()
        return total, operator.exponentials.notes

    wanted = (tensors["query"], tensors["key"], tensors["bias"], *values)
    expected = torch.autograd.grad(loss()[0], wanted)
    again, notes = loss()
    torch.autograd.grad(again, values[0], retain_graph=True)
    assert not notes.passes
    for _ in range(2):
        found = torch.autograd.grad(again, wanted, retain_graph=True)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("sight", SIGHTS)
def test_a_kernel_that_wants_round_widths_gets_them(sight, monkeypatch):
    widths = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def note(*tensors, **options):
        widths.extend(tensor.shape[-1] for tensor in tensors)
        return fused(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    tensors, seen = leaves(), SIGHTS[sight]()
    plain = segment("channel", seen, **tensors)
    assert set(widths) == {9}
    widths.clear()
    monkeypatch.setitem(evolution.KERNEL_WIDTHS, "cpu", evolution.KERNEL_WIDTHS["cuda"])
    torch.testing.assert_close(segment("channel", seen, **tensors), plain)
    assert set(widths) == {16}


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
