"""Files as users have them: packed or not, well or ill."""

import gzip
import lzma
from pathlib import Path

import pytest
from tests import published

from splitstep.data import parallel, text
from splitstep.data.files import LONGEST_LINE, STRICT, Reading, find, lines
from splitstep.solver.errors import UserError


@pytest.mark.parametrize(("ending", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_file_is_found_and_read_packed_or_not(tmp_path, ending, pack):
    (tmp_path / f"a.txt{ending}").write_bytes(pack(b"eins\nzwei\n"))
    assert list(lines(find(tmp_path, "a.txt"))) == ["eins", "zwei"]


@pytest.mark.parametrize(
    "content",
    [b"one\ntwo\n", b"one\ntwo", b"one\r\ntwo\r\n", b"\xef\xbb\xbfone\ntwo\n"],
    ids=["plain", "no last newline", "CRLF", "byte-order mark"],
)
def test_harmless_differences_of_text_files_do_not_matter(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    assert list(lines(tmp_path / "a")) == ["one", "two"]


def test_an_empty_line_is_a_line(tmp_path):
    (tmp_path / "a").write_bytes(b"one\n\ntwo\n")
    assert list(lines(tmp_path / "a")) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a", b"", "a is empty"),
        ("a", b"fine\nb\xff\n", "a, line 2: not utf-8 at byte 2"),
        ("a", b"fine\nb\0\n", "a, line 2: a NUL byte"),
        ("a", b"x" * (LONGEST_LINE + 1), "a, line 1: 1,000,001 bytes in one line"),
        ("a.gz", gzip.compress(b"some text\n" * 100)[:-20], "a.gz is damaged or cut short"),
        ("a.gz", b"no gzip", "a.gz is damaged or cut short"),
        ("a.xz", lzma.compress(b"some text\n" * 100)[:-20], "a.xz is damaged or cut short"),
    ],
    ids=["empty", "not UTF-8", "NUL", "long line", "cut gz", "no gz", "cut xz"],
)
def test_bad_files_are_named_with_the_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        list(lines(tmp_path / name))


def test_a_missing_file_is_named_with_what_was_tried(tmp_path):
    with pytest.raises(UserError, match=r"no file .*train.de, nor with .gz or .xz"):
        find(tmp_path, "train.de")


def _write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_unequal_line_counts_are_refused_with_both(tmp_path):
    _write(tmp_path, t_de="a\nb\nc\n", t_en="x\n")
    with pytest.raises(UserError, match=r"t.de has 3 lines and .*t.en has 1: they are not parallel"):
        list(parallel.line_pairs(tmp_path, "t.{language}", ("de", "en")))


def test_iwslt_talks_lose_their_tags_and_keep_their_sentences(tmp_path):
    _write(
        tmp_path,
        t_de="<url>http</url>\n<keywords>k</keywords>\nErster &amp; Satz\n<title>Titel </title>\nZweiter\n",
        t_en="<url>http</url>\n<keywords>k</keywords>\nFirst &amp; sentence\n<title> Title</title>\nSecond\n",
    )
    pairs = list(parallel.iwslt_pairs(tmp_path, "t.{language}", ("de", "en")))
    assert pairs == [("Erster &amp; Satz", "First &amp; sentence"), ("Titel", "Title"), ("Zweiter", "Second")]
    for language, sentence in (("de", "A &amp; B"), ("en", "C")):
        talk = f'<doc>\n<title>T</title>\n<seg id="1"> {sentence} </seg>\n</doc>\n'
        (tmp_path / f"d.{language}.xml").write_text(talk)
    assert list(parallel.iwslt_pairs(tmp_path, "d.{language}.xml", ("de", "en"))) == [("A & B", "C")]


def test_pairs_of_the_cldr_are_of_any_two_of_its_languages():
    found = list(parallel.FORMATS["cldr"].pairs(Path(), "test", ("fr", "es"), STRICT))
    assert ("Allemagne", "Alemania") in {*found, *parallel.FORMATS["cldr"].pairs(Path(), "train", ("fr", "es"), STRICT)}
    files = parallel.FORMATS["cldr"].files(Path(), "test", ("fr", "es"))
    assert [path.name for path in files] == ["fr.dat", "es.dat"]
    with pytest.raises(UserError, match="unknown language of the CLDR 'xx'"):
        parallel.FORMATS["cldr"].files(Path(), "test", ("xx", "es"))


def test_tab_pairs_follow_the_order_of_languages(tmp_path):
    _write(tmp_path, pairs="Hi.\tHallo.\nRun!\tLauf!\n")
    assert list(parallel.tab_pairs(tmp_path, "pairs:en-de", ("de", "en"))) == [("Hallo.", "Hi."), ("Lauf!", "Run!")]
    _write(tmp_path, pairs="Hi.\tHallo.\nRun!\n")
    with pytest.raises(UserError, match="pairs, line 2: no tab"):
        list(parallel.tab_pairs(tmp_path, "pairs:en-de", ("de", "en")))


@pytest.mark.parametrize("name", [name for name, entry in text.FORMATS.items() if not entry.packaged])
def test_documents_together_are_the_text(tmp_path, name):
    content = " \n = One = \n \n first ü text \n\n = Two = \n = = not a title = = \nmore\n\n\nlast\n"
    (tmp_path / "a").write_text(content)
    assert "".join(text.FORMATS[name].documents(tmp_path, "a", STRICT)) == content


def test_wikitext_articles_begin_with_their_title(tmp_path):
    one = " \n = One = \n \nx\n \n = = Part = = \n \ny\n = Goals ; A = \n = and = \nz\n"
    two = " = Two = \n \nz\n"
    (tmp_path / "a").write_text(f"{one} \n{two}")
    assert list(text.wikitext(tmp_path / "a")) == [f"{one} \n", two]


@pytest.mark.parametrize("chunk", [18, 20, 1000])
def test_no_word_is_cut_where_a_file_is_read_in_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text, "CHUNK", chunk)
    words = "an unbelievable\nfile  of some words "
    (tmp_path / "a").write_text(words)
    chunks = list(text.whole(tmp_path / "a"))
    assert "".join(chunks) == words
    assert all(chunk[0] == " " for chunk in chunks[1:])


def test_a_character_may_lie_across_two_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHUNK", 5)
    content = "aäöü€𝄞bc" * 7
    (tmp_path / "a").write_text(content)
    assert "".join(text.whole(tmp_path / "a")) == content
    (tmp_path / "a").write_bytes(content.encode()[:-9] + b"\xc3")
    with pytest.raises(UserError, match="not utf-8 at byte"):
        list(text.whole(tmp_path / "a"))


BAD_LINES = {"not UTF-8": b"\xff\xfe", "NUL": b"a\0b", "long": b"x" * (LONGEST_LINE + 1)}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines_are_left_out_when_asked_and_counted(tmp_path, bad):
    said = []
    reading = Reading("skip", said.append)
    (tmp_path / "t.de").write_bytes(b"eins\n" + bad + b"\ndrei\nvier\n")
    (tmp_path / "t.en").write_bytes(b"one\ntwo\n" + bad + b"\nfour\n")
    pairs = list(parallel.line_pairs(tmp_path, "t.{language}", ("de", "en"), reading))
    assert pairs == [("eins", "one"), ("vier", "four")]
    assert said[0].startswith("2 of 4 rows of t.{language} are malformed and left out; the first: ")
    (tmp_path / "pairs").write_bytes(b"eins\tone\n" + bad + b"\nno tab\nvier\tfour\n")
    assert list(parallel.tab_pairs(tmp_path, "pairs:de-en", ("de", "en"), reading)) == pairs
    (tmp_path / "text").write_bytes(b" = One = \n" + bad + b"\n word \n")
    assert list(text.wikitext(tmp_path / "text", reading)) == [" = One = \n word \n"]
    assert list(text.paragraphs(tmp_path / "text", reading)) == [" = One = \n word \n"]
    assert len(said) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("file", "count"), [("wiki.train.tokens", 600), ("wiki.valid.tokens", 60)])
def test_wikitext_has_its_published_number_of_articles(file, count):
    assert len(list(text.wikitext(find(published.folder("wikitext-2"), file)))) == count
