"""Vocabularies: learnt on training text or read from a file, as `tokenizers` objects that transformers can load."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from splitstep.data import listops
from splitstep.data.files import checksum, find, lines
from splitstep.data.places import data_folder
from splitstep.data.settings import Section
from splitstep.solver.errors import UserError, lookup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The special tokens by what they do. Ids 0 to 4 in a vocabulary of ours; in a given one, wherever it has them.
SPECIALS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
BERT_SPECIALS = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
AS_IN_BERT = {"cls": "bos", "sep": "eos"}  # its names of what begins a text, and of what ends it
NORMALIZATIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: normalizers.Sequence([]),
    "nfc": normalizers.NFC,
    "nfkc": normalizers.NFKC,
}


class Vocabulary(Section):
    """How text becomes tokens."""

    kind: Literal["bpe", "word", "byte", "wordpiece", "grey", "listops"] = "bpe"
    size: Annotated[int, Field(gt=len(SPECIALS))] | Literal["all"] = 10_000  # at most; "all" words of the training text
    lowercase: bool = False
    normalization: Literal["none", "nfc", "nfkc"] = "nfc"
    file: str | None = None  # a given WordPiece vocabulary, a token a line

    @model_validator(mode="after")
    def _fits(self) -> "Vocabulary":
        if self.file is not None and self.kind != "wordpiece":
            raise ValueError(f"data.vocabulary.file is of kind = 'wordpiece', and the kind is {self.kind!r}")
        return self

    def under(self, root: str | None) -> "Vocabulary":
        """The same, its file found in the folder of data sets."""
        if self.file is None:
            return self
        path = PurePath(self.file)
        return self.model_copy(update={"file": str(find(data_folder(root, str(path.parent)), path.name))})


def _number(settings: Vocabulary) -> int:
    if settings.size == "all":
        raise UserError(f"data.vocabulary.size = 'all' is for words; a {settings.kind} vocabulary has a number")
    return settings.size


def _bpe(settings: Vocabulary, texts: Iterable[str]) -> Tokenizer:
    # Bytes underneath: every text can be written, and read back as it was.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_number(settings),
        special_tokens=list(SPECIALS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A word in the place of a mask brings its own space.
    tokenizer.add_special_tokens([AddedToken(SPECIALS["mask"], lstrip=True, special=True)])
    return tokenizer


def _word(settings: Vocabulary, texts: Iterable[str]) -> Tokenizer:
    # `trainers.WordLevelTrainer` orders words of one count differently from run to run.
    counts: dict[str, int] = {}
    for text in texts:
        for word in text.lower().split() if settings.lowercase else text.split():
            counts[word] = counts.get(word, 0) + 1
    words = [word for word in sorted(counts, key=lambda w: (-counts[w], w)) if word not in SPECIALS.values()]
    return _of_words(words, size=None if settings.size == "all" else settings.size)


def _of_words(words: list[str], *, size: int | None = None) -> Tokenizer:
    """A tokenizer of words between spaces: the special tokens, then these words, cut at a size."""
    kept = [*SPECIALS.values(), *words][:size]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(kept)}, unk_token=SPECIALS["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS.values()))
    return tokenizer


def _grey(settings: Vocabulary, texts: Iterable[str]) -> Tokenizer:
    return _of_words([str(value) for value in range(256)])


def _listops(settings: Vocabulary, texts: Iterable[str]) -> Tokenizer:
    tokenizer = _of_words(listops.SYMBOLS)
    parentheses = pre_tokenizers.Split(Regex(f"[{listops.PARENTHESES}]"), "removed")  # as the arena does
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parentheses, pre_tokenizers.WhitespaceSplit()])
    return tokenizer


def _byte(settings: Vocabulary, texts: Iterable[str]) -> Tokenizer:
    symbols = _byte_symbols()
    vocabulary = {token: i for i, token in enumerate([*SPECIALS.values(), *symbols])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS.values()))
    return tokenizer


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _listed(path: Path) -> dict[str, int]:
    """The tokens of a file by their lines, which are their numbers."""
    words = list(lines(path))
    while words and not words[-1]:
        words.pop()
    numbers: dict[str, int] = {}
    for number, word in enumerate(words):
        if not word or word in numbers:
            flaw = f"{word!r} is in line {numbers[word] + 1} too" if word else "an empty token"
            raise UserError(f"{path}, line {number + 1}: {flaw}")
        numbers[word] = number
    return numbers


def _wordpiece(settings: Vocabulary, texts: Iterable[str]) -> Tokenizer:
    # `trainers.WordPieceTrainer` learns another vocabulary each time, so one must be given.
    if settings.file is None:
        raise UserError("data.vocabulary.kind = 'wordpiece' needs data.vocabulary.file, a token a line; or learn 'bpe'")
    vocabulary = _listed(Path(settings.file))
    missing = [token for token in BERT_SPECIALS.values() if token not in vocabulary]
    if missing:
        raise UserError(f"{settings.file} is no WordPiece vocabulary: it lacks {', '.join(missing)}")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=BERT_SPECIALS["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(BERT_SPECIALS.values()))
    return tokenizer


# A new kind of vocabulary is one entry here, and its name in `Vocabulary.kind`.
KINDS: dict[str, Callable[[Vocabulary, Iterable[str]], Tokenizer]] = {
    "bpe": _bpe,
    "word": _word,
    "byte": _byte,
    "wordpiece": _wordpiece,
    "grey": _grey,
    "listops": _listops,
}


def learn(settings: Vocabulary, texts: Iterable[str]) -> Tokenizer:
    """A tokenizer with its special tokens, which depends on the training text alone."""
    steps: list[Any] = [NORMALIZATIONS[settings.normalization]()]
    if settings.lowercase:
        steps.append(normalizers.BertNormalizer() if settings.kind == "wordpiece" else normalizers.Lowercase())
    normalizer = normalizers.Sequence(steps)
    if settings.kind != "byte":  # what is counted is what will be looked up
        texts = map(normalizer.normalize_str, texts)
    tokenizer = lookup("vocabulary", settings.kind, KINDS)(settings, texts)
    tokenizer.normalizer = normalizer
    return tokenizer


def for_text(settings: Vocabulary) -> None:
    """Refuse the vocabularies that know nothing but the symbols of one task."""
    if settings.kind in ("grey", "listops"):
        raise ValueError(
            f"data.vocabulary.kind = {settings.kind!r} knows no words; choose bpe, word, byte or wordpiece"
        )


def chosen(settings: Vocabulary, texts: Iterable[str], *, given: Path | None) -> Tokenizer:
    """The tokenizer of a model folder where one is given, or one that is learnt."""
    if given is None:
        return learn(settings, texts)
    tokenizer = load(given)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def origin(settings: Vocabulary, *, given: Path | None) -> dict[str, Any]:
    """What the chosen tokenizer depends on beside the texts, as a key to what is made with it."""
    if given is not None:
        if not (given / "tokenizer.json").is_file():
            raise UserError(f"training.init: {given} has no tokenizer.json; save the tokenizer beside the model")
        return {"tokenizer.json": checksum(given / "tokenizer.json")}
    file = {} if settings.file is None else {"file": checksum(Path(settings.file))}
    return settings.model_dump(exclude={"file"}) | file


def specials(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens by what they do."""
    for names in (SPECIALS, BERT_SPECIALS):
        ids = {role: index for role, name in names.items() if (index := tokenizer.token_to_id(name)) is not None}
        if len(ids) == len(names):
            return ids
    raise UserError("the vocabulary has neither our special tokens nor BERT's")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens as a configuration names them; BERT's [CLS] and [SEP] begin and end a text."""
    ids = specials(tokenizer)
    return {f"{name}_token_id": index for name, index in (ids | {n: ids[r] for n, r in AS_IN_BERT.items()}).items()}


def around_pairs(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with special tokens around a text or a pair: [CLS] a [SEP] b [SEP]."""
    ids = specials(tokenizer)
    begin, end = (tokenizer.id_to_token(ids[AS_IN_BERT[name]]) for name in ("cls", "sep"))
    return end_with(tokenizer, single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1")


def end_with(tokenizer: Tokenizer, *, single: str, pair: str | None = None) -> Tokenizer:
    """The tokenizer with special tokens around each text: `single="$A </s>"` ends it."""
    ids = specials(tokenizer)
    tokens = [(tokenizer.id_to_token(index), index) for index in ids.values()]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
    return tokenizer


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], *, add_special_tokens: bool = True
) -> Iterator[NDArray[np.int32]]:
    """The token ids of each text, as they are asked for."""
    remaining = iter(texts)
    while batch := list(islice(remaining, 1000)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=add_special_tokens):
            yield np.asarray(encoding.ids, dtype=np.int32)


def as_hugging_face(
    tokenizer: Tokenizer, *, max_length: int | None = None, token_types: bool = False
) -> "PreTrainedTokenizerFast":
    """The tokenizer as transformers knows it, to be saved beside a model; `token_types` tell two texts apart."""
    from transformers import PreTrainedTokenizerFast

    inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
    named = {role: tokenizer.id_to_token(index) for role, index in specials(tokenizer).items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{role}_token": token for role, token in named.items()},
        **{f"{name}_token": named[role] for name, role in AS_IN_BERT.items()},
        clean_up_tokenization_spaces=False,
        model_input_names=inputs,
        **({} if max_length is None else {"model_max_length": max_length}),
    )


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no class of its own for it
        raise UserError(f"{path} is no tokenizer, or damaged ({error})") from None
