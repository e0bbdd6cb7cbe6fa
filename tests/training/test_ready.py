"""What a run will need is looked at before it begins: what is wrong leaves no folder behind."""

import gzip

import pytest
import torch
from tests import corpora
from tests.image_files import cifar, images_recipe
from tests.runs import losses

from splitstep.recipe import recipe
from splitstep.solver.errors import RunError, UserError
from splitstep.tasks import task_class
from splitstep.tasks.base import METRICS
from splitstep.training.costs import training_flops
from splitstep.training.engine import evaluate, train
from splitstep.training.ready import all_ready, ready
from splitstep.training.run import Run
from splitstep.training.trials import check


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


TASKS = {
    "translation": lambda folder: corpora.translation_recipe(corpora.parallel(folder)),
    "language-modelling": lambda folder: corpora.language_recipe(corpora.articles(folder)),
    "pre-training": lambda folder: corpora.pretraining_recipe(corpora.documents(folder)),
    "text-classification": lambda folder: corpora.classification_recipe(corpora.news(folder)),
    "text-matching": lambda folder: corpora.matching_recipe(corpora.papers(folder)),
    "glue": lambda folder: corpora.glue_recipe(corpora.glue(folder)),
    "images": lambda folder: images_recipe(cifar(folder)),
}


@pytest.fixture(params=TASKS)
def tables(request, tmp_path):
    return TASKS[request.param](tmp_path / "data")


def refused(tables, tmp_path, complaint):
    """Training and checking alike, and nothing is left."""
    for trying in (lambda: train(recipe(tables), tmp_path / "run"), lambda: check(recipe(tables))):
        with pytest.raises(UserError, match=complaint):
            trying()
    assert not (tmp_path / "run").exists()


FIRST_FILE = {
    "translation": "train.en",
    "language-modelling": "wiki.train.tokens",
    "pre-training": "train.txt",
    "text-classification": "train.csv",
    "text-matching": "pairs.train.tsv",
    "glue": "glue/SST-2/train.tsv",
}


@pytest.mark.parametrize("name", FIRST_FILE)
def test_what_is_left_out_of_the_data_is_said_by_every_run(tmp_path, name):
    """Also when the tokens come from the cache."""
    tables = corpora.merged(TASKS[name](tmp_path / "data"), {"data": {"on_bad": "skip"}})
    path = tmp_path / "data" / FIRST_FILE[name]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], b"\xff\n", *lines[2:]]))
    for _ in range(2):
        said = []
        ready(recipe(tables), said.append)
        (note,) = (line for line in said if "malformed" in line)
        assert "line 2: not utf-8" in note
    said = []
    all_ready([recipe(tables), recipe(corpora.merged(tables, {"model": {"preset": "macaron"}}))], said.append)
    assert said.count(note) == 1


def test_what_cannot_be_measured_is_not_trained(tmp_path):
    words = corpora.language_recipe(corpora.articles(tmp_path / "data"), evaluation={"context_window": 31})
    refused(words, tmp_path, "context_window = 31 leaves nothing of a block of 32 tokens")
    pairs = corpora.translation_recipe(corpora.parallel(tmp_path / "pairs"), evaluation={"num_beams": 400})
    refused(pairs, tmp_path, "evaluation.num_beams = 400 is more than half of the vocabulary of")
    learned = {"model": {"position_embedding": "learned", "max_position_embeddings": 40}}
    pairs = corpora.merged(corpora.translation_recipe(corpora.parallel(tmp_path / "pairs")), learned)
    refused(pairs, tmp_path, "evaluation.max_source is 1,024 tokens, more than max_position_embeddings = 40 learned")
    learned = {"model": {"max_position_embeddings": 3}, "evaluation": {"max_source": 3}}
    refused(corpora.merged(pairs, learned), tmp_path, "the longest sentence of data.train is ")


def test_a_model_beyond_memory_is_told_in_a_line(tmp_path, monkeypatch):
    def full(config):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes")

    whole = recipe(corpora.language_recipe(corpora.articles(tmp_path / "data")))
    monkeypatch.setattr(task_class(whole.task), "model", classmethod(lambda cls: full))
    monkeypatch.setattr("splitstep.training.ready.empty_model", lambda config, model: torch.nn.Linear(2, 3))
    with pytest.raises(RunError, match="out of memory while a model of 9 parameters was made"):
        train(whole, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_training_selects_by_what_the_task_reports(tables, tmp_path):
    results = train(recipe(tables), tmp_path / "run").results
    task, _ = ready(recipe(tables))
    assert set(task.reported) == {name for name in results["metrics"]["valid"] if name in METRICS}
    other = next(name for name in METRICS if name not in task.reported)
    for name in (other, "blue"):
        with pytest.raises(UserError, match=f"training.select '{name}'"):
            ready(recipe(corpora.merged(tables, {"training": {"select": name}})))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_check_makes_the_first_update_of_the_run(tables, tmp_path, precision):
    whole = recipe(corpora.merged(tables, {"training": {"precision": precision, "log_every": 1}}))
    train(whole, tmp_path / "run")
    assert check(whole)["first_loss"] == losses(tmp_path / "run")[0]


WRONG_TEST_DATA = {
    "translation": ("test.en", lambda content: content + b"one more\n", "not parallel"),
    "text-classification": ("test.csv", lambda content: content + b'"9","a","b"\n', "label '9' is none of"),
    "images": ("test.bin", lambda content: content[:-5], "cut short"),
    "pre-training": ("test.txt", lambda content: content + b"\xff\xfe\n", "not utf-8"),
    "language-modelling": ("wiki.test.tokens", lambda content: content + b"\xff\xfe\n", "not utf-8"),
}


@pytest.mark.parametrize("name", WRONG_TEST_DATA)
def test_wrong_test_data_are_found_before_training(tmp_path, name):
    tables = TASKS[name](tmp_path / "data")
    file, damage, complaint = WRONG_TEST_DATA[name]
    (path,) = (tmp_path / "data").rglob(f"{file}*")
    packed = path.suffix == ".gz"
    content = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    path.write_bytes(gzip.compress(damage(content)) if packed else damage(content))
    refused(tables, tmp_path, complaint)


@pytest.mark.parametrize(
    ("name", "model", "complaint"),
    [
        ("text-classification", {"num_labels": 3}, "num_labels = 3, and the data need 4"),
        ("text-classification", {"max_position_embeddings": 4}, "max_position_embeddings = 4, and the data need"),
        ("text-classification", {"hiden_size": 3}, "hiden_size.*did you mean 'hidden_size'"),
        ("images", {"image_size": 64}, "image_size = 64, and the data need 32"),
        ("translation", {"decoder_start_token_id": 99999}, "decoder_start_token_id = 99999, and the data need"),
        ("translation", {"vocab_size": "many"}, "vocab_size"),
        ("translation", {"preset": [1]}, "preset"),
    ],
    ids=str,
)
def test_settings_that_the_data_contradict_are_refused(tmp_path, name, model, complaint):
    refused(corpora.merged(TASKS[name](tmp_path / "data"), {"model": model}), tmp_path, complaint)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"adaptive_cutoffs": [8]}, {"label_smoothing": 0.1}),
        ({"reversible": True}, {"gradient_checkpointing": True}),
        ({"reversible": True}, {"sharding": "fsdp"}),
    ],
    ids=str,
)
def test_training_that_a_model_cannot_have_is_refused(tmp_path, model, training):
    tables = corpora.merged(TASKS["language-modelling"](tmp_path / "data"), {"model": model, "training": training})
    refused(tables, tmp_path, f"training.{next(iter(training))}")


@pytest.mark.parametrize("name", ["language-modelling", "pre-training"])
def test_words_are_not_read_by_a_vocabulary_of_symbols(tmp_path, name):
    tables = corpora.merged(TASKS[name](tmp_path / "data"), {"data": {"vocabulary": {"kind": "grey"}}})
    with pytest.raises(UserError, match=r"data.vocabulary.kind = 'grey' knows no words"):
        recipe(tables)


def test_one_label_alone_is_refused(tmp_path):
    tables = corpora.merged(TASKS["text-classification"](tmp_path / "data"), {"data": {"format": "csv"}})
    for split in ("train", "valid", "test"):
        (tmp_path / "data" / f"{split}.csv").write_text("text,label\na b,x\nc d,x\n")
    refused(tables, tmp_path, "the training examples have one label, x; a classifier needs two")


def test_steps_of_its_own_choice_are_not_sharded(tmp_path):
    sections = {"model": {"integrator": "dopri5"}, "training": {"sharding": "fsdp"}}
    tables = corpora.merged(TASKS["text-classification"](tmp_path / "data"), sections)
    refused(tables, tmp_path, "training.sharding: with integrator 'dopri5' every process chooses steps of its own")


@pytest.mark.parametrize(
    ("metrics", "complaint"), [(["f1_binary"], "for two labels, and there are 4"), (["f1", "f1_binary"], "by one name")]
)
def test_metrics_that_do_not_fit_the_labels_are_refused(tmp_path, metrics, complaint):
    tables = corpora.merged(TASKS["text-classification"](tmp_path / "data"), {"evaluation": {"metrics": metrics}})
    refused(tables, tmp_path, complaint)


def test_of_several_runs_none_begins_when_one_is_wrong(tmp_path):
    good = TASKS["text-classification"](tmp_path / "data")
    all_ready([recipe(good), recipe(corpora.merged(good, {"training": {"seed": 2}}))])
    wrong = {"model": {"num_attention_heads": 5}}, {"training": {"select": "bleu"}}
    for sections, complaint in zip(wrong, ("does not divide", "training.select 'bleu'"), strict=True):
        with pytest.raises(UserError, match=complaint):
            all_ready([recipe(good), recipe(corpora.merged(good, sections))])


@pytest.mark.parametrize("name", ["language-modelling", "translation"])
def test_two_files_of_one_name_are_two_files(tmp_path, name):
    tables = TASKS[name](tmp_path / "data")
    for split in ("train", "valid"):
        (tmp_path / "data" / split).mkdir()
        for path in list((tmp_path / "data").glob(f"*{split}.*")):
            path.rename(tmp_path / "data" / split / path.name.replace(split, "text"))
    pattern = "text.{language}" if name == "translation" else "wiki.text.tokens"
    tables = corpora.merged(tables, {"data": {split: [f"{split}/{pattern}"] for split in ("train", "valid")}})
    train(recipe(tables), tmp_path / "run")
    before = ready(recipe(tables))[0].tokenizer.get_vocab_size()
    path = next((tmp_path / "data" / "train").glob("*en" if name == "translation" else "*"))
    path.write_text(path.read_text().replace("1", "another").replace("one", "another"))
    with pytest.raises(UserError, match=f"was begun with other data: train/{path.name} changed"):
        train(recipe(tables), tmp_path / "run")
    task, _ = ready(recipe(tables))
    assert "another" in " ".join(task.tokenizer.get_vocab()) or task.tokenizer.get_vocab_size() != before


def test_a_model_is_not_measured_on_labels_of_another_kind(tmp_path):
    tables = TASKS["glue"](tmp_path / "data")
    train(recipe(tables), tmp_path / "run")
    run = Run(tmp_path / "run")
    numbers = corpora.merged(tables, {"data": {"task": "STS-B"}})
    with pytest.raises(UserError, match="is not one for these data: "):
        evaluate(run, recipe(numbers), "valid")


def test_a_line_that_was_skipped_once_is_not_skipped_when_it_should_stop(tmp_path):
    tables = TASKS["pre-training"](tmp_path / "data")
    path = next((tmp_path / "data").rglob("*train*"))
    path.write_bytes(path.read_bytes() + b"\n\xff\xfe wrong\n")
    ready(recipe(corpora.merged(tables, {"data": {"on_bad": "skip"}})))
    with pytest.raises(UserError, match="not utf-8"):
        ready(recipe(tables))


def test_data_that_were_moved_are_the_same_data(tmp_path):
    tables = TASKS["language-modelling"](tmp_path / "data")
    train(recipe(tables), tmp_path / "run")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    moved = corpora.merged(tables, {"data": {"root": str(tmp_path / "elsewhere")}})
    assert train(recipe(moved), tmp_path / "run").code == 0


def test_operations_of_training_count_what_is_evaluated_again(tmp_path):
    tables = TASKS["language-modelling"](tmp_path / "data")
    task, config = ready(recipe(tables))
    plain = training_flops(recipe(tables), task, config)
    again = corpora.merged(tables, {"training": {"gradient_checkpointing": True}})
    assert 3 * training_flops(recipe(again), task, config) == 4 * plain


def test_a_run_that_begins_with_another_may_have_another_scheme(tmp_path):
    train(recipe(TASKS["pre-training"](tmp_path / "documents")), tmp_path / "before")
    begin = {"init": str(tmp_path / "before"), "init_weights": "random"}
    tables = corpora.merged(TASKS["text-classification"](tmp_path / "data"), {"training": begin})
    tables = tables | {"model": {"preset": "macaron"}}
    _, config = ready(recipe(tables))
    assert config.splitting == "strang"
