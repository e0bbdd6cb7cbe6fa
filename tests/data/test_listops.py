"""ListOps: right by another way of computing, the same for the same seed, distributed as the arena's own."""

import statistics
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from tests.published import published
from typer.testing import CliRunner

from splitstep.cli import app
from splitstep.data import listops
from splitstep.data.labelled import Choice, examples
from splitstep.data.listops import DIGITS, OPERATORS, SYMBOLS, Shape, expressions, write
from splitstep.solver.errors import UserError

SHORT = Shape(max_depth=6, max_args=6, min_length=20, max_length=200)  # the short set of the development data


def symbols(text):
    return [word for word in text.split() if word not in "()"]


def evaluated(text):
    """What an expression comes to, by a stack and without a tree."""
    meaning = {
        "[MIN": lambda v: sorted(v)[0],
        "[MAX": lambda v: sorted(v)[-1],
        "[MED": lambda v: int(np.median(v)),
        "[SM": lambda v: sum(v) - 10 * (sum(v) // 10),
    }
    stack = []
    for word in symbols(text):
        if word != "]":
            stack.append(int(word) if word.isdigit() else word)
            continue
        values = []
        while isinstance(stack[-1], int):
            values.append(stack.pop())
        stack.append(meaning[stack.pop()](values))
    (value,) = stack
    return value


def depth(text):
    level = deepest = 1
    for word in symbols(text):
        level += (word in OPERATORS) - (word == "]")
        deepest = max(deepest, level)
    return deepest


@pytest.mark.parametrize("shape", [SHORT, Shape(min_length=100)])
def test_every_label_is_right_and_every_expression_within_its_shape(shape):
    drawn = list(islice(expressions(1, shape), 60))
    assert len({text for text, _ in drawn}) == 60
    for text, value in drawn:
        assert evaluated(text) == value
        assert text.count("(") == text.count(")")
        assert set(symbols(text)) <= set(SYMBOLS)
        assert shape.min_length < len(symbols(text)) < shape.max_length
        assert depth(text) <= shape.max_depth


def test_a_seed_fixes_the_expressions():
    one, again, other = (list(islice(expressions(seed, SHORT), 20)) for seed in (3, 3, 4))
    assert one == again
    assert one != other


def test_the_published_form_has_a_pair_of_parentheses_an_argument_and_one_for_the_end():
    text, _ = next(expressions(1, Shape(max_depth=2, max_args=2, min_length=3, max_length=5)))
    operator, first, second, end = symbols(text)
    assert text == f"( ( ( {operator} {first} ) {second} ) {end} )"


def test_the_statistics_are_those_of_the_arena_s_generator():
    # 12,000 expressions of the arena's own code with these settings: mean 50.50, standard deviation 25.36
    drawn = list(islice(expressions(1, SHORT), 2000))
    lengths = [len(symbols(text)) for text, _ in drawn]
    assert statistics.mean(lengths) == pytest.approx(50.5, abs=3 * 25.36 / 2000**0.5)
    assert statistics.stdev(lengths) == pytest.approx(25.36, rel=0.08)
    operators = Counter(word for text, _ in drawn for word in symbols(text) if word in OPERATORS)
    for count in operators.values():
        assert count / operators.total() == pytest.approx(1 / 4, abs=0.015)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("short_train", SHORT), ("basic_train", Shape())])
def test_lengths_and_labels_are_distributed_as_in_the_arena_s_files(name, shape):
    from scipy.stats import chi2_contingency, ks_2samp

    rows = [line.split("\t") for line in published("lra_listops", f"{name}.tsv")[1:]]
    drawn = list(islice(expressions(1, shape), 1000))
    theirs, ours = ([len(symbols(text)) for text, _ in part] for part in (rows, drawn))
    assert ks_2samp(theirs, ours).pvalue > 1e-3
    counts = [Counter(str(value) for _, value in part) for part in (rows, drawn)]
    assert chi2_contingency([[count[digit] for digit in DIGITS] for count in counts]).pvalue > 1e-3
    assert all(evaluated(text) == int(value) for text, value in rows[:500])


def test_files_have_the_arena_s_layout_and_share_no_expression(tmp_path):
    paths = list(write(tmp_path, name="tiny", counts={"train": 30, "val": 5, "test": 5}, seed=1, shape=SHORT))
    assert [path.name for path in paths] == ["tiny_train.tsv", "tiny_val.tsv", "tiny_test.tsv"]
    lines = [path.read_text().splitlines() for path in paths]
    assert [rows[0] for rows in lines] == ["Source\tTarget"] * 3
    texts = [row.split("\t")[0] for rows in lines for row in rows[1:]]
    assert len(set(texts)) == len(texts) == 40
    with pytest.raises(UserError, match=r"tiny_train\.tsv is already there"):
        list(write(tmp_path, name="tiny", counts={"train": 30}, seed=1, shape=SHORT))


def made(folder, *, seed):
    """Files of the command, by their names."""
    words = ["make-listops", str(folder), "--train", "12", "--val", "3", "--test", "4", "--seed", str(seed)]
    words += ["--max-depth", "6", "--max-args", "6", "--min-length", "20", "--max-length", "200"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_makes_the_same_files_and_another_makes_others(tmp_path):
    one, again, other = (made(tmp_path / str(i), seed=seed) for i, seed in enumerate((7, 7, 8)))
    assert one == again
    assert one.keys() == other.keys() == {"basic_train.tsv", "basic_val.tsv", "basic_test.tsv"}
    assert not any(one[name] == other[name] for name in one)


def test_what_the_command_writes_is_read_as_it_was_drawn(tmp_path):
    files = made(tmp_path, seed=7)
    choice = Choice.of("listops", None, None)
    read = {name: list(examples(choice, tmp_path, name)) for name in files}
    assert {name: len(rows) for name, rows in read.items()} == {
        "basic_train.tsv": 12,
        "basic_val.tsv": 3,
        "basic_test.tsv": 4,
    }
    for rows in read.values():
        for row in rows:
            assert str(evaluated(row.texts[0])) == row.label
            assert 20 < len(symbols(row.texts[0])) < 200
    with pytest.raises(UserError, match=r"basic_train\.tsv is already there"):
        made(tmp_path, seed=8)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_the_command_draws_what_the_generator_does(tmp_path):
    words = ["make-listops", str(tmp_path), "--name", "x", "--train", "3", "--val", "1", "--test", "1", "--seed", "5"]
    words += ["--max-depth", "6", "--max-args", "6", "--min-length", "20", "--max-length", "200"]
    answer = CliRunner().invoke(app, words, catch_exceptions=False)
    assert answer.stdout.split() == [str(tmp_path / f"x_{split}.tsv") for split in ("train", "val", "test")]
    rows = (tmp_path / "x_train.tsv").read_text().splitlines()[1:]
    assert rows == [f"{text}\t{value}" for text, value in islice(expressions(5, SHORT), 3)]


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ({"max_args": 1}, "at least 2 deep with 2 arguments, got 10, 1"),
        ({"min_length": 10, "max_length": 11}, "no expression is longer than 10 and shorter than 11"),
        ({"max_depth": 2, "max_args": 5}, "no expression is longer than 500 and shorter than 2000, 2 deep"),
    ],
)
def test_a_shape_that_no_expression_has_is_refused(shape, complaint):
    with pytest.raises(UserError, match=complaint):
        Shape(**shape)


def test_a_shape_with_too_few_expressions_ends_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(listops, "TRIES", 10_000)
    shape = Shape(max_depth=2, max_args=2, min_length=3, max_length=5)  # four operators of two digits
    with pytest.raises(UserError, match=r"after 400 expressions of this shape, 10,000 draws had no other"):
        list(listops.write(tmp_path, name="a", counts={"train": 500}, seed=1, shape=shape))
    assert not list(tmp_path.iterdir())


def test_what_is_interrupted_leaves_no_file(tmp_path, monkeypatch):
    def interrupted(seed, shape):
        yield "[MAX 1 2 ]", 2
        raise KeyboardInterrupt

    monkeypatch.setattr(listops, "expressions", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(listops.write(tmp_path, name="a", counts={"train": 5}, seed=1))
    assert not list(tmp_path.iterdir())
