"""Pre-training: masked tokens and next sentences over plain text, an encoder (Devlin et al. 2018)."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from splitstep.data import corpus, vocabulary
from splitstep.data.cache import cached
from splitstep.data.corpus import Corpus, Spans
from splitstep.data.files import OnBad, Reading, fingerprint_of
from splitstep.data.masking import Masker, Masking
from splitstep.data.places import data_folder
from splitstep.data.sentences import DOCUMENTS, SPLITTERS, Format, joined
from splitstep.data.settings import Section, one_held_out
from splitstep.data.vocabulary import SPECIALS, Vocabulary, for_text
from splitstep.models.labels import IGNORED
from splitstep.solver.errors import UserError
from splitstep.tasks.base import Batch, Measured, Task, padded

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig
    from splitstep.tasks.prediction import Predictor

Texts = dict[Literal["paragraphs", "wikitext", "enwik8", "imdb"], Annotated[list[str], Field(min_length=1)]]
SPECIAL_PLACES = 3  # [CLS] first [SEP] second [SEP]
FOLLOWS, RANDOM = 0, 1  # the labels of next-sentence prediction, as in Hugging Face's models


class PreTrainingData(Section):
    """Which texts there are, and how they become pairs of passages with masked tokens."""

    root: str | None = None  # the folder of all data sets; SPLITSTEP_DATA without it
    folder: str = "."
    train: Texts  # names of files by their format
    valid: Texts | None = None
    test: Texts | None = None
    valid_every: int | None = Field(default=None, gt=1)  # every n-th document is held out, where valid is no file
    sentences: Literal["rule", "lines"] = "rule"  # where they end: by rule, or with the line
    min_words: int = Field(default=1, ge=1)  # a shorter sentence is joined to the next
    on_bad: OnBad = "stop"  # what a malformed line does
    vocabulary: Vocabulary = Vocabulary()
    pairs: Literal["packed", "sentences"] = "packed"  # passages that fill max_length, or two sentences
    max_length: int = Field(default=128, ge=8)  # tokens of a pair, special tokens included
    masking: Masking = Masking()

    @model_validator(mode="after")
    def _fits(self) -> "PreTrainingData":
        if self.valid is None and self.valid_every is None:
            raise ValueError("give one of data.valid and data.valid_every")
        one_held_out(self.valid, self.valid_every)
        for_text(self.vocabulary)
        return self


class PreTrainingEvaluation(Section):
    """Nothing is chosen here: held-out pairs are drawn and masked the same way each time."""


class PreTraining(Task):
    """Tokens behind a mask, and whether one passage follows another.

    Pairs and masks are drawn from (seed, epoch, index). The documents are tokenised once, into files that are mapped
    into memory.
    """

    Data, Evaluation = PreTrainingData, PreTrainingEvaluation
    kind = "encoder"
    model_class = "SplitstepForPreTraining"
    metric = "mlm_loss"
    reported = ("loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
    loss_options: ClassVar = {"skip_logits": True}

    # Text

    @cached_property
    def _root(self) -> Path:
        return data_folder(self.data.root, self.data.folder, self.say)

    def _texts(self, split: str) -> Iterator[tuple[Format, str]]:
        """What the recipe names for a split, with its formats."""
        for kind, names in (getattr(self.data, split) or {}).items():
            yield from ((DOCUMENTS[kind], name) for name in names)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The files of all splits."""
        texts = chain.from_iterable(map(self._texts, ("train", "valid", "test")))
        sums = (fingerprint_of(name, kind.files(self._root, name), under=self._root) for kind, name in texts)
        return {name: checksum for found in sums for name, checksum in found.items()}

    def documents(self, split: str, say: Callable[[str], None] = lambda line: None) -> Iterator[list[str]]:
        """The documents of a split as lists of sentences; those without two sentences have no pairs and are not."""
        texts = self._texts(self.files_of(split))
        reading = Reading(self.data.on_bad, say)
        read = chain.from_iterable(kind.documents(self._root, name, reading) for kind, name in texts)
        return self.own(self._of_several(map(self._sentences, read), split, say), split)

    @staticmethod
    def _of_several(documents: Iterable[list[str]], split: str, say: Callable[[str], None]) -> Iterator[list[str]]:
        count = short = 0
        for document in documents:
            count += 1
            if len(document) > 1:
                yield document
            else:
                short += 1
        if short:
            say(f"{short:,} of {count:,} documents read for {split} have fewer than two sentences: left out")

    def _sentences(self, paragraphs: list[str]) -> list[str]:
        split = SPLITTERS[self.data.sentences]
        return list(joined(chain.from_iterable(map(split, paragraphs)), words=self.data.min_words))

    # Tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's own, or that of the recipe, learnt on the training text if need be."""
        return vocabulary.load(self.folder or self._learnt)

    @cached_property
    def _learnt(self) -> Path:
        origin = vocabulary.origin(self.data.vocabulary.under(self.data.root), given=self.initial)
        return cached({"task": "pre-training", "text": self._made_from("train"), "vocabulary": origin}, self._learn)

    def _made_from(self, split: str) -> dict[str, Any]:
        """What the sentences of a split depend on."""
        settings = {"folder", "train", "valid", "test", "valid_every", "sentences", "min_words", "on_bad"}
        # In their order, on which it depends what is held out.
        texts = [[name for _, name in self._texts(one)] for one in ("train", "valid", "test")]
        data = self.data.model_dump(include=settings)
        return {"split": split, "texts": texts, "files": self.fingerprint, "data": data}

    def _learn(self, folder: Path) -> None:
        self.say("reading the training text for its vocabulary")
        settings = self.data.vocabulary.under(self.data.root)
        texts = chain.from_iterable(self.documents("train"))
        tokenizer = vocabulary.chosen(settings, texts, given=self.initial)
        vocabulary.around_pairs(tokenizer).save(str(folder / "tokenizer.json"))

    @cached_property
    def _corpora(self) -> dict[str, Corpus]:
        return {}

    def corpus(self, split: str) -> Corpus:
        """The documents of a split as tokens."""
        if split not in self._corpora:
            self._corpora[split] = Corpus.open(self._noted(self._tokenised(split)) / "sentences")
            if self._corpora[split].documents_with_text < 2:
                raise UserError(f"the {split} text has fewer than two documents of two sentences or more")
        return self._corpora[split]

    def _tokenised(self, split: str) -> Path:
        made_from = {"task": "pre-training", "text": self._made_from(split), "vocabulary": self._vocabulary_sum}
        return cached(made_from, lambda folder: self._tokenise(folder, split))

    @cached_property
    def _vocabulary_sum(self) -> str:
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    def _tokenise(self, folder: Path, split: str) -> list[str]:
        self.say(f"writing the {split} text as tokens")
        notes: list[str] = []
        Corpus.write(folder / "sentences", map(self._encoded, self.documents(split, notes.append)))
        return notes

    def _encoded(self, document: list[str]) -> list[NDArray[np.int32]]:
        unknown = str(self.tokenizer.id_to_token(self._ids["unk"]))
        texts = (sentence.replace(SPECIALS["unk"], unknown) for sentence in document)  # WikiText's own
        encoded = vocabulary.encode(self.tokenizer, texts, add_special_tokens=False)
        return [sentence for sentence in encoded if len(sentence)]

    # Pairs

    @property
    def _room(self) -> int:
        return self.data.max_length - SPECIAL_PLACES

    @cached_property
    def _spans(self) -> dict[str, Spans]:
        return {}

    def spans(self, split: str) -> Spans:
        """The sentences that each pair is drawn from."""
        if split not in self._spans:
            made_from: dict[str, Any] = {"tokens": self._tokenised(split).name, "pairs": self.data.pairs}
            folder = cached(made_from | {"room": self._room}, lambda folder: self._pair(folder, split))
            self._spans[split] = corpus.open_spans(folder / "spans")
        return self._spans[split]

    def _pair(self, folder: Path, split: str) -> None:
        corpus.write_spans(folder / "spans", self.corpus(split), self.data.pairs, self._room)

    def lengths(self, split: str) -> NDArray[np.int64]:
        """The most tokens that each pair can have."""
        sizes = self.corpus(split).sizes(self.spans(split))
        return np.minimum(sizes + SPECIAL_PLACES, self.data.max_length)

    # What the model takes

    def settings(self) -> dict[str, Any]:
        """Vocabulary size, special tokens, and positions for a pair."""
        return {
            "vocab_size": self.tokenizer.get_vocab_size(),
            "max_position_embeddings": self.data.max_length,
            **vocabulary.special_ids(self.tokenizer),
        }

    def save_processor(self, folder: Path) -> None:
        """The tokenizer, which puts special tokens around a text or a pair of texts."""
        tokenizer = vocabulary.as_hugging_face(self.tokenizer, max_length=self.data.max_length, token_types=True)
        tokenizer.save_pretrained(folder)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return vocabulary.specials(self.tokenizer)

    @cached_property
    def _masker(self) -> Masker:
        special = frozenset(self._ids.values())
        return Masker(self.data.masking, self.tokenizer.get_vocab_size(), special, self._ids["mask"])

    def batch(self, split: str, indices: NDArray[np.int64], *, epoch: int | None = None, seed: int = 0) -> Batch:
        """Masked pairs. The loss is a mean over `num_items` chosen tokens plus one over `num_pairs` pairs."""
        examples = [self._example(split, int(index), seed, epoch or 0) for index in indices]
        tokens, types, seen, target, follows = zip(*examples, strict=True)
        labels = padded([np.where(chosen, row, IGNORED) for chosen, row in zip(target, tokens, strict=True)], IGNORED)
        mask = padded([np.ones_like(row) for row in tokens], 0)
        return {
            "input_ids": padded(list(seen), self._ids["pad"]),
            "attention_mask": mask.astype(bool),
            "token_type_ids": padded(list(types), 0),
            "labels": labels,
            "next_sentence_label": np.asarray([FOLLOWS if real else RANDOM for real in follows]),
            "num_items": np.asarray((labels != IGNORED).sum()),
            "num_pairs": np.asarray(len(indices)),
        }

    def _example(self, split: str, index: int, seed: int, epoch: int) -> tuple[Any, ...]:
        """Tokens, types, what the model sees, which tokens are its targets, and whether the second part follows."""
        rng = np.random.default_rng((seed, epoch, index))
        start, end = map(int, self.spans(split)[index])
        pair = corpus.drawn(self.corpus(split), (start, end), rng, pairing=self.data.pairs, room=self._room)
        begin, divide = ([self._ids[role]] for role in ("bos", "eos"))
        tokens = np.concatenate([begin, pair.first, divide, pair.second, divide]).astype(np.int32)
        types = np.repeat([0, 1], [len(pair.first) + 2, len(pair.second) + 1]).astype(np.int32)
        return tokens, types, *self._masker(tokens, rng), pair.follows

    def units(self, items: int) -> int:
        """The tokens of text, of which the masked are a share."""
        return round(items / self.data.masking.rate)

    def flops_per_unit(self, config: "SplitstepConfig", *, sequences: int = 1) -> int:
        """Floating-point operations of a forward pass, a token; the output layer sees the masked ones alone."""
        head = 2 * config.hidden_size * (config.vocab_size + config.hidden_size * config.mlm_transform)
        return round(super().flops_per_unit(config, sequences=sequences) - (1 - self.data.masking.rate) * head)

    # What it is judged by

    def validate(self, predictor: "Predictor", split: str, *, select: str = "loss") -> dict[str, Any]:
        """Both losses and accuracies."""
        return self.measure(predictor, split).metrics

    def measure(self, predictor: "Predictor", split: str) -> Measured:
        """Losses and accuracies of masked tokens and of pairs."""
        found: dict[int, dict[str, float]] = {}
        with predictor:
            for indices in predictor.shares(self.lengths(split)):
                found |= zip(indices.tolist(), _scored(predictor, self.batch(split, indices)), strict=True)
        rows = predictor.gathered(found)
        tokens, pairs = sum(row["masked"] for row in rows), len(rows)
        if not tokens:
            raise UserError(f"not one token of the {split} text was masked; it is too short")
        metrics = {
            "mlm_loss": sum(row["mlm_loss"] for row in rows) / tokens,
            "mlm_accuracy": sum(row["mlm_correct"] for row in rows) / tokens,
            "nsp_loss": sum(row["nsp_loss"] for row in rows) / pairs,
            "nsp_accuracy": sum(row["nsp_correct"] for row in rows) / pairs,
        }
        return Measured({"loss": metrics["mlm_loss"] + metrics["nsp_loss"], **metrics}, rows)


def _scored(predictor: "Predictor", batch: Batch) -> Iterator[dict[str, float]]:
    """Each pair's summed losses, and how much of it was guessed right."""
    import torch
    from torch.nn.functional import cross_entropy

    inputs = predictor.to_device({name: array for name, array in batch.items() if not name.startswith("num_")})
    labels, related = inputs.pop("labels"), inputs.pop("next_sentence_label")
    model: Any = predictor.model
    states = model.model(**inputs).last_hidden_state
    rows, places = torch.nonzero(labels != IGNORED, as_tuple=True)
    logits, targets = model.lm_head(model.transform(states[rows, places])).float(), labels[rows, places]
    sums = torch.zeros(3, len(labels), dtype=torch.float64)  # on the processor: not every device has float64
    per_token = (cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets, targets >= 0)
    for total, values in zip(sums, per_token, strict=True):
        total.index_add_(0, rows.cpu(), values.cpu().double())
    pairs = model.next_sentence(model.pool(states, inputs["attention_mask"])).float()
    losses, right = cross_entropy(pairs, related, reduction="none"), pairs.argmax(-1) == related
    columns = torch.stack([*sums, losses.cpu().double(), right.cpu().double()]).tolist()
    names = ("mlm_loss", "mlm_correct", "masked", "nsp_loss", "nsp_correct")
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))
