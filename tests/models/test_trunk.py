"""The one stack against layers written out by others, and against itself under sharing and checkpointing."""

import pytest
import torch
from torch import nn

from splitstep.fields.evaluation import Sight
from splitstep.fields.norms import PLACEMENTS
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.trunk import Stack
from splitstep.solver.errors import UserError
from splitstep.solver.splittings import SPLITTINGS

SIZES = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 120, "num_hidden_layers": 2}


def stack(part="encoder", **settings):
    config = SplitstepConfig(**SIZES | {"kind": "seq2seq" if part == "decoder" else "encoder"} | settings)
    made = Stack(config, part)
    for parameter in made.parameters():  # norms too, so that a misplaced one shows
        nn.init.normal_(parameter, mean=0.2 if parameter.ndim == 1 else 0.0, std=0.2)
    return made


def copy_attention(ours, theirs):
    theirs.in_proj_weight.data = torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight])
    theirs.in_proj_bias.data = torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias])
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())


def torch_layer(layer, *, norm, decoder):
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    width = layer.convection[0].operator.up_proj.out_features
    theirs = kind(12, 3, width, dropout=0.0, norm_first=norm == "pre", batch_first=True)
    terms = [("interaction", "self_attn")] + [("coupling", "multihead_attn")] * decoder
    for ours, name in terms:
        copy_attention(getattr(layer, ours)[0].operator, getattr(theirs, name))
    theirs.linear1.load_state_dict(layer.convection[0].operator.up_proj.state_dict())
    theirs.linear2.load_state_dict(layer.convection[0].operator.down_proj.state_dict())
    for number, term in enumerate([*(ours for ours, _ in terms), "convection"], start=1):
        getattr(theirs, f"norm{number}").load_state_dict(getattr(layer, term)[0].norm.state_dict())
    return theirs.train()  # the fused inference path of torch skips nothing, but training mode is the plain code


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_lie_trotter_with_euler_is_torchs_encoder_layer(norm):
    ours = stack(norm=norm).eval()
    x = torch.randn(2, 5, 12)
    visible = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    expected = x
    for layer in ours.layers:
        expected = torch_layer(layer, norm=norm, decoder=False)(expected, src_key_padding_mask=~visible)
    expected = expected if ours.norm is None else ours.norm(expected)
    found = ours(x, interaction=Sight(mask=visible[:, None, None]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_lie_trotter_with_euler_is_torchs_decoder_layer(norm):
    ours = stack("decoder", norm=norm).eval()
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    visible = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    triangle = nn.Transformer.generate_square_subsequent_mask(5)
    expected = x
    for layer in ours.layers:
        theirs = torch_layer(layer, norm=norm, decoder=True)
        expected = theirs(expected, memory, tgt_mask=triangle, memory_key_padding_mask=~visible)
    expected = expected if ours.norm is None else ours.norm(expected)
    coupling = Sight(source=memory, mask=visible[:, None, None])
    found = ours(x, interaction=Sight(causal=True), coupling=coupling)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def torch_attention(term):
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    copy_attention(term.operator, theirs)
    return lambda z, source: theirs(z, source, source)[0]


def written_ffn(term):
    return lambda z: term.operator.down_proj(term.operator.up_proj(z).relu())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_strang_with_euler_is_a_macaron_layer(norm, part):
    """Lu et al. 2019, eq. 6-8, and the released decoder: half FFN, attentions, half FFN, each with its own norm."""
    splitting = {"encoder": {"splitting": "strang"}, "decoder": {"decoder_splitting": "macaron_decoder"}}[part]
    ours = stack(part, norm=norm, num_hidden_layers=1, **splitting).eval()
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    (layer,) = ours.layers
    assert layer.convection[0].operator.up_proj.out_features == SIZES["intermediate_size"] // 2

    def sublayer(x, term, factor, function):
        if norm == "pre":
            return x + factor * function(term.norm(x))
        return term.norm(x + factor * function(x))

    expected = sublayer(x, layer.convection[0], 0.5, written_ffn(layer.convection[0]))
    own = torch_attention(layer.interaction[0])
    expected = sublayer(expected, layer.interaction[0], 1.0, lambda z: own(z, z))
    if part == "decoder":
        cross = torch_attention(layer.coupling[0])
        expected = sublayer(expected, layer.coupling[0], 1.0, lambda z: cross(z, memory))
    expected = sublayer(expected, layer.convection[1], 0.5, written_ffn(layer.convection[1]))
    expected = ours.norm(expected) if norm == "pre" else expected
    torch.testing.assert_close(ours(x, coupling=Sight(source=memory)), expected, atol=1e-5, rtol=0)


def test_macaron_with_its_first_ffn_zeroed_and_its_second_doubled_is_sequential():
    macaron = stack(splitting="strang").eval()
    sequential = stack(intermediate_size=SIZES["intermediate_size"] // 2).eval()
    for theirs, ours in zip(macaron.layers, sequential.layers, strict=True):
        theirs.convection[0].operator.down_proj.requires_grad_(False).weight.zero_()
        theirs.convection[0].operator.down_proj.bias.zero_()
        ours.interaction.load_state_dict(theirs.interaction.state_dict())
        ours.convection[0].load_state_dict(theirs.convection[1].state_dict())
        with torch.no_grad():
            for parameter in theirs.convection[1].operator.down_proj.parameters():
                parameter.mul_(2)
    sequential.norm.load_state_dict(macaron.norm.state_dict())
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(macaron(x), sequential(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("norm", "written"),
    [
        ("pre", lambda x, g, f, n: x + g(n[0](x)) + f(n[1](x))),
        ("pre_shared", lambda x, g, f, n: x + g(n[0](x)) + f(n[0](x))),
        ("post", lambda x, g, f, n: n[0](x + g(x) + f(x))),
        ("branch", lambda x, g, f, n: x + n[0](g(x)) + n[1](f(x))),
    ],
)
def test_the_parallel_layer_under_each_norm_placement(norm, written):
    ours = stack(splitting="parallel", norm=norm, num_hidden_layers=1).eval()
    (layer,) = ours.layers
    own = torch_attention(layer.interaction[0])
    norms = [layer.interaction[0].norm, layer.convection[0].norm]
    assert (norms[1] is None) == PLACEMENTS[norm].joint
    x = torch.randn(2, 5, 12)
    expected = written(x, lambda z: own(z, z), written_ffn(layer.convection[0]), norms)
    expected = expected if ours.norm is None else ours.norm(expected)
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=0)


EVERY_SPLITTING = [(part, name) for part in SPLITTINGS for name in SPLITTINGS[part]]


def splitting_settings(part, name):
    return {"decoder_splitting": name} if part == "decoder" else {"splitting": name}


def settled(part, name, **more):
    settings = {"num_hidden_layers": 4, "integrator": "heun", "time_embedding": "field"} | more
    return stack(part, **splitting_settings(part, name), **settings)


@pytest.mark.parametrize(("part", "name"), EVERY_SPLITTING)
def test_a_shared_stack_is_the_same_stack_written_out(part, name):
    shared = settled(part, name, num_independent_layers=2).eval()
    written = settled(part, name, num_independent_layers=4).eval()
    for layer, twin in enumerate(written.layers):
        twin.load_state_dict(shared.layers[layer // 2].state_dict())
    written.norm.load_state_dict(shared.norm.state_dict())
    x, coupling = torch.randn(2, 5, 12), Sight(source=torch.randn(2, 3, 12))
    assert torch.equal(shared(x, coupling=coupling), written(x, coupling=coupling))


EVOLVED = {"attention": "evolved", "num_segments": 2, "feed_forward": "random", "attention_dropout": 0.0}


@pytest.mark.parametrize("more", [{}, EVOLVED, EVOLVED | {"evolution": "bilinear"}])
@pytest.mark.parametrize(("part", "name"), EVERY_SPLITTING)
def test_checkpointed_gradients_are_plain_gradients_noise_included(part, name, more):
    noise = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2, "drop_path": 0.3}
    model = settled(part, name, **{"num_independent_layers": 2} | noise | more).train()
    for buffer in model.buffers():
        nn.init.normal_(buffer)
    x, memory = torch.randn(3, 5, 12, requires_grad=True), torch.randn(3, 3, 12, requires_grad=True)
    found = []
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        torch.manual_seed(1)
        out = model(x, coupling=Sight(source=memory))
        inputs = (x, memory) if part == "decoder" else (x,)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append((out, *torch.autograd.grad((out**3).sum(), (*inputs, *trained))))
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(plain, checkpointed)


def test_checkpointing_keeps_less():
    kept = {}
    model = settled("encoder", "parallel", integrator="rk4").train()
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            model(torch.randn(3, 5, 12, requires_grad=True))
        kept[checkpointing] = sum(sizes)
    assert kept[True] < kept[False] / 10


@pytest.mark.parametrize("name", SPLITTINGS["encoder"])
def test_noise_is_drawn_once_a_sub_step_whatever_the_number_of_stages(name):
    noise = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2, "drop_path": 0.3}
    next_numbers = []
    for integrator in ("euler", "heun", "rk4"):
        model = settled("encoder", name, integrator=integrator, **noise).train()
        torch.manual_seed(7)
        model(torch.randn(2, 5, 12))
        next_numbers.append(torch.rand(3))
    assert torch.equal(next_numbers[0], next_numbers[1])
    assert torch.equal(next_numbers[0], next_numbers[2])


def test_sub_steps_own_their_weights_unless_they_share():
    own, shared = stack(splitting="strang"), stack(splitting="strang", share_substeps=True)
    assert len(own.layers[0].convection) == 2
    assert len(shared.layers[0].convection) == 1
    assert shared.layers[0].convection[0].operator.up_proj.out_features == SIZES["intermediate_size"]


def test_more_steps_a_layer_approach_the_flow_of_the_layer():
    """The same weights under smaller steps: errors against the limit fall by the order of the scheme."""
    model = stack(splitting="parallel", integrator="rk4", hidden_act="gelu", time_embedding="field").double().eval()
    x = torch.randn(1, 4, 12, dtype=torch.float64)

    def refined(steps):
        finer = Stack(
            SplitstepConfig(
                **SIZES,
                splitting="parallel",
                integrator="rk4",
                hidden_act="gelu",
                time_embedding="field",
                steps_per_layer=steps,
            )
        )
        finer.load_state_dict(model.state_dict())
        with torch.no_grad():
            return finer.double().eval()(x)

    exact = refined(128)
    ratio = (refined(8) - exact).norm() / (refined(16) - exact).norm()
    assert ratio.log2() == pytest.approx(4, abs=0.2)


def test_the_two_networks_of_a_macaron_layer_may_have_two_activations():
    """As in the released BERT of Lu et al. 2019: ReLU in the first, GELU in the second."""
    settings = {"splitting": "strang", "hidden_act": "gelu"}
    x = torch.randn(2, 5, 12)
    mixed = stack(**settings, first_hidden_act="relu")
    for silent, same in ((1, "relu"), (0, "gelu")):
        plain = stack(**settings | {"hidden_act": same})
        plain.load_state_dict(mixed.state_dict())
        assert not torch.allclose(plain(x), mixed(x), atol=1e-3)
        for one in (plain, mixed):
            for layer in one.layers:
                nn.init.zeros_(layer.convection[silent].operator.down_proj.weight)
        torch.testing.assert_close(plain(x), mixed(x))
        mixed = stack(**settings, first_hidden_act="relu")
    for wrong, complaint in (
        ({"splitting": "lie_trotter"}, "several feed-forward networks, and the splitting of the encoder has one"),
        ({"share_substeps": True}, "several feed-forward networks, and share_substeps has one"),
        ({"first_hidden_act": "swiglu"}, "have both a gate or neither"),
        ({"first_hidden_act": "reul"}, "unknown first_hidden_act 'reul'"),
    ):
        with pytest.raises(UserError, match=complaint):
            stack(**settings | {"first_hidden_act": "relu"} | wrong)
