"""Metrics as functions of sums over examples, so that one resampling of examples serves them all."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitstep.solver.errors import UserError

if TYPE_CHECKING:
    from splitstep.tasks.base import Task

Array = NDArray[np.float64]
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Measure:
    """A metric by what it needs of each example, and how it follows from the sums of that."""

    of_examples: Callable[[Rows, dict[str, Any]], Array]  # (rows, settings) -> (examples, statistics)
    of_sums: Callable[[Array], float]
    unit: str = "examples"  # what a test set is made of


def _ngrams(rows: Rows, settings: dict[str, Any]) -> Array:
    from splitstep.tasks.bleu import prepared

    hypotheses, references = ([row[key] for row in rows] for key in ("hypothesis", "reference"))
    metric, texts = prepared(hypotheses, references, **settings)
    return np.asarray(metric._extract_corpus_statistics(texts[0], [texts[1]]), dtype=np.float64)


def _bleu(sums: Array) -> float:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU.compute_bleu(
        correct=sums[2:6].tolist(),
        total=sums[6:10].tolist(),
        sys_len=int(sums[0]),
        ref_len=int(sums[1]),
        smooth_method="exp",
    ).score


def _answers(rows: Rows, settings: dict[str, Any]) -> Array:
    return np.asarray([[row["prediction"] == row["label"], 1.0] for row in rows], dtype=np.float64)


def _sums_of(value: str, count: str) -> Callable[[Rows, dict[str, Any]], Array]:
    return lambda rows, settings: np.asarray([[row[value], row[count]] for row in rows], dtype=np.float64)


def _mean(sums: Array) -> float:
    return float(sums[0] / sums[1])


def _perplexity(sums: Array) -> float:
    return math.exp(min(_mean(sums), 100))  # a float whose square, times that of any margin, is one too


def _classes(rows: Rows, settings: dict[str, Any]) -> Array:
    """Of each class whether it was right, said, and true, class after class."""
    names = np.asarray(settings["classes"])
    said = np.asarray([row["prediction"] for row in rows])[:, None] == names
    true = np.asarray([row["label"] for row in rows])[:, None] == names
    return np.stack([said & true, said, true], axis=2).reshape(len(rows), -1).astype(np.float64)


def _f1_of_each(sums: Array) -> Array:
    right, said, true = sums.reshape(-1, 3).T
    return 2 * right / np.maximum(said + true, 1)


def _macro_f1(sums: Array) -> float:
    seen = sums.reshape(-1, 3)[:, 1:].sum(1) > 0
    return float(_f1_of_each(sums)[seen].mean())


def _matthews(sums: Array) -> float:
    """Gorodkin 2004, which for two classes is Matthews' own."""
    right, said, true = sums.reshape(-1, 3).T
    count = true.sum()
    spread = (count**2 - said @ said) * (count**2 - true @ true)
    return float((right.sum() * count - said @ true) / math.sqrt(spread)) if spread > 0 else 0.0


def _products(rows: Rows, settings: dict[str, Any]) -> Array:
    said, true = (np.asarray([row[key] for row in rows], dtype=np.float64) for key in ("prediction", "label"))
    return _moments(said, true)


def _rank_products(rows: Rows, settings: dict[str, Any]) -> Array:
    """Of the ranks in the whole test set, which resampling leaves as they are."""
    from scipy.stats import rankdata

    return _moments(*(rankdata([row[key] for row in rows]) for key in ("prediction", "label")))


def _moments(x: Array, y: Array) -> Array:
    x, y = x - y.mean(), y - y.mean()  # which no correlation sees, and sums of squares lose fewer digits
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def _correlation(sums: Array) -> float:
    count, x, y, xx, yy, xy = sums
    spreads = count * xx - x * x, count * yy - y * y
    # What is left of two equal numbers is their rounding.
    constant = any(spread <= 1e-12 * count * squares for spread, squares in zip(spreads, (xx, yy), strict=True))
    return 0.0 if constant else float((count * xy - x * y) / math.sqrt(math.prod(spreads)))


# A new metric that comparisons look at is one row.
MEASURES = {
    "bleu": Measure(_ngrams, _bleu, "sentences"),
    "accuracy": Measure(_answers, _mean),
    "f1": Measure(_classes, _macro_f1),
    "f1_binary": Measure(_classes, lambda sums: float(_f1_of_each(sums)[1])),
    "matthews": Measure(_classes, _matthews),
    "pearson": Measure(_products, _correlation),
    "spearman": Measure(_rank_products, _correlation),
    "perplexity": Measure(_sums_of("loss", "tokens"), _perplexity, "documents"),
    "mlm_loss": Measure(_sums_of("mlm_loss", "masked"), _mean, "pairs of passages"),
}


def measure_name(task: "Task") -> str:
    """By which measure a comparison on a task is decided: its metric, or the first of those that its recipe chose."""
    name = next(iter(getattr(task, "scores", {task.metric: None})))
    if name not in MEASURES:
        raise UserError(f"there is no significance test for the metric {name!r}; there is for {', '.join(MEASURES)}")
    return name


def measure_settings(task: "Task") -> dict[str, Any]:
    """What a measure has to know of the task."""
    if task.metric == "bleu":
        return {"convention": task.evaluation.bleu, "language": task.data.target}
    if MEASURES[measure_name(task)].of_examples is _classes:
        return {"classes": task.names}  # type: ignore[attr-defined] # which every classifier has
    return {}
