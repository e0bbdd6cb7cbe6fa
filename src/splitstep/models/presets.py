"""The published architectures as rows of data: what each changes in the configuration's defaults."""

from typing import TYPE_CHECKING, Any

from splitstep.solver.errors import UserError, lookup

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig

# What a kind of model usually has, whatever its scheme.
KINDS: dict[str, dict[str, Any]] = {
    "encoder": {"hidden_act": "gelu", "position_embedding": "learned", "type_vocab_size": 2},
    "causal": {"hidden_act": "gelu_tanh", "position_embedding": "learned", "pooling": "last"},
    "seq2seq": {"hidden_act": "relu", "scale_embedding": True, "initialization": "xavier"},
    "image": {"hidden_act": "gelu", "position_embedding": "learned", "layer_norm_eps": 1e-6, "vocab_size": 1},
}

# A new architecture is one row.
PRESETS: dict[str, dict[str, Any]] = {
    "transformer": {"splitting": "lie_trotter", "integrator": "euler"},
    "macaron": {"splitting": "strang", "decoder_splitting": "macaron_decoder", "integrator": "euler"},
    "parallel": {"splitting": "parallel", "integrator": "euler"},
    "parallel-rk4": {"splitting": "parallel", "integrator": "rk4"},
    "universal": {
        "splitting": "lie_trotter",
        "integrator": "euler",
        "num_independent_layers": 1,
        "time_embedding": "field",
    },
}

PRESETS |= {
    # one segment of all layers, or two of half of them
    f"transevolve-{feed_forward}-{segments}": {
        "splitting": "lie_trotter",
        "integrator": "euler",
        "attention": "evolved",
        "feed_forward": feed_forward,
        "num_segments": segments,
        "layer_norm_eps": 1e-3,
        "hidden_act": "relu",
    }
    for feed_forward in ("full", "random")
    for segments in (1, 2)
}


MANNERS = {"hidden_act", "layer_norm_eps"}  # what a published model has beside its scheme
SCHEME_SETTINGS = {key for row in PRESETS.values() for key in row} - MANNERS
DECODER_SETTINGS = {"decoder_splitting"}  # of a model with a decoder beside its encoder


def settings_for(name: str, kind: str) -> dict[str, Any]:
    """What a published architecture changes in a model of this kind, whatever else the kind usually has."""
    row = lookup("preset", name, PRESETS)
    lookup("kind", kind, KINDS)
    return {key: value for key, value in row.items() if kind == "seq2seq" or key not in DECODER_SETTINGS}


def preset(name: str, kind: str = "encoder", **sizes: Any) -> "SplitstepConfig":
    """The configuration of a published architecture; sizes and anything else by their Hugging Face names."""
    from splitstep.models.configuration import SplitstepConfig

    row = settings_for(name, kind)
    try:
        return SplitstepConfig(**{"kind": kind} | KINDS[kind] | row | sizes)
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of a key of Hugging Face's own
        foreign = [key for key in sizes if key not in SplitstepConfig.__annotations__]
        raise UserError(f"{', '.join(foreign or sizes)}: {error}") from None
