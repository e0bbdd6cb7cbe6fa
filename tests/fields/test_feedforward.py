import pytest
import torch
from torch import nn

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
