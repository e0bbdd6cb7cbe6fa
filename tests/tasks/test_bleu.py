"""BLEU and chrF: what sacrebleu gives for text that each convention's own tools have prepared."""

import pytest
import sacrebleu
from sacremoses import MosesTokenizer

from splitstep.tasks.bleu import CONVENTIONS, bleu, chrf

# Capitals, punctuation, apostrophes, compounds and markup: whatever a convention treats in its own way.
REFERENCES = [
    "It's a state-of-the-art, well-known Method (so they say).",
    "Don't e-mail Mr. Smith & Sons: they don't read e-mails!",
    'She said: "The cat sat on the mat, and the Dog did not."',
    "Prices rose by 3.5% to $1,000 in the U.S. last year.",
]
HYPOTHESES = [
    "It's a state-of-the-art, well-Known method (or so they say).",
    "Don't e-mail mr. Smith & Sons: they don't read E-mail!",
    'She said: "the cat sat on the mat and the dog did not."',
    "Prices rose by 3.5 % to $1,000 in the u.s. last year.",
]


def moses(texts, language="en"):
    tokenizer = MosesTokenizer(lang=language)
    return [" ".join(tokenizer.tokenize(text, escape=False)) for text in texts]


def compounds_split(text):
    """The rule of get_ende_bleu.sh, token by token: a hyphen with something on both sides stands alone."""
    words = []
    for word in text.split():
        first, *others = word.split("-") if not word.startswith("-") and not word.endswith("-") else [word]
        words += [first, *(part for other in others for part in ("##AT##-##AT##", other))]
    return " ".join(words)


def lowered(texts):
    return [text.lower() for text in texts]


BY_HAND = {
    "detokenized": lambda texts, language: texts,
    "iwslt": lambda texts, language: lowered(moses(texts, language)),
    "wmt": lambda texts, language: [compounds_split(text) for text in moses(texts, language)],
    "transevolve": lambda texts, language: lowered(texts),
}


def by_hand(convention, language="en"):
    hypotheses, references = (BY_HAND[convention](texts, language) for texts in (HYPOTHESES, REFERENCES))
    tokenize = "13a" if convention == "detokenized" else "none"
    return sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize, force=True).score


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("language", ["en", "fr"])
def test_a_convention_is_sacrebleu_over_text_prepared_by_hand(convention, language):
    score, _ = bleu(HYPOTHESES, REFERENCES, convention=convention, language=language)
    assert 20 < score < 90
    assert score == pytest.approx(by_hand(convention, language))


def test_no_two_conventions_agree():
    scores = [bleu(HYPOTHESES, REFERENCES, convention=name)[0] for name in CONVENTIONS]
    assert len({round(score, 3) for score in scores}) == len(CONVENTIONS)


def test_moses_divides_words_by_the_rules_of_the_language():
    texts = ["je vois l'homme qui parle très vite"], ["je vois un homme qui parle très vite"]  # l' homme, or l 'homme
    english, french = (bleu(*texts, convention="iwslt", language=language)[0] for language in ("en", "fr"))
    assert french > english


def test_a_compound_counts_as_its_parts_and_its_hyphen_is_no_dash():
    reference = "they like a rich-text format most of all"
    other, dashed = reference.replace("text", "media"), reference.replace("-", " - ")
    by_parts = [text.replace("-", " ##AT##-##AT## ") for text in (other, reference)]
    expected = sacrebleu.corpus_bleu(by_parts[:1], [by_parts[1:]], tokenize="none", force=True).score
    assert bleu([other], [reference], convention="wmt")[0] == pytest.approx(expected)
    assert bleu([reference], [reference], convention="wmt")[0] == pytest.approx(100)
    assert bleu([dashed], [reference], convention="wmt")[0] < 100


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_case_matters_where_the_convention_says_so(convention):
    shouted = [text.upper() for text in REFERENCES]
    score, signature = bleu(shouted, REFERENCES, convention=convention)
    ignored = CONVENTIONS[convention].lowercase
    assert (score == pytest.approx(100)) == ignored
    parts = dict(part.split(":", 1) for part in signature.split("|"))
    assert parts["convention"] == convention
    assert parts["case"] == ("lc" if ignored else "mixed")
    assert parts["version"] == sacrebleu.__version__


def test_chrf_is_sacrebleu_s():
    expected = sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES], char_order=6, word_order=0, beta=2).score
    assert chrf(HYPOTHESES, REFERENCES) == pytest.approx(expected)
    assert 50 < expected < 100
