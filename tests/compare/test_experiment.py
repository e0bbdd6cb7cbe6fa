"""A comparison as a whole: equal terms, resumable, honest about failures, and its page."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from html import escape, unescape
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from plotly.offline import get_plotlyjs
from tests import corpora
from typer.testing import CliRunner

from splitstep.cli import app
from splitstep.compare.claims import CLAIMS, claims_among
from splitstep.compare.experiment import Experiment, compare
from splitstep.compare.measures import MEASURES, measure_name
from splitstep.compare.schemes import Candidate, contestants, shares_weights, width_steps
from splitstep.recipe import load, recipe
from splitstep.reports import page, tables
from splitstep.solver.errors import RunError, UserError
from splitstep.tables import read_json_lines, toml
from splitstep.tasks.bleu import bleu
from splitstep.tasks.scores import SCORES
from splitstep.training.ready import task_of
from splitstep.training.trials import paces

quiet = {"updates": 3, "evaluate_every": 3, "log_every": 1}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def whole(tmp_path):
    return recipe(corpora.language_recipe(corpora.articles(tmp_path / "data"), training=quiet))


def test_a_scheme_is_a_preset_with_settings():
    found = Candidate.named("parallel/num_independent_layers=3/integrator=heun")
    assert found.settings == {"preset": "parallel", "num_independent_layers": 3, "integrator": "heun"}
    with pytest.raises(UserError, match=r"unknown scheme 'macarn'.*did you mean 'macaron'"):
        Candidate.named("macarn")
    assert (Candidate.named("parallel-rk4:1").name, Candidate.named("parallel-rk4:1").seeds) == ("parallel-rk4", 1)
    with pytest.raises(UserError, match="the seeds of a scheme are a number from 1 on, got 'macaron:0'"):
        Candidate.named("macaron:0")

    with pytest.raises(UserError, match="a scheme begins with its preset, so parallel/preset=macaron has two"):
        Candidate.named("parallel/preset=macaron")


def test_a_recipe_does_not_make_a_scheme_another_one(whole):
    other = recipe(corpora.merged(whole.settings(), {"model": {"integrator": "heun", "hidden_act": "gelu"}}))
    refused = r"^transformer has integrator = 'euler', and the recipe sets .*'heun'; say .*transformer/integrator=heun$"
    with pytest.raises(UserError, match=refused):
        contestants(other, ["transformer", "parallel"], "none")
    named = ["transformer/integrator=heun", "transevolve-full-1/integrator=rk4"]
    assert [one.config.integrator for one in contestants(other, named, "none")] == ["heun", "rk4"]


@pytest.mark.parametrize(
    "names", [["parallel", "parallel/integrator=dopri5"], ["parallel/integrator=dopri5", "macaron"]]
)
def test_operations_that_are_not_known_beforehand_are_not_matched(tmp_path, names):
    news = recipe(corpora.classification_recipe(corpora.news(tmp_path / "data"), training=quiet))
    with pytest.raises(UserError, match=r"^parallel/integrator=dopri5 chooses its steps.*use --match seconds"):
        contestants(news, names, "flops")
    assert len(contestants(news, names, "none")) == 2


@pytest.mark.parametrize("name", ["macaron", "parallel", "parallel-rk4", "transevolve-full-1"])
def test_parameters_are_matched_within_a_hundredth(whole, name):
    sizes = recipe(corpora.merged(whole.settings(), {"model": {"hidden_size": 64, "num_hidden_layers": 2}}))
    baseline, other = contestants(sizes, ["transformer/intermediate_size=512", name], "parameters")
    assert other.parameters.total == pytest.approx(baseline.parameters.total, rel=0.01)
    assert other.adjusted["intermediate_size"] > sizes.model["intermediate_size"]


@pytest.mark.parametrize("name", ["universal", "transevolve-random-1", "parallel/num_independent_layers=1"])
def test_a_scheme_whose_point_is_fewer_parameters_is_not_widened(whole, name):
    whole = recipe(corpora.merged(whole.settings(), {"model": {"num_hidden_layers": 2}}))
    for names in (["transformer", name], [name, "transformer"]):
        with pytest.raises(UserError, match=rf"^{name} .*fewer parameters are its point.*use --match flops or --match"):
            contestants(whole, names, "parameters")
    same = [name, f"{name}/intermediate_size=96"]  # neither has more than the other by design
    baseline, other = contestants(whole, same, "parameters")
    assert other.parameters.total == baseline.parameters.total


def test_with_equal_flops_four_evaluations_leave_a_quarter_of_the_updates(whole):
    longer = recipe(corpora.merged(whole.settings(), {"training": {"updates": 1000, "warmup": 100}}))
    baseline, other = contestants(longer, ["parallel", "parallel-rk4"], "flops")
    share = baseline.flops_per_unit / other.flops_per_unit
    assert share < 0.6  # the output layer is evaluated once
    assert other.recipe.training.updates == round(1000 * share)
    assert other.recipe.training.warmup == round(100 * share)
    assert other.adjusted["updates"] == other.recipe.training.updates


def test_the_width_is_a_multiple_of_what_the_splitting_divides_it_by(whole):
    base = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 640}
    sizes = recipe(corpora.merged(whole.settings(), {"model": base}))
    names = ["transformer/splitting=suzuki4/intermediate_size=800", "macaron/splitting=suzuki4"]
    _, other = contestants(sizes, names, "parameters")
    networks = other.config.scheme(other.config.parts[0]).splitting.uses("convection")
    assert networks > 8
    assert other.adjusted["intermediate_size"] % networks == 0
    assert [step % networks for step in width_steps(other.config)] == [0, 0]


def test_the_width_is_fine_enough_for_a_small_model(whole):
    small = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 52}
    sizes = recipe(corpora.merged(whole.settings(), {"model": small}))
    base, other = contestants(sizes, ["transformer", "macaron/intermediate_size=64"], "parameters")
    assert other.adjusted["intermediate_size"] % 8 != 0
    assert other.parameters.total == pytest.approx(base.parameters.total, rel=0.01)


def test_layers_that_all_have_their_own_weights_share_none(whole):
    deep = recipe(corpora.merged(whole.settings(), {"model": {"num_hidden_layers": 3}}))
    names = ["transformer", "parallel/num_independent_layers=3", "parallel/num_independent_layers=1"]
    found = [shares_weights(one.config) for one in contestants(deep, names, "none")]
    assert found == [False, False, True]
    assert contestants(deep, names[:2], "parameters")[1].adjusted == {}


def test_the_updates_of_epochs_are_counted_where_their_number_is_changed(whole):
    tables = corpora.merged(whole.settings(), {"training": {"epochs": 20}})
    del tables["training"]["updates"]
    baseline, other = contestants(recipe(tables), ["parallel", "parallel-rk4"], "flops")
    share = baseline.flops_per_unit / other.flops_per_unit
    assert baseline.recipe.training.epochs == 20
    assert baseline.updates > 20
    assert (other.recipe.training.epochs, other.updates) == (None, round(baseline.updates * share))


def test_with_equal_seconds_a_slow_scheme_has_fewer_updates_and_the_pace_is_measured_once(whole, tmp_path, monkeypatch):
    from splitstep.training import trials

    measured = []
    monkeypatch.setattr(trials, "paces", lambda recipes, **how: measured.append(len(recipes)) or [1.0, 1.5])
    for _ in range(2):
        experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "seconds", 1)
        results = compare(experiment, say=lambda line: None)
        assert [row["adjusted"].get("updates") for row in results["schemes"]] == [None, 2]
    assert measured == [2, 2]  # before the runs, to make time equal, and after them, to say what they cost
    assert "(reached, against transformer: parallel " in tables.terms(results)
    more = Experiment(tmp_path / "a", whole, ["transformer", "parallel", "macaron"], "seconds", 1)
    with pytest.raises(UserError, match=r"holds another comparison: comparison.schemes was .*'macaron'\]$"):
        compare(more, say=lambda line: None)
    with pytest.raises(UserError, match=r"comparison.match was 'seconds', now 'none'"):
        compare(Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "none", 1), say=lambda line: None)
    with pytest.raises(UserError, match="tells comparisons apart by the names of their folders, got a, a"):
        page.write([tmp_path / "a", tmp_path / "b" / "a"], tmp_path / "report")


def test_schemes_without_a_common_seed_are_not_held_against_each_other(whole, tmp_path, monkeypatch):
    from splitstep.training import engine

    trained = engine.train

    def failing(run, *args, **kwargs):
        if run.model["preset"] == "transformer" and run.training.seed == 1:
            raise RuntimeError("out of luck")
        return trained(run, *args, **kwargs)

    monkeypatch.setattr(engine, "train", failing)
    experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel:1"], "none", 2)
    results = compare(experiment, say=lambda line: None)
    assert [len(row["values"]) for row in results["schemes"]] == [1, 1]
    assert all(results["schemes"][1][key] is None for key in ("difference", "interval", "p_value"))
    assert results["claims"] == []
    assert "| parallel |" in page.markdown([tmp_path / "a"])


def test_paces_are_those_of_real_updates(whole):
    found = paces([whole, whole], repeats=1)
    assert len(found) == 2
    assert min(found) > 0


def _quality(results):
    keys = ("name", "values", "mean", "std", "difference", "interval", "p_value", "p_corrected", "verdict")
    return [{key: row.get(key) for key in keys} for row in results["schemes"]]


def test_a_comparison_goes_on_where_it_was_and_ends_the_same(whole, tmp_path, monkeypatch):
    names = ["transformer", "macaron", "parallel:1"]
    first = compare(Experiment(tmp_path / "a", whole, names, "none", 2), say=lambda line: None)
    assert [row["name"] for row in first["schemes"]] == ["transformer", "macaron", "parallel"]
    assert [len(row["values"]) for row in first["schemes"]] == [2, 2, 1]
    assert [claim["answer"] for claim in first["claims"]] == [
        {"better": "holds", "worse": "the opposite holds"}.get(row["verdict"], "not shown")
        + (", by one seed" if row["common_seeds"] == 1 else "")
        for row in first["schemes"][1:]
    ]
    corrected = [[held["p_corrected"] for held in part] for part in (first["claims"], first["schemes"][1:])]
    assert corrected[0] == corrected[1]
    assert first["pairs"] == 2
    _report_can_be_made_again(tmp_path / "a", tmp_path / "report")
    from splitstep.training import engine

    trained, calls = engine.train, iter(range(100))

    def interrupted(*args, **kwargs):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return trained(*args, **kwargs)

    monkeypatch.setattr(engine, "train", interrupted)
    other = Experiment(tmp_path / "b", whole, names, "none", 2)
    with pytest.raises(KeyboardInterrupt):
        compare(other, say=lambda line: None)
    monkeypatch.setattr(engine, "train", trained)
    assert _quality(compare(other, say=lambda line: None)) == _quality(first)
    with pytest.raises(UserError, match=r"holds another comparison: comparison.match was 'none', now 'flops'"):
        compare(Experiment(tmp_path / "b", whole, names, "flops", 2), say=lambda line: None)
    for fewer, seeds in (names, 1), (["transformer", "macaron:1", "parallel:1"], 2):
        with pytest.raises(UserError, match=r"b has 2 seeds of .*; to leave some out would choose by the result"):
            compare(Experiment(tmp_path / "b", whole, fewer, "none", seeds), say=lambda line: None)
    for others in names[:2], [*names[:2], "parallel-rk4"], ["macaron", "transformer", *names[2:]]:
        with pytest.raises(UserError, match=r"b compares transformer, macaron, parallel: .* would choose"):
            compare(Experiment(tmp_path / "b", whole, others, "none", 2), say=lambda line: None)
    before = (tmp_path / "b" / "costs.json").read_text()
    faster = Experiment(tmp_path / "b", whole, names, "none", 2, jobs=2)
    assert _quality(compare(faster, say=lambda line: None)) == _quality(first)
    assert (tmp_path / "b" / "costs.json").read_text() == before  # measured once


def test_a_scheme_may_be_added_to_a_comparison(whole, tmp_path):
    """And the result is that of a comparison which had it from the start; no run is made again."""
    names = ["transformer", "parallel", "macaron"]
    compare(Experiment(tmp_path / "a", whole, names[:2], "none", 1), say=lambda line: None)
    kept = tmp_path / "a" / "parallel" / "seed-1" / "results.json"
    before = kept.read_bytes()
    added = compare(Experiment(tmp_path / "a", whole, names, "none", 1), say=lambda line: None)
    assert kept.read_bytes() == before
    at_once = compare(Experiment(tmp_path / "b", whole, names, "none", 1), say=lambda line: None)
    assert _quality(added) == _quality(at_once)


def _report_can_be_made_again(folder, out):
    """From what lies beside it, without the weights; its picture names every scheme."""
    page.write([folder], out)
    made = {path.name: path.read_text() for path in out.iterdir() if path.is_file()}
    assert made.keys() == {"report.html", "report.md", "results.json", "summary.svg"}
    assert not list((out / folder.name).rglob("*.safetensors"))
    page.write([out / folder.name], out)
    assert {path.name: path.read_text() for path in out.iterdir() if path.is_file()} == made
    words = [element.text for element in ElementTree.fromstring(made["summary.svg"]).iter() if element.text]
    assert {"macaron", "parallel"} <= set(words)


def test_a_comparison_goes_on_from_what_a_report_keeps_of_it(whole, tmp_path):
    """Without weights and predictions, and begun before a key of recipes was known."""
    names = ["transformer", "parallel"]
    compare(Experiment(tmp_path / "a", whole, names, "none", 1), say=lambda line: None)
    page.write([tmp_path / "a"], tmp_path / "report")
    kept = tmp_path / "report" / "a"
    assert not [path for path in kept.rglob("*") if path.name.startswith("predictions") or path.name == "model"]
    began = json.loads((kept / "comparison.json").read_text())
    del began["recipe"]["training"]["length_window"]
    (kept / "comparison.json").write_text(json.dumps(began))
    shutil.move(tmp_path / "data", tmp_path / "moved")
    moved = recipe(corpora.merged(whole.settings(), {"data": {"root": str(tmp_path / "moved")}}))
    whole_one, from_kept = (
        compare(Experiment(folder, moved, names, "none", 2), say=lambda line: None) for folder in (tmp_path / "a", kept)
    )
    assert _quality(from_kept) == _quality(whole_one)
    examples = kept / "parallel" / "seed-1" / "examples.json"
    for damage, complaint in (
        (lambda text: text[:-9], "examples.json is no JSON, or damaged"),
        (lambda text: text.replace("perplexity", "bleu"), "is of the measure 'bleu', and the comparison needs 'perp"),
        (None, "has neither predictions nor examples.json, which a test of significance needs"),
    ):
        before = examples.read_text()
        examples.write_text(damage(before)) if damage else examples.unlink()
        with pytest.raises(UserError, match=complaint):
            compare(Experiment(kept, moved, names, "none", 2), say=lambda line: None)
        examples.write_text(before)


@pytest.mark.parametrize("text", ["{", '{"schemes": []}'])
def test_a_folder_with_another_comparison_file_is_refused_in_a_line(whole, tmp_path, text):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "comparison.json").write_text(text)
    with pytest.raises(UserError, match=r"comparison.json (is no JSON|does not say what was compared)"):
        compare(Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "none", 1), say=lambda line: None)


def test_what_separates_lines_elsewhere_does_not_separate_predictions(tmp_path):
    rows = [{"hypothesis": "a\u2028b\x85c\x0bd"}, {"hypothesis": "e"}]
    path = tmp_path / "predictions.jsonl"
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    assert read_json_lines(path) == rows


def test_a_run_whose_metric_is_no_number_has_failed(whole, tmp_path):
    experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "none", 2)
    compare(experiment, say=lambda line: None)
    place = tmp_path / "a" / "parallel" / "seed-2" / "results.json"
    found = json.loads(place.read_text())
    found["metrics"]["test"]["perplexity"] = float("nan")
    place.write_text(json.dumps(found))
    row = compare(experiment, say=lambda line: None)["schemes"][1]
    assert row["failed"] == {"seed-2": "its perplexity is not finite"}
    assert (row["seeds"], row["common_seeds"]) == ([1], 1)
    for other in (tmp_path / "a").glob("*/seed-*/results.json"):
        other.write_text(json.dumps(found))
    results = compare(experiment, say=lambda line: None)
    assert results["tested"] is None
    assert "measured on the test split." in tables.terms(results)


def _failing(monkeypatch, *presets):
    """Training fails for some presets."""
    from splitstep.training import engine

    trained = engine.train

    def failing(run, *args, **kwargs):
        if run.model["preset"] in presets:
            raise RuntimeError("out of luck <script>")
        return trained(run, *args, **kwargs)

    monkeypatch.setattr(engine, "train", failing)


def test_a_run_that_fails_is_shown_and_the_others_go_on(whole, tmp_path, monkeypatch):
    _failing(monkeypatch, "macaron")
    names = ["transformer", "macaron", "parallel"]
    results = compare(Experiment(tmp_path / "a", whole, names, "none", 1), say=lambda line: None)
    macaron = results["schemes"][1]
    assert macaron["failed"] == {"seed-1": "out of luck <script>"}
    assert macaron["values"] == []
    assert results["schemes"][2]["verdict"]
    assert "macaron: failed" in tables.sentence(results)
    assert "out of luck &lt;script&gt;" in page.page([tmp_path / "a"])
    assert "- macaron, seed-1: out of luck <script>" in page.markdown([tmp_path / "a"])


def test_a_scheme_that_cannot_be_trained_leaves_the_others_their_costs(whole, tmp_path):
    experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel/step_size=1e38", "macaron"], "none", 1)
    first, wild, third = compare(experiment, say=lambda line: None)["schemes"]
    assert "not finite" in wild["failed"]["seed-1"]
    assert (wild["tokens_per_second"], wild["latency_seconds"]) == (None, None)
    for row in (first, third):
        assert row["tokens_per_second"] > 0
        assert row["latency_seconds"] > 0


def test_costs_that_are_missing_are_measured_when_they_can_be(whole, tmp_path, monkeypatch):
    from splitstep.training import trials

    def unmeasured(recipes, **how):
        raise MemoryError("out of memory")

    said, experiment = [], Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "none", 1)
    with monkeypatch.context() as patched:
        patched.setattr(trials, "paces", unmeasured)
        rows = compare(experiment, say=said.append)["schemes"]
    assert "seconds an update could not be measured: out of memory" in said
    assert [row["tokens_per_second"] for row in rows] == [None, None]
    before = json.loads((tmp_path / "a" / "costs.json").read_text())
    rows = compare(experiment, say=said.append)["schemes"]
    after = json.loads((tmp_path / "a" / "costs.json").read_text())
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert [costs["latency_seconds"] for costs in after.values()] == [c["latency_seconds"] for c in before.values()]


def test_where_the_baseline_fails_the_others_are_still_measured_on_the_test_split(whole, tmp_path, monkeypatch):
    _failing(monkeypatch, "transformer")
    experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "none", 1)
    results = compare(experiment, say=lambda line: None)
    assert results["split"] == "test"
    first, second = tables.rows(results)
    assert (first["verdict"], second["verdict"]) == ("failed", "no seed in common with the baseline")


def test_a_comparison_without_one_finished_run_has_failed(whole, tmp_path, monkeypatch):
    _failing(monkeypatch, "transformer", "parallel")
    experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "none", 2)
    with pytest.raises(RunError, match="not one of 4 runs finished; transformer 1 failed: out of luck"):
        compare(experiment, say=lambda line: None)


def test_a_metric_without_a_significance_test_is_refused_before_training(whole, tmp_path, monkeypatch):
    _failing(monkeypatch, "transformer", "parallel")
    monkeypatch.delitem(MEASURES, "perplexity")
    experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "none", 1)
    with pytest.raises(UserError, match="no significance test for the metric 'perplexity'; there is for bleu, acc"):
        compare(experiment, say=lambda line: None)
    assert not (tmp_path / "a").exists()


def _measured_recipes(folder):
    news, glue, texts = corpora.news(folder / "news"), corpora.glue(folder), corpora.documents(folder / "texts")
    yield corpora.translation_recipe(folder)
    yield corpora.language_recipe(folder)
    yield corpora.pretraining_recipe(texts)
    yield corpora.matching_recipe(folder)
    for name in SCORES["classes"]:
        yield corpora.classification_recipe(news, evaluation={"metrics": [name]})
    for name in corpora.GLUE_COLUMNS:
        yield corpora.glue_recipe(glue, data={"task": name})


def test_every_metric_that_a_recipe_can_choose_has_a_test(tmp_path):
    names = {measure_name(task_of(recipe(tables))) for tables in _measured_recipes(tmp_path)}
    assert names == set(MEASURES) - {"spearman"}  # which stands behind pearson unless it is chosen


CHOSEN = {
    "f1": lambda folder: corpora.classification_recipe(corpora.news(folder), evaluation={"metrics": ["f1"]}),
    "matthews": lambda folder: corpora.glue_recipe(corpora.glue(folder), data={"task": "CoLA"}),
    "pearson": lambda folder: corpora.glue_recipe(corpora.glue(folder), data={"task": "STS-B"}),
    "mlm_loss": lambda folder: corpora.pretraining_recipe(corpora.documents(folder)),
}


@pytest.mark.parametrize("metric", CHOSEN)
def test_the_difference_is_that_of_the_metric_the_recipe_chose(metric, tmp_path):
    chosen = recipe(corpora.merged(CHOSEN[metric](tmp_path / "data"), {"training": quiet}))
    experiment = Experiment(tmp_path / "a", chosen, ["transformer", "parallel"], "none", 1)
    results = compare(experiment, say=lambda line: None)
    first, second = results["schemes"]
    assert results["metric"] == metric
    assert second["difference"] == pytest.approx(second["mean"] - first["mean"], abs=1e-6)


def test_published_bleu_stands_beside_ours_by_its_own_convention(tmp_path):
    rows = [{"model.preset": "parallel", "model.dropout": 0.0, "value": 27.3}]
    published = {"source": "A paper", "metric": "bleu", "convention": "transevolve", "rows": rows}
    tables_ = corpora.translation_recipe(corpora.parallel(tmp_path / "data"), training=quiet)
    experiment = Experiment(
        tmp_path / "a", recipe(tables_ | {"published": published}), ["transformer", "parallel"], "none", 1
    )
    results = compare(experiment, say=lambda line: None)
    lines = (tmp_path / "a" / "parallel" / "seed-1" / "predictions-test.jsonl").read_text().splitlines()
    texts = [[json.loads(line)[key] for line in lines] for key in ("hypothesis", "reference")]
    (here,) = results["published"]["rows"][0]["here"]
    assert here["scheme"] == "parallel"
    assert here["values"] == [bleu(*texts, convention="transevolve", language="en")[0]]
    assert results["signature"].endswith("convention:detokenized")


def test_a_claim_is_answered_only_where_its_premise_holds(whole):
    names = ["transformer", "parallel", "transevolve-full-1"]
    claims = {claim.scheme: claim for claim in CLAIMS if claim.other == "transformer"}
    for rates, said in (
        ({}, ""),
        ({"dropout": 0.1}, "dropout is 0.1, the claim is of 0"),
        (
            {"drop_path": 0.2, "activation_dropout": 0.1},
            "activation_dropout is 0.1, drop_path is 0.2, the claim is of 0",
        ),
    ):
        base, parallel, evolved = contestants(recipe(corpora.merged(whole.settings(), {"model": rates})), names, "none")
        assert claims["parallel"].differs(parallel, base) == said
        fewer = evolved.parameters.body < base.parameters.body
        assert bool(claims["transevolve-full-1"].differs(evolved, base)) == (not fewer)
    assert "parameters in the layers" in claims["transevolve-full-1"].differs(base, base)


def test_fewer_sets_of_weights_are_held_against_the_next_more():
    sharing = [f"parallel/num_independent_layers={count}" for count in (1, 6, 3)]
    found = claims_among(["transformer", "parallel", *sharing])
    pairs = [(claim.scheme, claim.other) for claim in found]
    assert pairs == [("parallel", "transformer"), *pairwise(["parallel", sharing[1], sharing[2], sharing[0]])]
    assert claims_among(["transformer", *sharing]) == []


@pytest.mark.parametrize("unit", ["tokens", "images", "examples"])
def test_the_table_has_the_speed_in_the_unit_of_the_task(unit):
    names = ("parameters", "body", "flops", "seconds", "peak_memory_bytes", "latency_seconds")
    row = {"name": "a", "metric": "accuracy", "mean": 0.5, "std": None, "values": [0.5], **dict.fromkeys(names, 1.0)}
    speed = {f"{unit}_per_second": 1234.0, "evaluations_per_layer": {}, "failed": {}}
    (found,) = tables.rows({"metric": "accuracy", "schemes": [row | speed]})
    assert found[f"{unit}/s"] == "1.2 k"


def test_the_command_compares_reports_and_prints_json(whole, tmp_path):
    path = tmp_path / "recipe.toml"
    published = {"source": "A paper <b>", "rows": [{"model.preset": "parallel", "value": 1.5}], "differs": "much"}
    path.write_text(toml(whole.settings() | {"published": published}))
    out = tmp_path / "out <i>"
    command = [sys.executable, "-m", "splitstep", "compare", str(path), "--schemes", "transformer,parallel"]
    answer = subprocess.run(
        [*command, "--seeds", "1", "--out", str(out), "--jobs", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert answer.returncode == 0, answer.stderr
    results = json.loads(answer.stdout)
    assert results["schemes"][1].keys() >= {"name", "metric", "mean", "values", "difference", "interval", "p_value"}
    assert [(row["side_by_side"], row["besides"]) for row in results["schemes"]] == [([2], {}), ([2], {})]
    kept = json.loads((out / results["schemes"][0]["runs"][0] / "examples.json").read_text())["examples"]
    assert results["tested"] == {"count": len(kept), "unit": "documents"}
    text = (out / "report.html").read_text()
    assert "A paper &lt;b&gt;" in text
    (quoted,) = tables.published_rows(results)
    value = tables.quality(results["schemes"][1])
    assert quoted == {"published": "model.preset = parallel", "value": "1.5", "here": f"parallel: {value}"}
    assert f"| model.preset = parallel | 1.5 | parallel: {value} |" in (out / "report.md").read_text()
    assert "Source: A paper <b>. How it differs: much." in (out / "report.md").read_text()
    assert not re.search(r'(src|href)="http', text.replace(get_plotlyjs(), ""))
    assert text.count("<figcaption>") == 7
    assert text.count('role="img"') == 7
    assert '<th scope="col">scheme</th>' in text
    assert '<th scope="row">transformer</th>' in text
    assert "<h1>" in text
    assert "| transformer |" in (out / "report.md").read_text()
    again = re.findall(r"splitstep train (\S+|'.*') --out DIR", (out / "report.md").read_text())
    assert [tmp_path.joinpath(*shlex.split(name)).is_file() for name in again] == [True, True]
    _drawn_in_a_browser(out / "report.html", tmp_path, plots=6)


WIDTHS = {"screen": 1200, "phone": 360, "paper": 980}  # pixels; paper is Letter, landscape, within its margins

WATCHING = """<script>window.addEventListener("error", e => document.body.dataset.error = e.message);
console.error = (...words) => document.body.dataset.error = words.join(" ");</script>"""

LOOKING = """<script>setTimeout(() => {
  const page = document.querySelector("iframe").contentWindow, body = page.document.body;
  if (PRINTED) page.dispatchEvent(new Event("beforeprint"));
  const tall = body => Math.max(...[...body.querySelectorAll(".js-plotly-plot svg")].map(plot => plot.clientHeight));
  setTimeout(() => document.body.dataset.found = JSON.stringify({
    width: page.innerWidth, needed: page.document.documentElement.scrollWidth, error: body.dataset.error || null,
    plots: body.querySelectorAll(".js-plotly-plot .scatterlayer").length,
    tables: Math.max(...[...body.querySelectorAll("table")].map(table => table.scrollWidth)),
    tall: tall(body), recipes: [...body.querySelectorAll("details")].filter(run => run.offsetParent).length,
  }), 2000);
}, 15000);</script>"""


def _drawn_in_a_browser(path, tmp_path, *, plots):
    """Every plot is drawn, nothing sticks out, paper cuts no table and has two plots a sheet, the console is silent."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("the page is complete; that a browser draws it cannot be checked without chromium")
    watched = path.read_text().replace("<body>", f"<body>{WATCHING}", 1)
    for medium, width in WIDTHS.items():
        # Chromium's own windows are no narrower than 500 pixels, so the page stands in a frame.
        inner = escape(watched.replace("@media print", "@media all") if medium == "paper" else watched)
        frame = f'<iframe style="border:0" width="{width}" height="900" srcdoc="{inner}"></iframe>'
        framed = tmp_path / f"{medium}.html"
        printed = medium == "paper"
        framed.write_text(f"<!doctype html><body>{frame}{LOOKING.replace('PRINTED', json.dumps(printed))}</body>")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        answer = subprocess.run(
            [*command, profile, "--virtual-time-budget=20000", "--dump-dom", framed.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        )
        found = json.loads(unescape(re.findall(r'data-found="([^"]*)"', answer.stdout)[0]))
        assert found.pop("needed") <= width
        assert found.pop("tables") <= width or not printed
        assert (found.pop("tall") <= 300) == printed
        assert (found.pop("recipes") > 0) != printed
        assert found == {"width": width, "error": None, "plots": plots}


def test_the_demo_compares_on_all_its_tasks_and_writes_one_report(tmp_path, monkeypatch):
    from splitstep.cli import compare as commands

    monkeypatch.setattr(commands, "SCHEMES", "transformer,macaron")
    whole, short = load, ["training.updates=2", "training.warmup=1", "training.evaluate_every=2"]
    monkeypatch.setattr("splitstep.recipe.load", lambda name: whole(name, short))
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 0, result.output
    for task in ("images, accuracy", "language-modelling, perplexity", "translation, BLEU"):
        assert f"{task} against transformer" in result.stdout
    assert "one seed cannot tell luck in training" in result.stdout
    assert (tmp_path / "demo" / "report" / "report.html").is_file()
