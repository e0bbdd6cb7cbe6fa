from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitstep.solver.tableaus import TABLEAUS, rooted_trees, tableau

# What the literature gives each method; the coefficients must yield it by themselves.
KNOWN_ORDERS = {
    "euler": 1,
    "midpoint": 2,
    "heun": 2,
    "ralston": 2,
    "kutta3": 3,
    "rk4": 4,
    "rk4_38": 4,
    "bogacki_shampine": 3,
    "dopri5": 5,
}


@pytest.mark.parametrize("name", TABLEAUS)
def test_the_derived_order_is_the_known_one(name):
    assert TABLEAUS[name].order == KNOWN_ORDERS[name]


def test_embedded_weights_are_one_order_lower():
    pairs = {name: entry.embedded_order for name, entry in TABLEAUS.items() if entry.adaptive}
    assert pairs == {"bogacki_shampine": 2, "dopri5": 4}


def test_there_are_as_many_rooted_trees_as_cayley_counted():
    assert [len(set(rooted_trees(size))) for size in range(1, 8)] == [1, 1, 2, 4, 9, 20, 48]


@given(data=st.data(), name=st.sampled_from(list(TABLEAUS)))
def test_a_moved_weight_is_refused_or_lowers_the_order(data, name):
    entry = TABLEAUS[name]
    index = data.draw(st.integers(0, entry.stages - 1))
    shift = data.draw(st.fractions(min_value="1/100", max_value=1))
    moved = list(entry.b)
    moved[index] += shift
    with pytest.raises(ValueError, match="must sum to 1"):
        replace(entry, b=tuple(moved))
    if entry.stages > 1:
        moved[index - 1] -= shift
        assert replace(entry, b=tuple(moved)).order < entry.order


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0 |\n1/2 | 1/3\n | 0 1", "row 2 must sum to its node 1/2, got 1/3"),
        ("0 |\n1 | 1\n | 1/2 1/3", "must sum to 1"),
        ("0 |\n1 | 1 0\n | 1/2 1/2", "stage 2 of an explicit method has 1 entries"),
        ("0 |\n1 | 1\n | 1", "do not fit"),
        ("0 |\n1 | 1", "ends with one row of weights"),
        ("0\n | 1", "one bar"),
        ("0 |\n | one", "Fraction"),
    ],
)
def test_a_wrong_tableau_is_refused_when_built(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        tableau(text)


def test_a_tableau_reads_as_printed():
    rk4 = TABLEAUS["rk4"]
    assert rk4.c == (0, Fraction(1, 2), Fraction(1, 2), 1)
    assert rk4.a[3] == (0, 0, 1)
    assert rk4.b == tuple(Fraction(n, 6) for n in (1, 2, 2, 1))
