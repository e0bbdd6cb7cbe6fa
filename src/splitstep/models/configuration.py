"""What a model is: its sizes, its scheme, its embeddings and heads, in Hugging Face's words."""

import copy
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from math import inf
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, get_args, get_origin

import torch
from transformers import PreTrainedConfig

from splitstep.fields.attention import KERNELS
from splitstep.fields.evolution import EVOLUTIONS
from splitstep.fields.feedforward import ACTIVATIONS, FEED_FORWARDS, GATED
from splitstep.fields.norms import NORMS, PLACEMENTS
from splitstep.models.presets import KINDS
from splitstep.solver.errors import UserError, lookup, unknown
from splitstep.solver.schedules import TIME_EMBEDDINGS, Schedule
from splitstep.solver.schemes import Scheme, Tolerance, scheme
from splitstep.solver.sinusoids import LADDERS

ATTENTIONS = {"full": "computed in every layer", "evolved": "computed once a segment and evolved in time"}
POSITIONS = {
    "sinusoidal": "[sines | cosines] of the position, added to the embedding",
    "learned": "a vector for each position, added to the embedding",
    "rotary": "queries and keys turned by an angle that grows with the position",
    "none": "no positions: the particles are a set",
}
POOLINGS = {
    "first": "the first particle, a class token",
    "last": "the last visible particle, which in a causal model has seen all others",
    "mean": "the mean over the visible particles",
}
COMPARISONS = {
    "joined": "the vectors a and b of two texts side by side",
    "nli": "a, b, a * b and a - b (Mou et al. 2016)",
    "symmetric": "a + b, a * b and |a - b|: which text is the first makes no difference",
}
HALTINGS = {"none": "every particle takes every step", "act": "each particle halts when its probabilities sum to one"}
INITIALIZATIONS = {
    "normal": "weights and embeddings normal with `initializer_range` (BERT, GPT-2, ViT)",
    "xavier": "weights Xavier-uniform, embeddings normal with hidden_size ** -0.5 (fairseq)",
    "kaiming": "weights Kaiming-normal, embeddings normal with hidden_size ** -0.5 (Macaron Net's BERT)",
}

# Keys that Hugging Face's own machinery passes or saves beside the fields of a configuration.
HUGGING_FACE_KEYS = {
    "model_type",
    "num_labels",
    "torch_dtype",
    "name_or_path",
    "_name_or_path",
    "output_attentions",
    "attn_implementation",
    "quantization_config",
    "_commit_hash",
}


class Band(NamedTuple):
    """The tokens from `start` to before `stop` of an adaptive vocabulary, and the width of their vectors."""

    start: int
    stop: int
    width: int


class SplitstepConfig(PreTrainedConfig):
    """The configuration of every Splitstep model.

    It checks itself when it is built and when a model is built from it; an unknown key is an error.
    """

    model_type = "splitstep"
    # What the Trainer does not gather over a whole data set.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "ponder_cost",
        "last_hidden_state",
        "encoder_last_hidden_state",
    ]

    kind: str = "encoder"  # what it reads and writes

    # Sizes.
    vocab_size: int = 32768  # tokens
    hidden_size: int = 512  # width of a particle's state
    num_hidden_layers: int = 6  # of each stack; of the encoder where num_decoder_layers is given
    num_decoder_layers: int | None = None  # num_hidden_layers without it
    num_attention_heads: int = 8
    intermediate_size: int = 2048  # feed-forward width of a whole layer, divided among its feed-forward networks
    max_position_embeddings: int = 512  # the longest sequence

    # The scheme: how a layer's step is split and advanced, and which weights act when.
    splitting: str = "lie_trotter"  # how a layer's step is split into sub-steps
    decoder_splitting: str | None = None  # splitting without it
    integrator: str = "euler"  # how each sub-step is advanced
    num_independent_layers: int | None = None  # weight sets, each for equally many layers in a row
    steps_per_layer: int = 1  # equal steps in the time of a layer
    step_size: float = 1.0  # the time that a layer spans
    share_substeps: bool = False  # one module for all sub-steps of a term, at several times
    reversible: bool = False  # training memory that does not grow with depth, for twice the evaluations
    time_embedding: str = "none"  # how the weights come to know the time
    rtol: float = Tolerance.rtol  # relative error that an adaptive integrator allows
    atol: float = Tolerance.atol  # absolute error, likewise
    max_evaluations: int = Tolerance.max_evaluations  # of the field by an adaptive integrator, then an error

    # Adaptive halting.
    halting: str = "none"  # whether particles stop by themselves (Graves 2016; Dehghani et al. 2018)
    halting_epsilon: float = 0.01  # a particle halts when its probabilities sum to one less this
    ponder_weight: float = 0.01  # of the ponder cost in the loss that is trained

    # Attention.
    attention: str = "full"  # in every layer, or once a segment and evolved in time (Dutta et al. 2021)
    evolution: str = "published"  # how attention is evolved
    num_segments: int = 1  # of the depth; attention is computed anew in each
    time_dim: int | None = None  # width of the time vector of a head; the head's own without it
    time_keys: bool = True  # keep the published parameters that cancel in the softmax

    # Fields and norms.
    feed_forward: str = "full"  # learnt in every layer, or moved with depth
    norm: str = "pre"  # where the norms are
    norm_type: str = "layer_norm"  # what they are
    layer_norm_eps: float = 1e-5
    hidden_act: str = "relu"  # between the two products of a feed-forward network
    first_hidden_act: str | None = None  # of the first of a layer's several feed-forward networks, where it differs
    attention_bias: bool = True
    feed_forward_bias: bool = True

    # Noise.
    dropout: float = 0.0  # of what each term adds
    embedding_dropout: float | None = None  # dropout without it
    attention_dropout: float = 0.0  # of attention weights
    activation_dropout: float = 0.0  # inside feed-forward networks
    drop_path: float = 0.0  # the chance that an example skips a term, growing linearly with depth to this
    classifier_dropout: float = 0.0  # in front of a classifier

    # Embeddings.
    position_embedding: str = "sinusoidal"
    position_offset: int = 0  # the number of the first position; 2 in fairseq, which counts from pad_token_id + 1
    sinusoid_ladder: str = "tensor2tensor"  # frequencies of sinusoidal positions and times
    rotary_base: float = 10000.0  # of the frequencies of rotary positions
    type_vocab_size: int = 0  # token types that are told apart, as first and second text
    scale_embedding: bool = False  # embeddings times the square root of hidden_size
    embedding_norm: bool = False  # a norm on the embeddings
    tie_word_embeddings: bool = True  # one table for embeddings and the head over the vocabulary

    # An adaptive vocabulary (Grave et al. 2017; Baevski & Auli 2019), its tokens numbered by falling frequency.
    adaptive_cutoffs: list[int] | None = None  # where the bands of tokens end
    adaptive_factor: int = 4  # how much narrower each band is than the one before
    adaptive_dropout: float = 0.0  # behind the projections to the rarer bands of the softmax

    # Images.
    image_size: int = 224  # pixels a side
    patch_size: int = 16  # pixels a side
    num_channels: int = 3  # 1 grey, 3 colours

    # Heads.
    lm_head_bias: bool = False
    mlm_transform: bool = True  # BERT's dense layer in front of its head over the vocabulary
    pooler: bool = False  # BERT's dense layer in front of its classifiers
    pooling: str = "first"  # what a classifier reads
    comparison: str = "nli"  # what is read of two texts that do not see each other

    # Initialisation.
    initialization: str = "normal"
    initializer_range: float = 0.02  # deviation of normal weights

    # Special tokens.
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    cls_token_id: int | None = None
    sep_token_id: int | None = None
    mask_token_id: int | None = None
    decoder_start_token_id: int | None = None
    use_cache: bool = True  # keep keys and values in generation

    @classmethod
    def check_names(cls, keys: Iterable[str]) -> None:
        """Refuse a key that no configuration has."""
        own = {field.name for field in fields(cls)}
        for key in keys:
            if key not in own and key not in HUGGING_FACE_KEYS:
                raise unknown("configuration key", key, sorted(own))

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # code in a model's folder is never run
        self.check_names(kwargs)
        kwargs.pop("model_type", None)
        labels = kwargs.get("num_labels", 1)
        if labels is not None and (type(labels) is not int or labels < 1):
            raise UserError(f"num_labels must be a whole number of at least 1, got {labels!r}")
        self._check_types()
        self.is_encoder_decoder = self.kind == "seq2seq"
        super().__post_init__(**kwargs)
        self.check()

    def _check_types(self) -> None:
        for field in fields(SplitstepConfig):
            if isinstance(field.type, str):  # Hugging Face's own fields
                continue
            allowed = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
                setattr(self, field.name, float(value))
            elif not any(_is(value, kind) for kind in allowed):
                names = " or ".join(map(_type_name, allowed))
                raise UserError(f"{field.name} must be {names}, got {value!r}")

    def check(self) -> None:
        """Refuse wrong types, names that are in no table, sizes that do not fit, and combinations that cannot be."""
        self._check_types()
        for name, table in NAMED.items():
            lookup(name, getattr(self, name), table)
        for name, other, value in _ACTS_WITH:
            if getattr(self, other) != value and getattr(self, name) != getattr(SplitstepConfig, name):
                raise UserError(f"{name} is for {other} {value!r}, not {getattr(self, other)!r}")
        named = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if self.dtype not in (None, "auto") and not isinstance(named, torch.dtype):
            raise UserError(f"dtype must be a type of torch such as float32, got {self.dtype!r}")
        if self._attn_implementation is not None:
            lookup("attn_implementation", self._attn_implementation, KERNELS)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < inf:
                raise UserError(f"{name} must be at least {least}, got {value}")
        for name in _RATES:
            if not 0 <= (getattr(self, name) or 0) < 1:
                raise UserError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"num_attention_heads = {self.num_attention_heads} does not divide hidden_size = {self.hidden_size}; "
                f"choose from {', '.join(map(str, _divisors(self.hidden_size)))}"
            )
        for part in self.parts:
            self.schedule(part)
            self.feed_forward_width(part)
        self._check_adaptive()
        self._check_combinations()

    def _check_first_act(self, name: str) -> None:
        lookup("first_hidden_act", name, ACTIVATIONS)
        if (name in GATED) != (self.hidden_act in GATED):
            raise UserError("first_hidden_act and hidden_act have both a gate or neither")
        alone = [part for part in self.parts if self.scheme(part).splitting.uses("convection") < 2]
        if alone or self.share_substeps:
            why = "share_substeps" if self.share_substeps else f"the splitting of the {alone[0]}"
            raise UserError(f"first_hidden_act is for layers with several feed-forward networks, and {why} has one")

    def _check_adaptive(self) -> None:
        if self.adaptive_cutoffs is None:
            for name in ("adaptive_factor", "adaptive_dropout"):
                if getattr(self, name) != getattr(SplitstepConfig, name):
                    raise UserError(f"{name} is for a vocabulary with adaptive_cutoffs")
            return
        edges = (0, *self.adaptive_cutoffs, self.vocab_size)
        if len(edges) == 2 or any(stop <= start for start, stop in pairwise(edges)):
            raise UserError(
                f"adaptive_cutoffs must ascend between 0 and vocab_size = {self.vocab_size}, "
                f"got {self.adaptive_cutoffs}"
            )
        if self.adaptive_bands[-1].width < 1:
            raise UserError(
                f"with adaptive_factor = {self.adaptive_factor} the last of {len(self.adaptive_bands)} bands has no "
                f"channel left of hidden_size = {self.hidden_size}; choose fewer cutoffs or a smaller factor"
            )
        if self.lm_head_bias:
            raise UserError("an adaptive softmax has no lm_head_bias")

    def _check_combinations(self) -> None:
        reads_forward = self.kind in ("causal", "seq2seq")
        if reads_forward and self.scheme(self.parts[-1]).tableau.adaptive:
            raise UserError(
                f"integrator {self.integrator!r} chooses its steps by looking at the whole sequence, which a model "
                "that writes from left to right must not; choose a fixed-step integrator"
            )
        if self.reversible:
            self._check_reversible()
        if self.num_segments > 1 and self.attention == self.feed_forward == "full":
            raise UserError("num_segments is for attention 'evolved' or a feed_forward that moves with depth")
        if self.attention == "evolved":
            if self.evolved_time_dim < 1 or self.num_attention_heads * self.evolved_time_dim % 2:
                raise UserError(f"time_dim must be positive, and even over all heads; got {self.evolved_time_dim}")
            if self.position_embedding == "rotary" or self.attention_dropout:
                raise UserError("evolved attention has neither rotary positions nor attention_dropout")
        if self.first_hidden_act is not None:
            self._check_first_act(self.first_hidden_act)
        if self.feed_forward != "full":
            if self.hidden_act in GATED:
                raise UserError(f"feed_forward {self.feed_forward!r} has no gate; choose another hidden_act")
            if self.hidden_size % 2:
                raise UserError(f"feed_forward {self.feed_forward!r} needs an even hidden_size, got {self.hidden_size}")
            for part in self.parts:
                if self.feed_forward == "random" and self.feed_forward_width(part) % 2:
                    raise UserError(
                        f"a random feed-forward network has an even width, got {self.feed_forward_width(part)}"
                    )
                if self.feed_forward == "rotated" and self.feed_forward_width(part) % self.hidden_size:
                    raise UserError(
                        f"a rotated feed-forward network is a whole number of hidden_size = {self.hidden_size} wide, "
                        f"got {self.feed_forward_width(part)}"
                    )
        if self.halting == "act":
            if not 0 < self.halting_epsilon < 1:
                raise UserError(f"halting_epsilon must lie between 0 and 1, got {self.halting_epsilon}")
            if self.attention == "evolved":
                raise UserError("particles that halt would leave the norms between segments of evolved attention aside")
        if self.position_embedding == "rotary" and self.head_dim % 2:
            raise UserError(f"rotary positions need an even head width, got {self.head_dim}")
        if self.kind == "image":
            if self.image_size % self.patch_size:
                raise UserError(f"patch_size = {self.patch_size} does not divide image_size = {self.image_size}")
            if self.pooling == "last":
                raise UserError("the last patch of an image is no summary; choose pooling 'first' or 'mean'")
            if self.time_embedding == "state":
                raise UserError("time_embedding 'state' adds positions of a text; choose 'field' or 'none' for images")
            if self.position_embedding not in ("learned", "none"):
                raise UserError(f"images have learned positions or none, not {self.position_embedding!r}")

    def _check_reversible(self) -> None:
        """A step must be an increment alone, and the same when it is evaluated again."""
        hindrances = {
            f"norm {self.norm!r} changes the state after a step": PLACEMENTS[self.norm].around,
            f"integrator {self.integrator!r} chooses its own steps": self.scheme(self.parts[0]).tableau.adaptive,
            "particles that halt leave the flow": self.halting != "none",
            "a time embedding is added to the state": self.time_embedding == "state",
            "evolved attention keeps what a segment began with": self.attention == "evolved",
        }
        for reason, hinders in hindrances.items():
            if hinders:
                raise UserError(f"reversible needs a scheme of fixed steps and pre-norm: {reason}")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def evolved_time_dim(self) -> int:
        """The width of the time vector of evolved attention, a head."""
        return self.head_dim if self.time_dim is None else self.time_dim

    @property
    def adaptive_bands(self) -> tuple[Band, ...]:
        """The bands of the vocabulary, the most frequent first; one where it is not adaptive."""
        edges = (0, *(self.adaptive_cutoffs or ()), self.vocab_size)
        return tuple(
            Band(start, stop, self.hidden_size // self.adaptive_factor**number)
            for number, (start, stop) in enumerate(pairwise(edges))
        )

    @property
    def first_dropout(self) -> float:
        """Of the first state."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def parts(self) -> tuple[str, ...]:
        """The stacks of this model; one without coupling is called encoder, whatever its mask."""
        return ("encoder", "decoder") if self.kind == "seq2seq" else ("encoder",)

    def scheme(self, part: str) -> Scheme:
        """How a step of this part is split and advanced."""
        splitting = self.decoder_splitting if part == "decoder" and self.decoder_splitting else self.splitting
        tolerance = Tolerance(rtol=self.rtol, atol=self.atol, max_evaluations=self.max_evaluations)
        return scheme(
            part, splitting=splitting, integrator=self.integrator, tolerance=tolerance, reversible=self.reversible
        )

    def schedule(self, part: str) -> Schedule:
        """The steps of this part, and the weights that act in each."""
        decoder_layers = self.num_decoder_layers if part == "decoder" else None
        layers = self.num_hidden_layers if decoder_layers is None else decoder_layers
        return Schedule(
            num_layers=layers,
            num_independent_layers=layers if self.num_independent_layers is None else self.num_independent_layers,
            step_size=self.step_size,
            steps_per_layer=self.steps_per_layer,
            drop_path=self.drop_path,
            num_segments=self.num_segments,
        )

    def feed_forward_width(self, part: str) -> int:
        """The width of each feed-forward network of a layer, so that together they have `intermediate_size`."""
        networks = 1 if self.share_substeps else self.scheme(part).splitting.uses("convection")
        if self.intermediate_size % networks:
            raise UserError(
                f"intermediate_size = {self.intermediate_size} does not divide among the {networks} feed-forward "
                f"networks of a layer; choose a multiple of {networks}"
            )
        return self.intermediate_size // networks

    @property
    def cache_slots(self) -> int:
        """How many key/value pairs decoding keeps: one for each evaluation of attention in a whole pass."""
        part = self.parts[-1]
        scheme = self.scheme(part)
        operators = self.num_segments if self.attention == "evolved" else 0
        return operators + len(self.schedule(part).steps) * max(map(scheme.evaluations, ("interaction", "coupling")))

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "SplitstepConfig":
        """This configuration; for a decoder, one whose layers are the slots that a key/value cache must have."""
        if not decoder:
            return self
        slots = copy.copy(self)
        slots.num_hidden_layers = self.cache_slots
        return slots


NAMED: dict[str, Any] = {
    "kind": KINDS,
    "norm": PLACEMENTS,
    "norm_type": NORMS,
    "hidden_act": ACTIVATIONS,
    "attention": ATTENTIONS,
    "evolution": EVOLUTIONS,
    "feed_forward": FEED_FORWARDS,
    "time_embedding": TIME_EMBEDDINGS,
    "halting": HALTINGS,
    "position_embedding": POSITIONS,
    "sinusoid_ladder": LADDERS,
    "pooling": POOLINGS,
    "comparison": COMPARISONS,
    "initialization": INITIALIZATIONS,
}
# What acts under one value of another setting only; elsewhere it must be left as it is.
_ACTS_WITH = (
    ("num_decoder_layers", "kind", "seq2seq"),
    ("decoder_splitting", "kind", "seq2seq"),
    ("adaptive_cutoffs", "kind", "causal"),
    ("evolution", "attention", "evolved"),
    ("time_dim", "attention", "evolved"),
    ("time_keys", "attention", "evolved"),
    ("time_keys", "evolution", "published"),
    ("attention_bias", "attention", "full"),
    ("feed_forward_bias", "feed_forward", "full"),
)
_RATES = (
    "dropout",
    "embedding_dropout",
    "attention_dropout",
    "activation_dropout",
    "classifier_dropout",
    "adaptive_dropout",
)
_LEAST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_decoder_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 1,
    "image_size": 1,
    "patch_size": 1,
    "num_channels": 1,
    "adaptive_factor": 1,
    "type_vocab_size": 0,
    "position_offset": 0,
    "layer_norm_eps": 0.0,
    "initializer_range": 0.0,
    "ponder_weight": 0.0,
}


def _is(value: Any, kind: Any) -> bool:
    """Whether the value is of that very type; of a list, its items too."""
    if get_origin(kind) is list:
        return type(value) is list and all(_is(item, *get_args(kind)) for item in value)
    return type(value) is kind


def _type_name(kind: Any) -> str:
    if kind is NoneType:
        return "None"
    return str(kind) if get_args(kind) else kind.__name__


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]
