"""Optimizers as the papers have them, Muon, and the moving average of the weights."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from splitstep.models.accounting import part_of
from splitstep.recipe import Training

Named = list[tuple[str, nn.Parameter]]


def optimizer(model: nn.Module, settings: Training) -> torch.optim.Optimizer:
    """The optimizer of a recipe over all that is trained."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return OPTIMIZERS[settings.optimizer](named, settings)


def _adamw(named: Named, settings: Training) -> torch.optim.Optimizer:
    """AdamW with decoupled decay, which fairseq calls Adam."""
    first, second = settings.betas
    # One kernel for all parameters: a quarter of the time of torch's default on CPU.
    return torch.optim.AdamW(
        _groups(named, settings), lr=settings.learning_rate, betas=(first, second), eps=settings.eps, fused=True
    )


def _nag(named: Named, settings: Training) -> torch.optim.Optimizer:
    """Nesterov's accelerated gradient."""
    groups = [{"params": group["params"], "shrinkage": group["weight_decay"]} for group in _groups(named, settings)]
    nag = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, nesterov=True)
    nag.register_step_pre_hook(_shrink)
    return nag


def _muon(named: Named, settings: Training) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for all else.

    Its steps have the size of AdamW's (Liu et al. 2025), so that one rate serves both.
    """
    inner = {name: p for name, p in named if part_of(name) == "body" and p.ndim == 2}
    others = [(name, p) for name, p in named if name not in inner]
    muon = torch.optim.Muon(
        _groups(list(inner.items()), settings), lr=settings.learning_rate, adjust_lr_fn="match_rms_adamw"
    )
    return Joined(muon, _adamw(others, settings))


OPTIMIZERS: dict[str, Callable[[Named, Training], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "nag": _nag,
    "muon": _muon,
}


def _groups(named: Named, settings: Training) -> list[dict[str, Any]]:
    """What decays, and what does not."""
    spared = {name for name, p in named if settings.decay == "matrices" and _no_matrix(name, p)}
    groups = [
        {"params": [p for name, p in named if name not in spared], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Joined(torch.optim.Optimizer):
    """Several optimizers as one: each steps its own parameters, and what they remember is kept together."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what a checkpoint remembers."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of each."""
        for part in self.parts:
            part.step()


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Decay beside the step, as fairseq's nag has it: torch's own would go through the gradient and its momentum."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.mul_(1 - group["lr"] * group["shrinkage"])


def _no_matrix(name: str, parameter: Tensor) -> bool:
    """Norms, biases, the class token and embeddings of positions."""
    own = name.rpartition("embeddings.")[2]
    return parameter.ndim < 2 or own.startswith(("positions", "class_token"))


class MovingAverage:
    """The exponential moving average of the weights, a step after every update."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, model: nn.Module) -> None:
        """Move towards the model's weights."""
        now = {name: p.detach() for name, p in model.named_parameters()}
        if not self.weights:
            self.weights = {name: p.clone() for name, p in now.items()}
            return
        names = list(now)
        mean = [self.weights[name].to(now[name].device) for name in names]
        torch._foreach_lerp_(mean, [now[name] for name in names], 1 - self.decay)
        self.weights = dict(zip(names, mean, strict=True))
