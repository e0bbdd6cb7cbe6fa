"""Language modelling: every token is scored once with its context, and every unit is counted by hand."""

import math

import numpy as np
import pytest
import torch
from tests import corpora

from splitstep.recipe import recipe
from splitstep.solver.errors import UserError
from splitstep.tasks.language_modelling import LanguageModelling
from splitstep.tasks.prediction import Predictor
from splitstep.training.ready import build, configuration

SIZE = 12  # tokens of a block
KINDS = {
    "word": {"kind": "word", "size": "all"},
    "bpe": {"kind": "bpe", "size": 290},
    "byte": {"kind": "byte"},
}
# Letters of several bytes, lines without words, words that the training text does not have.
TEXT = " = Über = \n \n Ein größerer Satz mit € und 🙂 . \n Noch einer . \n \n = Zweites = \n \n Kurz , naïf . \n"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def untrained(folder, *, kind="word", context=0, size=SIZE, text=TEXT):
    """A random model whose probabilities are far from even, and its task."""
    folder.mkdir(exist_ok=True)
    (folder / "train.tokens").write_text(text.replace("Kurz", "Lang") * 3)
    (folder / "valid.tokens").write_text(text)
    names = {"train": ["train.tokens"], "valid": ["valid.tokens"], "test": None}
    data = {"tokens_per_sample": size, "vocabulary": KINDS[kind], **names}
    whole = recipe(
        corpora.language_recipe(
            folder, data=data, model={"initializer_range": 0.4}, evaluation={"context_window": context}
        )
    )
    task = LanguageModelling(whole.data, whole.evaluation)
    return task, build(whole, configuration(whole, task)).eval()


@torch.no_grad()
def surprise(model, before, token):
    """-log p(token | before), from one pass over these tokens alone."""
    logits = model(input_ids=torch.tensor([before.tolist()])).logits[0, -1]
    return float(-logits.double().log_softmax(-1)[int(token)])


def in_blocks(model, tokens, size=SIZE):
    """What all tokens but the first cost when the text is cut into blocks that share a token."""
    return sum(
        surprise(model, tokens[start:place], tokens[place])
        for start in range(0, len(tokens) - 1, size - 1)
        for place in range(start + 1, min(start + size, len(tokens)))
    )


@pytest.mark.parametrize("context", [0, 3, 7, SIZE - 2])
def test_with_a_context_window_every_token_is_scored_once_with_that_many_before_it(tmp_path, context):
    task, model = untrained(tmp_path / "data", kind="bpe", context=context)
    tokens = task.stream("valid").tokens
    new = SIZE - 1 - context  # tokens that a window scores; the first scores all it can
    costs = []
    for place in range(1, len(tokens)):
        windows = max(0, -(-(place - (SIZE - 1)) // new))
        start = windows * new
        assert place - start >= min(context, place)
        assert place - start < SIZE
        costs.append(surprise(model, tokens[start:place], tokens[place]))
    measured = task.measure(Predictor(model), "valid")
    assert measured.metrics["loss"] == pytest.approx(np.mean(costs), rel=1e-5)
    assert measured.metrics["context_window"] == context
    ends = task.stream("valid").ends
    assert len(ends) == 2
    own = [costs[: ends[0] - 1], costs[ends[0] - 1 :]]  # the first token of all has nothing before it
    assert [row["tokens"] for row in measured.examples] == [len(part) for part in own]
    assert [row["loss"] for row in measured.examples] == pytest.approx([sum(part) for part in own], rel=1e-5)


def test_the_largest_window_gives_every_token_all_that_the_model_can_see(tmp_path):
    task, model = untrained(tmp_path / "data", context=SIZE - 2)
    tokens = task.stream("valid").tokens
    costs = [surprise(model, tokens[max(0, i - SIZE + 1) : i], tokens[i]) for i in range(1, len(tokens))]
    assert task.measure(Predictor(model), "valid").metrics["loss"] == pytest.approx(np.mean(costs), rel=1e-5)


def test_a_window_that_leaves_nothing_to_score_is_refused(tmp_path):
    task, model = untrained(tmp_path / "data", context=SIZE - 1)
    with pytest.raises(UserError, match=r"context_window = 11 leaves nothing of a block of 12 tokens"):
        task.measure(Predictor(model), "valid")


@pytest.mark.parametrize("tokens", [1, 40, 10**6])
def test_the_size_of_batches_changes_no_measure(tmp_path, tokens):
    task, model = untrained(tmp_path / "data", kind="byte", context=5)
    expected = task.measure(Predictor(model), "valid").metrics
    assert task.measure(Predictor(model, tokens=tokens), "valid").metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_perplexities_and_bits_are_counted_from_the_file(tmp_path, kind):
    task, model = untrained(tmp_path / "data", kind=kind)
    tokens = task.stream("valid").tokens
    total = in_blocks(model, tokens)
    metrics = task.measure(Predictor(model), "valid").metrics
    assert metrics["perplexity"] == pytest.approx(math.exp(total / (len(tokens) - 1)), rel=1e-4)
    words = len(TEXT.split()) + TEXT.count("\n")  # the end of a line is a word
    raw = len((tmp_path / "data" / "valid.tokens").read_bytes())
    assert raw > len(TEXT)
    if kind == "word":
        assert len(tokens) == words
        assert metrics["word_perplexity"] == pytest.approx(math.exp(total / (words - 1)), rel=1e-4)
        assert "bits_per_byte" not in metrics  # an unknown word is not spelt out
        return
    assert metrics["word_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-4)
    assert metrics["bits_per_byte"] == pytest.approx(total / math.log(2) / raw, rel=1e-5)
    if kind == "byte":
        assert len(tokens) == raw
        assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2) * (raw - 1) / raw, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(tmp_path, kind):
    task, model = untrained(tmp_path / "data", kind=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    size = task.tokenizer.get_vocab_size()
    metrics = task.measure(Predictor(model), "valid").metrics
    assert metrics["perplexity"] == pytest.approx(size, rel=1e-5)
    if kind == "byte":
        raw = len(TEXT.encode())
        assert metrics["bits_per_byte"] == pytest.approx(math.log2(size) * (raw - 1) / raw, rel=1e-5)


@pytest.mark.parametrize("size", [5, 12, 1000])
def test_what_is_watched_in_training_is_what_is_measured_without_a_window(tmp_path, size):
    task, model = untrained(tmp_path / "data", size=size)
    watched, measured = (
        task.validate(Predictor(model), "valid"),
        task.measure(Predictor(model), "valid").metrics,
    )
    assert watched["perplexity"] == pytest.approx(measured["perplexity"], rel=1e-5)
    assert sum(task.lengths("valid") - 1) == len(task.stream("valid").tokens) - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["Ein größerer Satz", "Ein neues Wort , und noch eines mit mehr als zwölf Token"])
def test_a_prompt_is_given_back_as_it_was(kind, prompt, tmp_path):
    task, model = untrained(tmp_path / "data", kind=kind)
    text = task.continued(prompt, Predictor(model), tokens=4, temperature=0.8, seed=1)
    assert text.startswith(prompt)
    assert task.unknown([prompt]) == ([0] if kind == "word" and "neues" in prompt else [])
