"""Small data sets in their published formats, and recipes for them, made by the tests."""

import gzip
import random
from pathlib import Path

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


def merged(tables: dict, sections: dict) -> dict:
    """The tables with the keys of some sections exchanged."""
    out = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    for name, values in sections.items():
        out[name] = {**out.get(name, {}), **values}
    return out
