"""How well predictions fit labels, by scikit-learn and scipy; 1 is perfect."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Score:
    """A score of labels and predictions, and the metric whose name it is reported by."""

    metric: str
    of: Callable[[Array, Array], float]

    def __call__(self, labels: Array, predictions: Array) -> float:
        """The score."""
        return float(self.of(labels, predictions))


def _accuracy(labels: Array, predictions: Array) -> float:
    return np.mean(labels == predictions).item()


def _macro_f1(labels: Array, predictions: Array) -> float:
    from sklearn.metrics import f1_score

    return f1_score(labels, predictions, average="macro", zero_division=0)


def _binary_f1(labels: Array, predictions: Array) -> float:
    from sklearn.metrics import f1_score

    return f1_score(labels, predictions, average="binary", zero_division=0)


def _matthews(labels: Array, predictions: Array) -> float:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(labels, predictions)


def _pearson(labels: Array, predictions: Array) -> float:
    from scipy.stats import pearsonr

    return 0.0 if _constant(labels, predictions) else pearsonr(labels, predictions).statistic


def _spearman(labels: Array, predictions: Array) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _constant(labels, predictions) else spearmanr(labels, predictions).statistic


def _constant(*arrays: Array) -> bool:
    """Whether one of them never changes, so that its correlation with another is 0 over 0."""
    return any(np.ptp(array) == 0 for array in arrays)


# What there is to say of classes, and of numbers.
SCORES: dict[str, dict[str, Score]] = {
    "classes": {
        "accuracy": Score("accuracy", _accuracy),
        "f1": Score("f1", _macro_f1),  # the mean over all labels
        "f1_binary": Score("f1", _binary_f1),  # of label 1, as GLUE has it
        "matthews": Score("matthews", _matthews),
    },
    "numbers": {"pearson": Score("pearson", _pearson), "spearman": Score("spearman", _spearman)},
}
USUAL = {"classes": ["accuracy", "f1"], "numbers": ["pearson", "spearman"]}
