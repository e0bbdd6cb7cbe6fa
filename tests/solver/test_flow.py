import sys
from math import factorial

import pytest
import torch
import torchdiffeq

from splitstep.solver.errors import RunError, UserError
from splitstep.solver.flow import BudgetError, Equation, integrate
from splitstep.solver.schedules import Schedule
from splitstep.solver.schemes import Tolerance, scheme
from splitstep.solver.tableaus import TABLEAUS

FIXED = [name for name, entry in TABLEAUS.items() if not entry.adaptive]
ADAPTIVE = [name for name, entry in TABLEAUS.items() if entry.adaptive]


def solve(f, x, *, integrator, steps=4, splitting="parallel", tolerance=Tolerance(), checkpointing=False):
    chosen = scheme("encoder", splitting=splitting, integrator=integrator, tolerance=tolerance)
    halves = {"interaction": lambda x, t: 0.3 * f(x, t), "convection": lambda x, t: 0.7 * f(x, t)}
    return integrate(
        x,
        schedule=Schedule(num_layers=steps, num_independent_layers=1, step_size=1 / steps),
        scheme=chosen,
        dynamics=Equation(halves, scheme=chosen),
        checkpointing=checkpointing,
    )


def wave(x, t):
    return torch.sin(x.flip(-1)) + torch.cos(3 * torch.as_tensor(t, dtype=x.dtype)) * x.tanh()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("euler", "euler"), ("midpoint", "midpoint"), ("heun", "heun2"), ("rk4_38", "rk4")],
)
def test_fixed_steps_agree_with_torchdiffeq(ours, theirs):
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    grid = torch.linspace(0, 1, 5, dtype=torch.float64)
    expected = torchdiffeq.odeint(lambda t, x: wave(x, t), x, grid, method=theirs)[-1]
    torch.testing.assert_close(solve(wave, x, integrator=ours), expected, atol=1e-14, rtol=0)


def test_torchdiffeq_does_not_have_the_classical_rk4():
    """Its "rk4" is the 3/8 rule, so ours is compared with the Taylor series below."""
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    assert (solve(wave, x, integrator="rk4") - solve(wave, x, integrator="rk4_38")).abs().max() > 1e-9


@pytest.mark.parametrize("integrator", FIXED)
def test_one_step_of_a_linear_field_is_its_taylor_series(integrator):
    """The solution of x' = A x is sum_k A^k / k! x up to the order of the method, when it has as many stages."""
    order = TABLEAUS[integrator].order
    assert TABLEAUS[integrator].stages == order
    matrix = torch.randn(4, 4, dtype=torch.float64)
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    series = sum(torch.linalg.matrix_power(matrix, k) / factorial(k) for k in range(order + 1))
    torch.testing.assert_close(solve(lambda x, t: x @ matrix, x, integrator=integrator, steps=1), x @ series)


@pytest.mark.parametrize("integrator", FIXED)
@pytest.mark.parametrize("splitting", ["parallel", "strang"])
def test_gradients_are_those_of_finite_differences(integrator, splitting):
    x = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: solve(wave, x, integrator=integrator, splitting=splitting, steps=2), x)


@pytest.mark.parametrize("integrator", ADAPTIVE)
def test_gradients_of_adaptive_steps_are_those_of_finite_differences(integrator):
    x = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    fine = Tolerance(rtol=1e-7, atol=1e-7)
    assert torch.autograd.gradcheck(lambda x: solve(wave, x, integrator=integrator, tolerance=fine, steps=1), x)


@pytest.mark.parametrize("integrator", ADAPTIVE)
def test_adaptive_steps_keep_their_tolerance(integrator):
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    found = solve(wave, x, integrator=integrator, steps=1, tolerance=Tolerance(1e-7, 1e-7))
    torch.testing.assert_close(found, solve(wave, x, integrator="rk4", steps=256), atol=1e-6, rtol=0)


@pytest.mark.parametrize("integrator", ADAPTIVE)
def test_adaptive_sub_steps_leave_the_error_of_the_splitting(integrator):
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    exact = solve(wave, x, integrator="rk4", steps=256)
    coarse, fine = (
        solve(wave, x, integrator=integrator, steps=steps, splitting="strang", tolerance=Tolerance(1e-7, 1e-7)) - exact
        for steps in (16, 32)
    )
    assert (coarse.norm() / fine.norm()).log2() == pytest.approx(2, abs=0.1)


def test_the_budget_of_evaluations_ends_in_a_clear_error():
    stiff = lambda x, t: -5000 * x * (1 + x**2)  # noqa: E731
    with pytest.raises(BudgetError, match=r"dopri5 spent its 50 evaluations at t = .* raise max_evaluations"):
        solve(stiff, torch.ones(1, 1, 1), integrator="dopri5", tolerance=Tolerance(max_evaluations=50))
    assert issubclass(BudgetError, RunError)  # which the command line says in a line


def test_adaptive_steps_without_torchdiffeq_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(UserError, match=r"'dopri5' needs torchdiffeq: pip install 'splitstep\[adaptive\]'"):
        solve(wave, torch.ones(1, 1, 1), integrator="dopri5")


def test_a_wrong_tolerance_is_refused():
    with pytest.raises(UserError, match="rtol must be positive and finite, got -1"):
        Tolerance(rtol=-1)
    with pytest.raises(UserError, match="atol must be positive and finite, got nan"):
        Tolerance(atol=float("nan"))


def test_the_residual_lives_in_the_integrator_alone():
    """With f(x) = x one step of Heun gives 2.5 x and of RK4 2.708333 x; a second residual would give more."""
    x = torch.ones(1, 1, 1, dtype=torch.float64)
    identity = lambda x, t: x  # noqa: E731
    assert solve(identity, x, integrator="heun", steps=1).item() == pytest.approx(2.5)
    assert solve(identity, x, integrator="rk4", steps=1).item() == pytest.approx(2.7083333333)
