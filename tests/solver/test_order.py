"""The order that the coefficients promise is the order that the real fields show."""

import json
import subprocess
import sys

import pytest

from splitstep.solver.schemes import fixed_step_schemes, scheme


@pytest.fixture(scope="module")
def table():
    """What `splitstep order --json` prints: the command a user would check us with."""
    command = [sys.executable, "-m", "splitstep", "order", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    return json.loads(answer.stdout)


def test_derived_order_is_measured_order(table):
    assert [(row["part"], row["splitting"], row["integrator"]) for row in table] == fixed_step_schemes()
    for row in table:
        assert row["settled"], row
        assert row["measured"] == pytest.approx(row["derived"], abs=0.1), row


@pytest.mark.parametrize(
    ("part", "splitting", "integrator", "order"),
    [
        ("encoder", "lie_trotter", "euler", 1),
        ("encoder", "strang", "euler", 1),
        ("encoder", "strang", "midpoint", 2),
        ("encoder", "parallel", "rk4", 4),
        ("encoder", "suzuki4", "rk4", 4),
        ("encoder", "lie_trotter", "rk4", 1),
        ("decoder", "macaron_decoder", "rk4", 1),
        ("decoder", "strang", "rk4", 2),
    ],
)
def test_the_orders_that_the_papers_argue_about(part, splitting, integrator, order):
    assert scheme(part, splitting=splitting, integrator=integrator).order == order


@pytest.mark.parametrize(("part", "splitting", "integrator"), fixed_step_schemes())
def test_the_lower_order_is_exact_because_leading_errors_do_not_cancel(part, splitting, integrator):
    chosen = scheme(part, splitting=splitting, integrator=integrator)
    if chosen.tableau.order < chosen.splitting.order:
        assert any(chosen.leading_errors.values())
