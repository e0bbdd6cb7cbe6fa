"""Small data sets in their published formats, and recipes for them, made by the tests."""

import gzip
import random
from pathlib import Path

from splitstep.data.glue import GLUE

DIGITS = ["null", "eins", "zwei", "drei", "vier"], ["zero", "one", "two", "three", "four"]


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Counting in German and English: word for word, so that a tiny model can learn it."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        numbers = [rng.randrange(5) for _ in range(rng.randint(1, 9))]
        pairs.append(tuple(" ".join(names[n] for n in numbers) + " ." for names in DIGITS))
    return pairs


def parallel(folder: Path, **counts: int) -> Path:
    """Files train.de.gz, train.en and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate((counts or {"train": 200, "valid": 20, "test": 20}).items()):
        german, english = zip(*sentences(count, seed=number), strict=True)
        (folder / f"{split}.de.gz").write_bytes(gzip.compress("\n".join(german).encode()))
        (folder / f"{split}.en").write_text("".join(f"{line}\n" for line in english))
    return folder


def articles(folder: Path, **counts: int) -> Path:
    """Files wiki.train.tokens and so on, whose articles count up and down."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate((counts or {"train": 30, "valid": 6, "test": 6}).items()):
        rng = random.Random(number)
        lines = []
        for article in range(count):
            start = rng.randrange(20)
            words = " ".join(str((start + i) % 20) for i in range(40))
            lines += [" ", f" = Article {article} = ", " ", f" {words} "]
        (folder / f"wiki.{split}.tokens").write_text("".join(f"{line}\n" for line in lines))
    return folder


def documents(folder: Path, **counts: int) -> Path:
    """Files train.txt and so on: documents with blank lines between, each of which repeats one word."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate((counts or {"train": 30, "valid": 8, "test": 8}).items()):
        rng = random.Random(number)
        texts = []
        for document in range(count):
            word = DIGITS[1][document % len(DIGITS[1])]
            lengths = [rng.randint(3, 6) for _ in range(6)]
            texts.append("\n".join(f"{' '.join([word] * length).capitalize()} ." for length in lengths))
        (folder / f"{split}.txt").write_text("\n\n".join(texts))
    return folder


TOPICS = {
    "World": ["war", "peace", "treaty", "minister"],
    "Sports": ["goal", "match", "team", "coach"],
    "Business": ["profit", "shares", "bank", "oil"],
    "Sci/Tech": ["chip", "planet", "software", "robot"],
}


def news(folder: Path, **counts: int) -> Path:
    """AG News: classes.txt, train.csv and so on, whose descriptions are words of their topic among others."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("".join(f"{topic}\n" for topic in TOPICS))
    for seed, (split, count) in enumerate((counts or {"train": 200, "valid": 20, "test": 20}).items()):
        rng = random.Random(seed)
        rows = []
        for _ in range(count):
            number = rng.randrange(4)
            words = [rng.choice([*TOPICS.values()][number]) for _ in range(3)]
            words += [rng.choice(["the", "a", "of", "says", "new"]) for _ in range(rng.randint(1, 9))]
            rng.shuffle(words)
            rows.append(f'"{number + 1}","Title","{" ".join(words)}"\n')
        (folder / f"{split}.csv").write_text("".join(rows))
    return folder


def papers(folder: Path, **counts: int) -> Path:
    """The ACL Anthology Network's pairs: texts that share their topic and then say so, or do not."""
    folder.mkdir(parents=True, exist_ok=True)
    topics = [*TOPICS.values()]
    for seed, (split, count) in enumerate((counts or {"train": 200, "valid": 20, "test": 20}).items()):
        rng = random.Random(seed)
        rows = []
        for number in range(count):
            first = rng.randrange(4)
            second = first if number % 2 else (first + rng.randint(1, 3)) % 4
            said = ["see", "also"] if number % 2 else []
            words = ([rng.choice(topics[t]) for _ in range(rng.randint(2, 7))] for t in (first, second))
            texts = (" ".join([*said, *text]) for text in words)
            rows.append("\t".join([f"{number % 2}.0", f"P{number}", f"Q{number}", *texts]) + "\n")
        (folder / f"pairs.{split}.tsv").write_text("".join(rows))
    return folder


# The published columns of each task of GLUE; CoLA's files have no header.
GLUE_COLUMNS = {
    "CoLA": ["source", "label", "mark", "sentence"],
    "SST-2": ["sentence", "label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "STS-B": [
        "index",
        "genre",
        "filename",
        "year",
        "old_index",
        "source1",
        "source2",
        "sentence1",
        "sentence2",
        "score",
    ],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "MNLI": ["index", "promptID", "pairID", "genre", "sentence1", "sentence2", "label1", "gold_label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "RTE": ["index", "sentence1", "sentence2", "label"],
}


def glue(folder: Path, **counts: int) -> Path:
    """The eight tasks: which word is first tells the label, and an odd quotation mark means nothing."""
    rng = random.Random(0)
    for name, columns in GLUE_COLUMNS.items():
        task = GLUE[name]
        (folder / "glue" / name).mkdir(parents=True, exist_ok=True)
        labels = [*task.names] or ["1.000", "4.500"]
        for split, count in (counts or {"train": 24, "valid": 12}).items():
            rows = [] if task.header else [columns]
            for number in range(count):
                label = labels[number % len(labels)]
                cells = dict.fromkeys(columns, "n/a") | {task.label: label}
                for text in task.texts:
                    words = rng.choices(DIGITS[1], k=rng.randint(2, 5))
                    cells[text] = " ".join([DIGITS[1][labels.index(label)], '"quoted', *words])
                rows.append([*cells.values()])
            mark = "\ufeff" if name == "MRPC" else ""
            text = mark + "".join("\t".join(row) + "\n" for row in rows)
            (folder / "glue" / name / task.files[split]).write_text(text, encoding="utf-8")
    return folder


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TRAINING = {"updates": 6, "batch_size": 8, "learning_rate": 3e-3, "evaluate_every": 4, "log_every": 2}


def translation_recipe(root: Path, **sections: dict) -> dict:
    """A tiny translation of the fixture."""
    names = {split: [f"{split}.{{language}}"] for split in ("train", "valid", "test")}
    data = {"root": str(root), "source": "de", "target": "en", "vocabulary": {"size": 300}, **names}
    training = {**TRAINING, "tokens_per_update": 300}
    del training["batch_size"]
    return merged(
        {"task": "translation", "model": TINY, "data": data, "training": training, "evaluation": {"num_beams": 2}},
        sections,
    )


def language_recipe(root: Path, **sections: dict) -> dict:
    """A tiny language model of the fixture."""
    names = {split: [f"wiki.{split}.tokens"] for split in ("train", "valid", "test")}
    data = {"root": str(root), "tokens_per_sample": 32, **names}
    return merged({"task": "language-modelling", "model": TINY, "data": data, "training": TRAINING}, sections)


def pretraining_recipe(root: Path, **sections: dict) -> dict:
    """A tiny pre-training on the fixture."""
    names = {split: {"paragraphs": [f"{split}.txt"]} for split in ("train", "valid", "test")}
    data = {"root": str(root), "max_length": 24, "vocabulary": {"size": 300, "lowercase": True}, **names}
    return merged({"task": "pre-training", "model": TINY, "data": data, "training": TRAINING}, sections)


def classification_recipe(root: Path, **sections: dict) -> dict:
    """A tiny classifier of the fixture's news."""
    names = {split: [f"{split}.csv"] for split in ("train", "valid", "test")}
    data = {"root": str(root), "format": "ag-news", "max_length": 12, "vocabulary": {"kind": "word"}, **names}
    return merged({"task": "text-classification", "model": TINY, "data": data, "training": TRAINING}, sections)


def matching_recipe(root: Path, **sections: dict) -> dict:
    """Two tiny towers over the fixture's papers."""
    names = {split: [f"pairs.{split}.tsv"] for split in ("train", "valid", "test")}
    data = {"root": str(root), "format": "aan", "max_length": 12, "vocabulary": {"kind": "word"}, **names}
    return merged({"task": "text-matching", "model": TINY, "data": data, "training": TRAINING}, sections)


def glue_recipe(root: Path, **sections: dict) -> dict:
    """A tiny model of a task of GLUE."""
    data = {"root": str(root), "task": "SST-2", "max_length": 24, "vocabulary": {"size": 300, "lowercase": True}}
    return merged({"task": "glue", "model": TINY, "data": data, "training": TRAINING}, sections)


def merged(tables: dict, sections: dict) -> dict:
    """The tables with the keys of some sections exchanged."""
    out = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    for name, values in sections.items():
        out[name] = {**out.get(name, {}), **values}
    return out
