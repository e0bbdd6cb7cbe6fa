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


class Drawn(nn.Module):
    """A module whose buffers were drawn once; a cast of the module leaves them in float32 at least.

    An angle of a thousand has lost its sine in bf16, which has eight bits.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Drawn":
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in exact.items():
            cast = self._buffers[name]
            if before is not None and cast is not None and torch.finfo(cast.dtype).bits < 32:
                self._buffers[name] = before.to(cast.device, torch.float32)
        return self


class RandomProjection(Drawn):
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
        self.register_buffer("left", torch.empty(inputs, inputs // 2, dtype=torch.float32))
        self.register_buffer("right", torch.empty(outputs, outputs // 2, dtype=torch.float32))

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


PART = 2**20  # numbers that a processor's cache holds


class Rotations(Drawn):
    """Rotations R(t) = Q^T G(t) Q of `size` entries each: turns of pairs by omega_p t, seen from a fixed mixture Q."""

    mixtures: Tensor
    frequencies: Tensor

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.register_buffer("mixtures", torch.empty(count, size, size, dtype=torch.float32))
        self.register_buffer("frequencies", torch.empty(size // 2, dtype=torch.float32))

    def forward(self, time: float | Tensor) -> Float[Tensor, "count size size"]:
        """The matrices at that time."""
        angle = (time * self.frequencies).unsqueeze(-1)
        first, second = self.mixtures.chunk(2, dim=-2)
        turned = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -2)
        return self.mixtures.transpose(-1, -2) @ turned


def block_size(hidden_size: int) -> int:
    """The entries of a block: the fewest of which each block can give an equal number to every block."""
    sizes = range(2, hidden_size + 1, 2)
    return next(size for size in sizes if hidden_size % size == 0 and size**2 % hidden_size == 0)


class RotatedFeedForward(nn.Module):
    """The random network repaired: true rotations with time from 1 on, both sides used, scales and biases trained.

    The width is a whole number of copies of the state. A copy is the state turned in blocks of neighbours, shuffled so
    that every block has a share of all, and turned in blocks again (a Monarch matrix, Dao et al. 2022); the first turn
    serves all copies, and the way down is the way up mirrored. All of it is a few batched products, with entries in
    rows, where a shuffle moves whole rows or nothing: with particles in rows they took 1.3x to 2x the time.
    """

    def __init__(
        self, hidden_size: int, width: int, *, activation: str = "relu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % hidden_size:
            raise UserError(f"a rotated feed-forward width is a multiple of hidden_size = {hidden_size}, got {width}")
        if hidden_size % 2:
            raise UserError(f"rotations turn pairs of entries: hidden_size must be even, got {hidden_size}")
        self.copies, self.block = width // hidden_size, block_size(hidden_size)
        self.blocks = hidden_size // self.block
        self.activation = lookup("activation", activation, ACTIVATIONS)
        self.dropout = dropout
        self.rotations = nn.ModuleDict(
            {
                "inwards": Rotations(self.blocks, self.block),
                "up": Rotations(self.blocks * self.copies, self.block),
                "down": Rotations(self.blocks * self.copies, self.block),
                "outwards": Rotations(self.blocks, self.block),
            }
        )
        # Vectors, for which optimizers and decay take them; in use they have the shape of the blocks.
        self.up_scales = nn.Parameter(torch.empty(width))
        self.up_biases = nn.Parameter(torch.empty(width))
        self.down_scales = nn.Parameter(torch.empty(width))
        self.down_bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, z: Float[Tensor, "batch particles dim"], at: Evaluation) -> Tensor:
        """The drift of each particle at the depth of this evaluation."""
        turn = {name: rotations(at.depth + 1.0) for name, rotations in self.rotations.items()}
        # blocks x (copies and entries) x entries; the way down is used mirrored
        up_scales, up_biases, down_scales = (
            vector.view(self.blocks, -1, 1) for vector in (self.up_scales, self.up_biases, self.down_scales)
        )
        up = turn["up"].mT.unflatten(0, (self.blocks, self.copies)).flatten(1, 2) * up_scales
        down = turn["down"].unflatten(0, (self.blocks, self.copies)).flatten(1, 2) * down_scales
        inwards, up, down, outwards = (m.to(z.dtype) for m in (turn["inwards"], up, down, turn["outwards"]))
        biases = up_biases.to(z.dtype)

        def drift(part: Tensor) -> Tensor:
            blocks = part.T.unflatten(0, (self.blocks, self.block))
            inner = self.activation(torch.baddbmm(biases, up, self._shuffled(inwards.mT @ blocks)))
            moved = outwards.mT @ self._shuffled(down.mT @ at.noise.dropout(inner, self.dropout))
            return moved.flatten(0, 1).T

        return torch.cat([drift(part) for part in self._parts(z.flatten(0, -2))]).view(z.shape) + self.down_bias

    def _parts(self, z: Tensor) -> tuple[Tensor, ...]:
        """The particles, on a processor as many at a time as have their inner state in its cache."""
        if z.device.type != "cpu" or torch.compiler.is_compiling():
            return (z,)
        return z.split(max(PART // self.up_scales.numel(), 1))

    def _shuffled(self, blocks: Float[Tensor, "blocks entries particles"]) -> Tensor:
        """Blocks that each have an equal share of all blocks; done twice, it is undone."""
        return blocks.unflatten(1, (self.blocks, -1)).transpose(0, 1).flatten(1, 2)


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "full": FeedForward,
    "random": RandomFeedForward,
    "rotated": RotatedFeedForward,
}
