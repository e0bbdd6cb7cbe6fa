"""The tasks of GLUE in their published files: columns with tabs between them, and no quoting (Wang et al. 2018)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from splitstep.data.files import BadRowError, find, placed_lines
from splitstep.data.labelled import Choice, Format, Record
from splitstep.solver.errors import UserError


@dataclass(frozen=True)
class GlueTask:
    """Which columns are read and learnt, what the labels are called, and what is reported."""

    texts: tuple[str, ...]
    label: str
    metrics: tuple[str, ...]  # of SCORES in tasks/scores.py; their mean is the task's score
    names: dict[str, str] = field(default_factory=dict)  # by what stands in the file; numbers are learnt without it
    header: tuple[str, ...] = ()  # of files that have none
    files: dict[str, str] = field(default_factory=lambda: {"train": "train.tsv", "valid": "dev.tsv"})
    symmetric: bool = False  # which of two texts comes first means nothing
    numbers: tuple[float, float] | None = None  # between which labels lie that have no names

    @property
    def choice(self) -> Choice:
        """The columns, as readers of labelled texts take them."""
        columns = (*self.texts, self.label)
        layout = Format(
            columns=columns,
            records=self._records,
            row=_row,
            text=self.texts[0],
            label=self.label,
            names=lambda folder: self.names,
        )
        return Choice(layout, tuple((text,) for text in self.texts), self.label, self.numbers)

    def _records(self, folder: Path, name: str) -> Iterator[Record]:
        """Where each row stands, with the numbers of the columns that are read and of all."""
        path = find(folder, name)
        rows = placed_lines(path)
        header = list(self.header) or _header(*next(rows))
        if missing := [column for column in (*self.texts, self.label) if column not in header]:
            raise UserError(f"{path}, line 1: no column {missing[0]!r} among {', '.join(header)}")
        chosen = [header.index(column) for column in (*self.texts, self.label)]
        for place, line in rows:
            yield place, line if isinstance(line, BadRowError) else (line, chosen, len(header))


def _header(place: str, line: str | BadRowError) -> list[str]:
    if isinstance(line, BadRowError):
        raise UserError(f"{place}: {line}")
    return line.split("\t")


def _row(record: tuple[str, list[int], int]) -> Sequence[str]:
    line, chosen, width = record
    cells = line.split("\t")
    if len(cells) != width:
        raise BadRowError(f"{len(cells)} columns instead of {width}")
    return [cells[number] for number in chosen]


_SENTENCES = ("sentence1", "sentence2")
_ENTAILS = {"entailment": "entailment", "not_entailment": "not_entailment"}

GLUE = {
    "CoLA": GlueTask(
        texts=("sentence",),
        label="label",
        metrics=("matthews",),
        names={"0": "unacceptable", "1": "acceptable"},
        header=("source", "label", "mark", "sentence"),
    ),
    "SST-2": GlueTask(("sentence",), "label", ("accuracy",), {"0": "negative", "1": "positive"}),
    "MRPC": GlueTask(
        texts=("#1 String", "#2 String"),
        label="Quality",
        metrics=("accuracy", "f1_binary"),
        names={"0": "not_equivalent", "1": "equivalent"},
        symmetric=True,
    ),
    "STS-B": GlueTask(_SENTENCES, "score", ("pearson", "spearman"), symmetric=True, numbers=(0, 5)),
    "QQP": GlueTask(
        texts=("question1", "question2"),
        label="is_duplicate",
        metrics=("accuracy", "f1_binary"),
        names={"0": "not_duplicate", "1": "duplicate"},
        symmetric=True,
    ),
    "MNLI": GlueTask(
        texts=_SENTENCES,
        label="gold_label",
        metrics=("accuracy",),
        names={name: name for name in ("entailment", "neutral", "contradiction")},
        files={"train": "train.tsv", "valid": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
    ),
    "QNLI": GlueTask(("question", "sentence"), "label", ("accuracy",), _ENTAILS),
    "RTE": GlueTask(_SENTENCES, "label", ("accuracy",), _ENTAILS),
}
