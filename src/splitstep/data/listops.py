"""ListOps: nested lists of digits under operators, drawn as the Long Range Arena draws them.

Nangia & Bowman 2018; the distribution is that of Tay et al. 2021: an argument is an expression of its own with a chance
of one in four, up to a depth, and has two to ten arguments; only expressions within two lengths are kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median

from splitstep.solver.errors import UserError

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),  # a half is rounded down
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
DIGITS = [str(digit) for digit in range(10)]
SYMBOLS = [*DIGITS, *OPERATORS, END]
PARENTHESES = "()"  # of expressions as binary trees; they tell nothing that operators and ends do not
NESTED = 0.25  # the chance that an argument is an expression
HEADER = "Source\tTarget"
TRIES = 1_000_000  # draws in a row that find no new expression, after which there are no others


@dataclass(frozen=True)
class Shape:
    """How deep, wide and long expressions are; a length counts digits, operators and ends, not parentheses."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self) -> None:
        if self.max_depth < 2 or self.max_args < 2:
            raise UserError(f"an expression is at least 2 deep with 2 arguments, got {self.max_depth}, {self.max_args}")
        # Strictly between both lengths; the shortest expression has an operator, two digits and an end.
        if self.max_length < max(self.min_length + 2, 5) or self.longest <= self.min_length:
            raise UserError(
                f"no expression is longer than {self.min_length} and shorter than {self.max_length}, "
                f"{self.max_depth} deep with {self.max_args} arguments"
            )

    @property
    def longest(self) -> int:
        """The length of an expression that is as deep and wide as can be."""
        length = 1
        for _ in range(self.max_depth - 1):
            length = 2 + self.max_args * length
        return length


@dataclass(frozen=True)
class _Expression:
    text: str
    value: int
    length: int


class _TooLongError(Exception):
    """The expression being drawn has passed its greatest length."""


def expressions(seed: int, shape: Shape = Shape()) -> Iterator[tuple[str, int]]:
    """Expressions and what they come to, no two alike, as long as there are others."""
    rng, seen = Random(seed), set[str]()
    while (drawn := _another(rng, shape, seen)) is not None:
        seen.add(drawn.text)
        yield drawn.text, drawn.value
    raise UserError(
        f"after {len(seen):,} expressions of this shape, {TRIES:,} draws had no other; allow greater lengths, deeper "
        "ones or more arguments"
    )


def _another(rng: Random, shape: Shape, seen: set[str]) -> _Expression | None:
    for _ in range(TRIES):
        try:
            drawn = _drawn(rng, shape, 1)
        except _TooLongError:
            continue
        if shape.min_length < drawn.length < shape.max_length and drawn.text not in seen:
            return drawn
    return None


def _drawn(rng: Random, shape: Shape, depth: int) -> _Expression:
    if depth >= shape.max_depth or rng.random() > NESTED:
        digit = rng.randrange(10)
        return _Expression(str(digit), digit, 1)
    length, arguments = 2, []
    for _ in range(rng.randint(2, shape.max_args)):
        arguments.append(_drawn(rng, shape, depth + 1))
        length += arguments[-1].length
        if length >= shape.max_length:
            raise _TooLongError
    operator = rng.choice(list(OPERATORS))
    # Each argument is applied to what stands left of it, ( ( ( [MAX 1 ) 2 ) ] ), so all parentheses open in front.
    text = "".join(["( " * (len(arguments) + 1), operator, *(f" {arg.text} )" for arg in arguments), f" {END} )"])
    return _Expression(text, OPERATORS[operator]([arg.value for arg in arguments]), length)


def write(folder: Path, *, name: str, counts: dict[str, int], seed: int, shape: Shape = Shape()) -> Iterator[Path]:
    """Write NAME_train.tsv and so on in the arena's layout, and name each when it is done.

    No expression is in two of them.
    """
    paths = {split: folder / f"{name}_{split}.tsv" for split in counts}
    if there := [str(path) for path in paths.values() if path.exists()]:
        raise UserError(f"{there[0]} is already there")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = expressions(seed, shape)
    for split, count in counts.items():
        unfinished = paths[split].with_suffix(".unfinished")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(f"{HEADER}\n")
                file.writelines(f"{text}\t{value}\n" for text, value in islice(drawn, count))
            unfinished.rename(paths[split])
        finally:
            unfinished.unlink(missing_ok=True)
        yield paths[split]
