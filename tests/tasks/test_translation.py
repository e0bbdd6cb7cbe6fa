"""Translation: which pairs are trained on, which are held out, how long an output may be, what is scored."""

import numpy as np
import pytest
import sacrebleu
import torch
from sacremoses import MosesTokenizer
from tests import corpora

from splitstep.models.labels import IGNORED
from splitstep.recipe import recipe
from splitstep.solver.errors import UserError
from splitstep.tasks.prediction import Predictor
from splitstep.tasks.translation import Translation
from splitstep.training.engine import train
from splitstep.training.ready import build, configuration, plan

WORDS = {"vocabulary": {"kind": "word", "size": "all"}}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def lines(folder, **splits):
    """Files train.de, train.en and so on with these pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        for language, side in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in side))
    return folder


def made(root, say=lambda line: None, *, evaluation=None, **data):
    whole = recipe(corpora.translation_recipe(root, data=WORDS | data, evaluation=evaluation or {}))
    return Translation(whole.data, whole.evaluation, say=say)


def untrained(root, *, model, **sections):
    whole = recipe(corpora.translation_recipe(root, model=model, **sections))
    task = Translation(whole.data, whole.evaluation)
    return task, build(whole, configuration(whole, task)).eval()


# Which pairs are trained on


def uneven(sizes):
    """Pairs with so many words on each side."""
    return [(" ".join(["eins"] * german), " ".join(["one"] * english)) for german, english in sizes]


SIZES = [(1, 1), (3, 3), (4, 4), (5, 4), (4, 5), (9, 9), (1, 4), (4, 1), (2, 4), (0, 2), (12, 2)]


@pytest.mark.parametrize(("longest", "ratio"), [(5, None), (5, 2.0), (100, 2.0), (100, 1.5), (100, None)])
def test_pairs_too_long_too_unequal_or_empty_are_counted_and_left_out(tmp_path, longest, ratio):
    root = lines(tmp_path / "data", train=uneven(SIZES), valid=uneven([(2, 2)]))
    said = []
    limits = {"max_length": longest, **({"max_ratio": ratio} if ratio else {})}
    task = made(root, said.append, test=None, **limits)
    ends = [(german + 1, english + 1) for german, english in SIZES]  # every sentence has its end
    wrong = {
        f"longer than {longest} tokens": [max(pair) > longest for pair in ends],
        "empty on a side": [0 in pair for pair in SIZES],
        f"of lengths more unequal than {ratio}": [ratio is not None and max(p) / min(p) > ratio for p in ends],
    }
    kept = [sizes for sizes, *faults in zip(ends, *wrong.values(), strict=True) if not any(faults)]
    batch = task.batch("train", np.arange(len(kept)))
    found = zip(batch["attention_mask"].sum(1), (batch["labels"] != IGNORED).sum(1), strict=True)
    assert [(int(german), int(english)) for german, english in found] == kept
    assert task.lengths("train").tolist() == [max(pair) for pair in kept]
    assert task.tilts("train").tolist() == [german - english for german, english in kept]
    expected = [
        f"{sum(pairs)} of {len(SIZES)} training pairs are {reason}: left out"
        for reason, pairs in wrong.items()
        if any(pairs)
    ]
    assert [line for line in said if line.endswith("left out")] == expected


def test_pairs_that_are_measured_are_never_left_out(tmp_path):
    sizes = [pair for pair in SIZES if 0 not in pair]
    root = lines(tmp_path / "data", train=uneven([(3, 3)]), valid=uneven(sizes))
    task = made(root, test=None, max_length=4, max_ratio=1.5)
    assert task.lengths("valid").tolist() == [max(pair) + 1 for pair in sizes]


def test_a_training_set_of_nothing_but_such_pairs_is_refused(tmp_path):
    root = lines(tmp_path / "data", train=uneven([(9, 9), (8, 8)]), valid=uneven([(2, 2)]))
    whole = recipe(corpora.translation_recipe(root, data=WORDS | {"max_length": 4, "test": None}))
    with pytest.raises(UserError, match="there is not one training example"):
        plan(Translation(whole.data, whole.evaluation), whole.training)


# Which are held out


@pytest.mark.parametrize("every", [2, 5, 7])
def test_every_nth_pair_is_held_out_and_the_others_are_trained_on(tmp_path, every):
    pairs = [(f"wort{number} .", f"word{number} .") for number in range(23)]
    root = lines(tmp_path / "data", train=pairs[:12], more=pairs[12:], test=[("eins", "one")])
    task = made(root, train=["train.{language}", "more.{language}"], valid=None, valid_every=every)
    assert task.splits == ["train", "valid", "test"]
    assert task.pairs("valid") == pairs[::every]
    assert task.pairs("train") == [pair for pair in pairs if pair not in pairs[::every]]
    assert task.pairs("test") == [("eins", "one")]
    assert len(task.lengths("train")) + len(task.lengths("valid")) == len(pairs)
    known = {word for word in task.tokenizer.get_vocab() if word[-1].isdigit()}
    assert known == {word for pair in task.pairs("train") for text in pair for word in text.split()[:1]}


def test_a_run_is_watched_by_what_is_held_out(tmp_path):
    root = corpora.parallel(tmp_path / "data", train=40)
    short = {"updates": 1, "evaluate_every": 1}
    tables = corpora.translation_recipe(root, data=WORDS | {"valid": None, "test": None, "valid_every": 10})
    results = train(recipe(corpora.merged(tables, {"training": short})), tmp_path / "run").results
    assert results["metrics"].keys() == {"valid"}
    assert len((tmp_path / "run" / "predictions-valid.jsonl").read_text().splitlines()) == 4


# How long an output may be


@pytest.mark.parametrize(("ratio", "beams"), [(2.0, 1), (2.0, 3), (1.3, 2), (0.5, 1)])
def test_a_model_that_never_ends_is_cut_off_by_the_length_of_its_source(tmp_path, ratio, beams):
    root = corpora.parallel(tmp_path / "data", train=40, valid=4, test=4)
    evaluation = {"max_length_ratio": ratio, "num_beams": beams}
    task, model = untrained(root, model={"lm_head_bias": True}, data=WORDS, evaluation=evaluation)
    with torch.no_grad():
        model.lm_head.bias[model.config.eos_token_id] = -1e9
        model.lm_head.bias[task.tokenizer.token_to_id("one")] = 1e3
    sources = ["eins .", "eins zwei drei vier eins zwei drei .", "vier vier .", "eins " * 20]
    said = [beams[0][0].split() for beams in task.translated(sources, Predictor(model))]
    assert {word for words in said for word in words} == {"one"}
    assert [len(words) for words in said] == [int(ratio * (len(text.split()) + 1)) + 10 for text in sources]


def test_an_output_ends_where_learned_positions_do(tmp_path):
    root = corpora.parallel(tmp_path / "data", train=40, valid=4, test=4)
    positions = {"position_embedding": "learned", "max_position_embeddings": 12, "lm_head_bias": True}
    task, model = untrained(root, model=positions, data=WORDS, evaluation={"max_source": 12})
    with torch.no_grad():
        model.lm_head.bias[model.config.eos_token_id] = -1e9
        model.lm_head.bias[task.tokenizer.token_to_id("one")] = 1e3
    (beams,) = task.translated(["eins zwei drei ."], Predictor(model))
    assert beams[0][0] == " ".join(["one"] * 12)


def test_a_model_that_ends_at_once_says_nothing(tmp_path):
    root = corpora.parallel(tmp_path / "data", train=40, valid=4, test=4)
    task, model = untrained(root, model={"lm_head_bias": True}, data=WORDS)
    with torch.no_grad():
        model.lm_head.bias[model.config.eos_token_id] = 1e3
    assert [beams[0][0] for beams in task.translated(["eins .", "zwei drei ."], Predictor(model))] == ["", ""]


# What is scored


@pytest.mark.parametrize("convention", ["detokenized", "iwslt"])
def test_the_scores_are_those_of_the_translations_against_the_files(tmp_path, monkeypatch, convention):
    pairs = [(f"satz {n}", f"This is, I think, sentence no. {n}: it's a well-known One.") for n in range(6)]
    root = lines(tmp_path / "data", train=pairs, valid=pairs)
    evaluation = {"bleu": convention}
    task, model = untrained(root, model={}, data=WORDS | {"test": None}, evaluation=evaluation)
    hypotheses = [english.replace("sentence", "the Sentence").replace("One", "one") for _, english in pairs]
    monkeypatch.setattr(Translation, "translated", lambda self, sources, predictor: [[(h, 0.0)] for h in hypotheses])
    measured = task.measure(Predictor(model), "valid")
    references = [english for _, english in pairs]
    if convention == "iwslt":
        moses = MosesTokenizer(lang="en")
        ours, theirs = (
            [" ".join(moses.tokenize(text, escape=False)).lower() for text in texts]
            for texts in (hypotheses, references)
        )
        expected = sacrebleu.corpus_bleu(ours, [theirs], tokenize="none", force=True)
    else:
        expected = sacrebleu.corpus_bleu(hypotheses, [references])
    assert measured.metrics["bleu"] == pytest.approx(expected.score)
    assert measured.metrics["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score)
    assert [(row["source"], row["reference"]) for row in measured.examples] == pairs
    assert [row["hypothesis"] for row in measured.examples] == hypotheses


def test_the_loss_is_the_mean_over_target_tokens(tmp_path):
    root = corpora.parallel(tmp_path / "data", train=40, valid=7, test=4)
    task, model = untrained(root, model={"initializer_range": 0.5}, data=WORDS)
    total, count = 0.0, 0
    ids = task.settings()
    for german, english in task.pairs("valid"):  # one at a time, without padding
        source, target = (torch.tensor([task.tokenizer.encode(text).ids]) for text in (german, english))
        assert source[0, -1] == target[0, -1] == ids["eos_token_id"]
        shown = torch.cat([torch.tensor([[ids["decoder_start_token_id"]]]), target[:, :-1]], dim=1)
        with torch.no_grad():
            likely = model(input_ids=source, decoder_input_ids=shown).logits.log_softmax(-1)
        total -= float(likely[0].gather(1, target.T).sum())
        count += target.shape[1]
    metrics = task.measure(Predictor(model), "valid").metrics
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)
