"""Classification of whole texts: one or two texts as one sequence, a label or a number, accuracy and its kin."""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import Encoding, Tokenizer

from splitstep.data import vocabulary
from splitstep.data.cache import Ragged, cached
from splitstep.data.files import OnBad, Reading
from splitstep.data.labelled import Choice, Example, checksums, examples
from splitstep.data.places import data_folder
from splitstep.data.settings import Section, one_held_out
from splitstep.data.vocabulary import Vocabulary
from splitstep.solver.errors import UserError, lookup
from splitstep.tasks.base import Batch, Measured, Task, likeliest, padded
from splitstep.tasks.scores import SCORES, USUAL

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig
    from splitstep.tasks.prediction import Predictor

Names = Annotated[list[str], Field(min_length=1)]
Texts = tuple[str, ...]
MANY_UNKNOWN = 0.2  # the share of unknown tokens that is worth a line


class ClassificationData(Section):
    """Where the examples are, what of them is read and learnt, and how texts become tokens."""

    root: str | None = None  # the folder of all data sets; SPLITSTEP_DATA without it
    folder: str = "."  # of this data set, in the root
    format: str  # of FORMATS in data/labelled.py
    texts: Annotated[list[str], Field(min_length=1, max_length=2)] | None = None  # columns; "a+b" is two as one text
    label: str | None = None  # a column
    labels: Literal["classes", "numbers"] = "classes"
    train: Names
    valid: Names | None = None
    test: Names | None = None
    valid_every: int | None = Field(default=None, gt=1)  # every n-th of train is held out, where valid is no file
    on_bad: OnBad = "stop"  # what a malformed row does
    vocabulary: Vocabulary = Vocabulary()
    max_length: int = Field(default=512, gt=3)  # tokens, the special ones among them
    truncation: Literal["head", "tail"] = "head"  # the part of a longer text that is kept
    word_dropout: float = Field(default=0.0, ge=0, lt=1)  # the chance that a token is unknown in training

    @model_validator(mode="after")
    def _fits(self) -> "ClassificationData":
        Choice.of(self.format, self.texts, self.label)
        one_held_out(self.valid, self.valid_every)
        return self

    @property
    def choice(self) -> Choice:
        """The columns that are read and learnt."""
        chosen = Choice.of(self.format, self.texts, self.label)
        return chosen if self.labels == "classes" else replace(chosen, numbers=(-math.inf, math.inf))


class ClassificationEvaluation(Section):
    """What is reported; the first is what a comparison looks at."""

    metrics: Names | None = None  # of SCORES in tasks/scores.py; accuracy and f1, or pearson and spearman, without it


@dataclass(frozen=True)
class Sequences:
    """Examples as tokens, each of them one sequence or several in a row."""

    tokens: Ragged
    seconds: NDArray[np.int64]  # where in each sequence a second text begins
    labels: NDArray[np.float64]  # of each example
    clues: NDArray[np.str_]  # what a guesser would look at, of each example

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each sequence of each example."""
        return self.tokens.lengths.reshape(len(self), -1)

    @classmethod
    def open(cls, folder: Path) -> "Sequences":
        """What was prepared in a folder, the tokens read when they are used."""
        with np.load(folder / "columns.npz") as stored:
            columns = {name: stored[name] for name in ("seconds", "labels", "clues")}
        return cls(Ragged.open(folder / "sequences"), **columns)


class Classification(Task):
    """The label of a text or of a pair of texts, or a number."""

    Data: ClassVar[type[Section]] = ClassificationData
    Evaluation: ClassVar[type[Section]] = ClassificationEvaluation
    kind = "encoder"
    model_class = "SplitstepForSequenceClassification"
    metric = "accuracy"
    unit = "examples"

    def __init__(self, data: Any, evaluation: Any, **options: Any) -> None:
        super().__init__(data, evaluation, **options)
        known = SCORES[data.labels]
        for name in evaluation.metrics or []:
            lookup(f"metric of {data.labels}", name, known)
        self.scores = {name: known[name] for name in evaluation.metrics or USUAL[data.labels]}
        names = [score.metric for score in self.scores.values()]
        if len(set(names)) < len(names):
            raise UserError(f"evaluation.metrics: of {', '.join(self.scores)}, two would be reported by one name")
        self.metric, self.reported = names[0], ("loss", *names)

    # Files

    @cached_property
    def _root(self) -> Path:
        return data_folder(self.data.root, self.data.folder, self.say)

    def _files(self, split: str) -> list[str]:
        names = getattr(self.data, self.files_of(split))
        if not names:
            raise UserError(f"the recipe names no data.{split}")
        return names

    def _checksums(self, split: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in self._files(split):
            found |= checksums(self.data.choice, self._root, name)
        return found

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The files of all splits."""
        found: dict[str, str] = {}
        for split in self.splits:
            found |= self._checksums(split)
        return found

    def examples(self, split: str, notes: list[str] | None = None) -> Iterator[Example]:
        """The examples of a split as they stand in the files; what is wrong with some joins the notes."""
        reading = Reading(self.data.on_bad, (notes if notes is not None else []).append)
        read = chain.from_iterable(examples(self.data.choice, self._root, name, reading) for name in self._files(split))
        return self.own(read, split)

    # Labels and vocabulary

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's own, or one learnt on the training texts; it cuts what is too long."""
        tokenizer = vocabulary.load(self.folder or self._learnt)
        direction = {"head": "right", "tail": "left"}[self.data.truncation]  # where tokens are cut off
        tokenizer.enable_truncation(self.data.max_length, direction=direction)
        return tokenizer

    @cached_property
    def names(self) -> list[str]:
        """The labels by their number: the trained model's, or those of the training examples."""
        if self.folder is None:
            return json.loads((self._learnt / "labels.json").read_text())
        known = json.loads((self.folder / "config.json").read_text())["id2label"]
        return [known[str(number)] for number in range(len(known))]

    @cached_property
    def _learnt(self) -> Path:
        made_from = {"task": "text-classification", **self._read_from("train"), "data": self._reading()}
        origin = vocabulary.origin(self.data.vocabulary.under(self.data.root), given=self.initial)
        return cached(made_from | {"vocabulary": origin}, self._learn)

    def _read_from(self, split: str) -> dict[str, Any]:
        """The files of a split in their order, on which it depends what is held out."""
        return {"names": self._files(split), "files": self._checksums(split)}

    def _reading(self) -> dict[str, Any]:
        chosen = {"format", "texts", "label", "labels", "valid_every", "on_bad"}
        names = self.data.choice.names(self._root)
        return self.data.model_dump(include=chosen) | {"names": names}

    def _learn(self, folder: Path) -> None:
        self.say("reading the training examples and learning the vocabulary")
        settings = self.data.vocabulary.under(self.data.root)
        texts = chain.from_iterable(example.texts for example in self.examples("train"))
        tokenizer = vocabulary.chosen(settings, texts, given=self.initial)
        vocabulary.around_pairs(tokenizer).save(str(folder / "tokenizer.json"))
        (folder / "labels.json").write_text(json.dumps(self._found_names()))

    def _found_names(self) -> list[str]:
        if self.data.labels == "numbers":
            return []
        if listed := self.data.choice.names(self._root):
            return list(listed.values())
        found = {example.label for example in self.examples("train")}
        return sorted(found, key=lambda name: (len(name), name) if name.isdigit() else (0, name))

    def _number(self, example: Example) -> float:
        """The label as the loss takes it."""
        if self.data.labels == "numbers":
            return float(example.label)
        if example.label not in self._numbers:
            raise UserError(f"{example.place}: label {example.label!r} is none of {', '.join(self.names)}")
        return self._numbers[example.label]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def settings(self) -> dict[str, Any]:
        """Vocabulary, special tokens, positions, and the labels by name."""
        return {
            "vocab_size": self.tokenizer.get_vocab_size(),
            "max_position_embeddings": self.data.max_length,
            **vocabulary.special_ids(self.tokenizer),
            **self._label_settings(),
        }

    def _label_settings(self) -> dict[str, Any]:
        if self.data.labels == "numbers":
            return {"num_labels": 1, "problem_type": "regression"}
        if "f1_binary" in self.scores and len(self.names) != 2:
            raise UserError(f"evaluation.metrics: f1_binary is for two labels, and there are {len(self.names)}")
        if len(self.names) < 2:
            raise UserError(f"the training examples have one label, {', '.join(self.names)}; a classifier needs two")
        by_number = dict(enumerate(self.names))
        return {"id2label": by_number, "label2id": self._numbers, "problem_type": "single_label_classification"}

    def save_processor(self, folder: Path) -> None:
        """The tokenizer."""
        tokenizer = vocabulary.as_hugging_face(
            self.tokenizer, max_length=self.data.max_length, token_types=len(self.data.choice.texts) == 2
        )
        tokenizer.save_pretrained(folder)

    # Sequences

    def inputs_of(self, texts: Texts) -> list[Any]:
        """What is encoded as a sequence each: here all texts of an example as one."""
        return [texts[0] if len(texts) == 1 else texts]

    @cached_property
    def _opened(self) -> dict[str, Sequences]:
        return {}

    def sequences(self, split: str) -> Sequences:
        """The examples of a split as tokens."""
        if split not in self._opened:
            made_from = {
                "task": [type(self).__name__, split],
                **self._read_from(split),
                "data": self._reading(),
                "labels": self.names,
                "tokenizer": hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest(),
            }
            folder = self._noted(cached(made_from, lambda folder: self._prepare(split, folder)))
            self._opened[split] = Sequences.open(folder)
        return self._opened[split]

    def _prepare(self, split: str, folder: Path) -> list[str]:
        notes: list[str] = []
        columns: dict[str, list[Any]] = {"seconds": [], "labels": [], "clues": [], "cut": []}
        clue = self.data.choice.format.clue or (lambda text: "")
        unknown = vocabulary.specials(self.tokenizer)["unk"]
        counts = {"unknown": 0, "all": 0}

        def tokens() -> Iterator[list[int]]:
            for example, encodings in self._encoded(self.examples(split, notes)):
                columns["labels"].append(self._number(example))
                columns["clues"].append(clue(example.texts[0]))
                columns["cut"].append(any(encoding.overflowing for encoding in encodings))
                columns["seconds"] += map(_second, encodings)
                for encoding in encodings:
                    counts["unknown"] += encoding.ids.count(unknown)
                    counts["all"] += encoding.special_tokens_mask.count(0)
                    yield encoding.ids

        Ragged.write(folder / "sequences", tokens())
        if cut := sum(columns["cut"]):
            notes.append(
                f"{cut:,} of {len(columns['cut']):,} {split} examples are longer than {self.data.max_length} tokens; "
                f"the {self.data.truncation} of their text is kept"
            )
        if not columns["labels"]:
            raise UserError(f"there is not one {split} example")
        if (share := counts["unknown"] / max(counts["all"], 1)) > MANY_UNKNOWN:
            kind = self.data.vocabulary.kind
            notes.append(f"{share:.0%} of the {split} tokens are unknown: a vocabulary of the kind {kind!r} fits ill")
        arrays: dict[str, Any] = {name: np.asarray(column) for name, column in columns.items()}
        np.savez(folder / "columns.npz", **arrays)
        return notes

    def _encoded(self, rows: Iterable[Example]) -> Iterator[tuple[Example, list[Encoding]]]:
        """Each example with its sequences, one after another."""
        remaining = iter(rows)
        while batch := list(islice(remaining, 1000)):
            inputs = [self.inputs_of(example.texts) for example in batch]
            encodings = iter(self.tokenizer.encode_batch_fast(list(chain.from_iterable(inputs))))
            for example, sequences in zip(batch, inputs, strict=True):
                yield example, list(islice(encodings, len(sequences)))

    def lengths(self, split: str) -> NDArray[np.int64]:
        """The longest sequence of each example."""
        return self.sequences(split).lengths.max(1)

    def batch(self, split: str, indices: NDArray[np.int64], *, epoch: int | None = None, seed: int = 0) -> Batch:
        """Tokens, their mask and the labels; the loss is a sum over examples."""
        chosen = self.sequences(split)
        inputs = self.model_inputs(chosen, indices)
        if epoch is not None and self.data.word_dropout:
            texts = [name for name in inputs if name.endswith("input_ids")]
            for side, name in enumerate(texts):
                inputs[name] = self._with_gaps(inputs[name], [(seed, epoch, int(index), side) for index in indices])
        kind = np.int64 if self.data.labels == "classes" else np.float32
        labels = chosen.labels[indices].astype(kind)
        return {**inputs, "labels": labels, "num_items": np.asarray(len(indices))}

    def _with_gaps(self, ids: NDArray[np.int64], keys: list[tuple[int, ...]]) -> NDArray[np.int64]:
        """The tokens with some of them unknown, drawn by the key of each row (Iyyer et al. 2015)."""
        special = vocabulary.specials(self.tokenizer)
        drawn = np.stack([np.random.default_rng(key).random(ids.shape[1]) for key in keys])
        hidden = (drawn < self.data.word_dropout) & ~np.isin(ids, list(special.values()))
        return np.where(hidden, special["unk"], ids)

    def model_inputs(self, chosen: Sequences, indices: NDArray[np.int64]) -> Batch:
        """What the model reads of some examples."""
        rows = self.padded_rows(chosen, indices)
        if len(self.data.choice.texts) == 2:
            places = np.arange(rows["input_ids"].shape[1])
            rows["token_type_ids"] = (places >= chosen.seconds[indices, None]) & rows["attention_mask"]
            rows["token_type_ids"] = rows["token_type_ids"].astype(np.int64)
        return rows

    def padded_rows(self, chosen: Sequences, sequences: NDArray[np.int64]) -> Batch:
        """Sequences of tokens as rows of one array, and where they are no padding."""
        rows = [chosen.tokens[i] for i in sequences]
        ids = padded(rows, vocabulary.specials(self.tokenizer)["pad"])
        lengths = np.asarray([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": np.arange(ids.shape[1]) < lengths[:, None]}

    def flops_per_unit(self, config: "SplitstepConfig", *, sequences: int = 1) -> int:
        """Floating-point operations of a forward pass, an example."""
        from splitstep.models.accounting import flops_per_token

        lengths = self.sequences("train").lengths
        length = max(round(float(lengths.mean())), 1)
        a_token = flops_per_token(config, length=length, sequences=sequences, model=self.model())
        return a_token * length * lengths.shape[1]

    # Evaluation

    def logits(self, predictor: "Predictor", chosen: Sequences) -> NDArray[np.float64]:
        """What the model says of each example, a row each."""
        found: dict[int, NDArray[np.float64]] = {}
        with predictor:
            for indices in predictor.shares(chosen.lengths.max(1)):
                found |= zip(indices.tolist(), predictor.logits(self.model_inputs(chosen, indices)), strict=True)
        rows: list[NDArray[np.float64]] = predictor.gathered(found)
        return np.stack(rows)

    def measure(self, predictor: "Predictor", split: str) -> Measured:
        """The metrics of the recipe, the loss, and what was said of each example."""
        chosen = self.sequences(split)
        logits = self.logits(predictor, chosen)
        if self.data.labels == "numbers":
            values = logits[:, 0]
            metrics = self._scored(chosen.labels, values)
            pairs = zip(chosen.labels.tolist(), values.tolist(), strict=True)
            rows = [{"label": label, "prediction": value} for label, value in pairs]
            return Measured(metrics | {"loss": float(np.mean((values - chosen.labels) ** 2))}, rows)
        labels, predictions = chosen.labels.astype(np.int64), logits.argmax(1)
        likely = _log_softmax(logits)
        losses = -likely[np.arange(len(labels)), labels]
        metrics = self._scored(labels, predictions) | {"loss": float(losses.mean())} | self._baseline(chosen)
        names = zip(labels, predictions, strict=True)
        return Measured(metrics, [{"label": self.names[a], "prediction": self.names[b]} for a, b in names])

    def _scored(self, labels: NDArray[Any], predictions: NDArray[Any]) -> dict[str, float]:
        return {score.metric: score(labels, predictions) for score in self.scores.values()}

    def _baseline(self, chosen: Sequences) -> dict[str, float]:
        """The accuracy of guessing from what the format's guesser looks at, where it has one."""
        if self.data.choice.format.clue is None:
            return {}
        try:
            learnt = self.sequences("train")
        except UserError as error:  # a model may be measured where it was not trained
            self.say(f"no baseline without the training examples: {error}")
            return {}
        return {"baseline_accuracy": guessed(learnt, chosen)}

    def example_of(self, line: str, *, place: str) -> Texts:
        """The texts of a line, of which two have a tab between them."""
        wanted = len(self.data.choice.texts)
        texts = (line,) if wanted == 1 else tuple(line.split("\t"))
        if len(texts) != wanted:
            raise UserError(f"{place}: {len(texts)} texts with tabs between them, and the model reads {wanted}")
        return texts

    def remarks(self, rows: list[Texts]) -> Iterator[tuple[int, str]]:
        """Which of the examples are cut."""
        for number, (_, own) in enumerate(self._encoded(Example(texts, "", "") for texts in rows)):
            if any(encoding.overflowing for encoding in own):
                yield (
                    number,
                    f"longer than {self.data.max_length} tokens; the {self.data.truncation} of its text counts",
                )

    def classified(self, rows: list[Texts], predictor: "Predictor") -> list[tuple[str, float | None]]:
        """The likeliest label of each example and its probability, or the number."""
        encodings = [e for _, own in self._encoded(Example(texts, "", "") for texts in rows) for e in own]
        tokens, seconds = Ragged.of(e.ids for e in encodings), np.asarray([_second(e) for e in encodings])
        unknown = np.zeros(len(rows))
        logits = self.logits(predictor, Sequences(tokens, seconds, unknown, unknown.astype(str)))
        if self.data.labels == "numbers":
            return [(f"{value:.4f}", None) for value in logits[:, 0]]
        return [(self.names[number], probability) for number, probability in likeliest(logits)]


def _second(encoding: Encoding) -> int:
    """Where the second text begins: as many places on as belong to the first."""
    return len(encoding.type_ids) - sum(encoding.type_ids)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def guessed(learnt: Sequences, asked: Sequences) -> float:
    """The share of labels that are the commonest ones with the same clue among the learnt."""
    counts: dict[str, Counter[float]] = defaultdict(Counter)
    for clue, label in zip(learnt.clues, learnt.labels, strict=True):
        counts[clue][label] += 1
    commonest = {clue: counter.most_common(1)[0][0] for clue, counter in counts.items()}
    overall = Counter(learnt.labels.tolist()).most_common(1)[0][0]
    guesses = [commonest.get(clue, overall) for clue in asked.clues]
    return float(np.mean(np.asarray(guesses) == asked.labels))
