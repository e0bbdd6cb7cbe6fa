"""What a report shows of results that are given."""

import json
import shlex

import pytest
from tests import corpora

from splitstep.recipe import recipe
from splitstep.reports import drawing, page, tables
from splitstep.reports.published import beside
from splitstep.reports.read import results_of
from splitstep.solver.errors import UserError
from splitstep.tables import toml

COSTS = ("parameters", "body", "flops", "seconds", "peak_memory_bytes", "latency_seconds", "tokens_per_second")
HELD = {"difference": -0.0112, "interval": [-0.02, 0.01], "p_value": 0.01, "p_corrected": 0.02, "verdict": "worse"}


def _row(name, *values, **further):
    row = {"name": name, "metric": "accuracy", "values": list(values), "evaluations_per_layer": {}, "runs": []}
    mean = sum(values) / len(values) if values else None
    return row | dict.fromkeys(COSTS, 1.0) | {"mean": mean, "std": None, "adjusted": {}, "failed": {}} | further


def _results(*rows):
    about = {"task": "images", "metric": "accuracy", "split": "test", "match": "none", "seeds": 3, "pairs": 2}
    return about | {"schemes": list(rows)}


def _folder(folder, results):
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_the_number_of_seeds_is_shown_where_it_differs():
    few = _results(_row("transformer", 0.5, 0.6, 0.7), _row("macaron", 0.4, **HELD, test="one"), _row("parallel"))
    assert [row["seeds"] for row in tables.rows(few)] == ["3", "1", "0"]
    assert "3 seeds, but macaron 1)" in tables.sentence(few)
    same = _results(_row("transformer", 0.5, 0.6), _row("macaron", 0.4, 0.5, **HELD, test="two"))
    assert "seeds" not in tables.rows(same)[0]
    quality = ["difference", "p", "verdict", "parameters", "training"]
    assert list(tables.brief(tables.rows(few)[0])) == ["scheme", "accuracy", "seeds", *quality]
    assert list(tables.brief(tables.rows(same)[0])) == ["scheme", "accuracy", *quality]
    assert "; 2 seeds)" in tables.sentence(same)


def test_the_terms_name_the_test_of_each_scheme_where_they_differ_and_what_is_corrected():
    rows = [_row(name, 0.4, **HELD, test=test) for name, test in {"a": "by seeds", "b": "by examples"}.items()]
    said = tables.terms(_results(_row("transformer", 0.5), *rows))
    assert "by seeds (a); by examples (b)" in said
    assert "by itself; p and verdict are corrected for all 2 pairs" in said
    assert "by seeds." in tables.terms(_results(_row("transformer", 0.5), rows[0]))


def test_every_row_says_what_became_of_its_scheme():
    base = _row("transformer", 0.5)
    results = _results(base, _row("a", 0.4, **HELD), _row("b", 0.4), _row("c", failed={"seed-1": "out of luck"}))
    verdicts = [row["verdict"] for row in tables.rows(results)]
    assert verdicts == ["baseline", "worse", "no seed in common with the baseline", "failed"]
    assert tables.sentence(results).endswith("a: worse; b: no seed in common with the baseline; c: failed.")
    assert tables.failures(results) == ["c, seed-1: out of luck"]


def test_a_verdict_of_one_seed_or_of_the_runs_that_were_left_says_so():
    failed = {"seed-2": "out of luck"}
    base = _row("transformer", 0.5, 0.6, failed=failed)
    held = HELD | {"common_seeds": 1}
    results = _results(base, _row("a", 0.4, **held), _row("b", 0.4, 0.5, **HELD, failed=failed))
    verdicts = [row["verdict"] for row in tables.rows(results)]
    assert verdicts == ["baseline; 1 of 3 runs failed", "worse by one seed", "worse; 1 of 3 runs failed"]
    assert "(55.00 %; 2 seeds, but a 1; 1 of its runs failed)" in tables.sentence(results)
    assert tables.sentence(results).endswith("a: worse by one seed; b: worse; 1 of 3 runs failed.")


@pytest.mark.parametrize(
    ("p", "said"),
    [(0.0, "<0.001"), (0.0004, "<0.001"), (0.0014, "0.001"), (0.04996, "0.04996"), (0.0501, "0.050"), (1.0, "1.000")],
)
def test_a_chance_is_rounded_to_no_other_verdict(p, said):
    assert tables.chance(p, {"level": 0.05}) == said


def test_scores_between_0_and_1_keep_the_digits_in_which_they_differ():
    row = _row("a", 0.4282, metric="matthews", difference=0.0048, interval=[0.0011, 0.0082])
    assert (tables.quality(row), tables.gap(row)) == ("0.4282", "+0.0048 [0.0011, 0.0082]")


def test_what_was_to_be_equal_is_shown_as_it_was_reached():
    results = _results(_row("a", 0.5, seconds=100.0), _row("b", 0.4, seconds=84.0)) | {"match": "seconds"}
    assert "equal seconds of training were aimed at (reached, against a: b 0.84)" in tables.terms(results)


def test_runs_of_several_commits_are_said_to_be():
    results = _results(_row("a", 0.5), _row("b", 0.4)) | {"commits": ["0" * 40]}
    assert "versions" not in tables.terms(results)
    several = results | {"commits": ["0" * 40, "1" * 40 + " with changes"]}
    assert "made by 2 versions of the code: 00000000, 11111111 with changes." in tables.terms(several)


def test_a_run_names_its_commit_with_what_was_changed_and_a_recipe_that_is_there(tmp_path):
    folder = _run(tmp_path / "a run", accuracy=0.5)
    (folder / "environment.json").write_text(json.dumps({"seed": 1, "commit": "1" * 40 + " with changes"}))
    path = page.write([folder], tmp_path / "report")
    for shown in (path.read_text(), (path.parent / "report.md").read_text()):
        assert "11111111 with changes" in shown
    command = next(line for line in (path.parent / "report.md").read_text().splitlines() if "splitstep train" in line)
    (named,) = (word for word in shlex.split(command) if word.endswith("recipe.toml"))
    assert (path.parent / named).is_file()


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([[2], [2]], "that the runs took, 2 side by side."),
        ([[1], [1]], "that the runs took, one at a time."),
        ([[2], [1, 2]], "that the runs took: 2 side by side (a); one at a time or 2 side by side (b)."),
        ([[], []], "that the runs took."),
    ],
)
def test_it_is_said_how_many_runs_were_at_work_together(numbers, said):
    rows = [_row(name, 0.5, side_by_side=found) for name, found in zip("ab", numbers, strict=True)]
    assert said in tables.terms(_results(*rows))


def test_the_terms_say_on_how_much_was_measured_what_is_better_and_what_else_differs():
    besides = {"hidden_act": ["relu", "gelu"]}
    results = _results(_row("a", 9.0), *(_row(name, 8.0, besides=besides) for name in "bc"))
    said = tables.terms(results | {"metric": "perplexity", "tested": {"count": 2500, "unit": "documents"}})
    assert "measured on the test split (2,500 documents). Lower perplexity is better." in said
    assert said.endswith("as its paper has it: b, c: hidden_act = relu (baseline: gelu).")
    assert "Lower" not in tables.terms(results)


def test_an_interval_of_one_seed_looks_less_sure():
    rows = [_row("b", 0.4, **HELD, common_seeds=1), _row("c", 0.4, **HELD, common_seeds=3)]
    drawn = drawing.differences({"one": _results(_row("a", 0.5), *rows)})
    assert drawn.count('stroke-width="2" stroke-dasharray') == 1
    for end in ("-2.00 points", "+2.00 points"):
        assert f">{end}</text>" in drawn


@pytest.mark.parametrize(("seconds", "said"), [(99.4, "99 s"), (328, "5.5 min"), (274, "4.6 min"), (8000, "2.2 h")])
def test_a_duration_keeps_the_digits_that_tell_schemes_apart(seconds, said):
    assert tables.duration(seconds) == said


def test_percentages_differ_by_points():
    row = _row("macaron", 0.85, **HELD)
    assert tables.gap(row) == "-1.12 points [-2.00, 1.00]"
    assert tables.quality(row | {"std": 0.002}) == "85.00 ± 0.20 %"
    assert tables.gap(row | {"metric": "bleu", "difference": 1.5, "interval": [1, 2]}) == "+1.50 [1.00, 2.00]"


def test_a_run_alone_is_a_whole_sentence():
    said = tables.sentence(_results(_row("transformer", 0.5)) | {"seeds": 1})
    assert said == "images, accuracy of transformer: 50.00 % (one seed: luck in training is not counted)."


def test_a_split_that_chose_the_checkpoints_is_named():
    rows = _results(_row("transformer", 0.5), _row("macaron", 0.4, **HELD))
    for split, weights, said in (
        ("valid", "best", "measured on the valid split, which also chose each run's checkpoint."),
        ("valid", "last", "measured on the valid split."),
        ("test", "best", "measured on the test split."),
    ):
        assert said in tables.terms(rows | {"split": split, "weights": weights})


def test_results_without_the_parameters_in_the_layers_can_be_shown(tmp_path):
    rows = [_row("transformer", 0.5), _row("macaron", 0.4, **HELD)]
    for row in rows:
        del row["body"]
    folder = _folder(tmp_path / "a", _results(*rows))
    assert "| 1 | - | - | - | 1 |" in page.markdown([folder])
    assert "<section>" in page.page([folder])


def test_no_report_takes_the_place_of_results(tmp_path):
    one, other = (_folder(tmp_path / name, _results(_row("transformer", 0.5))) for name in "ab")
    before = (one / "results.json").read_text()
    for folders in ([one, other], [other]):
        with pytest.raises(UserError, match=r"a/results.json is no report's and would be overwritten"):
            page.write(folders, one)
    assert (one / "results.json").read_text() == before
    for _ in range(2):
        page.write([one, other], tmp_path / "report")
        page.write([one], one)
    assert (one / "results.json").read_text() == before
    with pytest.raises(UserError, match=r"report is a report; name the folders in it: .*report/a, .*report/b"):
        results_of(tmp_path / "report")


def test_no_two_schemes_look_the_same():
    looks = [page.look(index) for index in range(len(page.COLOURS) * len(page.DASHES))]
    assert len(set(looks)) == len(looks)


SCHEMES = {
    "parallel": {"model": {"preset": "parallel", "dropout": 0.0}},
    "macaron": {"model": {"preset": "macaron", "dropout": 0.0}},
}


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{"model.preset": "parallel", "value": 1}], [["parallel"]]),
        ([{"model.preset": "parallel", "model.dropout": 0.1, "value": 1}], [[]]),
        ([{"model.dropout": 0.0, "value": 1}, {"value": 2}], [["parallel", "macaron"], []]),
        ([{"value": 1}], [["macaron"]]),
    ],
)
def test_a_published_row_stands_beside_the_schemes_that_have_its_settings(rows, names):
    found = beside({"rows": rows}, SCHEMES, lambda name: [2.0, 4.0], preset="macaron")["rows"]
    assert [[own["scheme"] for own in row["here"]] for row in found] == names
    assert all(own["mean"] == 3 for row in found for own in row["here"])


def test_a_published_row_is_not_of_a_scheme_that_changes_what_it_does_not_name():
    schemes = {
        "parallel": {"model": {"preset": "parallel", "num_independent_layers": 12}},
        "parallel/num_independent_layers=1": {"model": {"preset": "parallel", "num_independent_layers": 1}},
    }
    rows = [{"model.preset": "parallel"}, {"model.num_independent_layers": 12}, {"model.num_independent_layers": 1}]
    changed = {"parallel/num_independent_layers=1": ["model.num_independent_layers"]}
    found = beside({"rows": rows}, schemes, lambda name: [1.0], preset="parallel", changed=changed)["rows"]
    names = [[own["scheme"] for own in row["here"]] for row in found]
    assert names == [["parallel"], ["parallel"], ["parallel/num_independent_layers=1"]]


@pytest.mark.parametrize(("convention", "here"), [("detokenized", "transformer: 12.00"), ("wmt", "-")])
def test_the_bleu_of_a_run_stands_beside_the_published_one_of_the_same_convention(tmp_path, convention, here):
    published = {"source": "A paper.", "metric": "bleu", "convention": convention, "rows": [{"value": 27.3}]}
    whole = recipe(corpora.translation_recipe(tmp_path)).settings() | {"published": published}
    measured = {"bleu": 12.0, "signature": "nrefs:1"}
    results = {"task": "translation", "metric": "bleu", "metrics": {"test": measured}, "parameters": {"total": 1}}
    folder = _folder(tmp_path / "run", results)
    (folder / "recipe.toml").write_text(toml(whole))
    (folder / "environment.json").write_text(json.dumps({"seed": 1, "commit": None}))
    found = results_of(folder)
    assert tables.published_rows(found) == [
        {"published": "model.preset = transformer", "value": "27.3", "here": here},
    ]
    assert "BLEU: nrefs:1." in tables.terms(found)
    said = f"Source: A paper. BLEU by the convention: {convention}."
    assert tables.published_notes(found) == said
    assert said in page.markdown([folder])


PUBLISHED = {"source": "A paper.", "rows": [{"model.num_independent_layers": n, "value": n / 20} for n in (12, 6)]}


def _run(folder, *, accuracy=None, seed=1, published=PUBLISHED, model=None, training=None, results=None):
    """What a report reads of a run with the task images."""
    folder.mkdir(parents=True)
    whole = {
        "task": "images",
        "model": {"preset": "parallel", "num_hidden_layers": 12} | (model or {}),
        "training": {"seed": seed} | (training or {}),
        "published": published,
    }
    (folder / "recipe.toml").write_text(toml(whole))
    (folder / "metrics.jsonl").write_text("")
    (folder / "environment.json").write_text(json.dumps({"seed": seed, "commit": None}))
    if accuracy is not None:
        measured = {"task": "images", "metric": "accuracy", "metrics": {"test": {"accuracy": accuracy}}}
        costs = {"parameters": {"total": 7}, "flops": 1e9, "seconds": 60.0, "images_per_second": 5.0}
        (folder / "results.json").write_text(json.dumps(measured | costs | (results or {})))
    return folder


def test_the_runs_of_a_grid_are_one_table_in_which_seeds_are_one_row(tmp_path):
    grid = tmp_path / "sharing"
    for layers in (12, 6):
        for seed in (1, 2):
            model = {"num_independent_layers": layers}
            _run(grid / f"layers={layers},seed={seed}", model=model, seed=seed, accuracy=layers / 20 + seed / 10)
    _run(grid / "layers=3,seed=1", model={"num_independent_layers": 3})
    for _ in range(2):  # the second time from what the report keeps
        found = results_of(grid)
        names = [f"num_independent_layers={layers}" for layers in (6, 12)]
        assert [(row["name"], row["values"]) for row in found["schemes"]] == [
            (names[0], pytest.approx([0.4, 0.5])),
            (names[1], pytest.approx([0.7, 0.8])),
        ]
        assert found["schemes"][0]["runs"] == ["layers=6,seed=1", "layers=6,seed=2"]
        shown = tables.rows(found)
        assert [row["accuracy"] for row in shown] == ["45.00 ± 7.07 %", "75.00 ± 7.07 %"]
        assert "verdict" not in shown[0]
        assert [row["here"] for row in tables.published_rows(found)] == [
            f"{names[1]}: 75.00 ± 7.07 %",
            f"{names[0]}: 45.00 ± 7.07 %",
        ]
        assert "Not finished: layers=3,seed=1." in tables.terms(found)
        assert tables.sentence(found).startswith(f"images, accuracy of {names[0]}: 45.00 ± 7.07 %; {names[1]}: 75.00")
        path = page.write([grid], tmp_path / "report")
        assert "layers=12,seed=2" in path.read_text()
        assert not (path.parent / page.SUMMARY).exists()
        grid = path.parent / "sharing"


def test_seeds_stay_together_however_they_were_made(tmp_path):
    """What no number depends on makes no other row, nor does a key that is newer than a run."""
    for seed, training in enumerate([{"log_every": 1}, {"log_every": 2, "threads": 1}, {"optimizer": "adamw"}]):
        _run(tmp_path / f"seed={seed}", seed=seed, accuracy=0.5, training=training)
    (row,) = results_of(tmp_path)["schemes"]
    assert (row["name"], row["values"]) == ("parallel", [0.5, 0.5, 0.5])


def test_the_split_that_chose_the_checkpoints_is_named_for_runs_too(tmp_path):
    results = {"weights": "best", "metrics": {"valid": {"accuracy": 0.5}}}
    folder = _run(tmp_path / "run", accuracy=0.5, results=results)
    assert "measured on the valid split, which also chose each run's checkpoint." in tables.terms(results_of(folder))


def test_a_published_number_is_of_no_preset_where_a_grid_has_several(tmp_path):
    lone = {"source": "A paper.", "rows": [{"value": 0.9}]}
    for preset in ("transformer", "macaron"):
        _run(tmp_path / f"preset={preset}", accuracy=0.5, model={"preset": preset}, published=lone)
    assert tables.published_rows(results_of(tmp_path)) == [{"published": "the row", "value": "90.00 %", "here": "-"}]


@pytest.mark.parametrize(
    ("model", "here"),
    [
        ({}, ["parallel: 50.00 %", "-", "parallel: 50.00 %"]),
        ({"num_independent_layers": 1}, ["-", "parallel: 50.00 %", "-"]),
        ({"integrator": "heun"}, ["-", "-", "-"]),
        ({"dropout": 0.5}, ["parallel: 50.00 %", "-", "-"]),
    ],
)
def test_a_run_stands_beside_what_was_published_of_its_own_scheme(tmp_path, model, here):
    """Settings that a recipe leaves out are those of the configuration."""
    rows = [{}, {"model.num_independent_layers": 1}, {"model.num_independent_layers": 12, "model.dropout": 0.0}]
    published = {"source": "A paper.", "rows": [{"model.preset": "parallel", "value": 0.9} | row for row in rows]}
    found = results_of(_run(tmp_path / "run", accuracy=0.5, model=model, published=published))
    assert [row["here"] for row in tables.published_rows(found)] == here


@pytest.mark.parametrize(("name", "said"), [("results.json", "is no JSON"), ("recipe.toml", "is no TOML")])
def test_a_damaged_file_is_told_in_a_line(tmp_path, name, said):
    folder = _run(tmp_path / "run", accuracy=0.5)
    whole = (folder / name).read_text()
    (folder / name).write_text(whole[: len(whole) // 2] + "[")
    with pytest.raises(UserError, match=rf"{name} {said}, or damaged"):
        results_of(folder)


def test_schemes_that_do_not_differ_at_all_are_drawn_beside_one_that_does(tmp_path):
    same = HELD | {"difference": 0.0, "interval": [0.0, 0.0], "verdict": "no significant difference"}
    rows = [_row("a", 0.5), _row("b", 0.5, **same), _row("c", 0.5, **same), _row("d", 0.4, **HELD)]
    assert drawing.differences({"one": _results(*rows)}).count("<circle") == 2


def test_a_folder_that_no_table_fits_is_refused_with_the_reason(tmp_path):
    _run(tmp_path / "one", accuracy=0.5)
    _run(tmp_path / "other", accuracy=0.5, results={"task": "text-classification"})
    with pytest.raises(UserError, match=r"fit no one table \(images by accuracy, text-classification by accuracy\)"):
        results_of(tmp_path)
    _run(tmp_path / "begun")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "results.json").write_text('{"tasks": []}')
    for name, said in {"begun": "it is no finished run", "tasks": "neither a run's nor a comparison's"}.items():
        with pytest.raises(UserError, match=said):
            results_of(tmp_path / name)
