"""What the hub has is read as the published files are. A folder of the repository's name stands in for the hub."""

import numpy as np
import pytest
from tests.image_files import images

from splitstep.data import hub, labelled, parallel
from splitstep.data import text as running
from splitstep.data.files import STRICT, lines
from splitstep.data.glue import GLUE
from splitstep.data.images import FORMATS, Place, as_image, read
from splitstep.data.places import data_folder
from splitstep.solver.errors import UserError

datasets = pytest.importorskip("datasets")
PLAIN = "default"


@pytest.fixture(autouse=True)
def _no_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where load_dataset finds a repository before it asks the hub
    monkeypatch.delenv("SPLITSTEP_DATA", raising=False)
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def upload(tmp_path, repository, tables):
    """A repository of parquet files: rows by configuration and split."""
    folder = tmp_path / repository
    card = ["---", "configs:"]
    for config, splits in tables.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split, (rows, features) in splits.items():
            path = folder / config / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(path)
            card += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def table(columns, rows, labels=None, *, images=()):
    """Rows of those columns; texts where nothing else is said."""
    kinds = {column: datasets.Value("string") for column in columns} | {name: datasets.Image() for name in images}
    kinds |= {column: datasets.ClassLabel(names=list(names)) for column, names in (labels or {}).items()}
    return [dict(zip(columns, row, strict=True)) for row in rows], kinds


def texts_and_labels(name, folder, file):
    choice = labelled.Choice.of(name, None, None)
    return [(example.texts[0], example.label) for example in labelled.examples(choice, folder, file)]


def test_ag_news(tmp_path):
    rows = [('Stocks "fell", said\\the trader', 2), ("A goal\nin the last minute", 1)]
    classes = {"label": ["World", "Sports", "Business", "Sci/Tech"]}
    upload(tmp_path, "fancyzhx/ag_news", {PLAIN: {s: table(("text", "label"), rows, classes) for s in hub.SPLITS}})
    said = []
    found = texts_and_labels("ag-news", data_folder(None, "ag_news_csv", said.append), "test.csv")
    assert "title and description are one text there" in said[-1]
    assert found == [('Stocks "fell", said the trader', "Business"), ("A goal in the last minute", "Sports")]


def test_imdb(tmp_path):
    rows = [("Awful.<br />", 0), ("Schön, and moving.", 1)]
    upload(
        tmp_path,
        "stanfordnlp/imdb",
        {PLAIN: {split: table(("text", "label"), rows, {"label": ["neg", "pos"]}) for split in hub.SPLITS}},
    )
    found = texts_and_labels("imdb", data_folder(None, "imdb"), "aclImdb/train")
    assert found == [("Awful.<br />", "neg"), ("Schön, and moving.", "pos")]


@pytest.mark.parametrize(("name", "config"), [("wikitext-2", "wikitext-2-v1"), ("wikitext-103", "wikitext-103-v1")])
def test_wikitext(tmp_path, name, config):
    kept = ["", " = Robert = \n", "", " He <unk> @-@ acted . \n", "", " = Next = \n", "", " Words \n"]
    tables = {s: table(("text",), [(line,) for line in kept]) for s in ("train", "validation", "test")}
    upload(tmp_path, "Salesforce/wikitext", {config: tables})
    documents = list(running.FORMATS["wikitext"].documents(data_folder(None, name), "wiki.valid.tokens", STRICT))
    assert documents == [" \n = Robert = \n \n He <unk> @-@ acted . \n \n", " = Next = \n \n Words \n"]


def test_multi30k(tmp_path):
    rows = [("Two men .", "Zwei Männer ."), ("A dog", "Ein Hund")]
    splits = ("train", "validation", "test")
    upload(tmp_path, "bentrevett/multi30k", {PLAIN: {split: table(("en", "de"), rows) for split in splits}})
    pairs = parallel.line_pairs(data_folder(None, "multi30k"), "test_2016_flickr.{language}", ("en", "de"))
    assert list(pairs) == rows


GLUE_TEXTS = {"MNLI": ("premise", "hypothesis"), "MRPC": ("sentence1", "sentence2")}


@pytest.fixture
def glue(tmp_path):
    """Two rows of each class in every split, with all that could break a line of tabs."""
    tables = {}
    for name, task in GLUE.items():
        columns = GLUE_TEXTS.get(name, task.texts)
        names = list(task.names.values())
        rows = [
            (*(f'"{column}\tof\n{label}' for column in columns), label, 7)
            for label in 2 * (list(range(len(names))) or [3.8])
        ]
        found, kinds = table((*columns, "label", "idx"), rows, {"label": names} if names else {})
        kinds |= {"idx": datasets.Value("int32")} | ({} if names else {"label": datasets.Value("float32")})
        tables[hub._GLUE_CONFIGS.get(name, name.lower())] = {
            hub._GLUE_SPLITS[file]: (found, kinds) for file in task.files.values()
        }
    upload(tmp_path, "nyu-mll/glue", tables)
    return data_folder(None, "glue")


def test_glue(glue):
    for name, task in GLUE.items():
        names = list(task.names.values())
        for file in task.files.values():
            found = list(labelled.examples(task.choice, glue, f"{name}/{file}"))
            labels = list(range(len(names))) or [3.8]
            columns = GLUE_TEXTS.get(name, task.texts)
            assert [example.texts for example in found] == [
                tuple(f'"{column} of {label}' for column in columns) for label in 2 * labels
            ]
            if names:
                assert [example.label for example in found] == 2 * names
            else:
                assert [float(example.label) for example in found] == pytest.approx([3.8, 3.8])


def test_the_vocabulary(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, name: tmp_path / name)
    assert list(lines(data_folder(None, "bert_vocab") / "vocab.txt")) == ["[PAD]", "[UNK]", "the"]


LABELS = np.arange(10)
PICTURES = {
    "cifar-10-batches-bin": ("cifar10", "uoft-cs/cifar10", ("img", "label"), "data_batch_{}.bin"),
    "cifar-100-binary": ("cifar100", "uoft-cs/cifar100", ("img", "fine_label", "coarse_label"), "train.bin"),
    "mnist": ("idx", "ylecun/mnist", ("image", "label"), "train"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_images(tmp_path, name):
    format, repository, columns, file = PICTURES[name]  # noqa: A001
    shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
    pixels = images(len(LABELS), shape=shape)
    rows = [(as_image(image), *[label] * (len(columns) - 1)) for image, label in zip(pixels, LABELS, strict=True)]
    names = {column: [f"{column} {i}" for i in LABELS] for column in columns[1:]}
    upload(tmp_path, repository, {PLAIN: {s: table(columns, rows, names, images=columns[:1]) for s in hub.SPLITS}})
    row, place = FORMATS[format], Place(data_folder(None, name))
    files = [file.format(number) for number in range(1, 6)] if "{}" in file else [file]
    found = row.names(place, files)
    pictures = read(row, place, files, found)
    np.testing.assert_array_equal(pictures.pixels, pixels)
    np.testing.assert_array_equal(pictures.labels, LABELS)
    assert found == ([str(i) for i in LABELS] if name == "mnist" else names[columns[1]])


def test_every_source_is_tested():
    tested = {"ag_news_csv", "bert_vocab", "glue", "imdb", "multi30k", "wikitext-103", "wikitext-2", *PICTURES}
    assert set(hub.SOURCES) == tested


def test_a_hub_that_does_not_answer_leaves_nothing_behind_and_says_what_to_do(tmp_path):
    said = []
    with pytest.raises(UserError, match=r"cannot fetch ylecun/mnist .* SPLITSTEP_DATA may name a folder"):
        data_folder(None, "mnist", said.append)
    assert said == ["fetching ylecun/mnist from the Hugging Face hub, once"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".locks"]


def test_what_was_fetched_is_not_fetched_again(glue, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_split", lambda *_: pytest.fail("asked the hub again"))
    assert data_folder(None, "glue") == glue
    assert data_folder(None, "glue/RTE") == glue / "RTE"


def test_a_named_folder_comes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "here" / "mnist").mkdir(parents=True)
    assert data_folder(str(tmp_path / "here"), "mnist") == tmp_path / "here" / "mnist"
    monkeypatch.setenv("SPLITSTEP_DATA", str(tmp_path / "here"))
    assert data_folder(None, "mnist") == tmp_path / "here" / "mnist"
    with pytest.raises(UserError, match=r"glue .*does not exist"):
        data_folder(None, "glue")


def test_without_a_folder_and_not_on_the_hub(tmp_path):
    with pytest.raises(UserError, match=r"where are the data.*has trec.*hub has ag_news_csv"):
        data_folder(None, "trec")
