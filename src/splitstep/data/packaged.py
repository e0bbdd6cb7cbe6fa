"""Data that come with installed packages, for a first experiment without any download.

Names, dates and units in two languages from the CLDR inside Babel; Python's own language reference. Each is one
set, of which every tenth entry is for validation and every tenth for testing.
"""

import datetime
import random
from collections.abc import Iterator
from pathlib import Path

from splitstep.solver.errors import lookup

PARTS = {"valid": (0,), "test": (1,), "train": tuple(range(2, 10))}  # of the number of an entry modulo 10
DATES = 3000
AMOUNTS = 2000


def cldr_pairs(languages: tuple[str, str], part: str) -> Iterator[tuple[str, str]]:
    """Pairs of names, dates and amounts in two languages of the CLDR; no text of one part is in another."""
    chosen = lookup("part of the CLDR", part, PARTS)
    pairs = {first: second for first, second in _all_pairs(languages) if first and second}
    mixed = sorted(pairs)
    random.Random(0).shuffle(mixed)
    for number, first in enumerate(mixed):
        if number % 10 in chosen:
            yield first, pairs[first]


def _all_pairs(languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    from babel import Locale
    from babel.dates import format_date
    from babel.units import format_unit

    rng = random.Random(0)
    first, second = (Locale.parse(language) for language in languages)
    for kind in ("territories", "languages", "scripts", "currencies"):
        names, others = getattr(first, kind), getattr(second, kind)
        yield from ((names[code], others[code]) for code in sorted(names) if code in others)
    start = datetime.date(1900, 1, 1).toordinal()
    for _ in range(DATES):
        day, style = datetime.date.fromordinal(start + rng.randrange(60_000)), rng.choice(["full", "long", "medium"])
        yield format_date(day, style, first), format_date(day, style, second)
    units = [
        "length-kilometer",
        "mass-kilogram",
        "volume-liter",
        "duration-day",
        "duration-hour",
        "temperature-celsius",
    ]
    for _ in range(AMOUNTS):
        amount, unit = rng.choice([rng.randrange(1000), rng.randrange(1000) / 10]), rng.choice(units)
        yield format_unit(amount, unit, locale=first), format_unit(amount, unit, locale=second)


def cldr_files(languages: tuple[str, str]) -> tuple[Path, Path]:
    """What the pairs are made from."""
    import babel

    folder = Path(babel.__file__).parent / "locale-data"
    known = {path.stem: path for path in folder.glob("*.dat")}
    first, second = (lookup("language of the CLDR", language, known) for language in languages)
    return first, second


def python_reference(part: str) -> Iterator[str]:
    """Sections of Python's language reference, a document each."""
    from pydoc_data.topics import topics

    chosen = lookup("part of Python's reference", part, PARTS)
    for number, name in enumerate(sorted(topics)):
        if number % 10 in chosen:
            yield f"{topics[name].strip()}\n\n"


def python_reference_files() -> list[Path]:
    """What the sections are read from."""
    from pydoc_data import topics

    return [Path(topics.__file__)]
