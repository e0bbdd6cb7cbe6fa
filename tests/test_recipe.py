"""Recipes: defaults under the file under the command line, refused when they do not make sense, all of ours sound."""

import tomllib
from datetime import UTC, date, datetime

import pytest
from tests import corpora, image_files

import splitstep
from splitstep.models.accounting import empty_model, parameters
from splitstep.models.presets import preset
from splitstep.recipe import load, recipe, schema
from splitstep.solver.errors import UserError
from splitstep.tables import differences, packaged, read, setting, toml, with_setting, with_settings
from splitstep.tasks import TASKS, task_class
from splitstep.training.engine import train

BASE = {
    "task": "translation",
    "data": {"source": "de", "target": "en", "train": ["train.{language}"]},
    "training": {"updates": 3, "tokens_per_update": 100, "learning_rate": 1e-3},
}


def test_the_command_line_stands_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(toml(corpora.merged(BASE, {"training": {"warmup": 5, "seed": 2}})))
    ((_, found),) = load(str(path), ["training.seed=7", "model.norm=post"])
    assert (found.training.seed, found.training.warmup, found.training.clip) == (7, 5, 0.0)
    assert found.model == {"norm": "post"}


def test_of_two_exclusive_settings_the_command_line_s_displaces_the_other(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(toml(BASE))
    ((_, found),) = load(str(path), ["training.epochs=2", "training.batch_size=8"])
    assert (found.training.updates, found.training.epochs) == (None, 2)
    assert (found.training.tokens_per_update, found.training.batch_size) == (None, 8)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("task", "translaton", "unknown task 'translaton'; choose from .*did you mean 'translation'"),
        ("dat", {}, "unknown section 'dat'; choose from .*did you mean 'data'"),
        ("training.updatse", 3, r"unknown key 'training.updatse'; .*did you mean 'training.updates'"),
        ("data.vocabulary.siz", 3, r"unknown key 'data.vocabulary.siz'; .*did you mean 'data.vocabulary.size'"),
        ("data.vocabulary.size", "al", "data.vocabulary.size: input should be a valid integer, got 'al'"),
        ("training.updates", "3", "training.updates: input should be a valid integer, got '3'"),
        ("training.updates", -3, "training.updates: input should be greater than 0, got -3"),
        ("training.schedule", "cosin", "training.schedule: input should be 'constant',.*got 'cosin'"),
        ("training.epochs", 2, "give one of training.updates and training.epochs"),
        ("training.final", "ema", r"training.final = 'ema' needs training.ema"),
        ("model.preset", "macarn", "unknown preset 'macarn'.*did you mean 'macaron'"),
        ("grid", {"training.seed": []}, "grid.training.seed has no values"),
        ("data", {"source": "de"}, "the recipe lacks data.target"),
        ("data.train", [], "data.train: list should have at least 1 item"),
        ("training.seed", 2**32, "training.seed: input should be less than 4294967296"),
        ("training.betas", [2.0, 0.9], "training.betas: input should be less than 1"),
        ("training.learning_rate", float("nan"), "training.learning_rate: input should be a finite number"),
        ("training.period_factor", 0.5, "training.period_factor: input should be greater than or equal to 1"),
        ("training.threads", 10**6, "training.threads: input should be less than or equal to 1024"),
        ("evaluation.length_penalty", 1000.0, "evaluation.length_penalty: input should be less than or equal to 10"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(key, value, complaint):
    with pytest.raises(UserError, match=complaint):
        recipe(with_setting(BASE, key, value))


def test_an_optimizer_by_its_momentum_has_some():
    with pytest.raises(UserError, match=r"training.optimizer = 'nag' needs a training.momentum above 0"):
        recipe(with_settings(BASE, [("training.optimizer", "nag"), ("training.momentum", 0.0)]))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"grid": 5, "training.updates": 3}, "grid: input should be a valid dict"),
        ({"training": 5, "training.updates": 3}, "training is no section, so there is no training.updates"),
    ],
)
def test_a_value_in_the_place_of_a_section_is_told(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        recipe(with_settings(BASE, settings.items()))


def test_a_missing_recipe_is_refused_with_what_is_near(tmp_path):
    with pytest.raises(UserError, match="did you mean 'laptop/multi30k-en-de'"):
        read("laptop/multi30k-en-dee")
    with pytest.raises(UserError, match=r"no recipe file .*mine.toml"):
        read(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text("task = \n")
    with pytest.raises(UserError, match=r"mine.toml is no TOML: .*line 1"):
        read(str(tmp_path / "mine.toml"))


def test_a_grid_makes_one_run_a_combination(tmp_path):
    path = tmp_path / "mine.toml"
    grid = {"model.preset": ["transformer", "macaron"], "training.seed": [1, 2, 3]}
    path.write_text(toml({**BASE, "grid": grid}))
    runs = load(str(path))
    assert [name for name, _ in runs][:4] == [
        "preset=transformer,seed=1",
        "preset=transformer,seed=2",
        "preset=transformer,seed=3",
        "preset=macaron,seed=1",
    ]
    assert runs[-1][1].training.seed == 3
    assert runs[-1][1].model["preset"] == "macaron"
    assert not runs[-1][1].grid


def test_a_run_of_a_grid_is_named_by_one_folder(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(toml({**BASE, "grid": {"training.init": ["runs/a", "runs/b"]}}))
    assert [label for label, _ in load(str(path))] == ["init=runs_a", "init=runs_b"]


def test_a_resolved_recipe_reads_back_as_it_was():
    moment = datetime(2019, 6, 6, 12, 30, tzinfo=UTC)
    row = {"a.b": 1.5, "c": 'ä"\n\x7f', "d": date(2019, 6, 6), "e": moment}
    whole = recipe({**BASE, "model": {"preset": "macaron", "norm": "post"}, "published": {"rows": [row]}})
    tables = whole.settings() | {"published": whole.published}
    assert tomllib.loads(toml(tables)) == tables
    assert recipe(tomllib.loads(toml(tables))) == whole


def test_settings_are_toml_or_text():
    assert setting("a.b=3e-4") == ("a.b", 3e-4)
    assert setting('a=["x", 2]') == ("a", ["x", 2])
    assert setting("a=macaron") == ("a", "macaron")
    with pytest.raises(UserError, match="a setting is KEY=VALUE"):
        setting("a.b")


def test_differences_name_the_keys_with_both_values():
    old, new = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 5}
    assert differences(old, new) == {"a.c": (2, 4), "d": (3, None), "e": (None, 5)}


# What the data would tell a model, so that it can be built without them.
TOLD = {
    "translation": {"vocab_size": 1000, "pad_token_id": 0, "decoder_start_token_id": 1},
    "language-modelling": {"vocab_size": 100_000},
    "pre-training": {"vocab_size": 30_000},
    "glue": {"vocab_size": 30_000},
    "images": {"num_labels": 100},
    "text-classification": {"vocab_size": 1000, "num_labels": 2},
    "text-matching": {"vocab_size": 1000, "num_labels": 2},
}


@pytest.mark.parametrize("name", packaged())
def test_every_recipe_builds_all_its_models(name):
    models = {toml(run.model): (label, run) for label, run in load(name)}
    for label, run in models.values():
        model = dict(run.model)
        kind = task_class(run.task).kind
        config = preset(model.pop("preset", "transformer"), kind, **{**TOLD[run.task], **model})
        built = empty_model(config, getattr(splitstep, task_class(run.task).model_class))
        assert sum(p.numel() for p in built.parameters()) > 0, label
    published = read(name).get("published")
    if not name.startswith(("demo/", "laptop/")):
        assert published["source"]
        for row in published["rows"]:
            settings = {key: value for key, value in row.items() if "." in key}
            assert any(settings.items() <= _flat(run.settings()).items() for _, run in load(name)), row


def _flat(tables, path=""):
    flat = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


SMALL = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}


FIXTURES = {
    "translation": (corpora.parallel, corpora.translation_recipe),
    "language-modelling": (corpora.articles, corpora.language_recipe),
    "images": (image_files.cifar, image_files.images_recipe),
    "text-classification": (corpora.news, corpora.classification_recipe),
    "text-matching": (corpora.papers, corpora.matching_recipe),
    "pre-training": (corpora.documents, corpora.pretraining_recipe),
    "glue": (corpora.glue, corpora.glue_recipe),
}


def _on_a_fixture(name, folder, sizes):
    """The first run of a recipe, two updates long, on the data of the fixture."""
    _, run = load(name)[0]
    tables = run.settings()
    make, fixture = FIXTURES[run.task]
    data = fixture(make(folder))["data"]
    if run.task == "images":
        data |= {key: tables["data"][key] for key in ("augmentation", "image_size") if key in tables["data"]}
    training = {"updates": 2, "evaluate_every": 1, "log_every": 1, "warmup": 0, "micro_batches": 1, "average": 1}
    examples = {"batch_size": 8 if run.task in ("translation", "language-modelling") else 64}
    size = {"tokens_per_update": 400} if "tokens_per_update" in tables["training"] else examples
    if "adaptive_cutoffs" in tables["model"]:
        sizes = {**sizes, "adaptive_cutoffs": [10, 20], "adaptive_factor": 2}
    if sizes and "num_independent_layers" in tables["model"]:
        sizes = {**sizes, "num_independent_layers": 1}
    rate = {"learning_rate": min(tables["training"]["learning_rate"], 1e-2), "schedule": "constant"}
    for key in ("epochs", "init", "warmup_share"):
        tables["training"].pop(key, None)
    context = {"context_window": 4} if run.task == "language-modelling" else {}
    sections = {"model": sizes, "training": {**training, **size, **rate}, "evaluation": context}
    return recipe({**corpora.merged(tables, sections), "data": data})


@pytest.mark.parametrize("name", packaged())
def test_two_updates_of_every_recipe_lower_the_loss(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    small = _on_a_fixture(name, tmp_path / "data", SMALL)
    train(small, tmp_path / "run")
    import json

    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged())
def test_two_updates_of_every_recipe_at_its_full_size(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    train(_on_a_fixture(name, tmp_path / "data", {}), tmp_path / "run")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_schema_of_its_own(task):
    assert schema(task).model_fields["data"].annotation is task_class(task).Data


@pytest.mark.parametrize(
    ("name", "setting", "left"),
    [
        ("parallel/cifar100-sharing", "model.num_independent_layers=3", 1),
        ("macaron/iwslt14-de-en", "model.preset=parallel", 1),
        ("macaron/glue-small", "training.updates=2", None),
    ],
)
def test_the_command_line_stands_over_a_grid(name, setting, left):
    key, _, value = setting.partition("=")
    section, _, inner = key.partition(".")
    found = load(name, [setting])
    assert {str(run.settings()[section][inner]) for _, run in found} == {value}
    assert len(found) < len(load(name))
    assert left is None or len(found) == left


@pytest.mark.parametrize(("name", "layer"), [("macaron/bert-base", 7_084_800), ("macaron/macaron-base", 7_085_568)])
def test_pre_training_has_the_layers_of_the_released_code(name, layer):
    """Lu et al.'s twelve layers, counted in their own models."""
    chosen = read(name)["model"]
    config = preset(chosen.pop("preset"), "encoder", **chosen)
    assert parameters(empty_model(config)).body == 12 * layer
    assert read(name)["training"] | {"seed": 3} == read("macaron/bert-base")["training"]
