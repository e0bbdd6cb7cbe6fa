"""Data sets of the Hugging Face hub, written once as the files they were published in: one reader serves both."""

import csv
import io
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from splitstep.data.cache import cached
from splitstep.data.glue import GLUE, GlueTask
from splitstep.data.images import IDX_IMAGES, IDX_LABELS, as_pixels
from splitstep.solver.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

LAYOUT = 1  # of the written files; a new layout is written anew
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Source:
    """A repository of the hub, and how what it holds becomes a folder of published files."""

    repository: str
    write: Callable[[str, Path], None]
    note: str = ""  # what it has other than the published files


def fetched(name: str, say: Callable[[str], None]) -> Path:
    """The folder of a data set, fetched now or earlier."""
    source = SOURCES[name]

    def fetch(folder: Path) -> None:
        say(f"fetching {source.repository} from the Hugging Face hub, once")
        try:
            source.write(source.repository, folder)
        except ModuleNotFoundError as error:
            raise UserError(f"{error}; data sets come from the hub with pip install 'splitstep[hub]'") from None
        except Exception as error:  # a network fails in more ways than can be listed
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(
                f"cannot fetch {source.repository} from the Hugging Face hub ({reason[0]}); "
                "data.root or SPLITSTEP_DATA may name a folder with the published files instead"
            ) from None

    folder = cached({"hub": source.repository, "folder": name, "layout": LAYOUT}, fetch)
    if source.note:
        say(f"{source.repository}: {source.note}")
    return folder


def _split(repository: str, split: str, config: str | None = None) -> "Dataset":
    from datasets import load_dataset

    return load_dataset(repository, config, split=split)


def _line(text: str) -> str:
    """A text as one cell of one line."""
    return " ".join(text.replace("\t", " ").splitlines())


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


# Texts


def _ag_news(repository: str, folder: Path) -> None:
    for name in SPLITS:
        rows = _split(repository, name)
        _write_lines(folder / "classes.txt", iter(rows.features["label"].names))
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
            writer.writerows((row["label"] + 1, "", _line(row["text"])) for row in rows)


def _imdb(repository: str, folder: Path) -> None:
    with tarfile.open(folder / "aclImdb.tar", "w") as archive:
        for name in SPLITS:
            rows = _split(repository, name)
            for number, row in enumerate(rows):
                content = row["text"].encode()
                label = rows.features["label"].names[row["label"]]
                entry = tarfile.TarInfo(f"aclImdb/{name}/{label}/{number}_0.txt")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def _wikitext(repository: str, folder: Path, *, config: str) -> None:
    for name, split in {"train": "train", "valid": "validation", "test": "test"}.items():
        rows = _split(repository, split, config)
        # The hub keeps the lines with their ends, and empties those that are blank.
        _write_lines(folder / f"wiki.{name}.tokens", (row["text"].removesuffix("\n") or " " for row in rows))


def _multi30k(repository: str, folder: Path) -> None:
    for name, split in {"train": "train", "val": "validation", "test_2016_flickr": "test"}.items():
        rows = _split(repository, split)
        for language in ("de", "en"):
            _write_lines(folder / f"{name}.{language}", (_line(row[language]) for row in rows))


_GLUE_CONFIGS = {"SST-2": "sst2", "STS-B": "stsb"}  # the others have their own name in small letters
_GLUE_SPLITS = {
    "train.tsv": "train",
    "dev.tsv": "validation",
    "dev_matched.tsv": "validation_matched",
    "dev_mismatched.tsv": "validation_mismatched",
}


def _glue(repository: str, folder: Path) -> None:
    for name, task in GLUE.items():
        (folder / name).mkdir()
        for file in task.files.values():
            rows = _split(repository, _GLUE_SPLITS[file], _GLUE_CONFIGS.get(name, name.lower()))
            _write_lines(folder / name / file, _glue_lines(task, rows))


def _glue_lines(task: GlueTask, rows: "Dataset") -> Iterator[str]:
    if not task.header:
        yield "\t".join((*task.texts, task.label))
    written = {name: text for text, name in task.names.items()}
    texts = [column for column in rows.column_names if column not in ("label", "idx")]
    for row in rows:
        label = row["label"]
        cells = dict(zip(task.texts, (_line(row[text]) for text in texts), strict=True))
        cells[task.label] = written[rows.features["label"].names[label]] if written else str(label)
        yield "\t".join(cells.get(column, "") for column in task.header or (*task.texts, task.label))


def _vocabulary(repository: str, folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    shutil.copyfile(hf_hub_download(repository, "vocab.txt"), folder / "vocab.txt")


# Images


def _cifar(repository: str, folder: Path, *, labels: dict[str, str], files: dict[str, str]) -> None:
    """Records of the labels, in that order, and the pixels; the names of each label are a list of their own."""
    for name, split in files.items():
        rows = _split(repository, split)
        for label, names in labels.items():
            _write_lines(folder / names, iter(rows.features[label].names))
        with (folder / name).open("wb") as file:
            for row in rows:
                file.write(bytes(row[label] for label in labels) + as_pixels(row["img"]).tobytes())


def _mnist(repository: str, folder: Path) -> None:
    for name, split in {"train": "train", "t10k": "test"}.items():
        rows = _split(repository, split)
        pixels = np.stack([np.asarray(row["image"], dtype=np.uint8) for row in rows])
        labels = np.asarray(rows["label"], dtype=np.uint8)
        for kind, magic, numbers in (("images-idx3", IDX_IMAGES, pixels), ("labels-idx1", IDX_LABELS, labels)):
            header = np.asarray([magic, *numbers.shape], dtype=">i4")
            (folder / f"{name}-{kind}-ubyte").write_bytes(header.tobytes() + numbers.tobytes())


# A new data set of the hub is one entry, under the name of its folder.
SOURCES: dict[str, Source] = {
    "ag_news_csv": Source(
        "fancyzhx/ag_news", _ag_news, "title and description are one text there, which is taken for the description"
    ),
    "bert_vocab": Source("google-bert/bert-base-uncased", _vocabulary),
    "cifar-10-batches-bin": Source(
        "uoft-cs/cifar10",
        partial(
            _cifar,
            labels={"label": "batches.meta.txt"},
            files={f"data_batch_{n}.bin": f"train[{20 * (n - 1)}%:{20 * n}%]" for n in range(1, 6)}
            | {"test_batch.bin": "test"},
        ),
    ),
    "cifar-100-binary": Source(
        "uoft-cs/cifar100",
        partial(
            _cifar,
            labels={"coarse_label": "coarse_label_names.txt", "fine_label": "fine_label_names.txt"},
            files={"train.bin": "train", "test.bin": "test"},
        ),
    ),
    "glue": Source("nyu-mll/glue", _glue),
    "imdb": Source("stanfordnlp/imdb", _imdb, "how many stars a review gave is not told there"),
    "mnist": Source("ylecun/mnist", _mnist),
    "multi30k": Source("bentrevett/multi30k", _multi30k),
    "wikitext-103": Source("Salesforce/wikitext", partial(_wikitext, config="wikitext-103-v1")),
    "wikitext-2": Source("Salesforce/wikitext", partial(_wikitext, config="wikitext-2-v1")),
}
