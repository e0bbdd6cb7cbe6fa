"""Whether one scheme is better than another, by how much, and how sure that is.

Every metric here is a function of sums over examples (n-gram counts, correct answers, losses), so one resampling of
examples serves all of them. Two things make a measured difference uncertain: which examples the test set has, and which
seeds the models were trained with.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitstep.solver.errors import lookup

Array = NDArray[np.float64]
Rows = Sequence[dict[str, Any]]

LEVEL = 0.05  # below which a difference is called significant
TRIALS = 2000


@dataclass(frozen=True)
class Measure:
    """A metric by what it needs of each example, and how it follows from the sums of that."""

    of_examples: Callable[[Rows, dict[str, Any]], Array]  # (rows, settings) -> (examples, statistics)
    of_sums: Callable[[Array], float]


def _bleu_statistics(rows: Rows, settings: dict[str, Any]) -> Array:
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


def _losses(rows: Rows, settings: dict[str, Any]) -> Array:
    return np.asarray([[row["loss"], row["tokens"]] for row in rows], dtype=np.float64)


# A new metric that comparisons look at is one row.
MEASURES = {
    "bleu": Measure(_bleu_statistics, _bleu),
    "accuracy": Measure(_answers, lambda sums: float(sums[0] / sums[1])),
    "perplexity": Measure(_losses, lambda sums: math.exp(min(float(sums[0] / sums[1]), 700))),
}


@dataclass(frozen=True)
class Difference:
    """A scheme's metric minus the baseline's, means over seeds, with a 95 % interval and a two-sided p-value."""

    value: float
    interval: tuple[float, float]
    p_value: float
    method: str


def difference(metric: str, scheme: Sequence[Array], baseline: Sequence[Array], *, seed: int = 0) -> Difference:
    """The difference between runs of two schemes, given the statistics of each run's examples, paired by seed."""
    of_sums = lookup("metric", metric, MEASURES).of_sums
    pairs = list(zip(scheme, baseline, strict=True))
    values = np.asarray([of_sums(ours.sum(0)) - of_sums(theirs.sum(0)) for ours, theirs in pairs])
    drawn = _bootstrap(of_sums, pairs, np.random.default_rng(seed))
    if len(pairs) == 1:
        low, high = np.quantile(drawn[:, 0], [0.025, 0.975])
        chance = _randomization(of_sums, *pairs[0], np.random.default_rng(seed))
        how = "approximate randomisation over test examples; one seed, so luck in training is not counted"
        return Difference(float(values[0]), (float(low), float(high)), chance, how)
    return _over_seeds(values, drawn)


def _bootstrap(of_sums: Callable[[Array], float], pairs: list[tuple[Array, Array]], rng: np.random.Generator) -> Array:
    """The difference of each seed (columns) on test sets drawn anew from the examples (rows)."""
    count = len(pairs[0][0])
    chosen = rng.multinomial(count, np.full(count, 1 / count), size=TRIALS).astype(np.float64)
    columns = [
        [of_sums(a) - of_sums(b) for a, b in zip(chosen @ ours, chosen @ theirs, strict=True)] for ours, theirs in pairs
    ]
    return np.asarray(columns).T


def _randomization(of_sums: Callable[[Array], float], ours: Array, theirs: Array, rng: np.random.Generator) -> float:
    """How often systems that swap their answers at random differ as much; McNemar's question, for accuracy."""
    seen = abs(of_sums(ours.sum(0)) - of_sums(theirs.sum(0)))
    swap = rng.integers(2, size=(TRIALS, len(ours))).astype(np.float64)
    mixed = swap @ ours + (1 - swap) @ theirs, (1 - swap) @ ours + swap @ theirs
    shuffled = np.asarray([abs(of_sums(a) - of_sums(b)) for a, b in zip(*mixed, strict=True)])
    return float((np.sum(shuffled >= seen - 1e-12) + 1) / (TRIALS + 1))


def _over_seeds(values: Array, drawn: Array) -> Difference:
    """A t-test in which the variance over seeds and that over test examples add up.

    With a difference of mu + a_seed + b_example + e_both, the mean over n seeds varies by A / n + B + E / n, where B
    and E are already divided by the number of examples. The seeds show A / n + E / n, the bootstrap B + E / n of the
    mean and B + E of a single seed, of which E follows. Satterthwaite's degrees of freedom: the few values are the
    seeds.
    """
    from scipy import stats

    count = len(values)
    seeds = float(values.var(ddof=1)) / count
    of_mean, of_one = float(drawn.mean(1).var(ddof=1)), float(drawn.var(0, ddof=1).mean())
    both = max(of_one - of_mean, 0.0) / (count - 1)
    variance = seeds + max(of_mean - both, 0.0)
    mean = float(values.mean())
    if variance == 0:
        return Difference(mean, (mean, mean), 1.0 if mean == 0 else 0.0, "the runs do not vary")
    freedom = variance**2 * (count - 1) / seeds**2 if seeds else math.inf
    error = math.sqrt(variance)
    reach = float(stats.t.ppf(0.975, freedom)) * error
    chance = float(2 * stats.t.sf(abs(mean) / error, freedom))
    return Difference(mean, (mean - reach, mean + reach), chance, f"t-test over {count} seeds and the test examples")


def corrected(chances: Sequence[float]) -> list[float]:
    """The p-values of several comparisons, each held against all (Holm 1979)."""
    order = sorted(range(len(chances)), key=lambda i: chances[i])
    out, running = [0.0] * len(chances), 0.0
    for place, index in enumerate(order):
        running = max(running, min((len(chances) - place) * chances[index], 1.0))
        out[index] = running
    return out
