import numpy as np
import pytest

from splitstep.data.batches import Plan, Stream


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_example_shown_again_has_another_turn(repeats):
    plan = Plan(np.ones(50, np.int64), 1, examples=8, repeats=repeats)
    shown = [key for update in plan.epoch(0) for key in zip(update.indices, update.turns, strict=True)]
    assert len(set(shown)) == len(shown) == 48
    assert {turn for _, turn in shown} == set(range(repeats))
    assert len({index for index, _ in shown}) == 48 // repeats


@pytest.mark.parametrize("pieces", [1, 2, 3, 11])
def test_cutting_an_update_keeps_its_examples_and_turns(pieces):
    plan = Plan(np.ones(50, np.int64), 1, examples=8, repeats=3)
    stream = list(Stream(plan, 12, pieces=pieces))
    assert len(stream) == 12 * pieces
    for number, update in zip(range(12), plan.updates(), strict=False):
        mine = [piece for piece in stream[number * pieces : (number + 1) * pieces] if piece.counted]
        np.testing.assert_array_equal(np.concatenate([piece.indices for piece in mine]), update.indices)
        assert {piece.epoch for piece in mine} == {update.epoch} == {0 if number < 6 else 1}
        assert [piece.update.number for piece in mine] == [number % 6] * len(mine)
