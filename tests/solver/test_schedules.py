import pytest

from splitstep.solver.errors import UserError
from splitstep.solver.schedules import Schedule


@pytest.mark.parametrize("independent", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("inner", [1, 3])
def test_every_weight_set_serves_equally_many_consecutive_layers(independent, inner):
    steps = Schedule(num_layers=12, num_independent_layers=independent, steps_per_layer=inner).steps
    used = [step.weights for step in steps]
    assert used == sorted(used)
    assert [used.count(k) for k in range(independent)] == [12 // independent * inner] * independent


@pytest.mark.parametrize("inner", [1, 2, 5])
def test_steps_follow_each_other_and_span_the_same_time(inner):
    steps = Schedule(num_layers=6, num_independent_layers=6, step_size=0.5, steps_per_layer=inner).steps
    ends = [step.t + step.gamma for step in steps]
    assert [step.t for step in steps] == pytest.approx([0.0, *ends[:-1]])
    assert ends[-1] == pytest.approx(3.0)
    assert [step.layer for step in steps] == [layer for layer in range(6) for _ in range(inner)]


def test_drop_path_grows_linearly_with_depth():
    steps = Schedule(num_layers=5, num_independent_layers=5, drop_path=0.2).steps
    assert [step.drop_path for step in steps] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_segments_begin_and_end_together():
    steps = Schedule(num_layers=6, num_independent_layers=6, steps_per_layer=2, num_segments=2).steps
    assert [step.number for step in steps if step.begins_segment] == [0, 6]
    assert [step.number for step in steps if step.ends_segment] == [5, 11]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"num_independent_layers": 5}, "num_independent_layers = 5 does not divide 12 layers; .* 1, 2, 3, 4, 6, 12"),
        ({"num_segments": 7}, "num_segments = 7 does not divide"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"steps_per_layer": 0}, "steps_per_layer must be at least 1"),
        ({"step_size": 0.0}, "step_size must be positive"),
        ({"step_size": float("nan")}, "step_size must be positive"),
        ({"step_size": float("inf")}, "step_size must be positive and finite"),
        ({"drop_path": 1.0}, "drop_path must lie in"),
    ],
)
def test_a_wrong_schedule_is_refused(wrong, complaint):
    with pytest.raises(UserError, match=complaint):
        Schedule(**{"num_layers": 12, "num_independent_layers": 12} | wrong)
