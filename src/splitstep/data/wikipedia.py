"""The plain text of Wikipedia's XML dumps, of which enwik8 is the first part: pages without their markup."""

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from splitstep.data.files import STRICT, Reading, lines

_OPENING, _CLOSING = re.compile(r"<text[^>/]*>"), "</text>"

# What is taken out, and what is put in its place: in this order, of nested things the innermost first.
_RULES = [
    (re.compile(r"<!--.*?-->", re.DOTALL), ""),
    (re.compile(r"<(math|ref|gallery|timeline|table|pre|nowiki|div)\b[^>]*?(?:/>|>.*?</\1>)", re.DOTALL | re.I), ""),
    (re.compile(r"<br\s*/?>", re.I), "\n"),
    (re.compile(r"</?[a-zA-Z][^<>]*>"), ""),
]
_NAMESPACE = re.compile(r":?[\w-]+:\S")  # images, categories, the same article in another language


def _shown(link: re.Match[str]) -> str:
    return "" if _NAMESPACE.match(link[1]) else link[1].rpartition("|")[2]


_NESTED: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\{\{[^{}]*\}\}"), ""),  # templates
    (re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL), ""),  # tables
    (re.compile(r"\[\[([^\[\]]*)\]\]"), _shown),
]
_LAST = [
    (re.compile(r"\[(?:https?|ftp)://\S+\s*([^\]]*)\]"), r"\1"),
    (re.compile(r"(?:https?|ftp)://\S+"), ""),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"[ \t\xa0]+"), " "),
]
_NO_PROSE = tuple("=*#:;|!{}-")  # how headings, lists, tables and rules begin


def pages(path: Path, reading: Reading = STRICT) -> Iterator[str]:
    """The marked-up text of each page of a dump; redirections have none. A page that the file cuts off is kept."""
    page: list[str] = []
    inside = True
    for line in lines(path, reading=reading):
        if opening := _OPENING.search(line):
            page, inside, line = [], True, line[opening.end() :]
        if inside:
            text, closing, _ = line.partition(_CLOSING)
            page.append(text)
            if closing:
                yield from _articles(page)
                page, inside = [], False
    yield from _articles(page)


def _articles(page: list[str]) -> Iterator[str]:
    text = html.unescape("\n".join(page))
    if text.strip() and not text.lstrip().lower().startswith("#redirect"):
        yield text


def prose(page: str) -> list[str]:
    """The paragraphs of a page as plain text, without headings, lists and tables (as Devlin et al. 2018)."""
    text = html.unescape(page)  # entities of HTML are themselves escaped in XML
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    for nested, inner in _NESTED:
        count = 1
        while count:
            text, count = nested.subn(inner, text)
    for pattern, instead in _LAST:
        text = pattern.sub(instead, text)
    found = (line.strip() for line in text.split("\n"))
    return [line for line in found if line and not line.startswith(_NO_PROSE)]
