"""The models with their heads: what a task reads off the particles."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput, can_return_tuple

from splitstep.fields.feedforward import ACTIVATIONS
from splitstep.fields.norms import norm
from splitstep.models.adaptive import AdaptiveSoftmax, adaptive_ties
from splitstep.models.backbone import SplitstepModel, SplitstepPreTrainedModel, States
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.labels import IGNORED
from splitstep.models.losses import chunked_token_loss, label_loss, share, token_loss, token_losses
from splitstep.solver.errors import UserError


@dataclass
class Scores(ModelOutput):
    """What a head makes of the states."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None


@dataclass
class HeadOutput(States, Scores):
    """Loss and logits first, then the states below."""


class _Headed(SplitstepPreTrainedModel):
    """A model with a head on it: the kinds of states it can stand on, and how loss and states are handed out.

    With `labels` every head also takes `num_items_in_batch` and `label_smoothing` for the loss (see losses.py), and a
    head over the vocabulary `skip_logits`: the same loss in less time and memory, and no logits.
    """

    kinds: tuple[str, ...] = ()
    of_labels: tuple[str, ...] = ()  # the parts that a task with other labels has no use for

    def __init__(self, config: SplitstepConfig) -> None:
        if config.kind not in self.kinds:
            raise UserError(
                f"{type(self).__name__} needs kind {' or '.join(map(repr, self.kinds))}, got {config.kind!r}"
            )
        super().__init__(config)
        self.model = SplitstepModel(config)
        self.main_input_name = self.model.main_input_name

    def _states(self, *args: Any, **kwargs: Any) -> States:
        """The states by name, whatever the configuration says of tuples."""
        states: States = self.model(*args, **kwargs, return_dict=True)
        return states

    def _output(
        self, states: States, logits: Tensor | None, loss: Tensor | None, *, share: Tensor | float = 1.0
    ) -> HeadOutput:
        """Everything together; in training the ponder cost joins the loss, by the batch's share in its update."""
        if loss is not None and states.ponder_cost is not None and self.training:
            loss = loss + self.config.ponder_weight * share * states.ponder_cost.mean()
        return HeadOutput(loss=loss, logits=logits, **states)


class _Vocabulary(_Headed):
    """A head over the vocabulary, tied to the table of tokens unless `tie_word_embeddings` is off."""

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        tokens = "model.encoder.embeddings.tokens"
        if config.adaptive_cutoffs is None:
            self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
            self._tied_weights_keys = {"lm_head.weight": f"{tokens}.weight"}
        else:
            self.lm_head = AdaptiveSoftmax(config)
            self._tied_weights_keys = adaptive_ties(config, tokens=tokens, head="lm_head")
        self.transform: nn.Module = nn.Identity()

    def _scored(
        self,
        states: States,
        labels: Tensor | None,
        num_items: Tensor | int | None,
        smoothing: float,
        skip_logits: bool,
        *,
        keep: int | Tensor = 0,
    ) -> HeadOutput:
        """Loss and logits; where the logits may be skipped, only places with a label go through the head."""
        assert states.last_hidden_state is not None
        x = states.last_hidden_state[:, slice(-keep, None) if isinstance(keep, int) else keep]
        if labels is None:
            return self._output(states, self.lm_head(self.transform(x)), None)
        labels = labels.to(x.device)
        counted = labels != IGNORED
        logits = None
        if skip_logits:
            loss = self._sparse_loss(self.transform(x[counted]), labels[counted], num_items, smoothing)
        else:
            logits = self.lm_head(self.transform(x))
            loss = token_loss(logits, labels, num_items, smoothing)
        return self._output(states, logits, loss, share=share(counted, num_items))

    def _sparse_loss(self, x: Tensor, labels: Tensor, num_items: Tensor | int | None, smoothing: float) -> Tensor:
        head = self.lm_head
        if isinstance(head, AdaptiveSoftmax):
            if smoothing:
                raise UserError(
                    "label smoothing needs every probability, so an adaptive softmax cannot skip its logits"
                )
            return head.loss(x, labels, num_items)
        if type(head) is nn.Linear:
            return chunked_token_loss(x, head.weight, head.bias, labels, num_items, smoothing)
        return token_loss(head(x), labels, num_items, smoothing)  # an adapter has wrapped the layer

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, for Hugging Face's machinery."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Exchange the output layer."""
        self.lm_head = value


def _label_smoothing(kwargs: dict[str, Any]) -> float:
    """The label smoothing asked for; as a named argument the Trainer, by its "label", would take it for data."""
    return kwargs.pop("label_smoothing", 0.0)


class MaskedHead(nn.Module):
    """BERT's dense layer, activation and norm in front of the output layer."""

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.norm = norm("layer_norm", config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """The states as the output layer reads them."""
        return self.norm(self.activation(self.dense(x)))


class Pool(nn.Module):
    """One vector for the whole sequence, through BERT's dense layer and tanh where there is a `pooler`."""

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.pooler else None

    def forward(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The vector of each sequence; padding on either side has no part in it."""
        pooled = _pooled(states, attention_mask, self.pooling)
        return pooled if self.dense is None else self.dense(pooled).tanh()


def _pooled(states: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UserError("to pool the states, give attention_mask as [batch, tokens], 0 for padding")
    if attention_mask is None:
        return {"first": states[:, 0], "last": states[:, -1], "mean": states.mean(1)}[pooling]
    visible = attention_mask.long()  # places are whole numbers: bf16 could not tell those beyond 256 apart
    if pooling == "mean":
        weights = visible.to(states.dtype)
        return (states * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
    places = torch.arange(1, visible.shape[1] + 1, device=states.device) * visible
    index = visible.argmax(1) if pooling == "first" else places.argmax(1)
    return states[torch.arange(states.shape[0], device=states.device), index]  # len() would fix the batch in an export


class SplitstepForMaskedLM(_Vocabulary):
    """Which token stood at each place, for an encoder (Devlin et al. 2018)."""

    kinds = ("encoder",)

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        self.transform = MaskedHead(config) if config.mlm_transform else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> HeadOutput:
        """Logits over the vocabulary at every place; the loss counts places whose label is not -100."""
        smoothing = _label_smoothing(kwargs)
        states = self._states(input_ids, attention_mask, **kwargs)
        return self._scored(states, labels, num_items_in_batch, smoothing, skip_logits)


class SplitstepForPreTraining(SplitstepForMaskedLM):
    """Masked tokens and whether the second sentence follows the first (Devlin et al. 2018)."""

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        self.pool = Pool(config)
        self.next_sentence = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_pairs_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> HeadOutput:
        """Both logits; the loss is the mean of masked tokens plus the mean of sentence pairs.

        `label_smoothing` and `skip_logits` are for the tokens.
        """
        kwargs["return_dict"] = True
        out: HeadOutput = super().forward(input_ids, attention_mask, labels, num_items_in_batch, **kwargs)
        assert out.last_hidden_state is not None
        related = self.next_sentence(self.pool(out.last_hidden_state, attention_mask))
        loss = out.loss
        if next_sentence_label is not None:
            pairs = token_loss(related, next_sentence_label, num_pairs_in_batch)
            loss = pairs if loss is None else loss + pairs
        # Anew, for as a tuple it has the order in which it was filled.
        return HeadOutput(**{**out, "loss": loss, "seq_relationship_logits": related})


class _Classifier(_Headed):
    """A linear layer on the vector of the whole sequence or image."""

    of_labels = ("classifier",)

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        self.pool = Pool(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.num_labels = config.num_labels or 2
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def _classified(
        self,
        states: States,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        num_items: Tensor | int | None,
        smoothing: float,
    ) -> HeadOutput:
        assert states.last_hidden_state is not None
        logits = self.classifier(self.dropout(self.pool(states.last_hidden_state, attention_mask)))
        if labels is None:
            return self._output(states, logits, None)
        loss = label_loss(logits, labels, self.config, num_items, smoothing)
        return self._output(states, logits, loss, share=share(labels != IGNORED, num_items))


class SplitstepForSequenceClassification(_Classifier):
    """The label of a whole text, read off an encoder or a causal model."""

    kinds = ("encoder", "causal")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> HeadOutput:
        """Logits of the labels, or the value of a regression where there is one label."""
        smoothing = _label_smoothing(kwargs)
        states = self._states(input_ids, attention_mask, **kwargs | {"use_cache": False})
        return self._classified(states, attention_mask, labels, num_items_in_batch, smoothing)


def _first(a: Tensor, b: Tensor) -> Tensor:
    return a


def _second(a: Tensor, b: Tensor) -> Tensor:
    return b


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs()


# What the network sees of the vectors of two texts, by the names of COMPARISONS.
FEATURES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], ...]] = {
    "joined": (_first, _second),
    "nli": (_first, _second, operator.mul, operator.sub),
    "symmetric": (operator.add, operator.mul, _distance),
}


class SplitstepForSequencePairClassification(_Headed):
    """The label of two texts that do not see each other: one model reads each, a small network compares.

    The two towers of the Long Range Arena's document retrieval (Tay et al. 2021).
    """

    kinds = ("encoder", "causal")
    of_labels = ("network", "classifier")

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        self.pool = Pool(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        width, inner = len(FEATURES[config.comparison]) * config.hidden_size, config.intermediate_size
        self.network = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, inner // 2), nn.ReLU())
        self.num_labels = config.num_labels or 2
        self.classifier = nn.Linear(inner // 2, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> HeadOutput:
        """Logits of the labels; `pair_...` is the second text, and the states handed out are those of the first."""
        smoothing = _label_smoothing(kwargs)
        texts = ((input_ids, attention_mask), (pair_input_ids, pair_attention_mask))
        kwargs["use_cache"] = False
        states, others = (self._states(ids, mask, **kwargs) for ids, mask in texts)
        a, b = (self.pool(x.last_hidden_state, mask) for x, (_, mask) in zip((states, others), texts, strict=True))
        features = torch.cat([feature(a, b) for feature in FEATURES[self.config.comparison]], dim=-1)
        logits = self.classifier(self.network(self.dropout(features)))
        if states.ponder_cost is not None and others.ponder_cost is not None:
            states.ponder_cost = states.ponder_cost + others.ponder_cost
        if labels is None:
            return self._output(states, logits, None)
        loss = label_loss(logits, labels, self.config, num_items_in_batch, smoothing)
        return self._output(states, logits, loss, share=share(labels != IGNORED, num_items_in_batch))


class SplitstepForImageClassification(_Classifier):
    """The label of an image, read off its class token or the mean of its patches (Dosovitskiy et al. 2020)."""

    kinds = ("image",)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> HeadOutput:
        """Logits of the labels; `interpolate_pos_encoding` takes images of another size."""
        smoothing = _label_smoothing(kwargs)
        states = self._states(pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        return self._classified(states, None, labels, num_items_in_batch, smoothing)


class SplitstepForCausalLM(_Vocabulary, GenerationMixin):
    """The next token, from those before it."""

    kinds = ("causal",)

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """The mask over tokens as it is; the model turns it into what attention sees."""
        return attention_mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> HeadOutput:
        """Logits of the token that follows each place; labels are the tokens themselves, shifted inside."""
        smoothing = _label_smoothing(kwargs)
        states = self._states(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache if labels is None else bool(use_cache),
            **kwargs,
        )
        shifted = None if labels is None else nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return self._scored(states, shifted, num_items_in_batch, smoothing, skip_logits, keep=logits_to_keep)

    @torch.no_grad()
    def token_losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token with a label, row by row, for what the loss of a batch cannot say."""
        labels = labels[:, 1:]
        counted = labels != IGNORED
        states = self._states(input_ids, use_cache=False)
        assert states.last_hidden_state is not None
        x, labels = states.last_hidden_state[:, :-1][counted], labels[counted]
        if isinstance(self.lm_head, AdaptiveSoftmax):
            return self.lm_head.losses(x, labels)
        return token_losses(self.lm_head, x, labels, width=self.config.vocab_size)


class SplitstepForConditionalGeneration(_Vocabulary, GenerationMixin):
    """The next token of a target, from a source and the tokens before it: translation."""

    kinds = ("seq2seq",)
    create_masks_for_generate = staticmethod(SplitstepForCausalLM.create_masks_for_generate)

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__(config)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels shifted right behind the start token, with padding where they are ignored."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise UserError("to make decoder inputs from labels set decoder_start_token_id and pad_token_id")
        shifted = nn.functional.pad(labels, (1, 0), value=start)[:, :-1]
        return shifted.masked_fill(shifted == IGNORED, pad)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> HeadOutput:
        """Logits of the token that follows each place of the target."""
        smoothing = _label_smoothing(kwargs)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        states = self._states(
            input_ids,
            attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache if labels is None else bool(use_cache),
            **kwargs,
        )
        return self._scored(states, labels, num_items_in_batch, smoothing, skip_logits)
