"""Attention computed once and evolved in time (TransEvolve, Dutta et al. 2021).

A segment of layers begins by computing its operator from the state it starts with; every layer takes it at its own
time. With x the initial condition, T(t) a vector function of time and [W^x | W^t] projections of content and time,

    (x W_Q^x + T W_Q^t)(y W_K^x + T W_K^t)^T = A0 + a(query) + b(key) + c,     A0 = (x W_Q^x)(y W_K^x)^T

and a softmax over keys cancels a and c, which do not depend on the key. So the attention that was published is exactly
softmax(A0 + b(t)), and that is what is computed here.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from splitstep.fields.attention import Keys, Queries
from splitstep.fields.evaluation import Evaluation, Mask, Sight
from splitstep.fields.noise import dropped

Scores = Float[Tensor, "batch heads queries keys"]
Bias = Float[Tensor, "batch heads keys"]

PERIOD = math.pi / 64  # the constant of the released code

# exp(b - max b) must not underflow where all that a query sees lies far below the maximum, nor must its inverse, by
# which gradients are multiplied, overflow in float32.
LARGEST_SPREAD = 60.0
# E has a value for each pair of particles; beyond this many bytes the ordinary kernel, which keeps none, takes over.
LARGEST_BYTES = 2 * 1024**3
# The width of a head must be a multiple of this for a device's fused kernels.
KERNEL_WIDTHS = {"cuda": 8}


def waves(depth: float | Tensor, size: int, *, like: Tensor) -> Tensor:
    """[sines | cosines] of depth * pi/64 * p, p = 0, 1, ..., size/2 - 1."""
    at = torch.as_tensor(depth, dtype=torch.float32, device=like.device)
    angle = at * PERIOD * torch.arange(size // 2, dtype=torch.float32, device=like.device)
    return torch.cat((angle.sin(), angle.cos())).to(like.dtype)


class Operator:
    """The attention of a segment: queries and keys of its initial condition.

    `fresh` are the keys that no cache had, by particle and not by head: those whose biases are still to be computed.
    """

    def __init__(self, query: Queries, key: Keys, *, sight: Sight, fresh: Tensor | None = None) -> None:
        self.query = query
        self.key = key.to(query.dtype)
        self.fresh = fresh
        self.sight = sight
        self.scale = query.shape[-1] ** -0.5
        self.query_time: Tensor | None = None
        self.exponentials: Exponentials | None = None

    def factor(self) -> None:
        """Compute E = exp(A0), with rows that add up to 1, for all layers of the segment, where it is of use."""
        if _can_factor(self):
            self.exponentials = Exponentials(self.query, self.key, mask=full_mask(self), scale=self.scale)

    def biases(self, time: Float[Tensor, "heads time_dim"]) -> Bias:
        """b_j(t) = <K_j W_Q^t, T(t)> of the fresh keys, over all entries of K_j and not a head's share of them."""
        assert self.fresh is not None
        assert self.query_time is not None
        # A few rows T(t) W_Q^t^T for each layer cost less than all of K W_Q^t once.
        rows = (self.query_time.unflatten(-1, time.shape) * time).sum(-1).transpose(0, 1).contiguous()
        return nn.functional.linear(self.fresh, rows.to(self.fresh.dtype)).transpose(-1, -2)


class Condition(nn.Module):
    """What a segment computes from the state it starts with: projections of the queries and of the keys."""

    def __init__(self, hidden_size: int, num_heads: int, *, time_dim: int, dropout: float) -> None:
        super().__init__()
        width = hidden_size + num_heads * time_dim
        self.heads, self.time_dim, self.dropout = num_heads, time_dim, dropout
        self.query = nn.Linear(hidden_size, width, bias=False)
        self.key = nn.Linear(hidden_size, width, bias=False)

    def forward(self, x: Tensor, sight: Sight) -> Operator:
        """The operator of the segment, from the particles' state and from whom they see."""
        query = self._heads(self._dropped(self.query(x)))
        kept = None if sight.store is None else sight.store.recall()
        if kept is not None:
            return Operator(query, kept[0], sight=sight)
        fresh = self._dropped(self.key(x if sight.source is None else sight.source))
        key = self._heads(fresh)
        key = key if sight.store is None else sight.store.keep(key, key[..., :0])[0]
        return Operator(query, key, sight=sight, fresh=fresh)

    def _dropped(self, x: Tensor) -> Tensor:
        return dropped(x, self.dropout) if self.training else x

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class PublishedCondition(Condition):
    """The operator as released. `time_keys` keeps W_K^t, which acts through a(query) and c only.

    It has no gradient, and is there to hold the authors' weights.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, time_dim: int, time_keys: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(hidden_size, num_heads, time_dim=time_dim, dropout=dropout)
        shape = (self.query.out_features, num_heads * time_dim)
        self.query_time = nn.Parameter(torch.empty(shape))
        self.key_time = nn.Parameter(torch.empty(shape), requires_grad=False) if time_keys else None

    def forward(self, x: Tensor, sight: Sight) -> Operator:
        """The operator, whose scores A0 stay the same at all times."""
        operator = super().forward(x, sight)
        operator.query_time = self.query_time
        operator.factor()
        return operator


class BilinearCondition(Condition):
    """Queries and keys with `time_dim` more entries a head, which meet at a strength that depends on time."""

    def __init__(
        self, hidden_size: int, num_heads: int, *, time_dim: int, time_keys: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(hidden_size, num_heads, time_dim=time_dim, dropout=dropout)


class EvolvedAttention(nn.Module, ABC):
    """A layer's use of its segment's operator: its own time vector, its own values, and the way out."""

    def __init__(self, hidden_size: int, num_heads: int, *, time_dim: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = num_heads
        self.coefficients = nn.Parameter(torch.empty(num_heads * time_dim))
        self.norm = norm  # of another sequence's values; a particle's own are normalised with its state
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, z: Float[Tensor, "batch particles dim"], at: Evaluation) -> Tensor:
        """The force on each particle at the time of this evaluation."""
        operator = at.sight.operator
        assert isinstance(operator, Operator)
        value, bias = self._values(z, operator, at)
        mixed = self.mix(operator, value, bias, at)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def biases(self, operator: Operator, at: Evaluation) -> Bias | None:
        """Of the fresh keys at this time, where the scores move by a bias."""
        return None

    @abstractmethod
    def mix(self, operator: Operator, value: Keys, bias: Bias, at: Evaluation) -> Queries:
        """The values, weighted as the operator says at this time."""

    def time(self, coefficients: Tensor, depth: float | Tensor) -> Float[Tensor, "heads time_dim"]:
        """T(t) = w * [sin | cos], a share of it for each head."""
        return (coefficients * waves(depth, len(coefficients), like=coefficients)).view(self.heads, -1)

    def _values(self, z: Tensor, operator: Operator, at: Evaluation) -> tuple[Keys, Bias]:
        """The values and the biases of all keys."""
        store, source = at.sight.store, at.sight.source
        kept = None if store is None else store.recall()
        if kept is None:
            values = z if source is None else source
            values = values if source is None or self.norm is None else self.norm(values)
            value = values.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            bias = self.biases(operator, at)
            kept = value, (value[..., :0] if bias is None else bias.unsqueeze(-1))
            kept = kept if store is None else store.keep(*kept)
        return kept[0], kept[1].sum(-1)  # no bias is a bias of 0


class PublishedAttention(EvolvedAttention):
    """softmax(A0 + b(t)): the published evolution, without the terms that cancel."""

    def biases(self, operator: Operator, at: Evaluation) -> Bias:
        """b(t), the part of the scores that moves."""
        return operator.biases(self.time(self.coefficients, at.depth))

    def mix(self, operator: Operator, value: Keys, bias: Bias, at: Evaluation) -> Queries:
        """In the form that suits the biases and the machine."""
        return attend(operator, bias, value.to(operator.query.dtype), sight=at.sight)


class BilinearAttention(EvolvedAttention):
    """softmax(s(t) (q k^T + p diag(g(t)) r^T)): an evolution that depends on the query too, so that nothing cancels.

    Not of the paper: a low-rank update of the scores that moves with time, and a temperature s(t) for each head.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, time_dim: int, norm: nn.Module | None = None) -> None:
        super().__init__(hidden_size, num_heads, time_dim=time_dim, norm=norm)
        self.temperature = nn.Parameter(torch.zeros(num_heads * time_dim))

    def mix(self, operator: Operator, value: Keys, bias: Bias, at: Evaluation) -> Queries:
        """Through the ordinary kernel, with queries that depend on time."""
        rank = len(self.coefficients) // self.heads
        strength = self.time(self.coefficients, at.depth)
        log_temperature = self.time(self.temperature, at.depth).mean(-1, keepdim=True)
        ones = strength.new_ones(self.heads, operator.query.shape[-1] - rank)
        factor = torch.cat((ones, strength), dim=-1) * log_temperature.exp()
        query = operator.query * factor.unsqueeze(1).to(operator.query.dtype)
        evolved = Operator(query, operator.key, sight=operator.sight)
        form = "literal" if at.sight.record is not None or at.sight.kernel == "eager" else "channel"
        return FORMS[form](evolved, bias.to(query.dtype), value.to(query.dtype))


EVOLUTIONS: dict[str, tuple[Callable[..., Condition], Callable[..., EvolvedAttention]]] = {
    "published": (PublishedCondition, PublishedAttention),
    "bilinear": (BilinearCondition, BilinearAttention),
}


def attend(operator: Operator, bias: Bias, value: Keys, *, sight: Sight) -> Queries:
    """softmax(A0 + b) v over the visible keys, in the form that suits; a particle that sees nobody feels no force."""
    return FORMS[_form(operator, bias, sight)](operator, bias, value)


def _form(operator: Operator, bias: Bias, sight: Sight) -> str:
    """The one place where the form is chosen."""
    if sight.record is not None or sight.kernel == "eager" or _is_incremental(operator):
        return "literal"
    if operator.exponentials is None:
        return "channel"
    visible = _hidden_keys(bias, operator.sight.mask, fill=math.nan).detach()
    spread = visible.nan_to_num(-math.inf).amax(-1) - visible.nan_to_num(math.inf).amin(-1)
    return "factored" if float(spread.max()) <= largest_spread(operator.query.dtype) else "channel"


def largest_spread(dtype: torch.dtype) -> float:
    """How far apart biases may be for products with exp(b - max b) to keep their digits in this precision."""
    limits = torch.finfo(dtype)
    return min(LARGEST_SPREAD, math.log(limits.eps / limits.tiny))


def _can_factor(operator: Operator) -> bool:
    """Whether E is worth computing: not where another form is asked for, nor where it would be too large."""
    sight = operator.sight
    if sight.record is not None or sight.kernel != "auto" or torch.compiler.is_compiling() or _is_incremental(operator):
        return False
    pairs = operator.query.shape[:3].numel() * operator.key.shape[-2]
    return pairs * operator.query.element_size() <= LARGEST_BYTES


def _is_incremental(operator: Operator) -> bool:
    """Whether these are a few new rows of a cached operator, whose exponentials would serve nobody else."""
    return operator.sight.source is None and operator.query.shape[-2] < operator.key.shape[-2]


def full_mask(operator: Operator) -> Mask | None:
    """The mask with the future in it, where the particles do not see it."""
    if not operator.sight.causal:
        return operator.sight.mask
    n, m = operator.query.shape[-2], operator.key.shape[-2]
    return torch.ones(n, m, dtype=torch.bool, device=operator.query.device).tril()[None, None]


def literal(operator: Operator, bias: Bias, value: Keys) -> Queries:
    """softmax(A0 + b) v as it is written."""
    scores = (operator.query * operator.scale) @ operator.key.transpose(-1, -2) + bias.unsqueeze(-2)
    mask = full_mask(operator)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    weights = weights if mask is None else weights * mask.any(-1, keepdim=True)
    if operator.sight.record is not None:
        operator.sight.record.append(weights)
    return weights.to(value.dtype) @ value


def channel(operator: Operator, bias: Bias, value: Keys) -> Queries:
    """The bias as one more channel of the keys, to which every query answers with 1: an ordinary kernel."""
    asked, sight = operator.query, operator.sight
    query = torch.cat((asked * operator.scale, torch.ones_like(asked[..., :1])), dim=-1)
    key = torch.cat((operator.key, bias.unsqueeze(-1)), dim=-1)
    multiple = KERNEL_WIDTHS.get(asked.device.type, 1)
    width = -(-key.shape[-1] // multiple) * multiple
    # Fused kernels want equal widths and one precision.
    q, k, v = (nn.functional.pad(x, (0, width - x.shape[-1])).to(asked.dtype) for x in (query, key, value))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sight.mask, is_causal=sight.causal, scale=1.0)
    return mixed[..., : value.shape[-1]]


def factored(operator: Operator, bias: Bias, value: Keys) -> Queries:
    """(E @ [w v | w]) normalised, E = exp(A0) of the segment up to a factor a row, w = exp(b - max b) of the layer."""
    visible = _hidden_keys(bias, operator.sight.mask, fill=-math.inf)
    weight = (visible - visible.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)).exp()
    assert operator.exponentials is not None
    return operator.exponentials.mean(value, weight)


def _hidden_keys(bias: Bias, mask: Mask | None, *, fill: float) -> Bias:
    """The biases, with `fill` for keys that a mask hides from every query."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask.any(-2), fill)


FORMS: dict[str, Callable[[Operator, Bias, Keys], Queries]] = {
    "literal": literal,
    "channel": channel,
    "factored": factored,
}


class Exponentials:
    """E of a segment. The gradients that its layers send are gathered into one product when the last has come."""

    def __init__(self, query: Queries, key: Keys, *, mask: Mask | None, scale: float) -> None:
        self.notes = Notes()
        self.matrix, self.token = _Exponentiate.apply(query, key, mask, scale, self.notes)

    def mean(self, value: Keys, weight: Bias) -> Queries:
        """The mean of the values for each query, by the weights E * weight."""
        dtype = self.matrix.dtype
        return _Mean.apply(self.matrix, self.token, value.to(dtype), weight.to(dtype), self.notes)


class Notes:
    """What the layers of a segment send to E, apart for each backward pass and forgotten at its end."""

    def __init__(self) -> None:
        self.passes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(self, rows: Tensor, sums: Tensor) -> None:
        """Note the part of a layer for E, whose turn comes in this pass, or never if its gradient is not asked for."""
        current = torch._C._current_graph_task_id()
        if current not in self.passes:
            self.passes[current] = []
            engine = cast(Any, torch.autograd.Variable)._execution_engine
            engine.queue_callback(lambda: self.passes.pop(current, None))
        self.passes[current].append((rows, sums))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """All parts of this pass."""
        return self.passes.pop(torch._C._current_graph_task_id(), [])


def _as_given(x: Tensor) -> torch.autocast:
    """No autocast, which would leave the two passes with different precisions."""
    return torch.autocast(x.device.type, enabled=False)


class _Exponentiate(torch.autograd.Function):
    """E = exp(A0) up to a factor of each row. It cancels when rows are normalised, so its gradient is not needed."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, mask: Tensor | None, scale: float, notes: Notes
    ) -> tuple[Tensor, Tensor]:
        with _as_given(query):
            query = query * scale
            scores = query @ key.transpose(-1, -2)
            if mask is not None:
                scores.masked_fill_(~mask, -math.inf)
            matrix = scores.softmax(-1)  # one pass, and nothing overflows
            if mask is not None:
                matrix.masked_fill_(~mask.any(-1, keepdim=True), 0.0)  # of a particle that sees nobody
        ctx.save_for_backward(query, key, matrix)
        ctx.scale, ctx.notes = scale, notes
        ctx.set_materialize_grads(False)
        return matrix, matrix.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _matrix: Tensor | None, _token: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, matrix = ctx.saved_tensors
        parts = ctx.notes.take()
        if not parts:
            return None, None, None, None, None
        rows, sums = (torch.cat(tensors, dim=-2) for tensors in zip(*parts, strict=True))
        with _as_given(query):
            # dE = sum over layers of dY^T X, one product for all; dA0 = dE * E
            gradient = (sums.transpose(-1, -2) @ rows).mul_(matrix)
            return (gradient @ key).mul_(ctx.scale), gradient.transpose(-1, -2) @ query, None, None, None


class _Mean(torch.autograd.Function):
    """Y = [w v | w]^T E^T, and its first rows divided by the last.

    Features lie in rows and particles in columns, the way round in which a product with E is fastest, and the rest is
    written out so that each array is passed over once. The gradient of E is only noted: the token, which has none,
    makes E wait for every layer.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, token: Tensor, value: Tensor, weight: Tensor, notes: Notes) -> Tensor:
        batch, heads, keys, width = value.shape
        rows = value.new_empty(batch, heads, width + 1, keys)
        torch.mul(value.transpose(-1, -2), weight.unsqueeze(-2), out=rows[..., :-1, :])
        rows[..., -1, :] = weight
        with _as_given(rows):
            sums = rows @ matrix.transpose(-1, -2)
        norm = sums[..., -1:, :]
        norm = norm.masked_fill(norm == 0, 1.0)  # of a particle that sees nobody
        mixed = _by_particle(sums[..., :-1, :])
        torch.div(sums[..., :-1, :].transpose(-1, -2), norm.transpose(-1, -2), out=mixed)
        ctx.save_for_backward(matrix, rows, value, weight, sums, norm)
        ctx.notes = notes
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, force: Tensor) -> tuple[Tensor | None, ...]:
        matrix, rows, value, weight, means, norm = ctx.saved_tensors
        with _as_given(force):
            sums = torch.empty_like(means)
            torch.div(force.transpose(-1, -2), norm, out=sums[..., :-1, :])
            sums[..., -1:, :] = (sums[..., :-1, :] * means[..., :-1, :]).sum(-2, keepdim=True).div_(norm).neg_()
            ctx.notes.add(rows, sums)
            sent = sums @ matrix
            to_value = _by_particle(sent[..., :-1, :])
            torch.mul(sent[..., :-1, :].transpose(-1, -2), weight.unsqueeze(-1), out=to_value)
            to_weight = (sent[..., :-1, :] * value.transpose(-1, -2)).sum(-2).add_(sent[..., -1, :])
        return None, sums.new_zeros(()), to_value, to_weight, None


def _by_particle(rows: Tensor) -> Tensor:
    """Memory for the rows as vectors of each head, laid out so that the heads of a particle lie side by side."""
    batch, heads, width, particles = rows.shape
    return rows.new_empty(batch, particles, heads, width).transpose(1, 2)
