"""The same weights under another scheme."""

import pytest
import torch

from splitstep import SplitstepForConditionalGeneration, SplitstepForMaskedLM, preset
from splitstep.solver.errors import UserError
from splitstep.solver.splittings import SPLITTINGS

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 50}
IDS = torch.arange(3, 15).view(2, 6)


def encoder(name="transformer", **more):
    return SplitstepForMaskedLM(preset(name, **SIZES, **more)).eval()


@pytest.mark.parametrize("splitting", SPLITTINGS["encoder"])
def test_weights_with_one_module_a_term_fit_every_splitting(splitting):
    model = encoder()
    other = model.with_solver(splitting=splitting, integrator="heun", steps_per_layer=2)
    assert {id(p) for p in other.parameters()} == {id(p) for p in model.parameters()}
    assert other.config.splitting == splitting
    assert model.config.splitting == "lie_trotter"
    with torch.no_grad():
        assert (other(IDS).logits - model(IDS).logits).abs().max() > 1e-6
        back = other.with_solver(splitting="lie_trotter", integrator="euler", steps_per_layer=1)
        assert torch.equal(back(IDS).logits, model(IDS).logits)


def test_all_splittings_approach_the_same_flow():
    model = encoder(time_embedding="field").double()
    with torch.no_grad():
        limits = [
            model.with_solver(splitting=splitting, integrator="rk4", steps_per_layer=steps)(IDS).logits
            for splitting, steps in (("parallel", 16), ("strang", 64), ("suzuki4", 4))
        ]
    for limit in limits[1:]:
        torch.testing.assert_close(limit, limits[0], atol=1e-5, rtol=0)


def test_an_adaptive_integrator_gives_the_flow_too():
    model = encoder("parallel").double()
    with torch.no_grad():
        fine = model.with_solver(integrator="rk4", steps_per_layer=32)(IDS).logits
        adaptive = model.with_solver(integrator="dopri5", rtol=1e-8, atol=1e-8)(IDS).logits
    torch.testing.assert_close(adaptive, fine, atol=1e-6, rtol=0)


def test_decoders_change_with_their_encoders_unless_told():
    model = SplitstepForConditionalGeneration(preset("transformer", "seq2seq", **SIZES)).eval()
    assert model.with_solver(splitting="strang").config.scheme("decoder").splitting == SPLITTINGS["decoder"]["strang"]
    other = model.with_solver(splitting="strang", decoder_splitting="macaron_decoder")
    assert other.config.scheme("decoder").order == 1
    with torch.no_grad():
        other(IDS, decoder_input_ids=IDS)


@pytest.mark.parametrize(
    ("model", "changes", "complaint"),
    [
        (lambda: encoder("macaron"), {"splitting": "lie_trotter"}, "do not fit '1 interaction, 1 convection'"),
        (lambda: encoder("macaron"), {"splitting": "strang_attention"}, "it needs .*interaction.1"),
        (lambda: encoder(norm="post"), {"splitting": "parallel"}, "it has no place for .*convection.0.norm"),
        (encoder, {"splitting": "strng"}, "did you mean 'strang'"),
        (encoder, {"hidden_size": 64}, "unknown setting of the solver 'hidden_size'; choose from splitting,"),
        (encoder, {"steps_per_layer": 0}, "steps_per_layer must be at least 1"),
    ],
)
def test_weights_that_do_not_fit_are_told_why(model, changes, complaint):
    with pytest.raises(UserError, match=complaint):
        model().with_solver(**changes)


def test_a_changed_model_saves_and_loads(tmp_path):
    other = encoder().with_solver(splitting="strang", integrator="midpoint")
    other.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(SplitstepForMaskedLM.from_pretrained(tmp_path).eval()(IDS).logits, other(IDS).logits)
