"""Linear layers in eight bits, for inference on CPU.

Weights have a scale a row, inputs a scale a token: so what becomes of a sentence does not depend on its batch, which
torch's own dynamic quantisation, with one scale for all inputs, does not promise. Inputs use seven of the eight bits,
because the sums of two products overflow sixteen bits on processors without VNNI.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from splitstep.models.trunk import Halting

Model = TypeVar("Model", bound=nn.Module)

WEIGHT_STEPS, INPUT_STEPS = 127, 63
TINY = 1e-12  # for rows of zeros


class Int8Linear(nn.Module):
    """What a linear layer computes, but for rounding; it cannot be trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(TINY) / WEIGHT_STEPS
        rows = (weight / scales.unsqueeze(1)).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rows, None)
        self.scales, self.zeros = scales, torch.zeros(len(weight), dtype=torch.long)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """X W^T + b."""
        scale = x.abs().amax(-1, keepdim=True).clamp_min(TINY)
        steps = (x * (INPUT_STEPS / scale)).round_().add_(INPUT_STEPS + 1).to(torch.uint8)
        product = torch.ops.onednn.qlinear_pointwise(
            steps,
            1 / INPUT_STEPS,
            INPUT_STEPS + 1,
            self.packed,
            self.scales,
            self.zeros,
            None,  # the bias comes after the scale of the token
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return product * scale if self.bias is None else torch.addcmul(self.bias, product, scale)


def quantized(model: Model) -> Model:
    """A copy of the model for inference, its linear layers in eight bits."""
    made = copy.deepcopy(model).eval()
    for module in list(made.modules()):
        for name, inner in list(module.named_children()):
            if isinstance(inner, nn.Linear) and not isinstance(module, Halting):  # which reads the weights itself
                setattr(module, name, Int8Linear(inner))
    return made
