"""What a model is: its sizes, its scheme, its embeddings and heads, in Hugging Face's words."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from splitstep.fields.feedforward import ACTIVATIONS
from splitstep.fields.norms import NORMS, PLACEMENTS
from splitstep.solver.errors import UserError, lookup
from splitstep.solver.schedules import TIME_EMBEDDINGS, Schedule
from splitstep.solver.schemes import Scheme, Tolerance, scheme

KINDS = {
    "encoder": "reads a whole sequence: masked language modelling, classification",
    "causal": "reads from left to right: language modelling",
    "seq2seq": "an encoder and a decoder that is coupled to it: translation",
    "image": "reads the patches of an image: image classification",
}
POSITIONS = {
    "sinusoidal": "[sines | cosines] of the position, added to the embedding",
    "learned": "a vector for each position, added to the embedding",
    "rotary": "queries and keys turned by an angle that grows with the position",
    "none": "none",
}
POOLINGS = {"first": "the first particle (class token)", "mean": "the mean over the visible particles"}


class SplitstepConfig(PreTrainedConfig):
    """The configuration of every Splitstep model.

    It checks itself when it is built and when a model is built from it; an unknown key is an error.
    """

    model_type = "splitstep"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    kind: str = "encoder"

    # Sizes. `intermediate_size` is the feed-forward width of a whole layer, divided among its convection sub-steps.
    vocab_size: int = 32768
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_decoder_layers: int | None = None
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 512

    # The scheme: how a layer's step is split and advanced, and which weights act when.
    splitting: str = "lie_trotter"
    decoder_splitting: str | None = None
    integrator: str = "euler"
    num_independent_layers: int | None = None
    steps_per_layer: int = 1
    step_size: float = 1.0
    share_substeps: bool = False
    time_embedding: str = "none"
    rtol: float = Tolerance.rtol
    atol: float = Tolerance.atol
    max_evaluations: int = Tolerance.max_evaluations

    # Fields and norms.
    norm: str = "pre"
    norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-5
    hidden_act: str = "relu"
    attention_bias: bool = True
    feed_forward_bias: bool = True

    # Noise.
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    drop_path: float = 0.0

    # Embeddings.
    position_embedding: str = "sinusoidal"
    rope_theta: float = 10000.0
    scale_embedding: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.is_encoder_decoder = self.kind == "seq2seq"
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Refuse names that are in no table, sizes that do not fit, and combinations that cannot be."""
        lookup("kind", self.kind, KINDS)
        lookup("norm", self.norm, PLACEMENTS)
        lookup("norm_type", self.norm_type, NORMS)
        lookup("hidden_act", self.hidden_act, ACTIVATIONS)
        lookup("time_embedding", self.time_embedding, TIME_EMBEDDINGS)
        lookup("position_embedding", self.position_embedding, POSITIONS)
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"num_attention_heads = {self.num_attention_heads} does not divide hidden_size = {self.hidden_size}"
            )
        for part in self.parts:
            self.schedule(part)
            self.feed_forward_width(part)
            if self.scheme(part).tableau.adaptive and (part == "decoder" or self.kind == "causal"):
                raise UserError(
                    f"integrator {self.integrator!r} chooses its steps by looking at the whole sequence, "
                    f"which a model that reads from left to right must not; choose a fixed-step integrator"
                )

    @property
    def parts(self) -> tuple[str, ...]:
        """The stacks of this model; one without coupling is called encoder, whatever its mask."""
        return ("encoder", "decoder") if self.kind == "seq2seq" else ("encoder",)

    def scheme(self, part: str) -> Scheme:
        """How a step of this part is split and advanced."""
        splitting = self.decoder_splitting if part == "decoder" and self.decoder_splitting else self.splitting
        tolerance = Tolerance(rtol=self.rtol, atol=self.atol, max_evaluations=self.max_evaluations)
        return scheme(part, splitting=splitting, integrator=self.integrator, tolerance=tolerance)

    def schedule(self, part: str) -> Schedule:
        """The steps of this part, and the weights that act in each."""
        layers = self.num_decoder_layers if part == "decoder" and self.num_decoder_layers else self.num_hidden_layers
        return Schedule(
            num_layers=layers,
            num_independent_layers=self.num_independent_layers or layers,
            step_size=self.step_size,
            steps_per_layer=self.steps_per_layer,
            drop_path=self.drop_path,
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
