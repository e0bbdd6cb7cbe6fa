"""The statistics on cases whose answer is known."""

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest
from scipy import stats

from splitstep.compare import statistics
from splitstep.compare.measures import MEASURES
from splitstep.compare.statistics import LEVEL, Difference, chance, corrected, difference, margin, variances
from splitstep.tasks.scores import SCORES


def answers(rng, seeds, chance, *, noise=0.0, examples=200, difficulty=None):
    """Right and wrong answers of runs whose skill varies by seed, on examples of varying difficulty."""
    skill = chance + noise * rng.standard_normal(seeds)
    level = np.zeros(examples) if difficulty is None else difficulty
    return [
        np.stack([rng.random(examples) < np.clip(s + level, 0, 1), np.ones(examples)], axis=1).astype(float)
        for s in skill
    ]


def test_two_equal_schemes_differ_by_chance_as_often_as_the_level_says_with_one_seed(monkeypatch):
    monkeypatch.setattr(statistics, "TRIALS", 100)
    rng = np.random.default_rng(0)
    difficulty = 0.2 * rng.standard_normal(200)
    pairs = ([answers(rng, 1, 0.6, difficulty=difficulty) for _ in range(2)] for _ in range(200))
    found = np.mean([difference("accuracy", *pair).p_value < LEVEL for pair in pairs])
    assert 0.005 < found < 0.095


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("noise", [0.0, 1.0, 4.0, 16.0])  # of seeds, in deviations of a seed's own errors
@pytest.mark.parametrize("shared", [0.0, 1.0, 4.0])  # of examples that are hard for one scheme with every seed
@pytest.mark.parametrize("examples", [5, 8, 20, 100])
def test_two_equal_schemes_differ_by_chance_no_oftener_than_the_level_says(seeds, noise, shared, examples):
    rng, trials = np.random.default_rng(0), 4000
    own = rng.standard_normal((trials, seeds, examples)) + shared * rng.standard_normal((trials, 1, examples))
    found = own + noise * rng.standard_normal((trials, seeds, 1)) / np.sqrt(examples)
    values = found.mean(2)
    of_mean, of_one = found.mean(1).var(1, ddof=1) / examples, found.var(2, ddof=1).mean(1) / examples
    parts = variances(values, of_mean=of_mean, of_one=of_one)
    wrong = np.mean(np.abs(values.mean(1)) > margin(*parts, of_mean, seeds, examples))
    assert wrong < 0.06
    assert wrong > 0.002 or examples < 20


@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("right", [0.5, 0.95])
def test_equal_schemes_are_told_apart_no_oftener_than_the_level_says_among_several_too(seeds, right, monkeypatch):
    """Counts of right answers agree by chance between seeds, and a correction multiplies small p-values only."""
    monkeypatch.setattr(statistics, "TRIALS", 200)
    rng, found = np.random.default_rng(8), []
    for _ in range(150):
        base, *others = (answers(rng, seeds, right, examples=60) for _ in range(5))
        found.append(min(corrected([difference("accuracy", other, base).p_value for other in others])) < LEVEL)
    assert np.mean(found) < 0.08


def test_seeds_that_agree_by_chance_make_no_one_surer_than_the_examples_do():
    ours, theirs = np.ones((2, 100, 2)), np.ones((2, 100, 2))
    theirs[0, 0, 0] = theirs[1, 1, 0] = 0.0  # each seed is wrong once, at another example
    found = difference("accuracy", list(ours), list(theirs))
    assert found.value == pytest.approx(0.01)
    assert found.p_value > 0.1
    assert found.interval[0] < 0 < found.interval[1]


@given(
    st.floats(0.01, 10),
    st.floats(0.01, 4),
    st.floats(0, 4),
    st.floats(0, 4),
    st.integers(2, 9),
    st.floats(0.001, 0.9),
    st.sampled_from([1, 2, 9, 1000]),
)
@settings(deadline=None)
def test_the_p_value_is_below_a_level_where_the_mean_is_beyond_its_margin(
    mean, seeds, examples, of_mean, count, level, tested
):
    parts = seeds, examples, of_mean
    reach = margin(*parts, count, tested, level)
    if abs(mean - reach) > 1e-6 * mean:
        assert (chance(mean, *parts, count, tested) < level) == (mean > reach)


@given(st.floats(-5, 5), st.floats(0.01, 3))
@settings(deadline=None)
def test_the_margin_of_one_cause_alone_is_the_textbook_one(mean, variance):
    score = abs(mean) / np.sqrt(variance)
    assert chance(mean, variance, 0.0, 0.0, 4, 50) == pytest.approx(2 * stats.t.sf(score, 3), rel=1e-6)
    assert chance(mean, 0.0, variance, variance, 4, 50) == pytest.approx(2 * stats.t.sf(score, 49), rel=1e-6)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_bootstrap_finds_the_variances_that_a_mean_has(seeds):
    rng = np.random.default_rng(4)
    runs = [answers(rng, seeds, 0.6, difficulty=0.2 * rng.standard_normal(400), examples=400) for _ in range(2)]
    found = difference("accuracy", *runs)
    apart = np.stack([ours[:, 0] - theirs[:, 0] for ours, theirs in zip(*runs, strict=True)])
    of_mean, of_one = apart.mean(0).var() / 400, apart.var(1).mean() / 400
    parts = variances(apart.mean(1), of_mean=of_mean, of_one=of_one)
    assert found.value == pytest.approx(apart.mean())
    assert found.interval[1] - found.value == pytest.approx(float(margin(*parts, of_mean, seeds, 400)), rel=0.05)
    assert found.p_value == pytest.approx(chance(apart.mean(), *map(float, parts), of_mean, seeds, 400), rel=0.2)


@pytest.mark.parametrize("examples", [3, 8, 30])
def test_few_examples_tell_as_little_with_one_seed_as_student_says(examples):
    """The share of intervals that have the true difference, 0, in them."""
    rng, held = np.random.default_rng(7), []
    for _ in range(300):
        losses = [np.stack([rng.standard_normal(examples), np.ones(examples)], axis=1) for _ in range(2)]
        low, high = difference("mlm_loss", [losses[0]], [losses[1]], seed=int(rng.integers(1 << 30))).interval
        held.append(low < 0 < high)
    assert 0.9 < np.mean(held) <= 1


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_one_example_is_no_evidence_of_its_own(seeds):
    right, wrong = [np.asarray([[1.0, 1.0]])] * seeds, [np.asarray([[0.0, 1.0]])] * seeds
    assert difference("accuracy", right, wrong).p_value == 1


def test_with_one_example_the_seeds_alone_are_counted_and_that_is_said():
    gaps = np.asarray([0.3, 0.5, 0.4])
    ours, theirs = ([np.asarray([[2 + gap, 1.0]]) for gap in own] for own in (gaps, 0 * gaps))
    found = difference("mlm_loss", ours, theirs)
    assert found.p_value == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)
    assert "one test example" in found.method


def test_runs_that_agree_in_every_example_are_as_sure_as_a_coin_that_always_falls_alike():
    right, wrong = [np.ones((10, 2))] * 2, [np.stack([np.zeros(10), np.ones(10)], axis=1)] * 2
    assert difference("accuracy", right, wrong).p_value == 2 / 2**10


@pytest.mark.parametrize("seeds", [1, 2])
def test_trials_in_blocks_are_the_trials_together(seeds, monkeypatch):
    rng = np.random.default_rng(0)
    schemes = [[rng.integers(2, size=(50, 1)).astype(float) for _ in range(seeds)] for _ in range(2)]
    ours, theirs = [[np.hstack([right, np.ones((50, 1))]) for right in runs] for runs in schemes]
    together = statistics.difference("accuracy", ours, theirs)
    monkeypatch.setattr(statistics, "NUMBERS", 7 * 50)
    assert statistics.difference("accuracy", ours, theirs) == together


def test_a_difference_can_be_seen_from_the_other_side():
    found = Difference(1.0, (-0.5, 2.5), 0.2, "a test")
    assert found.reversed() == Difference(-1.0, (-2.5, 0.5), 0.2, "a test")
    assert found.reversed().reversed() == found


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_a_clear_difference_is_found(seeds):
    rng = np.random.default_rng(1)
    better, worse = answers(rng, seeds, 0.8, noise=0.01), answers(rng, seeds, 0.6, noise=0.01)
    found = difference("accuracy", better, worse)
    assert found.p_value < 0.01
    assert found.interval[0] < found.value < found.interval[1]
    assert found.interval[0] > 0
    assert found.value == pytest.approx(0.2, abs=0.06)


def test_one_seed_with_noise_in_training_is_not_said_to_be_sure():
    """With one seed the test sees the examples alone, and says so."""
    rng = np.random.default_rng(2)
    assert "one seed" in difference("accuracy", answers(rng, 1, 0.6), answers(rng, 1, 0.6)).method


@pytest.mark.parametrize("metric", MEASURES)
def test_the_difference_of_a_scheme_to_itself_is_nothing(metric):
    rng = np.random.default_rng(3)
    width = {"bleu": 10, "pearson": 6, "spearman": 6, "f1": 9, "f1_binary": 6, "matthews": 9}.get(metric, 2)
    runs = [rng.integers(1, 9, size=(30, width)).astype(float) for _ in range(3)]
    found = difference(metric, runs, runs)
    assert (found.value, found.p_value) == (0, 1)


def _translations(seed, quality, count=120):
    rng = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(50)]
    references = [" ".join(rng.choice(words, size=12)) for _ in range(count)]
    out = [
        " ".join(w if rng.random() < quality else str(rng.choice(words)) for w in line.split()) for line in references
    ]
    return out, references


def test_bleu_from_sums_and_its_test_agree_with_sacrebleu():
    references = _translations(5, 1.0)[1]
    rng = np.random.default_rng(6)
    systems = []
    for quality in (0.8, 0.83):
        words = [f"w{i}" for i in range(50)]
        systems.append(
            [" ".join(w if rng.random() < quality else str(rng.choice(words)) for w in r.split()) for r in references]
        )
    measure = MEASURES["bleu"]
    rows = [[{"hypothesis": h, "reference": r} for h, r in zip(s, references, strict=True)] for s in systems]
    found = [measure.of_examples(r, {"convention": "detokenized", "language": "en"}) for r in rows]
    metric = BLEU(force=True)
    for statistics_, system in zip(found, systems, strict=True):
        assert measure.of_sums(statistics_.sum(0)) == pytest.approx(metric.corpus_score(system, [references]).score)
    named = [("baseline", systems[0]), ("ours", systems[1])]
    _, theirs = PairedTest(named, {"BLEU": metric}, [references], test_type="ar", n_samples=2000)()
    ours = difference("bleu", [found[1]], [found[0]])
    assert ours.p_value == pytest.approx(theirs["BLEU"][1].p_value, abs=0.03)


def test_perplexity_is_of_the_mean_loss_over_tokens_not_documents():
    rows = [{"loss": 10.0, "tokens": 10}, {"loss": 90.0, "tokens": 30}]
    measure = MEASURES["perplexity"]
    assert measure.of_sums(measure.of_examples(rows, {}).sum(0)) == pytest.approx(np.exp(2.5))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
@settings(deadline=None)  # the first imports scikit-learn or scipy
@pytest.mark.parametrize("name", [name for name in SCORES["classes"] if name != "f1_binary"])
def test_scores_of_classes_follow_from_sums(name, pairs):
    assume(len({label for pair in pairs for label in pair}) > 1)  # sklearn warns of one
    labels, predictions = np.asarray(pairs).T
    rows = [{"label": f"c{a}", "prediction": f"c{b}"} for a, b in pairs]
    found = MEASURES[name].of_examples(rows, {"classes": ["c0", "c1", "c2"]}).sum(0)
    assert MEASURES[name].of_sums(found) == pytest.approx(SCORES["classes"][name](labels, predictions))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
@settings(deadline=None)
def test_the_score_of_the_second_class_follows_from_sums(pairs):
    labels, predictions = np.asarray(pairs).T.astype(int)
    names = ["no", "yes"]
    rows = [{"label": names[a], "prediction": names[b]} for a, b in pairs]
    found = MEASURES["f1_binary"].of_examples(rows, {"classes": names}).sum(0)
    assert MEASURES["f1_binary"].of_sums(found) == pytest.approx(SCORES["classes"]["f1_binary"](labels, predictions))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-9, 9)), min_size=2, max_size=30))
@example([(0, 0), (0, 0), (0, 0), (1, 0), (0, 0)])
@settings(deadline=None)  # the first imports scikit-learn or scipy
@pytest.mark.parametrize("name", SCORES["numbers"])
def test_scores_of_numbers_follow_from_sums(name, pairs):
    labels, predictions = np.asarray(pairs, dtype=float).T
    rows = [{"label": a, "prediction": b} for a, b in zip(labels, predictions, strict=True)]
    found = MEASURES[name].of_examples(rows, {}).sum(0)
    assert MEASURES[name].of_sums(found) == pytest.approx(SCORES["numbers"][name](labels, predictions), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_s_correction_keeps_the_order_and_never_helps(chances):
    adjusted = corrected(chances)
    assert all(p <= q <= 1 for p, q in zip(chances, adjusted, strict=True))
    order = np.argsort(chances, kind="stable")
    assert all(np.diff(np.asarray(adjusted)[order]) >= 0)
    assert min(adjusted) == pytest.approx(min(min(chances) * len(chances), 1))


def test_holm_s_correction_on_the_textbook_case():
    assert corrected([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
