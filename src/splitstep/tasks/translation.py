"""Translation: parallel text, joint BPE, an encoder-decoder, BLEU."""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from splitstep.data import vocabulary
from splitstep.data.cache import Ragged, cached
from splitstep.data.files import OnBad, Reading, fingerprint
from splitstep.data.parallel import FORMATS, Format, Pair
from splitstep.data.places import data_folder
from splitstep.data.settings import Section, one_held_out
from splitstep.data.vocabulary import Vocabulary
from splitstep.models.labels import IGNORED
from splitstep.solver.errors import UserError
from splitstep.tasks.base import Batch, Measured, Task, padded
from splitstep.tasks.bleu import CONVENTIONS, bleu, chrf

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig
    from splitstep.tasks.prediction import Predictor

Patterns = Annotated[list[str], Field(min_length=1)]


class TranslationData(Section):
    """Where the parallel text is and how it becomes tokens."""

    root: str | None = None  # the folder of all data sets; SPLITSTEP_DATA without it
    folder: str = "."  # of this data set, in the root
    format: Literal["lines", "iwslt", "tsv", "cldr"] = "lines"
    source: str  # language
    target: str  # language
    train: Patterns  # names of files, with {language} in them; parts of a packaged set
    valid: Patterns | None = None
    test: Patterns | None = None
    valid_every: int | None = Field(default=None, gt=1)  # every n-th pair of train is held out, where valid is no file
    on_bad: OnBad = "stop"  # what a malformed pair does
    vocabulary: Vocabulary = Vocabulary()
    max_length: int = Field(default=256, gt=1)  # tokens; longer training pairs are counted and left out
    max_ratio: float | None = Field(default=None, gt=1)  # of the lengths of both sides, likewise

    @model_validator(mode="after")
    def _fits(self) -> "TranslationData":
        one_held_out(self.valid, self.valid_every)
        if self.vocabulary.kind not in ("bpe", "byte", "word"):
            raise ValueError(f"data.vocabulary.kind = {self.vocabulary.kind!r} has no way to write a sentence")
        return self


class TranslationEvaluation(Section):
    """How a finished model translates, and how that is scored."""

    num_beams: int = Field(default=5, ge=1)
    length_penalty: float = Field(
        default=1.0, ge=-10, le=10
    )  # the power of the length that log-probabilities are divided by
    normalization: Literal["length", "gnmt"] = "length"  # by length, or by (5 + length) / 6 as Wu et al. 2016
    early_stopping: bool = False  # as soon as there are as many whole sentences as beams, as in fairseq
    max_length_ratio: float = Field(default=2.0, ge=0, le=1000)  # at most so many tokens a source token,
    max_length_offset: int = Field(default=10, ge=0)  # and so many more
    max_source: int = Field(default=1024, ge=2)  # tokens of a sentence; the end of a longer one is cut off
    precision: Literal["float32", "bfloat16", "int8"] = "float32"  # of the search; int8 linear layers are for CPU
    bleu: Literal["detokenized", "iwslt", "wmt", "transevolve"] = "detokenized"


class Translation(Task):
    """From one language to another."""

    Data, Evaluation = TranslationData, TranslationEvaluation
    kind = "seq2seq"
    model_class = "SplitstepForConditionalGeneration"
    metric = "bleu"
    reported = ("loss", "perplexity", "bleu", "chrf")
    loss_options: ClassVar = {"skip_logits": True}

    @cached_property
    def _root(self) -> Path:
        if self._format.packaged:
            return Path()
        return data_folder(self.data.root, self.data.folder, self.say)

    @property
    def _format(self) -> Format:
        return FORMATS[self.data.format]

    @property
    def _languages(self) -> Pair:
        return self.data.source, self.data.target

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The files of all splits."""
        patterns = chain(*(getattr(self.data, split) or [] for split in ("train", "valid", "test")))
        files = chain(*(self._format.files(self._root, name, self._languages) for name in patterns))
        return fingerprint(files, under=self._root)

    def pairs(self, split: str, say: Callable[[str], None] = lambda line: None) -> list[Pair]:
        """The sentences of a split as they stand in the files."""
        reading = Reading(self.data.on_bad, say)
        patterns = getattr(self.data, self.files_of(split))
        if not patterns:
            raise UserError(f"the recipe names no data.{split}")
        read: Iterator[Pair] = chain(
            *(self._format.pairs(self._root, name, self._languages, reading) for name in patterns)
        )
        return list(self.own(read, split))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's own, or one learnt on both sides of the training text."""
        return vocabulary.load(self.folder or self._prepared)

    @cached_property
    def _prepared(self) -> Path:
        made_from = {"task": "translation", "files": self.fingerprint, "data": self.data.model_dump(exclude={"root"})}
        origin = vocabulary.origin(self.data.vocabulary.under(self.data.root), given=self.initial)
        return self._noted(cached(made_from | {"vocabulary": origin}, self._prepare))

    def _prepare(self, folder: Path) -> list[str]:
        self.say("reading the training text and learning the vocabulary")
        notes: list[str] = []
        pairs = self.pairs("train", notes.append)
        texts = chain.from_iterable(pairs)
        tokenizer = vocabulary.chosen(self.data.vocabulary.under(self.data.root), texts, given=self.initial)
        vocabulary.end_with(tokenizer, single="$A </s>")
        tokenizer.save(str(folder / "tokenizer.json"))
        for side, name in enumerate(("source", "target")):
            Ragged.write(folder / f"train.{name}", vocabulary.encode(tokenizer, (pair[side] for pair in pairs)))
        return notes

    def _encoded(self, tokenizer: Tokenizer, pairs: list[Pair]) -> tuple[Ragged, Ragged]:
        source, target = (Ragged.of(vocabulary.encode(tokenizer, (pair[side] for pair in pairs))) for side in (0, 1))
        return source, target

    @cached_property
    def _sides(self) -> dict[str, tuple[Ragged, Ragged]]:
        return {}

    def _split(self, split: str) -> tuple[Ragged, Ragged]:
        if split not in self._sides:
            if split == "train" and self.folder is None:
                sides = (Ragged.open(self._prepared / "train.source"), Ragged.open(self._prepared / "train.target"))
            else:
                sides = self._encoded(self.tokenizer, self.pairs(split, self.say))
            self._sides[split] = sides
        return self._sides[split]

    @cached_property
    def _kept(self) -> NDArray[np.int64]:
        """The training pairs that are not too long."""
        source, target = self._split("train")
        longest = np.maximum(source.lengths, target.lengths)
        shortest = np.minimum(source.lengths, target.lengths)
        reasons = {
            f"longer than {self.data.max_length} tokens": longest > self.data.max_length,
            "empty on a side": shortest <= 1,  # nothing but the end
            f"of lengths more unequal than {self.data.max_ratio}": longest > (self.data.max_ratio or np.inf) * shortest,
        }
        for reason, pairs in reasons.items():
            if pairs.any():
                self.say(f"{int(pairs.sum()):,} of {len(pairs):,} training pairs are {reason}: left out")
        return np.flatnonzero(~np.any(list(reasons.values()), axis=0))

    def settings(self) -> dict[str, Any]:
        """Vocabulary size and special tokens."""
        ids = vocabulary.specials(self.tokenizer)
        named = {f"{role}_token_id": ids[role] for role in ("pad", "bos", "eos", "unk")}
        size = self.tokenizer.get_vocab_size()
        return {"vocab_size": size, **named, "decoder_start_token_id": ids["bos"]}

    def save_processor(self, folder: Path) -> None:
        """The tokenizer."""
        vocabulary.as_hugging_face(self.tokenizer).save_pretrained(folder)

    def lengths(self, split: str) -> NDArray[np.int64]:
        """The longer side of each pair."""
        source, target = self._split(split)
        longest = np.maximum(source.lengths, target.lengths)
        return longest[self._kept] if split == "train" else longest

    def tilts(self, split: str) -> NDArray[np.int64]:
        """How much longer the source is than the target."""
        source, target = self._split(split)
        tilts = source.lengths - target.lengths
        return tilts[self._kept] if split == "train" else tilts

    def batch(self, split: str, indices: NDArray[np.int64], *, epoch: int | None = None, seed: int = 0) -> Batch:
        """Source, its mask and the target; the loss is a sum over target tokens."""
        if split == "train":
            indices = self._kept[indices]
        source, target = self._split(split)
        pad = vocabulary.specials(self.tokenizer)["pad"]
        sources = padded([source[i] for i in indices], pad)
        labels = padded([target[i] for i in indices], IGNORED)
        items = np.asarray((labels != IGNORED).sum())
        return {"input_ids": sources, "attention_mask": sources != pad, "labels": labels, "num_items": items}

    def from_loss(self, loss: float, split: str) -> dict[str, float]:
        """Loss and perplexity a token."""
        return {"loss": loss, "perplexity": math.exp(min(loss, 700))}

    def measure(self, predictor: "Predictor", split: str) -> Measured:
        """BLEU of beam search, and the translations."""
        loss = predictor.mean_loss(self, split)
        pairs = self.pairs(split)
        if cut := self.too_long([source for source, _ in pairs]):
            self.say(f"{len(cut):,} {split} sentences are longer than {self.evaluation.max_source} tokens: cut")
        hypotheses = [beams[0][0] for beams in self.translated([source for source, _ in pairs], predictor)]
        references = [target for _, target in pairs]
        score, signature = bleu(hypotheses, references, convention=self.evaluation.bleu, language=self.data.target)
        metrics = {
            "bleu": score,
            "chrf": chrf(hypotheses, references),
            "signature": signature,
            "convention": CONVENTIONS[self.evaluation.bleu].used_by,
            **self.from_loss(loss, split),
        }
        rows = zip(pairs, hypotheses, strict=True)
        return Measured(metrics, [{"source": s, "reference": r, "hypothesis": h} for (s, r), h in rows])

    def answer(self, predictor: "Predictor") -> None:
        """Translate the first validation sentence."""
        self.translated([self._first_source], predictor)

    @cached_property
    def _first_source(self) -> str:
        return self.pairs("valid")[0][0]  # read once: an answer is timed

    def check(self, config: "SplitstepConfig") -> None:
        """Refuse more beams than there are first words, and sentences that learned positions have no place for."""
        if self.evaluation.num_beams > config.vocab_size // 2:
            raise UserError(
                f"evaluation.num_beams = {self.evaluation.num_beams} is more than half of the vocabulary of "
                f"{config.vocab_size} tokens"
            )
        if config.position_embedding == "learned":
            longest = {split: int(self.lengths(split).max(initial=0)) for split in self.splits}
            read = {f"the longest sentence of data.{split}": length for split, length in longest.items()}
            for what, length in (read | {"evaluation.max_source": self.evaluation.max_source}).items():
                if length > config.max_position_embeddings:
                    known = f"max_position_embeddings = {config.max_position_embeddings} learned positions"
                    raise UserError(f"{what} is {length:,} tokens, more than {known}")

    def translated(
        self, sources: list[str], predictor: "Predictor", *, nbest: int = 1
    ) -> list[list[tuple[str, float]]]:
        """The best translations of each sentence with their scores."""
        tokens = Ragged.of(self._cut(ids) for ids in vocabulary.encode(self.tokenizer, sources))
        results: dict[int, list[tuple[str, float]]] = {}
        with predictor:
            for indices in predictor.shares(tokens.lengths * self.evaluation.num_beams):
                results |= zip(
                    indices.tolist(), self._beams([tokens[i] for i in indices], predictor, nbest), strict=True
                )
        return predictor.gathered(results)

    def too_long(self, sources: list[str]) -> list[int]:
        """Which of the sentences are cut."""
        lengths = map(len, vocabulary.encode(self.tokenizer, sources))
        return [number for number, length in enumerate(lengths) if length > self.evaluation.max_source]

    def _cut(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        most = self.evaluation.max_source
        return ids if len(ids) <= most else np.append(ids[: most - 1], ids[-1:])  # the last is the end token

    def _beams(
        self, sources: list[NDArray[np.int32]], predictor: "Predictor", nbest: int
    ) -> Iterator[list[tuple[str, float]]]:
        from splitstep.models.decoding import beam_search

        pad = vocabulary.specials(self.tokenizer)["pad"]
        ratio, offset = self.evaluation.max_length_ratio, self.evaluation.max_length_offset
        ids = padded(sources, pad)
        inputs = predictor.to_device({"input_ids": ids, "attention_mask": ids != pad})
        with predictor.in_precision(self.evaluation.precision) as model:
            found = beam_search(
                model,  # type: ignore[arg-type]
                **inputs,
                num_beams=max(self.evaluation.num_beams, nbest),
                num_return=nbest,
                length_penalty=self.evaluation.length_penalty,
                normalization=self.evaluation.normalization,
                early_stopping=self.evaluation.early_stopping,
                max_new_tokens=[max(int(ratio * len(source)) + offset, 1) for source in sources],
            )
        for beams in found:
            texts = self.tokenizer.decode_batch([beam.tokens for beam in beams], skip_special_tokens=True)
            # A sentence is a line, whatever bytes a model comes up with.
            yield [(" ".join(text.splitlines()).strip(), beam.score) for text, beam in zip(texts, beams, strict=True)]
