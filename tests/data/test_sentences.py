"""Documents of every format come as plain sentences."""

import tarfile

import pytest

from splitstep.data.files import STRICT
from splitstep.data.sentences import DOCUMENTS, by_rule, joined
from splitstep.data.wikipedia import pages, prose
from splitstep.solver.errors import UserError


@pytest.mark.parametrize(
    "sentences",
    [
        ["He came.", "She went!", "Why?", "3 of them stayed."],
        ["Mr. Smith and J. K. Rowling met Dr. No in the U.S. Army.", "They spoke."],
        ['He said "Stop." ', "Then he left (at last.)", "All was quiet."],
        ["WikiText writes a space before the full stop .", 'It quotes : " so . "', "And ends ."],
        ["Version 3.5 of e.g. this is fine.", "Is it?"],
        ["no end here"],
        ["Et al. is no end, nor is no. 7 one."],
    ],
)
def test_sentences_end_where_a_reader_ends_them(sentences):
    assert list(by_rule(" ".join(sentences))) == [sentence.strip() for sentence in sentences]


def test_short_sentences_are_joined_to_the_next():
    assert list(joined(["One.", "Two three four.", "Five six.", "End."], words=3)) == [
        "One. Two three four.",
        "Five six. End.",
    ]
    assert list(joined(["One.", "Two."], words=1)) == ["One.", "Two."]


def test_text_with_blank_lines_has_a_document_between_them(tmp_path):
    (tmp_path / "a").write_text("One.\nTwo.\n\n\nThree.\n")
    assert list(DOCUMENTS["paragraphs"].documents(tmp_path, "a", STRICT)) == [["One.", "Two."], ["Three."]]


def test_wikitext_loses_its_headings_and_joins_its_numbers(tmp_path):
    lines = [" ", " = Title = ", " ", " A 1 @,@ 000 @-@ fold text . ", " ", " = = Part = = ", " ", " = 2 . More . ", ""]
    (tmp_path / "a").write_text("\n".join(lines))
    assert list(DOCUMENTS["wikitext"].documents(tmp_path, "a", STRICT)) == [["A 1,000-fold text .", "= 2 . More ."]]


DUMP = """<mediawiki>
  <page>
    <title>AaA</title>
      <text xml:space="preserve">#REDIRECT [[AAA]]</text>
  </page>
  <page>
    <title>Tea</title>
      <text xml:space="preserve">{{Infobox
| a = {{b}}
}}[[Image:tea.jpg|A [[cup]] of tea]]'''Tea''' is a [[drink|beverage]] &amp;mdash; see [[leaf|leaves]].&lt;!-- no --&gt;

== Making ==
* a list
Boil [http://x.org water] for 3&amp;nbsp;minutes.&lt;ref&gt;a book&lt;/ref&gt; &lt;b&gt;Pour.&lt;/b&gt;
{| class=x
| {|
| inner
|}
|}
[[Category:Drinks]]
[[de:Tee]]</text>
  </page>
  <page>
      <text xml:space="preserve">The file ends in the mid"""


def test_pages_of_a_dump_become_paragraphs(tmp_path):
    (tmp_path / "a").write_text(DUMP)
    tea, cut = DOCUMENTS["enwik8"].documents(tmp_path, "a", STRICT)
    assert tea == ["Tea is a beverage — see leaves.", "Boil water for 3 minutes. Pour."]
    assert cut == ["The file ends in the mid"]


def test_a_dump_that_begins_inside_a_page_keeps_it(tmp_path):
    (tmp_path / "a").write_text("dle of a page.\nMore.</text>\n</page>\n<page>\n<text>Next.</text>\n")
    assert list(pages(tmp_path / "a")) == ["dle of a page.\nMore.", "Next."]


def test_reviews_are_documents_labelled_or_not_from_a_folder_and_from_its_archive(tmp_path):
    for name, text in {"pos/0_9.txt": "Good.<br /><br />Yes!", "unsup/5_0.txt": "Two stars?", "urls.txt": "x"}.items():
        path = tmp_path / "sets" / "aclImdb" / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "packed" / "sets").mkdir(parents=True)
    with tarfile.open(tmp_path / "packed" / "sets" / "aclImdb.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "sets" / "aclImdb", "aclImdb")
    for root in (tmp_path, tmp_path / "packed"):
        found = list(DOCUMENTS["imdb"].documents(root, "sets/aclImdb/train", STRICT))
        assert found == [["Good.", "Yes!"], ["Two stars?"]]


def test_a_review_that_is_no_text_is_named(tmp_path):
    (tmp_path / "pos").mkdir()
    (tmp_path / "pos" / "1_9.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"1_9\.txt: not utf-8 at byte 1"):
        list(DOCUMENTS["imdb"].documents(tmp_path, ".", STRICT))


def test_prose_ends_with_unbalanced_markup_too():
    assert prose("A {{broken [[link of a '''page''' that never closes.") == [
        "A {{broken [[link of a page that never closes."
    ]
