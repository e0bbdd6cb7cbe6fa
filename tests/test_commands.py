"""Commands on runs: what goes in comes out in order, and wrong use is told in one line."""

import json
import os
import shutil

import pytest
from tests import corpora
from transformers import AutoConfig
from typer.testing import CliRunner

from splitstep import SplitstepForConditionalGeneration
from splitstep.cli import app
from splitstep.cli.use import _as_they_come
from splitstep.recipe import recipe
from splitstep.solver.errors import UserError
from splitstep.tables import toml
from splitstep.training.engine import loaded, train
from splitstep.training.run import Run

long = {"updates": 250, "evaluate_every": 250, "log_every": 50, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A translation, a language model and a classifier, trained a little."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPLITSTEP_CACHE", str(folder / "cache"))
        train(
            recipe(corpora.translation_recipe(corpora.parallel(folder / "pairs"), training=long)),
            folder / "translation",
        )
        train(recipe(corpora.language_recipe(corpora.articles(folder / "text"))), folder / "language")
        train(recipe(corpora.classification_recipe(corpora.news(folder / "items"))), folder / "news")
    return folder


def told(*words, given=b""):
    """The output of a command in this process; a wrong use is raised."""
    answer = CliRunner().invoke(app, [str(word) for word in words], input=given, catch_exceptions=False)
    return answer.output


def test_a_finished_run_says_what_it_reached_as_json_too_and_once_among_processes(runs, monkeypatch):
    words = ["train", str(runs / "news" / "recipe.toml"), "--out", str(runs / "news")]
    plain, numbers = (CliRunner().invoke(app, [*words, *more]).stdout for more in ([], ["--json"]))
    assert json.loads(numbers) == {"run": str(runs / "news")} | Run(runs / "news").results()
    assert "accuracy" in plain
    monkeypatch.setenv("RANK", "1")
    assert CliRunner().invoke(app, words).stdout == ""


def test_translations_come_a_line_for_each_line_whatever_the_batch(runs):
    given = b"eins zwei .\n\ndrei drei drei .\nvier .\n" + b"\xff eins .\r\nzwei"
    whole = told("translate", runs / "translation", given=given).splitlines()
    lines = [line for line in whole if not line.startswith("line ")]
    assert len(lines) == 6
    assert lines[0] == "one two ."
    assert lines[1] == ""
    single = told("translate", runs / "translation", "--batch", 1, given=given).splitlines()
    assert [line for line in single if not line.startswith("line ")] == lines
    assert "line 5: not UTF-8; the wrong bytes are replaced" in whole


def test_the_best_translations_are_numbered_and_scored(runs):
    rows = told("translate", runs / "translation", "--nbest", 3, given=b"eins .\nzwei .\n").splitlines()
    cells = [row.split("\t") for row in rows]
    assert [cell[0] for cell in cells] == ["0", "0", "0", "1", "1", "1"]
    scores = [float(cell[1]) for cell in cells]
    assert scores[:3] == sorted(scores[:3], reverse=True)


def test_a_language_model_goes_on_with_a_prompt(runs):
    words = ("generate", runs / "language", "--prompt", "1 2 3", "--tokens", 5)
    assert told(*words).startswith("1 2 3")
    assert told(*words) == told(*words)
    assert told(*words, "--temperature", 0) == told(*words, "--temperature", 0, "--seed", 2)


@pytest.mark.parametrize(
    ("command", "settings", "warning"),
    [
        ("translate", ["evaluation.max_source=8"], "line 3: longer than 8 tokens; its end is cut off"),
        ("generate", ["--tokens", 3], "line 3: longer than what the model sees; its end counts"),
        ("classify", [], "line 3: longer than 12 tokens; the head of its text counts"),
    ],
)
def test_every_line_is_answered_by_a_line_in_order(runs, command, settings, warning):
    run = runs / {"translate": "translation", "generate": "language", "classify": "news"}[command]
    given = [b"eins zwei .", b"", b"1 2 3 " * 50, b"\xff\xfe drei", b" \t ", "zwölf 🙂".encode(), b"vier"]
    answer = CliRunner().invoke(app, [command, str(run), *map(str, settings)], input=b"\n".join(given))
    assert answer.exit_code == 0, answer.exception
    rows = answer.stdout.splitlines()
    assert len(rows) == len(given)
    assert [not row for row in rows] == [not line.strip() for line in given]
    assert warning in answer.stderr
    assert "line 4: not UTF-8" in answer.stderr
    alone = [CliRunner().invoke(app, [command, str(run), *map(str, settings)], input=line + b"\n") for line in given]
    assert [one.stdout for one in alone] == [f"{row}\n" for row in rows]


def test_with_nothing_to_read_nothing_is_written(runs):
    assert told("translate", runs / "translation", given=b"") == ""


def test_evaluation_takes_other_data_and_prints_json(runs):
    answer = json.loads(told("evaluate", runs / "translation", "--split", "test", "--json"))
    assert json.loads(told("evaluate", runs / "translation", "--json")) == answer
    assert answer.keys() == {"task", "split", "metrics"}
    assert answer["metrics"].keys() >= {"bleu", "chrf", "signature", "loss"}
    other = json.loads(
        told("evaluate", runs / "translation", 'data.test=["valid.{language}"]', "--json", "evaluation.num_beams=1")
    )
    assert other["metrics"]["loss"] != answer["metrics"]["loss"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["translate", "{runs}/language"], "is a run of the task language-modelling, not translation"),
        (
            ["generate", "{runs}/translation", "--prompt", "a"],
            "is a run of the task translation, not language-modelling",
        ),
        (["translate", "{runs}/nothing"], "there is no run folder"),
        (["evaluate", "{runs}/pairs"], "is no run folder: it has no recipe.toml"),
        (["classify", "{runs}/news/model"], r"it has no recipe.toml; did you mean .*/news\?$"),
        (["evaluate", "{runs}/translation", "training.seed=3"], "training.seed: of a finished run only data.KEY"),
        (["evaluate", "{runs}/translation", "--split", "tset"], "unknown split 'tset'"),
        (["evaluate", "{runs}/translation", 'data.test=["no.{language}"]'], "no file"),
        (["report", "{runs}/nothing"], "there is no folder"),
        (["report", "{runs}/pairs"], "is no finished run"),
    ],
)
def test_wrong_use_is_told(runs, words, complaint):
    with pytest.raises(UserError, match=complaint):
        told(*(word.replace("{runs}", str(runs)) for word in words))


def test_the_vocabulary_of_another_model_is_refused(runs, tmp_path):
    shutil.copytree(runs / "translation", tmp_path / "run")
    run = Run(tmp_path / "run")
    config = AutoConfig.from_pretrained(run.model)
    vocabulary, config.vocab_size = config.vocab_size, 20
    SplitstepForConditionalGeneration(config).save_pretrained(run.model)  # beside the tokenizer of the other
    complaint = f"has {vocabulary} tokens and the model 20: it belongs to another model"
    with pytest.raises(UserError, match=complaint):
        loaded(run, run.recipe())


def test_a_report_of_runs_is_one_page(runs, tmp_path):
    printed = told("report", runs / "translation", runs / "language", "--out", tmp_path / "report")
    assert "## translation: translation" in printed
    numbers = json.loads((tmp_path / "report" / "results.json").read_text())
    assert [row["metric"] for row in numbers["schemes"]] == ["bleu", "perplexity"]
    assert (tmp_path / "report" / "report.html").is_file()


def test_missing_data_are_told_before_anything_heavy_is_imported(tmp_path):
    import subprocess
    import sys

    (tmp_path / "mine.toml").write_text(toml(corpora.translation_recipe(tmp_path / "nowhere")))
    program = (
        "import sys; sys.argv = ['splitstep', 'train', sys.argv[1]]\n"
        "from splitstep.cli import main\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code == 2, left.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "mine.toml")], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert "nowhere, which data.root or SPLITSTEP_DATA names, is no folder" in answer.stderr


def test_lines_are_answered_as_they_come_and_together_when_they_come_together():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as sender:
        batches = _as_they_come(stream, 3)
        for sent in ([b"a\n"], [b"b\n", b"c\n"], [b"d\n"] * 3):
            sender.write(b"".join(sent))
            assert next(batches) == sent
        sender.write(b"e\nf\ng\nh")
        sender.close()
        assert list(batches) == [[b"e\n", b"f\n", b"g\n"], [b"h"]]
