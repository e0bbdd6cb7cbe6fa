"""Whether one scheme is better than another, by how much, and how sure that is.

Two things make a measured difference uncertain: which examples the test set has, and which seeds the models were
trained with.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from splitstep.compare.measures import MEASURES, Array
from splitstep.solver.errors import lookup

LEVEL = 0.05  # below which a difference is called significant
TRIALS = 2000
NUMBERS = 2**24  # of trials and examples that are in memory together


@dataclass(frozen=True)
class Difference:
    """A scheme's metric minus the baseline's, means over seeds, with a 95 % interval and a two-sided p-value."""

    value: float
    interval: tuple[float, float]
    p_value: float
    method: str
    seeds: int = 1  # that both have

    def reversed(self) -> "Difference":
        """The baseline's metric minus the scheme's."""
        return replace(self, value=-self.value, interval=(-self.interval[1], -self.interval[0]))


def difference(metric: str, scheme: Sequence[Array], baseline: Sequence[Array], *, seed: int = 0) -> Difference:
    """The difference between runs of two schemes, given the statistics of each run's examples, paired by seed."""
    of_sums = lookup("measure", metric, MEASURES).of_sums
    pairs = list(zip(scheme, baseline, strict=True))
    values = np.asarray([of_sums(ours.sum(0)) - of_sums(theirs.sum(0)) for ours, theirs in pairs])
    drawn = _bootstrap(of_sums, pairs, np.random.default_rng(seed))
    tested = len(scheme[0])
    if len(pairs) == 1:
        ends = np.quantile(drawn[:, 0], [0.025, 0.975]) - values[0]
        low, high = values[0] + ends * math.sqrt(_scale(tested)) * _examples_margin(LEVEL, tested) / _normal(LEVEL)
        chance = _randomization(of_sums, *pairs[0], np.random.default_rng(seed))
        how = "approximate randomisation over test examples; one seed, so luck in training is not counted"
        return Difference(float(values[0]), (float(low), float(high)), chance, how)
    return replace(_over_seeds(values, drawn, tested), seeds=len(pairs))


def _bootstrap(of_sums: Callable[[Array], float], pairs: list[tuple[Array, Array]], rng: np.random.Generator) -> Array:
    """The difference of each seed (columns) on test sets drawn anew from the examples (rows)."""
    count = len(pairs[0][0])
    rows = []
    for trials in _blocks(count):
        chosen = rng.multinomial(count, np.full(count, 1 / count), size=trials).astype(np.float64)
        columns = [
            [of_sums(a) - of_sums(b) for a, b in zip(chosen @ ours, chosen @ theirs, strict=True)]
            for ours, theirs in pairs
        ]
        rows.append(np.asarray(columns).T)
    return np.concatenate(rows)


def _blocks(count: int) -> Iterator[int]:
    """How many trials are drawn at a time, so that their choices among so many examples stay small."""
    most = max(NUMBERS // count, 1)
    for done in range(0, TRIALS, most):
        yield min(most, TRIALS - done)


def _randomization(of_sums: Callable[[Array], float], ours: Array, theirs: Array, rng: np.random.Generator) -> float:
    """How often systems that swap their answers at random differ as much; McNemar's question, for accuracy."""
    seen = abs(of_sums(ours.sum(0)) - of_sums(theirs.sum(0)))
    as_much = 0
    for trials in _blocks(len(ours)):
        swap = rng.integers(2, size=(trials, len(ours))).astype(np.float64)
        mixed = swap @ ours + (1 - swap) @ theirs, (1 - swap) @ ours + swap @ theirs
        as_much += sum(abs(of_sums(a) - of_sums(b)) >= seen - 1e-12 for a, b in zip(*mixed, strict=True))
    return float((as_much + 1) / (TRIALS + 1))


def _over_seeds(values: Array, drawn: Array, tested: int) -> Difference:
    """The test of a mean over seeds: both causes of error, each by its own law."""
    count, mean = len(values), float(values.mean())
    of_mean, of_one = _scale(tested) * drawn.mean(1).var(ddof=1), _scale(tested) * drawn.var(0, ddof=1).mean()
    seeds, examples = variances(values, of_mean=of_mean, of_one=of_one)
    parts = float(seeds), float(examples), float(of_mean)
    if not any(parts):  # all examples agree, as heads of a coin do
        return Difference(mean, (mean, mean), 1.0 if mean == 0 else 2.0 ** (1 - tested), "the runs do not vary")
    reach = float(margin(*parts, count, tested))
    how = f"margins of {count} seeds (t) and of the test examples (bootstrap) together"
    if tested == 1:
        how = f"margin of {count} seeds (t); one test example, so its choice is not counted"
    return Difference(mean, (mean - reach, mean + reach), chance(mean, *parts, count, tested), how)


def _scale(tested: int) -> float:
    """By how much the variance of a bootstrap falls short, which divides by the number of examples."""
    return tested / max(tested - 1, 1)


def variances(values: Array, *, of_mean: Array, of_one: Array) -> tuple[Array, Array]:
    """What the mean over seeds (the last axis) varies by through the seeds, and through the examples all seeds share.

    With a difference of mu + a_seed + b_example + e_both, the mean over n seeds varies by A / n + B + E / n, where B
    and E are already divided by the number of examples. The seeds show A / n + E / n. The bootstrap shows B + E / n of
    the mean (`of_mean`) and B + E of a single seed (`of_one`), of which B follows.
    """
    count = values.shape[-1]
    both = np.maximum(of_one - of_mean, 0.0) / (count - 1)
    return values.var(-1, ddof=1) / count, np.maximum(of_mean - both, 0.0)


def margin(
    seeds: Array | float,
    examples: Array | float,
    of_mean: Array | float,
    count: int,
    tested: int,
    level: float = LEVEL,
) -> Array:
    """How far the mean of equal schemes is from 0 in all but a share `level` of comparisons, or in fewer.

    The margins of the two causes add up as their deviations do. Each is Student's, for `count` seeds, and few `tested`
    examples, tell their own variance badly; one t of all the variance, its degrees of freedom estimated too, is wrong
    up to 12 times in 100 with two seeds, where 5 are meant. A few seeds that agree by chance, as counts of right
    answers often do, make no one surer than the examples alone, `of_mean`.
    """
    from scipy import stats

    # margin**2 = max((t s)**2 + (u b)**2, (u m)**2)
    t, u = stats.t.isf(level / 2, count - 1), _examples_margin(level, tested)
    return np.sqrt(np.maximum(t**2 * seeds + u**2 * examples, u**2 * of_mean))


def _examples_margin(level: float, tested: int) -> float:
    """Student's margin of the mean over examples, in deviations; a single one has none."""
    from scipy import stats

    return float(stats.t.isf(level / 2, tested - 1)) if tested > 1 else 0.0


def _normal(level: float) -> float:
    from scipy import stats

    return float(stats.norm.isf(level / 2))


def chance(mean: float, seeds: float, examples: float, of_mean: float, count: int, tested: int) -> float:
    """The p-value: the level whose margin the mean just reaches."""
    from scipy.optimize import brentq

    def short(exponent: float) -> float:
        return float(margin(seeds, examples, of_mean, count, tested, math.exp(exponent))) - abs(mean)

    least = math.log(1e-100)  # below which Student's margin leaves the range of floats
    if mean == 0 or short(least) < 0:
        return 1.0 if mean == 0 else 0.0
    return math.exp(brentq(short, least, 0.0))


def corrected(chances: Sequence[float]) -> list[float]:
    """The p-values of several comparisons, each held against all (Holm 1979)."""
    order = sorted(range(len(chances)), key=lambda i: chances[i])
    out, running = [0.0] * len(chances), 0.0
    for place, index in enumerate(order):
        running = max(running, min((len(chances) - place) * chances[index], 1.0))
        out[index] = running
    return out
