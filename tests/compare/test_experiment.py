"""A comparison as a whole: equal terms, resumable, honest about failures, and its page."""

import json
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from plotly.offline import get_plotlyjs
from tests import corpora

from splitstep.compare.experiment import Experiment, compare
from splitstep.compare.schemes import Scheme, contestants
from splitstep.recipe import recipe, toml
from splitstep.reports import page, tables
from splitstep.solver.errors import UserError
from splitstep.training.engine import paces

quiet = {"updates": 3, "evaluate_every": 3, "log_every": 1}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def whole(tmp_path):
    return recipe(corpora.language_recipe(corpora.articles(tmp_path / "data"), training=quiet))


def test_a_scheme_is_a_preset_with_settings():
    found = Scheme.named("parallel/num_independent_layers=3/integrator=heun")
    assert found.settings == {"preset": "parallel", "num_independent_layers": 3, "integrator": "heun"}
    with pytest.raises(UserError, match=r"unknown scheme 'macarn'.*did you mean 'macaron'"):
        Scheme.named("macarn")
    assert (Scheme.named("parallel-rk4:1").name, Scheme.named("parallel-rk4:1").seeds) == ("parallel-rk4", 1)
    with pytest.raises(UserError, match="the seeds of a scheme are a number from 1 on, got 'macaron:0'"):
        Scheme.named("macaron:0")


@pytest.mark.parametrize("name", ["macaron", "parallel", "parallel-rk4", "transevolve-full-1"])
def test_parameters_are_matched_within_a_hundredth(whole, name):
    sizes = recipe(corpora.merged(whole.settings(), {"model": {"hidden_size": 64, "num_hidden_layers": 2}}))
    baseline, other = contestants(sizes, ["transformer", name], "parameters")
    assert other.parameters.total == pytest.approx(baseline.parameters.total, rel=0.01)


@pytest.mark.parametrize("name", ["universal", "transevolve-random-1", "parallel/num_independent_layers=1"])
def test_a_scheme_whose_point_is_fewer_parameters_is_not_widened(whole, name):
    with pytest.raises(UserError, match=r"fewer parameters are its point.*use --match flops or --match none"):
        contestants(whole, ["transformer", name], "parameters")


def test_with_equal_flops_four_evaluations_leave_a_quarter_of_the_updates(whole):
    longer = recipe(corpora.merged(whole.settings(), {"training": {"updates": 1000, "warmup": 100}}))
    baseline, other = contestants(longer, ["parallel", "parallel-rk4"], "flops")
    share = baseline.flops_per_unit / other.flops_per_unit
    assert share < 0.6  # the output layer is evaluated once
    assert other.recipe.training.updates == round(1000 * share)
    assert other.recipe.training.warmup == round(100 * share)
    assert other.adjusted["updates"] == other.recipe.training.updates


def test_with_equal_seconds_a_slow_scheme_has_fewer_updates_and_the_pace_is_measured_once(whole, tmp_path, monkeypatch):
    from splitstep.training import engine

    measured = []
    monkeypatch.setattr(engine, "paces", lambda recipes: measured.append(len(recipes)) or [1.0, 1.5])
    for _ in range(2):
        experiment = Experiment(tmp_path / "a", whole, ["transformer", "parallel"], "seconds", 1)
        results = compare(experiment, say=lambda line: None)
        assert [row["adjusted"].get("updates") for row in results["schemes"]] == [None, 2]
    assert measured == [2]
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
    assert "difference" not in results["schemes"][1]
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
        for row in first["schemes"][1:]
    ]
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


def test_a_run_that_fails_is_shown_and_the_others_go_on(whole, tmp_path, monkeypatch):
    from splitstep.training import engine

    trained = engine.train

    def failing(run, *args, **kwargs):
        if run.model["preset"] == "macaron":
            raise RuntimeError("out of luck <script>")
        return trained(run, *args, **kwargs)

    monkeypatch.setattr(engine, "train", failing)
    names = ["transformer", "macaron", "parallel"]
    results = compare(Experiment(tmp_path / "a", whole, names, "none", 1), say=lambda line: None)
    macaron = results["schemes"][1]
    assert macaron["failed"] == {"seed-1": "out of luck <script>"}
    assert macaron["values"] == []
    assert results["schemes"][2]["verdict"]
    assert "failed: macaron" in tables.sentence(results)
    assert "out of luck &lt;script&gt;" in page.page([tmp_path / "a"])


@pytest.mark.parametrize("unit", ["tokens", "images", "examples"])
def test_the_table_has_the_speed_in_the_unit_of_the_task(unit):
    names = ("parameters", "body", "flops", "seconds", "peak_memory_bytes", "latency_seconds")
    row = {"name": "a", "metric": "accuracy", "mean": 0.5, "std": None, "values": [0.5], **dict.fromkeys(names, 1.0)}
    speed = {f"{unit}_per_second": 1234.0, "evaluations_per_layer": {}}
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
    text = (out / "report.html").read_text()
    assert "A paper &lt;b&gt;" in text
    assert not re.search(r'(src|href)="http', text.replace(get_plotlyjs(), ""))
    assert text.count('role="img"') == 4
    assert "<h1>" in text
    assert "| transformer |" in (out / "report.md").read_text()
    _drawn_in_a_browser(out / "report.html", tmp_path, plots=4)


def _drawn_in_a_browser(path, tmp_path, *, plots):
    """Every plot is drawn, on a screen and on a phone, and the console has nothing to say."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("the page is complete; that a browser draws it cannot be checked without chromium")
    watching = """<script>window.addEventListener("error", e => document.body.dataset.error = e.message);
        console.error = (...words) => document.body.dataset.error = words.join(" ");</script>"""
    watched = tmp_path / "watched.html"
    watched.write_text(path.read_text().replace("<body>", f"<body>{watching}", 1))
    for width in (1200, 360):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        answer = subprocess.run(
            [*command, profile, "--virtual-time-budget=20000", "--dump-dom", watched.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        )
        before, _, body = answer.stdout.partition("<h1>")  # plotly itself stands before
        assert "data-error" not in before.rpartition("<body")[2]
        assert body.count('class="js-plotly-plot') == plots, answer.stderr
        assert body.count('class="main-svg"') >= plots
