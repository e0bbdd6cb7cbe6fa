"""Feed-forward networks: the convection that moves every particle by itself."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from splitstep.fields.evaluation import Evaluation
from splitstep.solver.errors import lookup

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
