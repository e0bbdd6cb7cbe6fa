import pytest
import torch

from splitstep import SplitstepModel, preset
from splitstep.fields.norms import NORMS, norm
from splitstep.solver.errors import UserError


def centred(x, eps):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()


WRITTEN_OUT = {
    "layer_norm": lambda n, x, eps: centred(x, eps) * n.weight + n.bias,
    "layer_norm_plain": lambda n, x, eps: centred(x, eps),
    "rms_norm": lambda n, x, eps: x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * n.weight,
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_each_norm_is_what_its_name_says(name, eps):
    made, x = norm(name, 8, eps=eps), torch.randn(2, 3, 8)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    torch.testing.assert_close(made(x), WRITTEN_OUT[name](made, x, eps), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_a_model_takes_its_norms_and_their_eps_from_the_configuration(name):
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 9,
    }
    model = SplitstepModel(preset("macaron", **sizes, norm_type=name, layer_norm_eps=0.25)).eval()
    norms = [module for module in model.modules() if type(module) is type(norm(name, 8, eps=0.25))]
    assert len(norms) == 4  # three terms and the end of the stack
    assert all(made.eps == 0.25 for made in norms)
    assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.isfinite().all()


def test_an_unknown_norm_is_refused():
    with pytest.raises(UserError, match="unknown norm_type 'rms'; choose from layer_norm, layer_norm_plain, rms_norm"):
        norm("rms", 8, eps=1e-5)
