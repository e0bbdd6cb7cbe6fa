"""Language modelling: running text in blocks, a causal model, perplexity."""

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
from splitstep.data.places import data_folder
from splitstep.data.settings import Section
from splitstep.data.text import FORMATS, Format
from splitstep.data.vocabulary import Vocabulary, for_text
from splitstep.models.labels import IGNORED
from splitstep.solver.errors import UserError
from splitstep.tasks.base import Batch, Measured, Task

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig
    from splitstep.tasks.prediction import Predictor

Names = Annotated[list[str], Field(min_length=1)]


class LanguageModellingData(Section):
    """Where the text is, how it becomes tokens, and how long the blocks are."""

    root: str | None = None  # the folder of all data sets; SPLITSTEP_DATA without it
    folder: str = "."  # of this data set, in the root
    format: Literal["wikitext", "paragraphs", "whole", "python-reference"] = "wikitext"
    train: Names
    valid: Names
    test: Names | None = None
    on_bad: OnBad = "stop"  # what a malformed line does
    vocabulary: Vocabulary = Vocabulary(kind="word", size="all")
    tokens_per_sample: int = Field(default=512, gt=1)  # of a block

    @model_validator(mode="after")
    def _fits(self) -> "LanguageModellingData":
        for_text(self.vocabulary)
        return self


class LanguageModellingEvaluation(Section):
    """How a finished model is measured."""

    context_window: int = Field(
        default=0, ge=0
    )  # tokens that each scored token has before it at least, where there are


class LanguageModelling(Task):
    """The next token of a running text.

    The stream of tokens is cut into blocks that overlap by one token, so that every token but the first is predicted
    exactly once.
    """

    Data, Evaluation = LanguageModellingData, LanguageModellingEvaluation
    kind = "causal"
    model_class = "SplitstepForCausalLM"
    metric = "perplexity"
    reported: tuple[str, ...] = ("loss", "perplexity", "word_perplexity")
    loss_options: ClassVar = {"skip_logits": True}

    def __init__(self, data: Any, evaluation: Any, **options: Any) -> None:
        super().__init__(data, evaluation, **options)
        if data.vocabulary.kind != "word":
            self.reported = (*self.reported, "bits_per_byte")

    @property
    def _format(self) -> Format:
        return FORMATS[self.data.format]

    @cached_property
    def _root(self) -> Path:
        if self._format.packaged:
            return Path()
        return data_folder(self.data.root, self.data.folder, self.say)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The files of all splits."""
        names = chain(*(getattr(self.data, split) for split in self.splits))
        files = chain(*(self._format.files(self._root, name) for name in names))
        return fingerprint(files, under=self._root)

    def documents(self, split: str, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """The documents of a split, one after another."""
        reading = Reading(self.data.on_bad, say)
        return chain(*(self._format.documents(self._root, name, reading) for name in getattr(self.data, split)))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's own, or one learnt on the training text."""
        return vocabulary.load(self.folder or self._prepared)

    @cached_property
    def _prepared(self) -> Path:
        made_from = {"task": "language-modelling", "files": self.fingerprint}
        settings = self.data.model_dump(exclude={"root", "tokens_per_sample"})
        origin = vocabulary.origin(self.data.vocabulary.under(self.data.root), given=self.initial)
        return self._noted(cached(made_from | {"data": settings, "vocabulary": origin}, self._prepare))

    def _prepare(self, folder: Path) -> list[str]:
        self.say("reading the text and learning the vocabulary")
        settings = self.data.vocabulary.under(self.data.root)
        tokenizer = vocabulary.chosen(settings, self.documents("train"), given=self.initial)
        tokenizer.save(str(folder / "tokenizer.json"))
        notes: list[str] = []
        for split in self.splits:
            Ragged.write(folder / split, self._encoded(tokenizer, split, notes.append))
        return notes

    def _encoded(self, tokenizer: Tokenizer, split: str, say: Callable[[str], None]) -> Iterator[NDArray[np.int32]]:
        if self.data.vocabulary.kind == "word":  # the end of a line is a word, as in the published counts
            end = f" {vocabulary.SPECIALS['eos']} "
            texts: Iterator[str] = (document.replace("\n", end) for document in self.documents(split, say))
        else:
            texts = self.documents(split, say)
        return vocabulary.encode(tokenizer, texts, add_special_tokens=False)

    @cached_property
    def _streams(self) -> dict[str, Ragged]:
        return {}

    def stream(self, split: str) -> Ragged:
        """The documents of a split as tokens."""
        if split not in self._streams:
            if self.folder is None:
                self._streams[split] = Ragged.open(self._prepared / split)
            else:
                self._streams[split] = Ragged.of(self._encoded(self.tokenizer, split, self.say))
            if len(self._streams[split].tokens) < 2:
                raise UserError(f"the {split} text has fewer than two tokens")
        return self._streams[split]

    def settings(self) -> dict[str, Any]:
        """Vocabulary size, special tokens, and positions for a block."""
        ids = vocabulary.specials(self.tokenizer)
        named = {f"{role}_token_id": ids[role] for role in ("pad", "bos", "eos", "unk")}
        size = self.tokenizer.get_vocab_size()
        return {"vocab_size": size, **named, "max_position_embeddings": self.data.tokens_per_sample}

    def save_processor(self, folder: Path) -> None:
        """The tokenizer."""
        tokenizer = vocabulary.as_hugging_face(self.tokenizer, max_length=self.data.tokens_per_sample)
        tokenizer.save_pretrained(folder)

    @property
    def _stride(self) -> int:
        return self.data.tokens_per_sample - 1

    def lengths(self, split: str) -> NDArray[np.int64]:
        """The tokens of each block; the last may be shorter."""
        predicted = len(self.stream(split).tokens) - 1
        whole, rest = divmod(predicted, self._stride)
        lengths = np.full(whole + (rest > 0), self.data.tokens_per_sample, dtype=np.int64)
        if rest:
            lengths[-1] = rest + 1
        return lengths

    def batch(self, split: str, indices: NDArray[np.int64], *, epoch: int | None = None, seed: int = 0) -> Batch:
        """Blocks of tokens, which are their own labels; the loss is a sum over the tokens after the first of each."""
        starts = [int(index) * self._stride for index in indices]
        return self._rows(split, [(start, start + self.data.tokens_per_sample, start + 1) for start in starts])

    def _rows(self, split: str, spans: list[tuple[int, int, int]]) -> Batch:
        """Rows of tokens from start to end, whose labels count from a place on."""
        tokens = self.stream(split).tokens
        parts = [tokens[start:end] for start, end, _ in spans]
        ids = np.full((len(parts), max(map(len, parts))), vocabulary.specials(self.tokenizer)["pad"], dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row, (part, (start, _, counted)) in enumerate(zip(parts, spans, strict=True)):
            ids[row, : len(part)] = part
            labels[row, counted - start : len(part)] = part[counted - start :]
        return {"input_ids": ids, "labels": labels, "num_items": np.asarray((labels != IGNORED).sum())}

    def flops_per_unit(self, config: "SplitstepConfig", *, sequences: int = 1) -> int:
        """Floating-point operations of a forward pass with its loss, a token."""
        from splitstep.models.accounting import flops_per_token

        shares = None
        if config.adaptive_cutoffs is not None:
            tokens = self.stream("train").tokens
            shares = [((band.start <= tokens) & (tokens < band.stop)).mean() for band in config.adaptive_bands[1:]]
        return flops_per_token(config, length=self.data.tokens_per_sample, sequences=sequences, shares=shares)

    def from_loss(self, loss: float, split: str) -> dict[str, float]:
        """Loss and perplexity a token."""
        return {"loss": loss, "perplexity": math.exp(min(loss, 700))}

    def measure(self, predictor: "Predictor", split: str) -> Measured:
        """Perplexities over the whole text, and the loss of each document."""
        losses = self._token_losses(predictor, split)
        stream = self.stream(split)
        total = float(losses.sum())
        metrics: dict[str, Any] = self.from_loss(total / len(losses), split)
        text = list(self.documents(split))
        if self.data.vocabulary.kind == "word":
            metrics["word_perplexity"] = metrics["perplexity"]
        else:
            words = sum(len(document.split()) + document.count("\n") for document in text)
            metrics["word_perplexity"] = math.exp(min(total / words, 700))
            metrics["bits_per_byte"] = total / math.log(2) / sum(len(document.encode()) for document in text)
        metrics["context_window"] = self.evaluation.context_window
        sums = np.add.reduceat(np.concatenate([[0.0], losses]), np.concatenate([[0], stream.ends[:-1]]))
        counts = stream.lengths.copy()
        counts[0] -= 1  # the first token of all has nothing before it
        rows = [{"loss": float(s), "tokens": int(n)} for s, n in zip(sums, counts, strict=True) if n]
        return Measured(metrics, rows)

    def check(self, config: "SplitstepConfig") -> None:
        """Refuse a context window that leaves nothing to measure."""
        self._check_window()

    def _check_window(self) -> None:
        context, size = self.evaluation.context_window, self.data.tokens_per_sample
        if context >= size - 1:
            raise UserError(f"evaluation.context_window = {context} leaves nothing of a block of {size} tokens")

    def _token_losses(self, predictor: "Predictor", split: str) -> NDArray[np.float64]:
        """The loss of every token but the first, each with at least `context_window` tokens before it."""
        self._check_window()
        context, size = self.evaluation.context_window, self.data.tokens_per_sample
        last = len(self.stream(split).tokens)
        spans = [(0, min(size, last), 1)]
        while spans[-1][1] < last:
            counted = spans[-1][1]
            start = max(counted - 1 - context, 0)
            spans.append((start, min(start + size, last), counted))
        lengths = np.asarray([end - start for start, end, _ in spans])
        found: dict[int, NDArray[np.float64]] = {}
        with predictor:
            for indices in predictor.shares(lengths):
                chosen = [spans[i] for i in indices]
                found |= zip(indices.tolist(), predictor.token_losses(self._rows(split, chosen)), strict=True)
        return np.concatenate(predictor.gathered(found))

    def continued(self, prompt: str, predictor: "Predictor", *, tokens: int, temperature: float, seed: int) -> str:
        """The prompt and what the model writes after it."""
        import torch

        ids = self._prompt(prompt)
        inputs = predictor.to_device({"input_ids": ids[None, -self._room :]})
        draw = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        torch.manual_seed(seed)
        with predictor:
            out = predictor.model.generate(  # type: ignore[operator]
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                max_new_tokens=min(tokens, self.data.tokens_per_sample - inputs["input_ids"].shape[1]),
                **draw,
            )
        new = self._text([*ids.tolist(), *out[0, inputs["input_ids"].shape[1] :].tolist()])
        return prompt + new.removeprefix(self._text(ids.tolist()))

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def too_long(self, prompts: list[str]) -> list[int]:
        """Of which prompts the model sees the end alone."""
        return [number for number, prompt in enumerate(prompts) if len(self._prompt(prompt)) > self._room]

    def unknown(self, prompts: list[str]) -> list[int]:
        """Which prompts have words that the model does not know."""
        unknown = vocabulary.specials(self.tokenizer)["unk"]
        return [number for number, prompt in enumerate(prompts) if unknown in self._prompt(prompt)]

    def _prompt(self, text: str) -> NDArray[np.int64]:
        return next(vocabulary.encode(self.tokenizer, [text], add_special_tokens=False)).astype(np.int64)

    @property
    def _room(self) -> int:
        """Positions that the model knows, less one to write in."""
        return self.data.tokens_per_sample - 1
