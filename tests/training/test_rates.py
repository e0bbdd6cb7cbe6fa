"""Learning rates at the values the papers' systems have."""

import pytest

from splitstep.recipe import Training
from splitstep.training.rates import RATES, rate

BASE = {"updates": 100, "batch_size": 1}


def rates(updates, *, total=100_000, width=512, **settings):
    training = Training(**BASE, **settings)
    return [rate(training, update, total=total, width=width) for update in updates]


def test_fairseq_s_inverse_square_root():
    found = rates([0, 1, 8000, 32_000], learning_rate=1.5e-3, warmup=8000, warmup_init=1e-7, schedule="inverse_sqrt")
    assert found == pytest.approx([1e-7, 1e-7 + (1.5e-3 - 1e-7) / 8000, 1.5e-3, 7.5e-4])


def test_transevolve_s_own():
    found = rates([0, 7999, 15_999, 63_999, 299_999], learning_rate=0.5, warmup=16_000, schedule="transevolve")
    assert found == pytest.approx([1.0918e-8, 8.7346e-5, 1.74693e-4, 8.7346e-5, 4.03436e-5], rel=1e-4)


def test_linear_and_cosine_end_where_they_should():
    for schedule in ("linear", "cosine"):
        settings = {"learning_rate": 1.0, "warmup": 10, "min_learning_rate": 0.1, "schedule": schedule}
        found = rates([0, 5, 10, 55, 100], total=100, **settings)
        assert found == pytest.approx([0, 0.5, 1, 0.55, 0.1])


def test_restarts_lengthen_and_shrink():
    settings = {"learning_rate": 1.0, "schedule": "cosine_restarts", "period": 10, "period_factor": 2.0, "shrink": 0.5}
    found = rates([0, 5, 10, 20, 30], **settings)
    assert found == pytest.approx([1, 0.5, 0.5, 0.25, 0.25])


@pytest.mark.parametrize("schedule", RATES)
def test_every_schedule_is_positive_after_the_first_update_and_never_above_its_peak(schedule):
    settings = {"learning_rate": 1.0, "warmup": 10, "schedule": schedule, "period": 20}
    found = rates(range(1, 99), total=100, **settings)
    assert all(0 < value <= 1 for value in found)
