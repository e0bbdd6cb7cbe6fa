"""Attention: the force that particles exert on each other (interaction) or another sequence on them (coupling)."""

from contextlib import nullcontext
from functools import cache
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitstep.fields.evaluation import Evaluation, Sight
from splitstep.fields.noise import Noise, dropped
from splitstep.solver.errors import UserError

Heads: TypeAlias = Float[Tensor, "batch heads length head_dim"]
Queries: TypeAlias = Float[Tensor, "batch heads queries head_dim"]
Keys: TypeAlias = Float[Tensor, "batch heads keys head_dim"]

# Hugging Face's words for how attention is computed, and ours for leaving the choice to `_kernel`.
KERNELS = {
    "auto": "the fastest that was measured for the device, precision and length",
    "sdpa": "torch's fused kernels",
    "eager": "scores and weights written out; the only one that can show its weights",
}

# On a CPU that multiplies bf16 natively SDPA's backward is slow, and up to this many keys explicit attention trains
# faster (splitstep bench attention). On one that does not, it was measured 3 to 4 times slower than SDPA.
EAGER_KEYS = 1024

# Torch's kernel for CPUs hides later keys in blocks of up to 512, so that at these lengths it computes nearly all of
# them. Given blocks of queries it trains 1.2 to 1.3 times as fast; shorter and longer sequences gain nothing.
QUERY_BLOCK, SPLIT_LENGTHS = 128, range(257, 513)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017); dropout acts on its probabilities."""

    def __init__(self, hidden_size: int, num_heads: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise UserError(f"num_attention_heads = {num_heads} does not divide hidden_size = {hidden_size}")
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, z: Float[Tensor, "batch particles dim"], at: Evaluation) -> Tensor:
        """The force on each particle."""
        query = self._heads(self.q_proj(z))
        if at.sight.rotary is not None:
            query = rotate(query, *at.sight.rotary)
        key, value = self._keys_values(z, at.sight)
        heads = attend(query, key, value, sight=at.sight, noise=at.noise, dropout=self.dropout)
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _keys_values(self, z: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        kept = None if sight.store is None else sight.store.recall()
        if kept is not None:
            return kept
        source = z if sight.source is None else sight.source
        key, value = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
        if sight.rotary is not None:
            key = rotate(key, *sight.rotary)
        return (key, value) if sight.store is None else sight.store.keep(key, value)

    def _heads(self, x: Tensor) -> Heads:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate(x: Heads, cos: Tensor, sin: Tensor) -> Heads:
    """Rotary positions (Su et al. 2021): each pair (x_p, x_{p + d/2}) turned by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(query: Queries, key: Keys, value: Keys, *, sight: Sight, noise: Noise, dropout: float = 0.0) -> Queries:
    """softmax(q k^T / sqrt(d)) v over the visible keys; a particle that sees nobody feels no force."""
    dropout = dropout if noise.training else 0.0
    with noise.replay(query.device) if dropout and noise.recalls else nullcontext():
        if _kernel(query, key, sight) == "eager":
            return _eager(query, key, value, sight=sight, dropout=dropout)
        if sight.causal and query.device.type == "cpu" and _split(query):
            return _causal_blocks(query, key, value, dropout=dropout)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sight.mask, is_causal=sight.causal, dropout_p=dropout
        )


def _split(query: Queries) -> bool:
    """Whether blocks are faster; an exported program has one way for every length."""
    return not torch.compiler.is_exporting() and query.shape[-2] in SPLIT_LENGTHS


def _causal_blocks(query: Queries, key: Keys, value: Keys, *, dropout: float) -> Queries:
    """Blocks of queries, each with the keys up to its last one."""
    length = query.shape[-2]
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    blocks = [slice(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)]
    return torch.cat(
        [
            nn.functional.scaled_dot_product_attention(
                query[..., block, :],
                key[..., : block.stop, :],
                value[..., : block.stop, :],
                attn_mask=visible[block, : block.stop],
                dropout_p=dropout,
            )
            for block in blocks
        ],
        dim=-2,
    )


def _kernel(query: Tensor, key: Tensor, sight: Sight) -> str:
    """The one place where the kernel is chosen."""
    if sight.record is not None:
        return "eager"
    if sight.kernel != "auto":
        return sight.kernel
    trains_in_bf16 = query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.requires_grad
    if trains_in_bf16 and key.shape[-2] <= EAGER_KEYS and _cpu_multiplies_bf16():
        return "eager"
    return "sdpa"


@cache
def _cpu_multiplies_bf16() -> bool:
    able = torch.cpu.get_capabilities()
    return any(able.get(feature, False) for feature in ("avx512_bf16", "amx_bf16"))


def _eager(query: Queries, key: Keys, value: Keys, *, sight: Sight, dropout: float) -> Queries:
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    mask = sight.mask
    if sight.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    visible = None if mask is None else mask.any(-1, keepdim=True)
    if sight.record is not None:
        sight.record.append(weights if visible is None else weights * visible)
    result = dropped(weights, dropout) @ value
    return result if visible is None else result * visible
