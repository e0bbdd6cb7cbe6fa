"""BLEU and chrF by sacrebleu, under the conventions that the papers' numbers were made with."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


@dataclass(frozen=True)
class Convention:
    """How text is prepared before n-grams are counted, and who reports numbers this way."""

    prepare: Callable[[str, str], str]  # (text, language) -> text
    tokenize: str  # sacrebleu's own tokenisation after that
    lowercase: bool
    used_by: str


def _moses(text: str, language: str) -> str:
    return _moses_tokenizer(language).tokenize(text, escape=False, return_str=True)


def _moses_compound_split(text: str, language: str) -> str:
    # get_ende_bleu.sh of tensor2tensor: "rich-text" counts as three tokens.
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", _moses(text, language))


def _moses_tokenizer(language: str) -> Any:
    from sacremoses import MosesTokenizer

    if language not in _MOSES:
        _MOSES[language] = MosesTokenizer(lang=language)
    return _MOSES[language]


_MOSES: dict[str, Any] = {}

CONVENTIONS = {
    "detokenized": Convention(lambda text, _: text, "13a", False, "sacreBLEU; the parallel paper, Table 3"),
    "iwslt": Convention(_moses, "none", True, "lower-cased and tokenised: Macaron, IWSLT14"),
    "wmt": Convention(
        _moses_compound_split, "none", False, "tokenised, compounds split: Macaron and Vaswani et al., WMT14"
    ),
    "transevolve": Convention(lambda text, _: text, "none", True, "lower-cased, split at white space: TransEvolve"),
}


def prepared(
    hypotheses: list[str], references: list[str], *, convention: str = "detokenized", language: str = "en"
) -> "tuple[BLEU, list[list[str]]]":
    """Sacrebleu's metric for a convention, and both texts as it takes them."""
    from sacrebleu.metrics.bleu import BLEU

    rule = CONVENTIONS[convention]
    metric = BLEU(tokenize=rule.tokenize, lowercase=rule.lowercase, force=True)
    return metric, [[rule.prepare(text, language) for text in texts] for texts in (hypotheses, references)]


def bleu(
    hypotheses: list[str], references: list[str], *, convention: str = "detokenized", language: str = "en"
) -> tuple[float, str]:
    """The corpus BLEU under a convention, and the signature that says what was computed."""
    metric, texts = prepared(hypotheses, references, convention=convention, language=language)
    score = metric.corpus_score(texts[0], [texts[1]]).score
    return score, f"{metric.get_signature()}|convention:{convention}"


def chrf(hypotheses: list[str], references: list[str]) -> float:
    """The corpus chrF (character 6-grams, beta 2)."""
    from sacrebleu.metrics.chrf import CHRF

    return CHRF().corpus_score(hypotheses, [references]).score
