"""Pairs of passages: never too long, cut as stated, half of them real; masks at the rates asked for."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, chi2_contingency, chisquare
from sklearn.tree import DecisionTreeClassifier

from splitstep.data.cache import Ragged
from splitstep.data.corpus import PAIRINGS, Corpus, drawn, open_spans, truncated, write_spans
from splitstep.data.masking import Masker, Masking

shapes = st.lists(st.lists(st.integers(1, 12), min_size=0, max_size=9), min_size=1, max_size=8)


def corpus(shape: list[list[int]]) -> Corpus:
    """Documents of sentences of these lengths; every token says where it stands."""
    lengths = [length for document in shape for length in document]
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
    return Corpus(Ragged(tokens, ends), np.cumsum([len(document) for document in shape]))


@given(shapes)
def test_a_corpus_comes_back_from_its_files(tmp_path_factory, shape):
    path = tmp_path_factory.mktemp("corpus") / "train"
    whole = corpus(shape)
    bounds = [0, *whole.documents]
    documents = [[whole.sentences[i] for i in range(a, b)] for a, b in pairwise(bounds)]
    Corpus.write(path, iter(documents))
    again = Corpus.open(path)
    assert again.documents.tolist() == whole.documents.tolist()
    assert again.sentences.tokens.tolist() == whole.sentences.tokens.tolist()
    assert again.sentences.ends.tolist() == whole.sentences.ends.tolist()


@pytest.mark.parametrize("pairing", PAIRINGS)
@given(shape=shapes, room=st.integers(2, 30))
def test_spans_cover_every_document_of_two_sentences_and_cross_none(tmp_path_factory, pairing, shape, room):
    path, whole = tmp_path_factory.mktemp("spans") / "spans", corpus(shape)
    write_spans(path, whole, pairing, room)
    spans = open_spans(path)
    covered = set()
    for start, end in spans.tolist():
        assert end - start >= 2
        first, last = whole.document_of(start)
        assert first <= start < end <= last
        covered |= set(range(start, end))
    starts = np.concatenate([[0], whole.documents[:-1]])
    wanted = {i for a, b in zip(starts, whole.documents, strict=True) if b - a > 1 for i in range(a, b)}
    assert covered == wanted
    assert whole.sizes(spans).tolist() == [len(whole.tokens(a, b)) for a, b in spans.tolist()]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 60), st.integers(0, 9))
def test_the_longer_passage_is_cut_first_until_both_fit(a, b, room, seed):
    first, second = np.arange(a), np.arange(b)
    cut = truncated(first, second, np.random.default_rng(seed), room=room)
    while a + b > room:  # Devlin et al.'s loop
        a, b = (a - 1, b) if a > b else (a, b - 1)
    assert [len(part) for part in cut] == [a, b]
    for part in cut:
        assert (np.diff(part) == 1).all()


DOCUMENTS = [[4, 3, 5, 2, 6, 3], [2, 2, 7], [5, 1], [3, 3, 3, 3, 9]]


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_real_pairs_follow_in_their_document_and_the_others_are_from_another(pairing):
    whole, room = corpus(DOCUMENTS), 12
    real = 0
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        pair = drawn(whole, (0, 4), rng, pairing=pairing, room=room)
        assert 2 <= len(pair.first) + len(pair.second) <= room
        own = whole.tokens(*whole.document_of(0))
        assert np.isin(pair.first, own).all()
        assert np.isin(pair.second, own).all() == pair.follows
        assert pair.follows or not np.isin(pair.second, own).any()
        if pair.follows:
            assert pair.second[0] > pair.first[-1]
        others = {whole.document_of(int(np.searchsorted(whole.sentences.ends, t, side="right"))) for t in pair.second}
        assert len(others) == 1
        real += pair.follows
    assert binomtest(real, 2000, 0.5).pvalue > 0.001


@pytest.mark.parametrize(("pairing", "room"), [("packed", 40), ("packed", 125), ("sentences", 40), ("sentences", 381)])
def test_nothing_but_the_words_tells_real_pairs_from_others(tmp_path, pairing, room):
    """How long passages are, and whether they begin and end with a sentence: a guesser by these gains nothing."""
    rng = np.random.default_rng(7)
    shape = [(1 + rng.geometric(1 / 20, rng.integers(2, 40))).tolist() for _ in range(300)]
    whole = corpus(shape)
    write_spans(tmp_path / "spans", whole, pairing, room)
    spans = open_spans(tmp_path / "spans")
    starts, ends = {0, *whole.sentences.ends.tolist()}, set(whole.sentences.ends.tolist())
    clues, real = [], []
    for number in range(8000):
        rng = np.random.default_rng([7, number])
        pair = drawn(whole, tuple(spans[rng.integers(len(spans))]), rng, pairing=pairing, room=room)
        parts = (pair.first, pair.second)
        edges = [int(part[0]) in starts for part in parts] + [int(part[-1]) + 1 in ends for part in parts]
        inside = sum(int(token) + 1 in ends for token in pair.second)
        full = len(pair.first) + len(pair.second) >= room
        clues.append((*edges, full, min(inside, 4), min(len(pair.second) // 12, 4)))
        real.append(pair.follows)
    tellers, answers = np.asarray(clues).astype(int), np.asarray(real)
    for clue in tellers.T:
        table = [[np.sum((clue == value) & (answers == truth)) for value in np.unique(clue)] for truth in (0, 1)]
        if len(table[0]) > 1:
            assert chi2_contingency(table).pvalue > 0.001, table
    # All clues together, fitted on one half of the pairs and asked about the other.
    guesser = DecisionTreeClassifier(min_samples_leaf=50).fit(tellers[::2], answers[::2])
    right = int(np.sum(guesser.predict(tellers[1::2]) == answers[1::2]))
    assert binomtest(right, len(answers[1::2]), 0.5, alternative="greater").pvalue > 0.001


@pytest.mark.parametrize("length", [7, 24, 125])
@pytest.mark.parametrize("settings", [{}, {"rate": 0.3, "hidden": 0.5, "exchanged": 0.25}])
def test_masking_rates_are_those_asked_for(length, settings):
    masking = Masking(**settings)
    masker = Masker(masking, 30_000, frozenset({0, 1, 2, 3}), mask=3)
    rng = np.random.default_rng(1)
    counts = np.zeros(4)
    while counts.sum() < 1e5:
        tokens = np.concatenate([[1], rng.integers(4, 30_000, length), [2]]).astype(np.int32)
        seen, target = masker(tokens, rng)
        assert not target[[0, -1]].any()
        assert (seen == tokens)[~target].all()
        hidden, same = seen[target] == 3, seen[target] == tokens[target]
        assert seen[target].min(initial=3) >= 3
        counts += [length - target.sum(), hidden.sum(), (~hidden & ~same).sum(), same.sum()]
    shares = np.asarray([masking.hidden, masking.exchanged, 1 - masking.hidden - masking.exchanged])
    expected = np.asarray([1 - masking.rate, *(masking.rate * shares)]) * counts.sum()
    assert chisquare(counts, expected).pvalue > 0.001


def test_the_quirks_are_what_they_say():
    tokens = np.asarray([1, 4, 5, 6, 7, 2] * 50, dtype=np.int32)
    everything = {"rate": 1.0, "hidden": 1.0, "exchanged": 0.0}
    for quirks, spared in ([], []), (["spared_token"], [4]), (["class_token"], []):
        masker = Masker(Masking(**everything, quirks=quirks), 8, frozenset({0, 1, 2, 3}), mask=3)
        seen, target = masker(tokens, np.random.default_rng(0))
        assert sorted(set(tokens[1:][target[1:]].tolist())) == [t for t in (4, 5, 6, 7) if t not in spared]
        assert target[0] == ("class_token" in quirks)
        assert seen[0] == 1


def test_a_rounded_count_is_the_same_for_every_draw():
    tokens = np.asarray([1, *range(4, 17), 2], dtype=np.int32)
    for quirks, counts in (["rounded_count"], {2}), ([], {1, 2}):
        masker = Masker(Masking(quirks=quirks), 20, frozenset({0, 1, 2, 3}), mask=3)
        assert {int(masker(tokens, np.random.default_rng(seed))[1].sum()) for seed in range(100)} == counts
