"""Beam search for encoder-decoders: the search of transformers' `generate`, with less copying.

The beams of a sentence are particles of one row of the batch. Each step hands the decoder the newest token of every
beam, with a mask that says which of the earlier keys are its ancestors:

    cross-attention   num_beams queries against the keys of their sentence, which are computed and kept once
    self-attention    the cache only grows; where beams change places the mask does too, and no key is moved

Keys that no beam descends from are forgotten now and then, and a sentence leaves the batch when its search is over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from splitstep.models.heads import SplitstepForConditionalGeneration
from splitstep.solver.errors import UserError, lookup

# What a sum of log-probabilities is divided by, from its length with the end token and the penalty.
NORMALIZATIONS: dict[str, Callable[[int, float], float]] = {
    "length": lambda length, penalty: length**penalty,  # as in transformers and fairseq
    "gnmt": lambda length, penalty: ((5 + length) / 6) ** penalty,  # Wu et al. 2016, eq. 14
}

BLOCK = 128  # tokens of the vocabulary that are looked at together; the fastest of 16, 32, ..., 256
# Logits that a CPU looks at together. Larger temporaries go back to the system at every step and come as new pages,
# which took a quarter of the time of a small model (d = 128, 64 sentences, 10,000 tokens).
TOGETHER = 2**20
NO_TOKEN = -1


@dataclass(frozen=True)
class Hypothesis:
    """One output without its start and end token, and the normalised sum of its log-probabilities."""

    tokens: list[int]
    score: float


@torch.inference_mode()
def beam_search(
    model: SplitstepForConditionalGeneration,
    input_ids: Int[Tensor, "sentences sources"],
    attention_mask: Tensor,
    *,
    num_beams: int = 5,
    num_return: int = 1,
    length_penalty: float = 1.0,
    normalization: str = "length",
    early_stopping: bool = False,
    max_new_tokens: int | Sequence[int],
) -> list[list[Hypothesis]]:
    """The `num_return` best hypotheses of each sentence, best first; with one beam this is greedy search.

    With normalization "length", tokens and scores are those of transformers' `generate`: of the 2 * num_beams best
    continuations, those of the first num_beams that end are hypotheses, and the first num_beams that do not end go on.
    A sentence is over when it has num_beams hypotheses and, without `early_stopping`, its best beam, normalised at its
    present length, is no better than the worst of them; at `max_new_tokens`, one number or one a sentence, and where
    learned positions end, all beams end. The sentences of a batch do not see each other.
    """
    normalize = lookup("normalization", normalization, NORMALIZATIONS)
    limits = torch.as_tensor(max_new_tokens, device=input_ids.device).expand(len(input_ids))
    if model.config.position_embedding == "learned":
        limits = limits.clamp(max=model.config.max_position_embeddings)
    _check(model, num_beams=num_beams, num_return=num_return, max_new_tokens=int(limits.min()))
    decoder = _Decoder(model, input_ids, attention_mask)
    search = _Search(limits, num_beams, end=model.config.eos_token_id, early=early_stopping)
    tokens = torch.full((len(input_ids), 1), _start(model), device=input_ids.device)
    found: dict[int, list[Hypothesis]] = {}
    for length in range(1, int(limits.max()) + 1):
        candidates = _continuations(decoder.step(tokens), search.scores, count=2 * num_beams)
        over = search.advance(candidates, divisor=normalize(length, length_penalty))
        if over.any():
            found |= search.hypotheses(over, num_return)
            if over.all():
                break
            search.select(~over)
            decoder.select(~over)
        decoder.descend(search.parents)
        tokens = search.tokens[..., -1]
    return [found[row] for row in range(len(input_ids))]


def _check(model: SplitstepForConditionalGeneration, *, num_beams: int, num_return: int, max_new_tokens: int) -> None:
    if model.training:
        raise UserError("beam search is for a model that does not train; call model.eval() first")
    if not 1 <= num_beams <= model.config.vocab_size // 2:
        raise UserError(f"num_beams must lie between 1 and half of vocab_size, got {num_beams}")
    if not 1 <= num_return <= num_beams:
        raise UserError(f"num_return must lie between 1 and num_beams = {num_beams}, got {num_return}")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")


def _start(model: SplitstepForConditionalGeneration) -> int:
    config = model.config
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if start is None:
        raise UserError("to know where an output starts set decoder_start_token_id")
    return start


@dataclass(frozen=True)
class _Candidates:
    """The best continuations of each sentence, best first: their sums, the beams they continue, their new tokens."""

    scores: Float[Tensor, "sentences candidates"]
    parents: Int[Tensor, "sentences candidates"]
    tokens: Int[Tensor, "sentences candidates"]


def _continuations(
    logits: Float[Tensor, "sentences beams vocabulary"], scores: Float[Tensor, "sentences beams"], *, count: int
) -> _Candidates:
    """The `count` best sums of a beam's score and the log-probability of a token."""
    rows = max(1, TOGETHER // logits[0].numel()) if logits.device.type == "cpu" else len(logits)
    parts = [_best(*part, count=count) for part in zip(logits.split(rows), scores.split(rows), strict=True)]
    return _Candidates(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _best(logits: Tensor, scores: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    gains = logits.float().log_softmax(-1)  # one fused pass; logsumexp alone takes longer
    vocabulary = gains.shape[-1]
    pool = _pool(gains, scores, count=count)
    sums = gains.flatten(1).gather(1, pool) + scores.gather(1, pool // vocabulary)
    best, order = sums.topk(count)
    place = pool.gather(1, order)
    return best, place // vocabulary, place % vocabulary


def _pool(gains: Tensor, scores: Tensor, *, count: int) -> Int[Tensor, "sentences places"]:
    """Places among all beams and tokens of a sentence where the `count` best sums must lie.

    They lie in the `count` blocks with the largest maxima, or in what the blocks leave of the vocabulary. To sort no
    more than those is 4 times faster than torch.topk over 10,000 tokens a beam, on one CPU thread.
    """
    sentences, beams, vocabulary = gains.shape
    places = torch.arange(beams * vocabulary, device=gains.device).view(beams, vocabulary)
    blocks = vocabulary // BLOCK
    if beams * blocks <= count:
        return places.flatten().expand(sentences, -1)
    covered = blocks * BLOCK
    highest = gains[..., :covered].unflatten(-1, (blocks, BLOCK)).amax(-1) + scores.unsqueeze(-1)
    inside = places[:, :covered].reshape(-1, BLOCK)[highest.flatten(1).topk(count).indices].flatten(1)
    return torch.cat((inside, places[:, covered:].flatten().expand(sentences, -1)), dim=1)


class _Search:
    """The beams and the hypotheses of the sentences that are not over."""

    def __init__(self, limits: Int[Tensor, " sentences"], num_beams: int, *, end: int | None, early: bool) -> None:
        self.limits, self.num_beams = limits, num_beams
        # Greedy search takes the first end that comes; what might follow a second choice is not its business.
        self.early = early or num_beams == 1
        sentences, device = len(limits), limits.device
        self.end = NO_TOKEN if end is None else end
        self.rows = torch.arange(sentences, device=device)
        # A sentence starts with one beam, the start token.
        self.scores = torch.zeros(sentences, 1, device=device)
        self.tokens = torch.empty(sentences, 1, 0, dtype=torch.long, device=device)
        self.parents = torch.zeros(sentences, 1, dtype=torch.long, device=device)
        self.ended_scores = torch.full((sentences, num_beams), -torch.inf, device=device)
        self.ended_tokens = torch.full((sentences, num_beams, int(limits.max())), NO_TOKEN, device=device)

    def advance(self, candidates: _Candidates, *, divisor: float) -> Tensor:
        """Take in the best continuations; True for the sentences whose search is over."""
        is_end = candidates.tokens == self.end
        is_last = self.limits == self.tokens.shape[-1] + 1
        ends = is_end[:, : self.num_beams] | is_last.unsqueeze(-1)
        if ends.any():
            self._end(candidates, ends, divisor=divisor)
        # No more than num_beams of the candidates end, one a beam, so there are enough that do not.
        order = is_end.int().argsort(dim=1, stable=True)[:, : self.num_beams]
        self.scores, self.parents = candidates.scores.gather(1, order), candidates.parents.gather(1, order)
        self.tokens = _extended(self.tokens, self.parents, candidates.tokens.gather(1, order))
        worst = self.ended_scores.amin(1)
        is_found = worst > -torch.inf if self.early else worst >= self.scores[:, 0] / divisor
        return is_found | is_last

    def _end(self, candidates: _Candidates, ends: Tensor, *, divisor: float) -> None:
        """Keep the best of the hypotheses so far and of the first num_beams candidates, where these end."""
        scores, parents, tokens = (
            part[:, : self.num_beams] for part in (candidates.scores, candidates.parents, candidates.tokens)
        )
        written = _extended(self.tokens, parents, tokens.masked_fill(tokens == self.end, NO_TOKEN))
        missing = self.ended_tokens.shape[-1] - written.shape[-1]
        written = torch.nn.functional.pad(written, (0, missing), value=NO_TOKEN)
        scores = torch.cat((self.ended_scores, (scores / divisor).masked_fill(~ends, -torch.inf)), dim=1)
        self.ended_scores, order = scores.topk(self.num_beams)
        self.ended_tokens = _beams(torch.cat((self.ended_tokens, written), dim=1), order)

    def hypotheses(self, which: Tensor, number: int) -> dict[int, list[Hypothesis]]:
        """The best hypotheses of these sentences, by their row of the batch."""
        return {
            row: [
                Hypothesis([token for token in tokens if token != NO_TOKEN], score)
                for tokens, score in zip(best, scores, strict=True)
            ]
            for row, best, scores in zip(
                self.rows[which].tolist(),
                self.ended_tokens[which, :number].tolist(),
                self.ended_scores[which, :number].tolist(),
                strict=True,
            )
        }

    def select(self, which: Tensor) -> None:
        """Go on with these sentences only."""
        for name in ("rows", "limits", "scores", "tokens", "parents", "ended_scores", "ended_tokens"):
            setattr(self, name, getattr(self, name)[which])


def _beams(tensor: Tensor, order: Tensor) -> Tensor:
    """The beams of each sentence in that order."""
    return tensor.take_along_dim(order.unsqueeze(-1), dim=1)


def _extended(tokens: Tensor, parents: Tensor, new: Tensor) -> Tensor:
    """What the parents have written, with one more token."""
    return torch.cat((_beams(tokens, parents), new.unsqueeze(-1)), dim=-1)


class _Decoder:
    """The decoder with one row a sentence and one particle a beam, and what it remembers of their tokens."""

    def __init__(self, model: SplitstepForConditionalGeneration, input_ids: Tensor, attention_mask: Tensor) -> None:
        assert model.model.decoder is not None
        self.model, self.tower = model, model.model.decoder
        self.memory = model.model.encoder(input_ids, attention_mask).last_hidden_state
        self.memory_mask = attention_mask
        self.cache = EncoderDecoderCache(Cache(layer_class_to_replicate=GrowingLayer), DynamicCache())
        self.length = 0
        # Which keys of the cache are a beam's own.
        self.ancestors = torch.empty(len(input_ids), 1, 0, dtype=torch.bool, device=input_ids.device)

    def step(self, tokens: Int[Tensor, "sentences beams"]) -> Float[Tensor, "sentences beams vocabulary"]:
        """Logits of what follows the newest token of every beam."""
        beams, device = tokens.shape[1], tokens.device
        own = torch.eye(beams, dtype=torch.bool, device=device).expand(len(tokens), -1, -1)
        self.ancestors = torch.cat((self.ancestors, own), dim=-1)
        states = self.tower(
            None,
            self.ancestors.unsqueeze(1),
            inputs_embeds=self.model.get_input_embeddings()(tokens),
            position_ids=torch.full((1, beams), self.length, device=device),
            memory=self.memory,
            memory_mask=self.memory_mask,
            past_key_values=self.cache,
        )
        self.length += 1
        return self.model.lm_head(states.last_hidden_state)

    def descend(self, parents: Int[Tensor, "sentences beams"]) -> None:
        """Let every beam continue its parent; keys without descendants are forgotten when they are the larger part."""
        self.ancestors = _beams(self.ancestors, parents)
        needed = self.ancestors.any(1)
        most = int(needed.sum(1).max())
        if 2 * most > needed.shape[1]:
            return
        keys = needed.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        self.ancestors = self.ancestors.take_along_dim(keys.unsqueeze(1), dim=2)
        rows = torch.arange(len(keys), device=keys.device).unsqueeze(-1)
        for layer in _filled(self.cache.self_attention_cache):
            layer.keys, layer.values = (
                x.transpose(1, 2)[rows, keys].transpose(1, 2) for x in (layer.keys, layer.values)
            )

    def select(self, which: Tensor) -> None:
        """Go on with these sentences only."""
        self.memory, self.memory_mask, self.ancestors = (
            x[which] for x in (self.memory, self.memory_mask, self.ancestors)
        )
        for cache in (self.cache.self_attention_cache, self.cache.cross_attention_cache):
            for layer in _filled(cache):
                layer.batch_select_indices(which)


def _filled(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if cast(Any, layer).is_initialized]


class GrowingLayer(DynamicLayer):
    """A layer of a cache with room to spare: new tokens are written behind the others, which stay where they are."""

    room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, the new ones last."""
        if not self.is_initialized:
            self.lazy_initialization(key_states[..., :0, :], value_states[..., :0, :])
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        start = keys.shape[-2]
        end = start + key_states.shape[-2]
        # Keys that were reordered or selected no longer lie in the room, and get a new one.
        if self.room is None or end > self.room[0].shape[-2] or keys.data_ptr() != self.room[0].data_ptr():
            self.room = _with_room(keys, size=2 * end), _with_room(values, size=2 * end)
        self.room[0][..., start:end, :] = key_states
        self.room[1][..., start:end, :] = value_states
        self.keys, self.values = self.room[0][..., :end, :], self.room[1][..., :end, :]
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with these keys and values."""
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states


def _with_room(x: Tensor, *, size: int) -> Tensor:
    room = x.new_empty(*x.shape[:-2], size, x.shape[-1])
    room[..., : x.shape[-2], :] = x
    return room
