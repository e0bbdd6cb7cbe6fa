"""Where particles start: tokens with their positions and segments, or the patches of an image."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from splitstep.fields.noise import dropped
from splitstep.fields.norms import norm
from splitstep.models.adaptive import AdaptiveInput
from splitstep.models.configuration import SplitstepConfig
from splitstep.solver.errors import UserError
from splitstep.solver.sinusoids import sinusoid


def token_table(config: SplitstepConfig) -> nn.Module:
    """What looks up the vectors of tokens."""
    if config.adaptive_cutoffs is not None:
        return AdaptiveInput(config)
    return nn.Embedding(config.vocab_size, config.hidden_size)


class TextEmbeddings(nn.Module):
    """Tokens, their positions and, where there are segments, their types.

    A decoder has no table of tokens: it shares the encoder's.
    """

    def __init__(self, config: SplitstepConfig, part: str) -> None:
        super().__init__()
        self.kind = config.position_embedding
        self.offset = config.position_offset
        self.ladder = config.sinusoid_ladder
        self.dropout = config.first_dropout
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.tokens = token_table(config) if part == "encoder" else None
        longest = config.max_position_embeddings + config.position_offset
        self.positions = nn.Embedding(longest, config.hidden_size) if self.kind == "learned" else None
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.norm = (
            norm(config.norm_type, config.hidden_size, eps=config.layer_norm_eps) if config.embedding_norm else None
        )

    def forward(
        self,
        tokens: Float[Tensor, "batch particles dim"],
        positions: Int[Tensor, "#batch particles"],
        types: Int[Tensor, "batch particles"] | None = None,
    ) -> Tensor:
        """The first state, from looked-up tokens."""
        x = tokens * self.scale
        if self.positions is not None:
            x = x + self._learned(positions)
        elif self.kind == "sinusoidal":
            x = x + self.waves(positions, like=x)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(positions) if types is None else types)
        x = x if self.norm is None else self.norm(x)
        return dropped(x, self.dropout) if self.training else x

    def waves(self, positions: Int[Tensor, "#batch particles"], *, like: Tensor) -> Tensor:
        """The sinusoids of the positions."""
        at = (positions + self.offset).to(torch.float32)
        return sinusoid(at, like.shape[-1], ladder=self.ladder).to(like.dtype)

    def _learned(self, positions: Tensor) -> Tensor:
        assert self.positions is not None
        longest = self.positions.num_embeddings - self.offset
        checked = not torch.compiler.is_compiling() and positions.device.type == "cpu" and positions.numel()
        if checked and positions.max() >= longest:
            raise UserError(
                f"a sequence of {int(positions.max()) + 1} tokens is longer than max_position_embeddings = {longest}"
            )
        return self.positions(positions + self.offset)


class ImageEmbeddings(nn.Module):
    """Patches of an image, behind a class token, with learned positions."""

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__()
        self.size, self.patch, self.channels = config.image_size, config.patch_size, config.num_channels
        self.side = config.image_size // config.patch_size
        self.dropout = config.first_dropout
        self.patches = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)
        has_class = config.pooling == "first"
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if has_class else None
        particles = self.side**2 + has_class
        learned = config.position_embedding == "learned"
        self.positions = nn.Parameter(torch.zeros(1, particles, config.hidden_size)) if learned else None

    def forward(
        self, pixels: Float[Tensor, "batch channels height width"], *, interpolate: bool = False
    ) -> Float[Tensor, "batch particles dim"]:
        """The first state; `interpolate` stretches the positions to images of another size."""
        height, width = pixels.shape[-2:]
        if pixels.shape[1] != self.channels:
            raise UserError(f"images have num_channels = {self.channels}, got {pixels.shape[1]}")
        if not interpolate and (height, width) != (self.size, self.size):
            raise UserError(
                f"images are {self.size} x {self.size}, got {height} x {width}; "
                "interpolate_pos_encoding=True takes other sizes"
            )
        if height % self.patch or width % self.patch:
            raise UserError(f"patch_size = {self.patch} does not divide an image of {height} x {width}")
        x = self.patches(pixels.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        if self.positions is not None:
            x = x + self._positions(height // self.patch, width // self.patch)
        return dropped(x, self.dropout) if self.training else x

    def _positions(self, rows: int, columns: int) -> Tensor:
        assert self.positions is not None
        if rows == columns == self.side:
            return self.positions
        extra = self.positions.shape[1] - self.side**2
        grid = self.positions[:, extra:].unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((self.positions[:, :extra], grid.flatten(2).transpose(1, 2)), dim=1)
