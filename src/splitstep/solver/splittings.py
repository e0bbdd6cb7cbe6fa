"""How one step of the right-hand side is split into sub-steps, with the order derived from words.

    dx/dt = interaction(x, t) + convection(x, t)  [+ coupling(x, t) in a decoder]

A splitting is a sentence read in the order of application: "1/2 convection, 1 interaction, 1/2 convection" advances by
half a step of convection alone, then a step of interaction alone, then half a step of convection. Terms joined by
a plus act at once. A new splitting is one line of SPLITTINGS.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import comb, inf, lcm

TERMS = ("interaction", "coupling", "convection")


@dataclass(frozen=True)
class Substep:
    """A fraction of the step in which only these terms act, jointly."""

    fraction: Fraction
    terms: tuple[str, ...]

    def __post_init__(self) -> None:
        for term in self.terms:
            if term not in TERMS:
                raise ValueError(f"unknown term {term!r}; choose from {', '.join(TERMS)}")
        if not self.terms or len(set(self.terms)) != len(self.terms):
            raise ValueError(f"a sub-step joins one or more different terms, got {' + '.join(self.terms)!r}")
        if self.fraction == 0:
            raise ValueError(f"a sub-step of length 0 does nothing: 0 {' + '.join(self.terms)}")

    def __str__(self) -> str:
        return f"{self.fraction} {' + '.join(self.terms)}"


@dataclass(frozen=True)
class Splitting:
    """The sub-steps of one step. Each term keeps its own clock, which has run one step at the end."""

    substeps: tuple[Substep, ...]

    def __post_init__(self) -> None:
        for term in self.terms:
            total = sum(s.fraction for s in self.substeps if term in s.terms)
            if total != 1:
                raise ValueError(f"the fractions of {term} must sum to 1, got {total}")
        _ = self.clocks  # refuses joint sub-steps of terms whose clocks differ

    def __str__(self) -> str:
        return ", ".join(map(str, self.substeps))

    @cached_property
    def terms(self) -> tuple[str, ...]:
        """The terms of the right-hand side that this splitting advances."""
        return tuple(term for term in TERMS if any(term in s.terms for s in self.substeps))

    @cached_property
    def clocks(self) -> tuple[Fraction, ...]:
        """Where in the step each sub-step starts, on the clock of its own terms."""
        now = dict.fromkeys(TERMS, Fraction(0))
        starts = []
        for substep in self.substeps:
            times = {now[term] for term in substep.terms}
            if len(times) > 1:
                raise ValueError(
                    f"'{substep}' joins terms whose clocks differ: "
                    + ", ".join(f"{term} at {now[term]}" for term in substep.terms)
                )
            starts.append(times.pop())
            for term in substep.terms:
                now[term] += substep.fraction
        return tuple(starts)

    @cached_property
    def intervals(self) -> tuple[tuple[float, float], ...]:
        """(start, length) of each sub-step in units of the step, as the loop uses them."""
        return tuple(
            (float(clock), float(substep.fraction)) for clock, substep in zip(self.clocks, self.substeps, strict=True)
        )

    @cached_property
    def occurrences(self) -> tuple[dict[str, int], ...]:
        """For each sub-step, how often each of its terms has acted before it in the same step."""
        return tuple(
            {term: sum(term in s.terms for s in self.substeps[:index]) for term in substep.terms}
            for index, substep in enumerate(self.substeps)
        )

    def uses(self, term: str) -> int:
        """In how many sub-steps of one step the term acts."""
        return sum(term in substep.terms for substep in self.substeps)

    @cached_property
    def order(self) -> float:
        """The order of accuracy with exact sub-steps; infinite where nothing is split."""
        if len(_merged(self.substeps)) <= 1:
            return inf
        length = 1
        while self._agrees(length):
            length += 1
        return length - 1

    def _agrees(self, length: int) -> bool:
        # prod_i exp(c_i T_i) = exp(sum T) up to order p when every word of n <= p letters has coefficient 1 / n!.
        # Each term is a field on the state and its own clock, so this covers fields that depend on time.
        return all(self._coefficient(word) == 1 for word in product(self.terms, repeat=length))

    def _coefficient(self, word: tuple[str, ...]) -> Fraction:
        """The coefficient of a word of n letters in the product of exponentials, times n!."""
        # In whole numbers, which are much faster than fractions: with c_i = m_i / d, done[k] is k! d^k times the
        # coefficient of the first k letters so far. A sub-step appends n of its own letters with c^n / n!.
        d = lcm(*(substep.fraction.denominator for substep in self.substeps))
        done = [1] + [0] * len(word)
        for substep in self.substeps:
            m = int(substep.fraction * d)
            for end in range(len(word), 0, -1):
                for n, letter in enumerate(reversed(word[:end]), start=1):
                    if letter not in substep.terms:
                        break
                    done[end] += comb(end, n) * m**n * done[end - n]
        return Fraction(done[-1], d ** len(word))


def splitting(sentence: str) -> Splitting:
    """The splitting that a sentence such as '1/2 convection, 1 interaction, 1/2 convection' describes."""
    return Splitting(tuple(map(_substep, sentence.split(","))))


def composition(sentence: str, lengths: str) -> Splitting:
    """The splitting repeated with these step lengths, neighbouring sub-steps of the same terms merged."""
    parts = [
        Substep(part.fraction * length, part.terms)
        for length in map(Fraction, lengths.split())
        for part in splitting(sentence).substeps
    ]
    return Splitting(tuple(_merged(parts)))


def _merged(substeps: Iterable[Substep]) -> list[Substep]:
    """The same flow in as few sub-steps: neighbours of the same terms are one, or none where they cancel."""
    merged: list[Substep] = []
    for substep in substeps:
        if merged and set(merged[-1].terms) == set(substep.terms):
            together = merged.pop().fraction + substep.fraction
            merged += [Substep(together, substep.terms)] if together else []
        else:
            merged.append(substep)
    return merged


def _substep(phrase: str) -> Substep:
    fraction, _, terms = phrase.strip().partition(" ")
    try:
        return Substep(Fraction(fraction), tuple(term.strip() for term in terms.split("+")))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{phrase.strip()!r} is no sub-step such as '1/2 convection': {error}") from None


# Four steps of 1/6, one of -1/3, four of 1/6: the lengths sum to 1 and their cubes to 0, which lifts a symmetric
# scheme of order 2 to order 4 with rational coefficients.
SUZUKI = "1/6 1/6 1/6 1/6 -1/3 1/6 1/6 1/6 1/6"

STRANG = "1/2 convection, 1 interaction, 1/2 convection"
STRANG_DECODER = "1/2 convection, 1/2 interaction, 1 coupling, 1/2 interaction, 1/2 convection"

SPLITTINGS = {
    "encoder": {
        "lie_trotter": splitting("1 interaction, 1 convection"),
        "lie_trotter_reversed": splitting("1 convection, 1 interaction"),
        "strang": splitting(STRANG),
        "strang_attention": splitting("1/2 interaction, 1 convection, 1/2 interaction"),
        "parallel": splitting("1 interaction + convection"),
        "suzuki4": composition(STRANG, SUZUKI),
    },
    "decoder": {
        "lie_trotter": splitting("1 interaction, 1 coupling, 1 convection"),
        "lie_trotter_reversed": splitting("1 convection, 1 coupling, 1 interaction"),
        "macaron_decoder": splitting("1/2 convection, 1 interaction, 1 coupling, 1/2 convection"),
        "strang": splitting(STRANG_DECODER),
        "strang_attention": splitting("1/2 interaction, 1/2 coupling, 1 convection, 1/2 coupling, 1/2 interaction"),
        "parallel": splitting("1 interaction + coupling + convection"),
        "parallel_then_coupling": splitting("1 interaction + convection, 1 coupling"),
        "suzuki4": composition(STRANG_DECODER, SUZUKI),
    },
}
