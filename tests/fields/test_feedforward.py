import pytest
import torch
from torch import nn

from splitstep import SplitstepModel, preset
from splitstep.fields.evaluation import Evaluation, Sight
from splitstep.fields.feedforward import ACTIVATIONS, FeedForward
from splitstep.fields.noise import Noise

AT = Evaluation(0.0, Noise(training=False), Sight())

WRITTEN_OUT = {
    "relu": lambda f, z: f.down_proj(f.up_proj(z).clamp(min=0)),
    "gelu": lambda f, z: f.down_proj(nn.GELU()(f.up_proj(z))),
    "gelu_tanh": lambda f, z: f.down_proj(nn.GELU("tanh")(f.up_proj(z))),
    "swiglu": lambda f, z: f.down_proj(nn.SiLU()(f.gate_proj(z)) * f.up_proj(z)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_is_what_its_name_says(activation):
    field, z = FeedForward(6, 10, activation=activation), torch.randn(2, 3, 6)
    torch.testing.assert_close(field(z, AT), WRITTEN_OUT[activation](field, z))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_convection_moves_every_particle_by_itself(activation):
    field, z = FeedForward(6, 10, activation=activation), torch.randn(2, 3, 6)
    torch.testing.assert_close(field(z, AT)[:, 1:2], field(z[:, 1:2], AT))


def network(kind, **more):
    """A feed-forward network of a model, initialised as the model does it."""
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 9,
    }
    model = SplitstepModel(preset("transformer", **sizes | more, feed_forward=kind, hidden_act="relu"))
    return model.encoder.stack.layers[0].convection[0].operator


def at(depth):
    return Evaluation(depth, Noise(training=False), Sight(), depth)


def test_the_published_random_network_gives_its_bias_in_the_first_layer():
    field, z = network("random"), torch.randn(2, 3, 16)
    nn.init.normal_(field.down_proj.bias)
    torch.testing.assert_close(field(z, at(0.0)), field.down_proj.bias.expand(2, 3, 16), atol=1e-6, rtol=0)
    assert (field(z, at(1.0)) - field.down_proj.bias).abs().max() > 1e-4


def test_the_rotated_network_moves_in_the_first_layer_too():
    field, z = network("rotated"), torch.randn(2, 3, 16)
    drift = [field(z, at(depth)) for depth in (0.0, 1.0, 2.0)]
    assert drift[0].std() > 0.1
    assert (drift[0] - drift[1]).abs().max() > 1e-2


@pytest.mark.parametrize("size", [6, 16, 24, 96, 512])
@pytest.mark.parametrize("time", [1.0, 2.5, 6.0])
def test_each_copy_is_an_orthogonal_mixture_of_all_entries_at_every_time(size, time):
    field = network("rotated", hidden_size=size, num_attention_heads=2, intermediate_size=2 * size).double()
    seen = []
    field.activation = lambda inner: seen.append(inner) or inner
    whole = field(torch.eye(size, dtype=torch.float64)[None], at(time - 1.0))[0]
    inner = seen[0].unflatten(1, (2, -1))  # blocks, copies, entries, particles
    for copy in (inner[:, number].flatten(0, 1) for number in range(2)):
        torch.testing.assert_close(copy @ copy.T, torch.eye(size, dtype=torch.float64), atol=1e-6, rtol=0)
        assert copy.abs().min() > 0
    assert whole.abs().min() > 0


def test_the_rotated_network_is_the_same_in_parts(monkeypatch):
    field, z = network("rotated"), torch.randn(2, 3, 16)
    whole = field(z, at(2.0))
    monkeypatch.setattr("splitstep.fields.feedforward.PART", 2 * 64)
    torch.testing.assert_close(field(z, at(2.0)), whole)


def test_few_parameters_are_trained():
    counts = {kind: sum(p.numel() for p in network(kind).parameters()) for kind in ("full", "random", "rotated")}
    assert counts == {"full": 8 * 16**2 + 5 * 16, "random": 10 * 16, "rotated": 13 * 16}


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
@pytest.mark.parametrize("kind", ["random", "rotated"])
def test_a_cast_leaves_what_was_drawn_as_it_is(kind, cast):
    field, z = network(kind), torch.randn(2, 3, 16)
    exact, drawn = field(z, at(3.0)), {name: buffer.clone() for name, buffer in field.named_buffers()}
    made = getattr(field, cast)()
    dtype = getattr(torch, cast)
    assert all(parameter.dtype == dtype for parameter in made.parameters())
    assert all(torch.equal(buffer, drawn[name]) for name, buffer in made.named_buffers())
    found = made(z.to(dtype), at(3.0))
    assert found.dtype == dtype
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_rotations_stay_orthogonal_in_bf16():
    field = network("rotated").bfloat16().double().bfloat16()
    for rotations in field.rotations.values():
        turned = rotations(2.5).double()
        identity = torch.eye(turned.shape[-1], dtype=torch.float64).expand_as(turned)
        torch.testing.assert_close(turned @ turned.transpose(-1, -2), identity, atol=1e-6, rtol=0)
