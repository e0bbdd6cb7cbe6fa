"""A vocabulary in bands: frequent tokens have wide vectors, rare ones narrow (Grave et al. 2017; Baevski & Auli 2019).

Tokens are numbered by falling frequency, which is the work of the tokenizer.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding, linear

from splitstep.models.configuration import Band, SplitstepConfig
from splitstep.models.labels import IGNORED
from splitstep.models.losses import chunked_token_loss, items, precise, token_losses


class AdaptiveInput(nn.Module):
    """Each token's vector, looked up in its band and projected to the width of the model.

    Tables and projections have the shapes of the softmax, so that the two can share them.
    """

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__()
        self.bands = config.adaptive_bands
        self.tables = _tables(self.bands)
        self.projections = _projections(self.bands, config.hidden_size)

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch dim"]:
        """The vectors of the tokens."""
        # Every band answers for every token, with zero for one that is another's: the projections cost little, and no
        # shape depends on the tokens.
        number = _band(ids, self.bands)
        parts = []
        for own, (band, table, projection) in enumerate(zip(self.bands, self.tables, self.projections, strict=True)):
            mine = number == own
            vectors = embedding(torch.where(mine, ids - band.start, 0), table) * mine.unsqueeze(-1)
            parts.append((vectors @ projection).to(table.dtype))
        return sum(parts[1:], start=parts[0])


class AdaptiveSoftmax(nn.Module):
    """The log-probability of every token, p(token) = p(band) p(token | band).

    One softmax is over the tokens of the first band and the other bands, each of which has one over its own tokens.
    torch's AdaptiveLogSoftmaxWithLoss is the same function, but has no weights to share and holds all logits of a band.
    """

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__()
        self.bands = config.adaptive_bands
        self.dropout = config.adaptive_dropout
        self.tables = _tables(self.bands)
        self.clusters = nn.Parameter(torch.zeros(len(self.bands) - 1, config.hidden_size))
        self.projections = _projections(self.bands[1:], config.hidden_size)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocabulary"]:
        """All log-probabilities, in float32 or better."""
        head = precise(linear(x, self._head())).log_softmax(-1)
        frequent, *rare = head.split([self.bands[0].stop] + [1] * len(self.clusters), dim=-1)
        # log p(token) = log p(band) + log p(token | band)
        tails = (
            band + precise(linear(self._narrowed(x, projection), table)).log_softmax(-1)
            for band, (_, projection, table) in zip(rare, self._tails(), strict=True)
        )
        return torch.cat((frequent, *tails), dim=-1)

    def loss(
        self, x: Float[Tensor, "*batch dim"], labels: Int[Tensor, "*batch"], num_items: Tensor | int | None = None
    ) -> Tensor:
        """The `token_loss` of the labels, each of the rarer bands evaluated only where a label lies in it."""
        number, in_head = self._places(labels)
        total = chunked_token_loss(x, self._head(), None, in_head, 1)
        for own, (start, projection, table) in enumerate(self._tails(), start=1):
            mine = number == own
            narrow = self._narrowed(x[mine], projection)
            total = total + chunked_token_loss(narrow, table, None, labels[mine] - start, 1)
        return total / items(labels != IGNORED, num_items)

    @torch.no_grad()
    def losses(self, x: Float[Tensor, "rows dim"], labels: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The loss of each label, without a gradient."""
        number, in_head = self._places(labels)
        head = self._head()
        found = token_losses(partial(linear, weight=head), x, in_head, width=len(head))
        for own, (start, projection, table) in enumerate(self._tails(), start=1):
            mine = number == own
            narrow = self._narrowed(x[mine], projection)
            found[mine] += token_losses(partial(linear, weight=table), narrow, labels[mine] - start, width=len(table))
        return found

    def _places(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The number of each label's band, and what stands for the label in the first softmax."""
        number = _band(labels, self.bands)
        return number, torch.where(number == 0, labels, self.bands[0].stop - 1 + number)

    def _head(self) -> Tensor:
        return torch.cat((self.tables[0], self.clusters))

    def _tails(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        starts = (band.start for band in self.bands[1:])
        return zip(starts, self.projections, list(self.tables)[1:], strict=True)

    def _narrowed(self, x: Tensor, projection: Tensor) -> Tensor:
        return dropout(linear(x, projection), self.dropout, self.training)


def adaptive_ties(config: SplitstepConfig, *, tokens: str, head: str) -> dict[str, str]:
    """Which weights of a softmax named `head` are those of the input named `tokens`: all but one vector a rare band.

    The first band's projection has no counterpart in the softmax, which reads the states as they are.
    """
    count = len(config.adaptive_bands)
    tables = {f"{head}.tables.{number}": f"{tokens}.tables.{number}" for number in range(count)}
    return tables | {f"{head}.projections.{number - 1}": f"{tokens}.projections.{number}" for number in range(1, count)}


def _tables(bands: Sequence[Band]) -> nn.ParameterList:
    return nn.ParameterList(torch.zeros(band.stop - band.start, band.width) for band in bands)


def _projections(bands: Sequence[Band], size: int) -> nn.ParameterList:
    return nn.ParameterList(torch.zeros(band.width, size) for band in bands)


def _band(ids: Tensor, bands: Sequence[Band]) -> Tensor:
    """The number of each token's band. One beyond the vocabulary counts to the last, whose table then refuses it."""
    number = torch.zeros_like(ids)
    for band in bands[1:]:
        number += ids >= band.start
    return number
