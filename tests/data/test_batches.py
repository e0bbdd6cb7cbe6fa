"""Batches are a pure function of seed, epoch and lengths, however the work is shared."""

import os
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitstep.data.batches import Plan, Stream
from splitstep.data.cache import Ragged, cached
from splitstep.solver.errors import UserError

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=200).map(np.asarray)


@given(lengths, st.integers(50, 400), st.integers(0, 5))
def test_token_batches_hold_every_example_once_and_stay_within_the_budget(lengths, tokens, epoch):
    batches = [update.indices for update in Plan(lengths, 1, tokens=tokens).epoch(epoch)]
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert all(len(batch) * lengths[batch].max() <= tokens for batch in batches)


@given(lengths, st.integers(1, 40), st.integers(1, 9))
def test_batches_of_examples_are_all_of_one_size(lengths, size, window):
    batches = [update.indices for update in Plan(lengths, 1, examples=size, window=window).epoch(0)]
    seen = np.concatenate(batches)
    assert len(set(seen.tolist())) == len(seen)
    assert {len(batch) for batch in batches} == {min(size, len(lengths))}
    assert len(lengths) - len(seen) < size


@given(lengths, st.integers(1, 20), st.integers(2, 9), st.integers(1, 3))
def test_a_window_deals_the_same_examples_out_by_length(lengths, size, window, repeats):
    """Whatever is in a window stays in it, in its turn; inside it updates do not overlap in length."""
    drawn, dealt = (Plan(lengths, 1, examples=size, repeats=repeats, window=chosen).epoch(0) for chosen in (1, window))
    found = {_shown(update): lengths[update.indices] for update in dealt}
    assert len(found) == len(drawn)
    for start in range(0, len(drawn), window):
        pool = {pair for update in drawn[start : start + window] for pair in _shown(update)}
        inside = [found.pop(shown) for shown in list(found) if shown <= pool]
        assert sum(map(len, inside)) == len(pool)
        inside.sort(key=lambda held: (held.max(), held.min()))
        assert all(one.max() <= other.min() for one, other in pairwise(inside))
    assert not found


def _shown(update):
    return frozenset(zip(update.indices.tolist(), update.turns.tolist(), strict=True))


def test_a_window_spares_padding():
    """Lengths as those of short sentences: half of the places are padding when drawn, a tenth in windows."""
    lengths = 3 + np.random.default_rng(0).geometric(1 / 12, 5000)
    drawn, dealt = (Plan(lengths, 1, examples=32, window=window).padding() for window in (1, 50))
    assert dealt < 0.1 < 0.5 < drawn


def test_epochs_differ_and_repeat():
    plan = Plan(np.arange(1, 60), 3, tokens=100)
    first, again, second, other = (
        [update.indices.tolist() for update in chosen.epoch(number)]
        for chosen, number in ((plan, 0), (plan, 0), (plan, 1), (Plan(plan.lengths, 4, tokens=100), 0))
    )
    assert first == again
    assert first not in (second, other)


@given(lengths, st.integers(1, 4), st.integers(1, 3))
def test_however_an_update_is_shared_its_examples_stay(lengths, world, accumulation):
    plan, pieces = Plan(lengths, 0, tokens=60), world * accumulation
    streams = [list(Stream(plan, 5, pieces=pieces, rank=rank, world=world)) for rank in range(world)]
    assert {len(stream) for stream in streams} == {5 * accumulation}
    for number, update in enumerate(islice(plan.updates(), 5)):
        shares = [
            piece
            for stream in streams
            for piece in stream[number * accumulation : (number + 1) * accumulation]
            if piece.counted
        ]
        assert sorted(np.concatenate([piece.indices for piece in shares])) == sorted(update.indices)


def test_what_cannot_be_batched_is_refused():
    with pytest.raises(UserError, match="tokens_per_update = 10 is less than the longest example, 12"):
        Plan(np.asarray([3, 12]), 0, tokens=10)
    with pytest.raises(UserError, match="not one training example"):
        Plan(np.asarray([], dtype=np.int64), 0, examples=1)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=12))
def test_ragged_sequences_come_back_from_memory_and_from_a_file(tmp_path_factory, sequences):
    path = tmp_path_factory.mktemp("ragged") / "train.source"
    Ragged.write(path, iter(sequences))
    for ragged in (Ragged.of(sequences), Ragged.open(path)):
        assert [ragged[i].tolist() for i in range(len(ragged))] == sequences
        assert ragged.lengths.tolist() == [len(sequence) for sequence in sequences]


def test_a_cache_is_filled_once_and_never_by_halves(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path))
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "a").write_text("made")
        if len(calls) == 1:
            raise RuntimeError("cut short")

    with pytest.raises(RuntimeError):
        cached({"a": 1}, build)
    assert [path.name for path in tmp_path.iterdir()] == [".locks"]
    assert (cached({"a": 1}, build) / "a").read_text() == "made"
    cached({"a": 1}, build)
    assert len(calls) == 2
    cached({"a": 2}, build)
    assert len(calls) == 3


def test_what_a_killed_process_left_in_the_cache_gives_way(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path))

    def killed(folder):
        (folder / "half").write_text("made")
        os._exit(9)

    for _ in range(2):
        if (child := os.fork()) == 0:
            cached({"a": 1}, killed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.glob("*.unfinished"))) == 1
    folder = cached({"a": 1}, lambda folder: (folder / "whole").write_text("made") and None)
    assert {path.name for path in folder.iterdir()} == {"whole", "notes.json", "made_from.json"}
    assert not list(tmp_path.glob("*.unfinished"))


def test_of_two_sides_both_are_hardly_padded():
    """Sides of like length, as in translation: less than 5 % of the places are padding, and 7 % without the tilts."""
    rng = np.random.default_rng(0)
    first = np.clip(rng.normal(14, 4, 20_000), 4, 45).astype(np.int64)
    second = np.clip(first + rng.normal(0, 2.5, 20_000).round().astype(np.int64), 3, 60)
    wastes = []
    for tilts in (first - second, None):
        plan = Plan(np.maximum(first, second), 1, tokens=4096, tilts=tilts)
        updates = [update.indices for update in plan.epoch(0)]
        assert sorted(np.concatenate(updates)) == list(range(20_000))
        places = sum(len(indices) * side[indices].max() for indices in updates for side in (first, second))
        wastes.append(1 - (first.sum() + second.sum()) / places)
        assert tilts is None or plan.padding() == pytest.approx(wastes[-1])
    assert wastes[0] < 0.05 < wastes[1]


def test_padding_is_what_the_longest_of_an_update_adds():
    assert Plan(np.array([3, 3, 3, 3]), 1, examples=2).padding() == 0
    assert Plan(np.array([1, 3]), 1, examples=2).padding() == pytest.approx(2 / 6)
    assert Plan(np.array([2, 3]), 1, examples=2, tilts=np.array([1, -2])).padding() == pytest.approx(3 / 10)
