"""Feed-forward networks: the convection that moves every particle by itself."""

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitstep.fields.evaluation import Evaluation
from splitstep.solver.errors import UserError, lookup

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "swiglu": nn.functional.silu,
}
GATED = {"swiglu"}  # these multiply the activation by a second projection (Shazeer 2020)


class FeedForward(nn.Module):
    """down(activation(up(z))); dropout acts behind the activation."""

    def __init__(
        self, hidden_size: int, width: int, *, activation: str = "relu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.activation = lookup("activation", activation, ACTIVATIONS)
        self.dropout = dropout
        self.gate_proj = nn.Linear(hidden_size, width, bias=bias) if activation in GATED else None
        self.up_proj = nn.Linear(hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden_size, bias=bias)

    def forward(self, z: Float[Tensor, "batch particles dim"], at: Evaluation) -> Tensor:
        """The drift of each particle."""
        inner = self.up_proj(z)
        if self.gate_proj is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(self.gate_proj(z)) * inner
        return self.down_proj(at.noise.dropout(inner, self.dropout))


class RandomProjection(nn.Module):
    """h U(t) S V(t) + b, with U and V sines and cosines of random angles that grow with depth (Dutta et al. 2021).

    As released: the angles are buffers, only the singular values S and the bias are trained, the scale is 1/sqrt(out)
    on both sides, and at depth 0 every sine is 0. A projection to fewer entries uses sines only, and so gives its bias
    there.
    """

    left: Tensor
    right: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.rank = min(inputs, outputs)
        self.scale = outputs**-0.5
        self.values = nn.Parameter(torch.empty(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("left", torch.empty(inputs, inputs // 2))
        self.register_buffer("right", torch.empty(outputs, outputs // 2))

    def forward(self, h: Tensor, depth: float | Tensor) -> Tensor:
        """The projection at that depth."""
        # W(l) = sum over j < min(in, out) of s_j U[:, j] V[j, :]
        left = self._waves(self.left, depth, columns=self.rank) * self.values[: self.rank]
        return h @ (left @ self._waves(self.right[: self.rank], depth, columns=len(self.right))).to(h.dtype) + self.bias

    def _waves(self, gaussian: Tensor, depth: float | Tensor, *, columns: int) -> Tensor:
        """The first columns of [sines | cosines]."""
        half = gaussian.shape[1]
        waves = torch.arange(min(columns, half), device=gaussian.device)
        angle = depth * math.pi / (2 * half) * waves * gaussian[:, :columns]
        return torch.cat((angle.sin(), angle[:, : max(columns - half, 0)].cos()), dim=-1) * self.scale


class RandomFeedForward(nn.Module):
    """The published random network. In the first layer of a segment it returns the bias of its second projection."""

    def __init__(
        self, hidden_size: int, width: int, *, activation: str = "relu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.activation = lookup("activation", activation, ACTIVATIONS)
        self.dropout = dropout
        self.up_proj = RandomProjection(hidden_size, width)
        self.down_proj = RandomProjection(width, hidden_size)

    def forward(self, z: Float[Tensor, "batch particles dim"], at: Evaluation) -> Tensor:
        """The drift of each particle at the depth of this evaluation."""
        inner = self.activation(self.up_proj(z, at.depth))
        return self.down_proj(at.noise.dropout(inner, self.dropout), at.depth)


class Rotation(nn.Module):
    """A rotation R(t) = Q^T G(t) Q of `size` entries: turns of pairs by omega_p t, between fixed orthogonal mixtures.

    Q is a product of random signs and two small orthogonal matrices on the rows and columns of the entries, so that a
    vector costs size * (rows + columns) operations instead of size^2.
    """

    signs: Tensor
    row_mixture: Tensor
    column_mixture: Tensor
    frequencies: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.columns = max(k for k in range(1, math.isqrt(size) + 1) if size % k == 0)
        self.rows = size // self.columns
        self.register_buffer("signs", torch.empty(size))
        self.register_buffer("row_mixture", torch.empty(self.rows, self.rows))
        self.register_buffer("column_mixture", torch.empty(self.columns, self.columns))
        self.register_buffer("frequencies", torch.empty(size // 2))

    def forward(self, x: Tensor, time: float | Tensor) -> Tensor:
        """The vectors, rotated as at that time."""
        mixed = self._mixed(x * self.signs)
        first, second = mixed.chunk(2, dim=-1)
        angle = time * self.frequencies
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return self._mixed(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def _mixed(self, x: Tensor) -> Tensor:
        grid = x.unflatten(-1, (self.rows, self.columns)) @ self.column_mixture.to(x.dtype)
        return (self.row_mixture.to(x.dtype) @ grid).flatten(-2)


class RotatedFeedForward(nn.Module):
    """The random network repaired: true rotations with time from 1 on, both sides used, scales and biases trained.

    The width is a whole number of copies of the state, each rotated by itself.
    """

    def __init__(
        self, hidden_size: int, width: int, *, activation: str = "relu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % hidden_size:
            raise UserError(f"a rotated feed-forward width is a multiple of hidden_size = {hidden_size}, got {width}")
        if hidden_size % 2:
            raise UserError(f"rotations turn pairs of entries: hidden_size must be even, got {hidden_size}")
        copies = width // hidden_size
        self.activation = lookup("activation", activation, ACTIVATIONS)
        self.dropout = dropout
        self.up_rotations = nn.ModuleList(Rotation(hidden_size) for _ in range(copies))
        self.down_rotations = nn.ModuleList(Rotation(hidden_size) for _ in range(copies))
        self.up_scales = nn.Parameter(torch.ones(copies, hidden_size))
        self.up_biases = nn.Parameter(torch.zeros(copies, hidden_size))
        self.down_scales = nn.Parameter(torch.full((copies, hidden_size), copies**-0.5))
        self.down_bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, z: Float[Tensor, "batch particles dim"], at: Evaluation) -> Tensor:
        """The drift of each particle at the depth of this evaluation."""
        time = at.depth + 1.0
        drift = self.down_bias
        for copy, (up, down) in enumerate(zip(self.up_rotations, self.down_rotations, strict=True)):
            inner = self.activation(up(z, time) * self.up_scales[copy] + self.up_biases[copy])
            drift = drift + down(at.noise.dropout(inner, self.dropout) * self.down_scales[copy], time)
        return drift


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "full": FeedForward,
    "random": RandomFeedForward,
    "rotated": RotatedFeedForward,
}
