"""The base of every model: embeddings and stacks, without a head."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils import ModelOutput, can_return_tuple

from splitstep.fields.attention import KERNELS, Attention
from splitstep.fields.evaluation import Sight
from splitstep.fields.evolution import BilinearAttention, EvolvedAttention, PublishedCondition
from splitstep.fields.feedforward import FeedForward, RandomProjection, RotatedFeedForward, Rotations
from splitstep.models.adaptive import AdaptiveInput, AdaptiveSoftmax
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.embeddings import ImageEmbeddings, TextEmbeddings
from splitstep.models.trunk import Record, Stack
from splitstep.solver.errors import UserError, lookup, unknown

PaddingMask = Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"]


@dataclass
class States(ModelOutput):
    """The particles after the last step, and what was asked to be recorded on the way.

    With two towers `last_hidden_state` is the decoder's. `ponder_cost`, one an example, is there where particles halt
    by themselves.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    ponder_cost: Tensor | None = None


class SplitstepPreTrainedModel(PreTrainedModel):
    """What all models share: how weights are initialised, which kernels there are, how a scheme is exchanged."""

    config: SplitstepConfig
    config_class = SplitstepConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Tower"]  # whose stack advances the state, so that it stays on one device
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True

    def __init__(self, config: SplitstepConfig) -> None:
        config.check()  # the configuration can be assigned to, so what was right when built may be wrong now
        super().__init__(config)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        name = attn_implementation or "auto"
        lookup("attn_implementation", name, KERNELS)
        return name

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The model saved in a folder. A body that is not wholly there is refused; a new head is named in one line."""
        logger = logging.getLogger("transformers.modeling_utils")
        logger.addFilter(_is_no_load_report)
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
            )
        finally:
            logger.removeFilter(_is_no_load_report)
        model, info = loaded
        wrong = {key: f"{tuple(found)} instead of {tuple(needed)}" for key, found, needed in info["mismatched_keys"]}
        missing = {key: "missing" for key in sorted(info["missing_keys"]) if key not in wrong}
        faults = {key: why for key, why in (wrong | missing).items() if _in_body(key)}
        if not ignore_mismatched_sizes:
            faults |= wrong
        if faults:
            listed = "; ".join(f"{key}: {why}" for key, why in list(faults.items())[:3])
            more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise UserError(f"the weights in {pretrained_model_name_or_path} do not fit {cls.__name__}: {listed}{more}")
        if new := sorted(wrong | missing):
            logging.getLogger("splitstep").warning("new in %s, initialised at random: %s", cls.__name__, ", ".join(new))
        _align(model)
        return (model, info) if output_loading_info else model

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Keep one state a step in training, and compute what lies between again."""
        if self.config.reversible:
            raise UserError("a reversible model keeps no states, so there is nothing to checkpoint")
        super().gradient_checkpointing_enable(*args, **kwargs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """The table of tokens, with another number of them where one is given; the output layer follows."""
        if self.config.adaptive_cutoffs is None:
            return super().resize_token_embeddings(*args, **kwargs)
        if args or kwargs:
            raise UserError(
                "an adaptive vocabulary cannot be resized: its last band is for the rarest tokens, not new ones"
            )
        return self.get_input_embeddings()

    def with_solver(self, **changes: Any) -> Self:
        """The same weights under another scheme: a new model that shares them with this one.

        Changes are `splitting`, `decoder_splitting`, `integrator`, `steps_per_layer`, `step_size`, `share_substeps`,
        `rtol`, `atol` and `max_evaluations`. Where each term of a layer has one module, a splitting that uses a term
        more often samples the same field at more times.
        """
        for name in changes:
            if name not in _SOLVER_KEYS:
                raise unknown("setting of the solver", name, _SOLVER_KEYS)
        config = copy.deepcopy(self.config)
        if "splitting" in changes:
            config.decoder_splitting = None
        single = all(
            config.share_substeps or self.config.scheme(part).splitting.uses(term) == 1
            for part in config.parts
            for term in self.config.scheme(part).splitting.terms
        )
        for name, value in ({"share_substeps": single} | changes).items():
            setattr(config, name, value)
        config.check()
        with torch.device("meta"):
            other = type(self)(config)
        weights = self.state_dict(keep_vars=True)
        _refuse_other_shapes(weights, other.state_dict(), config)
        other.load_state_dict(weights, assign=True)
        if self.can_generate():
            other.generation_config = copy.deepcopy(self.generation_config)
        if self.is_gradient_checkpointing:
            other.gradient_checkpointing_enable()
        return other.train(self.training)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside of transformers, modules without parameters of their own, such as attention, would be left
        # out; the functions of `transformers.initialization` already spare what was loaded.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        xavier, kaiming = (self.config.initialization == name for name in ("xavier", "kaiming"))
        std = self.config.hidden_size**-0.5 if xavier or kaiming else self.config.initializer_range
        if isinstance(module, Attention) and xavier:
            # The three projections are initialised as one matrix, whose limit is smaller by sqrt(2).
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                init.xavier_uniform_(projection.weight, gain=2**-0.5)
                projection.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        elif isinstance(module, PublishedCondition) and xavier:
            # Content and time of a side are initialised as one square matrix.
            limit = (3 / module.query.out_features) ** 0.5
            for weight in (module.query.weight, module.key.weight, module.query_time, module.key_time):
                if weight is not None:
                    init.uniform_(weight, -limit, limit)
                    weight._is_hf_initialized = True  # type: ignore[attr-defined]
        elif isinstance(module, FeedForward) and kaiming:
            # Behind an activation, which loses half of the variance.
            init.kaiming_normal_(module.down_proj.weight, nonlinearity="relu")
            module.down_proj.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        elif isinstance(module, nn.Linear) and xavier:
            init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Linear) and kaiming:
            init.kaiming_normal_(module.weight, nonlinearity="linear")
        elif isinstance(module, nn.Linear | nn.Conv2d):
            init.trunc_normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, AdaptiveInput | AdaptiveSoftmax):
            _init_adaptive(module)
        elif isinstance(module, ImageEmbeddings):
            for parameter in (module.class_token, module.positions):
                if parameter is not None:
                    init.trunc_normal_(parameter, std=std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
            init.ones_(module.weight)
        else:
            _init_evolution(module, std)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            init.zeros_(bias)


def _init_adaptive(module: AdaptiveInput | AdaptiveSoftmax) -> None:
    """As fairseq does, whatever `initialization` is: a band's width is what scales its vectors."""
    for projection in module.projections:
        init.xavier_uniform_(projection)
    if isinstance(module, AdaptiveInput):
        for table in module.tables:
            init.normal_(table, std=table.shape[1] ** -0.5)
    else:
        for table in (*module.tables, module.clusters):
            init.xavier_uniform_(table)


def _init_evolution(module: nn.Module, std: float) -> None:
    """The modules of TransEvolve: bare parameters, and buffers that are drawn once and never trained."""
    if isinstance(module, PublishedCondition):
        init.normal_(module.query_time, std=std)
        if module.key_time is not None:
            init.normal_(module.key_time, std=std)
    elif isinstance(module, EvolvedAttention):
        limit = (6 / len(module.coefficients)) ** 0.5
        init.uniform_(module.coefficients, -limit, limit)
        if isinstance(module, BilinearAttention):
            init.zeros_(module.temperature)
    elif isinstance(module, RandomProjection):
        limit = (6 / module.rank) ** 0.5
        init.uniform_(module.values, -limit, limit)
        init.normal_(module.left, std=float(len(module.left)))
        init.normal_(module.right, std=float(len(module.right)))
    elif isinstance(module, Rotations):
        pairs = len(module.frequencies)
        if not getattr(module.mixtures, "_is_hf_initialized", False):  # which its slices would not show
            for mixture in module.mixtures:
                init.orthogonal_(mixture)
        init.copy_(module.frequencies, torch.arange(1, pairs + 1, device=module.mixtures.device) * (torch.pi / pairs))
    elif isinstance(module, RotatedFeedForward):
        init.ones_(module.up_scales)
        init.constant_(module.down_scales, module.copies**-0.5)
        for bias in (module.up_biases, module.down_bias):
            init.zeros_(bias)


_SOLVER_KEYS = (
    "splitting",
    "decoder_splitting",
    "integrator",
    "steps_per_layer",
    "step_size",
    "share_substeps",
    "rtol",
    "atol",
    "max_evaluations",
)


def _refuse_other_shapes(has: Mapping[str, Tensor], needs: Mapping[str, Tensor], config: SplitstepConfig) -> None:
    for key in [*needs, *has]:
        found, needed = has.get(key), needs.get(key)
        if found is not None and needed is not None and found.shape == needed.shape:
            continue
        part = "decoder" if "decoder.stack" in key else "encoder"
        why = (
            f"it needs {key}, which they do not have"
            if found is None
            else f"it has no place for {key}"
            if needed is None
            else f"{key} is {tuple(found.shape)}, not {tuple(needed.shape)}"
        )
        raise UserError(
            f"these weights do not fit '{config.scheme(part).splitting}' with norm {config.norm!r}: {why}; "
            "a splitting fits when its layer has the same modules"
        )


ALIGNED = 64  # bytes: as memory that torch itself asks for


def _align(model: nn.Module) -> None:
    """Move weights that a file was mapped to: the rounding of some products depends on where in memory they begin."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()


def _in_body(key: str) -> bool:
    return ".stack." in f".{key}" or ".embeddings." in f".{key}"


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


class Tower(nn.Module):
    """Embeddings and a stack: the encoder or the decoder of a model."""

    def __init__(self, config: SplitstepConfig, part: str) -> None:
        super().__init__()
        self.config = config
        self.causal = part == "decoder" or config.kind == "causal"
        image = config.kind == "image"
        self.embeddings = ImageEmbeddings(config) if image else TextEmbeddings(config, part)
        self.main_input_name = "pixel_values" if image else "input_ids"
        self.stack = Stack(config, part)

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"] | None = None,
        attention_mask: PaddingMask | None = None,
        *,
        token_type_ids: Int[Tensor, "batch tokens"] | None = None,
        position_ids: Int[Tensor, "#batch tokens"] | None = None,
        inputs_embeds: Float[Tensor, "batch tokens dim"] | None = None,
        pixel_values: Float[Tensor, "batch channels height width"] | None = None,
        interpolate_pos_encoding: bool = False,
        memory: Float[Tensor, "batch sources dim"] | None = None,
        memory_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> States:
        """The last state, with what was asked to be recorded. Keyword arguments of other models are not for it."""
        config = self.config
        waves = None
        rotary = None
        interaction = Sight()
        if isinstance(self.embeddings, ImageEmbeddings):
            if pixel_values is None:
                raise UserError("an image model needs pixel_values")
            x = self.embeddings(pixel_values, interpolate=interpolate_pos_encoding)
        else:
            if (input_ids is None) == (inputs_embeds is None):
                raise UserError("give either input_ids or inputs_embeds")
            if inputs_embeds is None:
                assert self.embeddings.tokens is not None
                inputs_embeds = self.embeddings.tokens(input_ids)
            tokens = inputs_embeds
            positions, interaction = self._surroundings(tokens, attention_mask, position_ids, past_key_values)
            x = self.embeddings(tokens, positions, token_type_ids)
            if config.time_embedding == "state":
                waves = self.embeddings.waves(positions, like=x)
            if config.position_embedding == "rotary":
                rotary = self._rotary(positions, like=x)
        interaction.rotary = rotary
        attentions: list[Tensor] | None = [] if output_attentions else None
        couplings: list[Tensor] | None = [] if output_attentions and memory is not None else None
        interaction.kernel = config._attn_implementation or "auto"
        interaction.record = attentions
        coupling = Sight(source=memory, mask=_visible(memory_mask), kernel=interaction.kernel, record=couplings)
        record = Record(states=[] if output_hidden_states else None)
        x = self.stack(
            x, interaction=interaction, coupling=coupling, coordinates=waves, cache=past_key_values, record=record
        )
        return States(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=None if record.states is None else tuple(record.states),
            attentions=None if attentions is None else tuple(attentions),
            cross_attentions=None if couplings is None else tuple(couplings),
            ponder_cost=None if record.ponder_cost is None else _mean(record.ponder_cost, attention_mask),
        )

    def _surroundings(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Sight]:
        """The positions of the new tokens and whom they see: earlier tokens in the cache, none of the padding."""
        length = tokens.shape[1]
        past = 0 if cache is None else cache.get_seq_length()
        place = torch.arange(length, device=tokens.device) + past
        if position_ids is None:
            position_ids = place.unsqueeze(0)
            if attention_mask is not None and attention_mask.ndim == 2:
                # Padding on either side takes no position, so that it changes nothing for the rest.
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        mask = _visible(attention_mask)
        if not self.causal:
            return position_ids, Sight(mask=mask)
        keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
        if mask is None and keys == length:
            return position_ids, Sight(causal=True)
        earlier = torch.arange(keys, device=tokens.device) <= place.unsqueeze(-1)
        if mask is not None and mask.shape[-1] < keys:  # a static cache is longer than what has been written
            mask = nn.functional.pad(mask, (0, keys - mask.shape[-1]))
        return position_ids, Sight(mask=earlier[None, None] if mask is None else earlier & mask)

    def _rotary(self, positions: Tensor, *, like: Tensor) -> tuple[Tensor, Tensor]:
        pairs = self.config.head_dim // 2
        frequency = self.config.rotary_base ** -(torch.arange(pairs, device=positions.device) / pairs)
        angle = (positions.unsqueeze(-1) * frequency).unsqueeze(1)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _visible(attention_mask: Tensor | None) -> Tensor | None:
    """A mask over keys, True = visible, as attention takes it; None where everything is visible.

    It comes as [batch, keys], [batch, queries, keys] or with heads between; of the last, floats are added to scores in
    Hugging Face's models, so that 0 is what is visible.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim not in (2, 3, 4):
        raise UserError(f"attention_mask has 2, 3 or 4 dimensions, got {attention_mask.ndim}")
    added = attention_mask.ndim == 4 and attention_mask.is_floating_point()
    visible = attention_mask >= 0 if added else attention_mask.bool()
    if not torch.compiler.is_compiling() and visible.all():
        return None
    return visible.reshape(visible.shape[:1] + (1,) * (4 - visible.ndim) + visible.shape[1:])


def _mean(cost: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean over the visible particles of each example."""
    if attention_mask is None or attention_mask.shape != cost.shape:
        return cost.mean(-1)
    weights = attention_mask.to(cost.dtype)
    return (cost * weights).sum(-1) / weights.sum(-1).clamp(min=1)


class SplitstepModel(SplitstepPreTrainedModel):
    """The states of all particles after the last step: an encoder, and a decoder where the kind has one."""

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        self.main_input_name = "pixel_values" if config.kind == "image" else "input_ids"
        self.encoder = Tower(config, "encoder")
        self.decoder = Tower(config, "decoder") if config.kind == "seq2seq" else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens, or what cuts an image into patches."""
        embeddings = self.encoder.embeddings
        if isinstance(embeddings, ImageEmbeddings):
            return embeddings.patches
        assert embeddings.tokens is not None
        return embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Exchange the table of tokens."""
        if self.config.adaptive_cutoffs is not None:
            raise UserError("the bands of an adaptive vocabulary cannot be exchanged for one table")
        self.encoder.embeddings.tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **inputs: Any,
    ) -> States:
        """The last states. `inputs` are the encoder's: token_type_ids, position_ids, inputs_embeds, pixel_values."""
        asked = {
            "output_hidden_states": self.config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states,
            "output_attentions": self.config.output_attentions if output_attentions is None else output_attentions,
        }
        if past_key_values is None and self._keeps(use_cache):
            past_key_values = self._new_cache()
        if self.decoder is None:
            return self.encoder(input_ids, attention_mask, past_key_values=past_key_values, **asked, **inputs)
        if attention_mask is None and input_ids is not None and (padding := self._padding()) is not None:
            attention_mask = input_ids.ne(padding).long()
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, **asked, **inputs)
        elif not hasattr(encoder_outputs, "last_hidden_state"):
            encoder_outputs = States(last_hidden_state=encoder_outputs[0])
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise UserError("give either decoder_input_ids or decoder_inputs_embeds, or labels to make them from")
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.get_input_embeddings()(decoder_input_ids)
        written = self.decoder(
            None,
            decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            memory=encoder_outputs.last_hidden_state,
            memory_mask=attention_mask,
            past_key_values=past_key_values,
            **asked,
        )
        costs = [
            cost for cost in (getattr(encoder_outputs, "ponder_cost", None), written.ponder_cost) if cost is not None
        ]
        return States(
            last_hidden_state=written.last_hidden_state,
            past_key_values=past_key_values,
            decoder_hidden_states=written.hidden_states,
            decoder_attentions=written.attentions,
            cross_attentions=written.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            ponder_cost=torch.stack(costs).sum(0) if costs else None,
        )

    def _padding(self) -> int | None:
        """The pad token, if it can be nothing but padding: then a source without a mask has one all the same."""
        config = self.config
        return None if config.pad_token_id in (config.bos_token_id, config.eos_token_id) else config.pad_token_id

    def _keeps(self, use_cache: bool | None) -> bool:
        writes = self.config.kind in ("causal", "seq2seq")
        # A reversible pass evaluates its fields again on the way back, when the cache would hold what comes later.
        differentiated = self.training or (self.config.reversible and torch.is_grad_enabled())
        return writes and not differentiated and (self.config.use_cache if use_cache is None else use_cache)

    def _new_cache(self) -> Cache:
        slots = self.config.get_text_config(decoder=True)
        own = DynamicCache(config=slots)
        return own if self.decoder is None else EncoderDecoderCache(own, DynamicCache(config=slots))
