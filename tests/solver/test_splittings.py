from fractions import Fraction
from math import inf

import pytest
import torch

from splitstep.solver.splittings import SPLITTINGS, TERMS, composition, splitting

TABLE = [(part, name) for part, entries in SPLITTINGS.items() for name in entries]
KNOWN_ORDERS = {
    "lie_trotter": 1,
    "lie_trotter_reversed": 1,
    "macaron_decoder": 1,
    "strang": 2,
    "strang_attention": 2,
    "parallel": inf,
    "parallel_then_coupling": 1,
    "suzuki4": 4,
}


@pytest.mark.parametrize(("part", "name"), TABLE)
def test_the_derived_order_is_the_known_one(part, name):
    assert SPLITTINGS[part][name].order == KNOWN_ORDERS[name]


@pytest.mark.parametrize(("part", "name"), TABLE)
def test_a_splitting_advances_every_term_of_its_part(part, name):
    terms = TERMS if part == "decoder" else ("interaction", "convection")
    assert SPLITTINGS[part][name].terms == terms


@pytest.mark.parametrize(("part", "name"), TABLE)
def test_the_derived_order_is_that_of_matrix_exponentials(part, name):
    """Exact sub-flows of linear fields: prod exp(c_i h A_i) against exp(h sum A)."""
    entry = SPLITTINGS[part][name]
    matrices = {term: torch.randn(5, 5, dtype=torch.float64) / 3 for term in entry.terms}

    def local_error(h):
        product = torch.eye(5, dtype=torch.float64)
        for substep in entry.substeps:
            generator = sum(matrices[term] for term in substep.terms)
            product = torch.matrix_exp(float(substep.fraction) * h * generator) @ product
        return float((product - torch.matrix_exp(h * sum(matrices.values()))).norm())

    if entry.order == inf:
        assert local_error(1.0) < 1e-13
    else:
        slope = torch.tensor(local_error(0.1) / local_error(0.05)).log2()
        assert slope == pytest.approx(entry.order + 1, abs=0.15)


@pytest.mark.parametrize(
    ("sentence", "complaint"),
    [
        ("1/2 convection, 1 interaction, 1/3 convection", "fractions of convection must sum to 1, got 5/6"),
        ("1 interaction, 1 convction", "unknown term 'convction'"),
        ("interaction, convection", "'interaction' is no sub-step"),
        ("1/0 interaction, 1 convection", "'1/0 interaction' is no sub-step"),
        ("0 interaction, 1 interaction, 1 convection", "does nothing"),
        ("1 interaction + interaction, 1 convection", "different terms"),
        ("1/2 convection, 1/2 interaction + convection, 1/2 interaction", "convection at 1/2"),
    ],
)
def test_a_wrong_splitting_is_refused_when_built(sentence, complaint):
    with pytest.raises(ValueError, match=complaint):
        splitting(sentence)


def test_each_term_keeps_its_own_clock():
    strang = SPLITTINGS["encoder"]["strang"]
    assert strang.clocks == (0, 0, Fraction(1, 2))
    assert strang.occurrences == ({"convection": 0}, {"interaction": 0}, {"convection": 1})


def test_a_composition_merges_neighbours():
    halves = composition("1/2 convection, 1 interaction, 1/2 convection", "1/2 1/2")
    assert str(halves) == "1/4 convection, 1/2 interaction, 1/2 convection, 1/2 interaction, 1/4 convection"
    assert halves.order == 2


@pytest.mark.parametrize(
    "sentence",
    [
        "1/2 interaction + convection, 1/2 convection + interaction",
        "1/3 interaction, 2/3 interaction",
        "1/2 convection, 1 interaction, -1 interaction, -1/2 convection, 1 interaction + convection",
    ],
)
def test_what_is_split_in_time_alone_is_exact(sentence):
    assert splitting(sentence).order == inf


def test_a_splitting_reads_as_written():
    for entries in SPLITTINGS.values():
        for entry in entries.values():
            assert splitting(str(entry)) == entry
