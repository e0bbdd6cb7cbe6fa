import pytest

from splitstep.solver.errors import UserError, lookup


def test_an_unknown_name_is_told_what_is_allowed_and_what_is_near():
    with pytest.raises(UserError) as error:
        lookup("integrator", "rk5", {"euler": 1, "rk4": 2})
    assert str(error.value) == "unknown integrator 'rk5'; choose from euler, rk4 (did you mean 'rk4'?)"


def test_of_many_names_only_the_near_one_is_told():
    table = {f"name{i}": i for i in range(40)}
    with pytest.raises(UserError) as error:
        lookup("scheme", "nam7", table)
    assert str(error.value) == "unknown scheme 'nam7'; did you mean 'name7'?"
    with pytest.raises(UserError, match=r"choose from name0, name1, .*, name39$"):
        lookup("scheme", "zzz", table)


def test_a_name_that_is_near_to_nothing_gets_no_hint():
    with pytest.raises(UserError, match=r"choose from euler$"):
        lookup("integrator", "zzz", {"euler": 1})
