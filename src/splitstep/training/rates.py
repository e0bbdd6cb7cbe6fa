"""Learning rates as functions of the number of updates already made."""

import math
from collections.abc import Callable

from splitstep.recipe import Training
from splitstep.solver.errors import lookup

Rate = Callable[[Training, int, int, int], float]  # (settings, updates made, updates in all, width of the model)


def _inverse_sqrt(s: Training, update: int, total: int, width: int) -> float:
    # lr * sqrt(warmup / update): fairseq's, continuous at the end of the warm-up
    return s.learning_rate * math.sqrt(max(s.warmup, 1) / max(update, 1))


def _constant(s: Training, update: int, total: int, width: int) -> float:
    return s.learning_rate


def _remaining(s: Training, update: int, total: int) -> float:
    return max(total - update, 0) / max(total - s.warmup, 1)


def _linear(s: Training, update: int, total: int, width: int) -> float:
    return s.min_learning_rate + (s.learning_rate - s.min_learning_rate) * _remaining(s, update, total)


def _cosine(s: Training, update: int, total: int, width: int) -> float:
    wave = (1 - math.cos(math.pi * _remaining(s, update, total))) / 2
    return s.min_learning_rate + (s.learning_rate - s.min_learning_rate) * wave


def _cosine_restarts(s: Training, update: int, total: int, width: int) -> float:
    # Loshchilov & Hutter 2017, as fairseq has it: each period longer by a factor, both ends of its range shrunk
    assert s.period is not None
    position, length, number = float(update - s.warmup), float(s.period), 0
    while position >= length:
        position, length, number = position - length, length * s.period_factor, number + 1
    low, high = (rate * s.shrink**number for rate in (s.min_learning_rate, s.learning_rate))
    return low + (high - low) * (1 + math.cos(math.pi * position / length)) / 2


def _transevolve(s: Training, update: int, total: int, width: int) -> float:
    # lr0 * d^(-1/2) * min(1, t / warm) / sqrt(max(t, warm)), warm-up included; t counts from 1
    t, warm = update + 1, max(s.warmup, 1)
    return s.learning_rate * width**-0.5 * min(1.0, t / warm) / math.sqrt(max(t, warm))


# A new schedule is one row, and its name in `Training.schedule`.
RATES: dict[str, Rate] = {
    "constant": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_restarts": _cosine_restarts,
    "transevolve": _transevolve,
}


def rate(settings: Training, update: int, *, total: int, width: int) -> float:
    """The learning rate of the update that follows `update` others."""
    if settings.warmup_share:
        warmup = round(settings.warmup_share * total)
        settings = settings.model_copy(update={"warmup": warmup, "warmup_share": 0.0})
    if update < settings.warmup and settings.schedule != "transevolve":
        return settings.warmup_init + (settings.learning_rate - settings.warmup_init) * update / settings.warmup
    return lookup("schedule", settings.schedule, RATES)(settings, update, total, width)
