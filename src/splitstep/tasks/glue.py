"""The tasks of GLUE: one sentence or two, a label or a number, and the metrics each is known by."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from splitstep.data.files import PACKERS, OnBad
from splitstep.data.glue import GLUE, GlueTask
from splitstep.data.labelled import Choice
from splitstep.data.settings import Section
from splitstep.data.vocabulary import Vocabulary
from splitstep.tasks.base import Batch
from splitstep.tasks.classification import Classification, ClassificationEvaluation
from splitstep.tasks.scores import SCORES


class GlueData(Section):
    """Which task, where its files are, and how its texts become tokens."""

    root: str | None = None  # the folder of all data sets; SPLITSTEP_DATA without it
    folder: str = "glue"  # which has a folder for each task
    task: Literal["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"]
    on_bad: OnBad = "stop"  # what a malformed row does
    vocabulary: Vocabulary = Vocabulary()
    max_length: int = Field(default=128, gt=3)  # tokens, the special ones among them; the longer text is cut first
    truncation: Literal["head", "tail"] = "head"  # the part of a longer text that is kept
    word_dropout: float = Field(default=0.0, ge=0, lt=1)  # the chance that a token is unknown in training
    swap: float = Field(default=0.0, ge=0, le=1)  # how often two texts change places in training, where that is allowed

    @property
    def chosen(self) -> GlueTask:
        """The task."""
        return GLUE[self.task]

    @property
    def choice(self) -> Choice:
        """The columns that are read and learnt."""
        return self.chosen.choice

    @property
    def labels(self) -> str:
        """What is learnt."""
        return "classes" if self.chosen.names else "numbers"


class GlueEvaluation(Section):
    """Nothing is chosen here: each task has its metrics."""


class Glue(Classification):
    """A task of GLUE."""

    Data, Evaluation = GlueData, GlueEvaluation

    def __init__(self, data: Any, evaluation: Any, **options: Any) -> None:
        own = ClassificationEvaluation(metrics=list(data.chosen.metrics))
        super().__init__(data, own, **options)

    @property
    def splits(self) -> list[str]:
        """train, valid, and what further files the task has."""
        further = (split for split in self.data.chosen.files if split not in ("train", "valid"))
        return ["train", "valid", *(split for split in further if self._is_there(*self._files(split)))]

    def _is_there(self, name: str) -> bool:
        return any((self._root / f"{name}{ending}").is_file() for ending in PACKERS)

    def _files(self, split: str) -> list[str]:
        return [f"{self.data.task}/{self.data.chosen.files[split]}"]

    def _reading(self) -> dict[str, Any]:
        return self.data.model_dump(include={"task", "on_bad"})

    def batch(self, split: str, indices: NDArray[np.int64], *, epoch: int | None = None, seed: int = 0) -> Batch:
        """Tokens, their mask and the labels; in training some pairs of a symmetric task change places."""
        batch = super().batch(split, indices, epoch=epoch, seed=seed)
        if epoch is not None and self.data.swap and self.data.chosen.symmetric:
            for row, index in enumerate(indices.tolist()):
                if np.random.default_rng((seed, epoch, index)).random() < self.data.swap:
                    _swap(batch, row)
        return batch


def _swap(batch: Batch, row: int) -> None:
    """Exchange the texts of a row: [CLS] a [SEP] b [SEP] becomes [CLS] b [SEP] a [SEP]."""
    length = int(batch["attention_mask"][row].sum())
    second = length - int(batch["token_type_ids"][row].sum())
    tokens, types = batch["input_ids"][row], batch["token_type_ids"][row]
    tokens[1:length] = np.roll(tokens[1:length], 1 - second)
    types[1:length] = np.arange(1, length) >= 1 + length - second


# The ninth task is not trained on: its training and development examples contradict each other, and the papers count
# the score of its majority.
WNLI = 65.1


def metrics_of(task: str) -> list[str]:
    """The names that a task's metrics are reported by."""
    known = {name: score.metric for scores in SCORES.values() for name, score in scores.items()}
    return [known[name] for name in GLUE[task].metrics]


def score(task: str, metrics: Mapping[str, Mapping[str, Any]]) -> float:
    """The score of a task in per cent: the mean of its metrics, over matched and mismatched where there are both."""
    return 100 * float(np.mean([metrics[split][name] for split in metrics for name in metrics_of(task)]))


def averages(scores: dict[str, float]) -> dict[str, float]:
    """The mean of the tasks in per cent; of all eight also with WNLI as a ninth, as Macaron Net's Table 2 has it."""
    mean = sum(scores.values()) / len(scores)
    if set(scores) != set(GLUE):
        return {f"mean of {len(scores)} task{'s' * (len(scores) > 1)}": mean}
    return {"mean of eight tasks": mean, f"mean of nine, WNLI at {WNLI}": (8 * mean + WNLI) / 9}
