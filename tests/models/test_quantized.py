"""Linear layers in eight bits: nearly the same numbers, and a row's own whatever the batch."""

import pytest
import torch
from torch import nn

from splitstep import SplitstepForConditionalGeneration, SplitstepModel, preset
from splitstep.models.decoding import beam_search
from splitstep.models.quantized import Int8Linear, quantized


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_nearly_the_same(bias):
    linear = nn.Linear(96, 40, bias=bias)
    x = torch.randn(3, 7, 96) * torch.logspace(-3, 3, 7).view(1, 7, 1)
    found, expected = Int8Linear(linear)(x), linear(x)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 0.03


def test_a_row_alone_is_the_row_in_a_batch_to_the_bit():
    layer = Int8Linear(nn.Linear(96, 40))
    x = torch.randn(9, 96)
    x[3] *= 1000
    assert torch.equal(layer(x)[5:6], layer(x[5:6]))


def test_a_row_of_zeros_gives_the_bias():
    linear = nn.Linear(8, 4)
    assert torch.equal(Int8Linear(linear)(torch.zeros(1, 8))[0], linear.bias)


def test_a_quantised_model_searches_as_the_model_does_and_leaves_it_alone():
    config = preset(
        "transformer",
        "seq2seq",
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        num_hidden_layers=2,
        vocab_size=100,
        pad_token_id=0,
        decoder_start_token_id=1,
        eos_token_id=2,
    )
    model = SplitstepForConditionalGeneration(config).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = quantized(model)
    ids = torch.randint(3, 100, (4, 9))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        first, second = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (model, made))
    assert (first - second).norm() < 0.05 * first.norm()
    assert not torch.equal(first, second)
    assert len(beam_search(made, ids, mask, num_beams=3, max_new_tokens=5)) == 4
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_quantised_model_halts_as_the_model_does():
    config = preset(
        "universal", hidden_size=32, num_attention_heads=4, num_hidden_layers=3, vocab_size=50, halting="act"
    )
    model = SplitstepModel(config).eval()
    ids = torch.randint(3, 50, (4, 9))
    with torch.no_grad():
        first, second = (m(ids) for m in (model, quantized(model)))
    assert not torch.equal(first.last_hidden_state, second.last_hidden_state)
    torch.testing.assert_close(second.ponder_cost, first.ponder_cost, atol=0.02, rtol=0)
