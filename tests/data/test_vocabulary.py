"""Vocabularies: learnt on the training text alone, lossless where they claim it, the same every time."""

import pytest

from splitstep.data import vocabulary
from splitstep.data.vocabulary import KINDS, SPECIALS, Vocabulary
from splitstep.solver.errors import UserError

TEXT = ["Ein Hund läuft über die Straße .", "A dog runs — across the street, 3.5 times!", "Ein Hund <unk> ."] * 3


def learnt(**settings):
    return vocabulary.learn(Vocabulary(**{"size": 320, **settings}), TEXT)


LEARNT = [kind for kind in KINDS if kind != "wordpiece"]


@pytest.mark.parametrize("kind", LEARNT)
def test_learning_twice_gives_the_same_vocabulary(kind):
    assert learnt(kind=kind).to_str() == learnt(kind=kind).to_str()


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_what_is_made_of_bytes_reads_back_any_text(kind):
    tokenizer = learnt(kind=kind)
    for text in [*TEXT[:2], "Tränen 日本語 \t \U0001d11e", "new\nlines\n"]:
        ids = next(vocabulary.encode(tokenizer, [text]))
        assert tokenizer.decode(ids.tolist()).strip() == text.strip()


def test_bytes_are_their_own_tokens():
    tokenizer = learnt(kind="byte")
    assert tokenizer.get_vocab_size() == 256 + len(SPECIALS)
    ids = next(vocabulary.encode(tokenizer, ["aü"]))
    assert (ids - len(SPECIALS)).tolist() == list("aü".encode())


def test_grey_values_and_listops_symbols_are_vocabularies_of_their_own():
    grey = learnt(kind="grey")
    assert (next(vocabulary.encode(grey, ["0 255 7"])) - len(SPECIALS)).tolist() == [0, 255, 7]
    listops = learnt(kind="listops")
    assert listops.get_vocab_size() == len(SPECIALS) + 15
    with_, without = vocabulary.encode(listops, ["( ( ( [MAX 1 ) 2 ) ] )", "[MAX 1 2 ]"])
    assert with_.tolist() == without.tolist()
    assert SPECIALS["unk"] not in [listops.id_to_token(token) for token in with_]


def test_words_are_sorted_by_frequency_behind_the_special_tokens():
    tokenizer = vocabulary.learn(Vocabulary(kind="word", size="all"), ["b a b c b a", "c <unk> d"])
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    assert words == [*SPECIALS.values(), "b", "a", "c", "d"]
    small = vocabulary.learn(Vocabulary(kind="word", size=7), ["b a b c b a"])
    assert next(vocabulary.encode(small, ["b a c <unk>"])).tolist() == [5, 6, 3, 3]


def test_a_word_in_the_place_of_a_mask_brings_its_own_space():
    tokenizer = vocabulary.as_hugging_face(learnt(kind="bpe"))
    words = TEXT[0].split()
    ids = tokenizer(TEXT[0])["input_ids"]
    hidden = tokenizer(" ".join([words[0], tokenizer.mask_token, *words[2:]]))["input_ids"]
    place = hidden.index(tokenizer.mask_token_id)
    rest = len(hidden) - place - 1
    assert hidden[:place] + hidden[place + 1 :] == ids[:place] + ids[len(ids) - rest :]
    assert tokenizer.decode(ids[place : len(ids) - rest]) == f" {words[1]}"


@pytest.mark.parametrize("kind", LEARNT)
def test_special_tokens_have_their_places_and_survive_saving(kind, tmp_path):
    tokenizer = learnt(kind=kind)
    ids = vocabulary.specials(tokenizer)
    assert sorted(ids.values()) == list(range(5))
    saved = vocabulary.as_hugging_face(tokenizer)
    saved.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert {role: getattr(loaded, f"{role}_token_id") for role in ids} == ids
    assert loaded(TEXT[0])["input_ids"] == next(vocabulary.encode(tokenizer, TEXT)).tolist()
    assert vocabulary.load(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_a_given_wordpiece_vocabulary_is_used_as_it_is(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhund\nein\n##e\n")
    tokenizer = vocabulary.learn(Vocabulary(kind="wordpiece", file=str(path), lowercase=True), [])
    assert next(vocabulary.encode(tokenizer, ["Ein Hunde"])).tolist() == [6, 5, 7]
    path.write_text("hund\nein\n")
    with pytest.raises(UserError, match=r"is no WordPiece vocabulary: it lacks \[PAD\]"):
        vocabulary.learn(Vocabulary(kind="wordpiece", file=str(path)), [])
    with pytest.raises(UserError, match=r"needs data\.vocabulary\.file"):
        learnt(kind="wordpiece")
    with pytest.raises(ValueError, match=r"data.vocabulary.file is of kind = 'wordpiece', and the kind is 'bpe'"):
        Vocabulary(file=str(path))


@pytest.mark.parametrize(
    ("words", "said"),
    [("hund\nein\nhund\n", "line 8: 'hund' is in line 6 too"), ("hund\n\nein\n", "line 7: an empty token")],
)
def test_a_vocabulary_that_numbers_no_token_once_is_refused(tmp_path, words, said):
    path = tmp_path / "vocab.txt"
    path.write_text(f"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n{words}")
    with pytest.raises(UserError, match=said):
        vocabulary.learn(Vocabulary(kind="wordpiece", file=str(path)), [])
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhund\n\n\n")
    assert vocabulary.learn(Vocabulary(kind="wordpiece", file=str(path)), []).get_vocab_size() == 6


def test_lower_case_and_normal_forms_hold_in_learning_and_in_use():
    tokenizer = vocabulary.learn(Vocabulary(kind="word", size="all", lowercase=True, normalization="nfkc"), ["ﬁSCH Ab"])
    assert next(vocabulary.encode(tokenizer, ["FIsch aB"])).tolist() == [6, 5]
