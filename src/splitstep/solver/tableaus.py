"""Runge-Kutta integrators: Butcher tableaus as a textbook prints them, with their order derived.

An integrator advances one sub-step of length gamma by sampling the field at s stages:

    k_i = f(x + gamma * sum_j a_ij k_j, t + c_i gamma)        x(t + gamma) = x + gamma * sum_i b_i k_i

A new integrator is one entry of TABLEAUS; its order and its tests follow from the coefficients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import combinations_with_replacement
from math import prod

Tree = tuple["Tree", ...]  # a rooted tree is the sorted tuple of the trees that hang from its root


@dataclass(frozen=True)
class Tableau:
    """The coefficients of one explicit Runge-Kutta method; `embedded` weights estimate its error."""

    c: tuple[Fraction, ...]
    a: tuple[tuple[Fraction, ...], ...]
    b: tuple[Fraction, ...]
    embedded: tuple[Fraction, ...] | None = None

    def __post_init__(self) -> None:
        if not len(self.c) == len(self.a) == len(self.b):
            raise ValueError(f"{len(self.c)} nodes, {len(self.a)} stages and {len(self.b)} weights do not fit")
        for number, (node, row) in enumerate(zip(self.c, self.a, strict=True)):
            if len(row) != number:
                raise ValueError(f"stage {number + 1} of an explicit method has {number} entries, got {len(row)}")
            if sum(row) != node:
                raise ValueError(f"row {number + 1} must sum to its node {node}, got {sum(row)}")
        for weights in filter(None, (self.b, self.embedded)):
            if len(weights) != self.stages or sum(weights) != 1:
                raise ValueError(f"the {self.stages} weights b must sum to 1, got {' '.join(map(str, weights))}")

    @property
    def stages(self) -> int:
        """How often the field is evaluated in one sub-step."""
        return len(self.c)

    @property
    def adaptive(self) -> bool:
        """Whether the method chooses its own steps from the error its embedded weights estimate."""
        return self.embedded is not None

    @cached_property
    def rows(self) -> tuple[tuple[float, tuple[float, ...]], ...]:
        """(node, weights of the earlier stages) of each stage, as the loop uses them."""
        return tuple((float(node), tuple(map(float, row))) for node, row in zip(self.c, self.a, strict=True))

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The weights b, as the loop uses them."""
        return tuple(map(float, self.b))

    @cached_property
    def order(self) -> int:
        """The order of accuracy, from Butcher's conditions: one for every rooted tree up to that size."""
        return _order(self.a, self.b)

    @cached_property
    def embedded_order(self) -> int | None:
        """The order of the embedded weights, or None where there are none."""
        return None if self.embedded is None else _order(self.a, self.embedded)


def tableau(text: str) -> Tableau:
    """The tableau a textbook would print: `node | stage weights` a line, then the weights b."""
    lines = [line.split("|") for line in text.strip().splitlines()]
    if any(len(line) != 2 for line in lines):
        raise ValueError("each line of a tableau has one bar: 'node | weights'")
    rows = [(left.split(), tuple(map(Fraction, right.split()))) for left, right in lines]
    stages = [(Fraction(*left), row) for left, row in rows if left]
    weights = [row for left, row in rows if not left]
    if len(weights) not in (1, 2):
        raise ValueError(f"a tableau ends with one row of weights, or two for an embedded pair, got {len(weights)}")
    nodes, matrix = zip(*stages, strict=True)
    return Tableau(nodes, matrix, *weights)


def _order(a: tuple[tuple[Fraction, ...], ...], b: tuple[Fraction, ...]) -> int:
    # An explicit method of s stages has at most order s, so the search ends.
    for size in range(1, len(b) + 1):
        # sum_i b_i Phi_i(tree) = 1 / density(tree) for every tree with `size` nodes
        if any(
            sum(w * phi for w, phi in zip(b, _stage_weights(tree, a), strict=True)) != Fraction(1, _density(tree))
            for tree in rooted_trees(size)
        ):
            return size - 1
    return len(b)


@cache
def rooted_trees(size: int) -> tuple[Tree, ...]:
    """All rooted trees with that many nodes: 1, 1, 2, 4, 9, ..."""
    return tuple(_forests(size - 1, size - 1))


def _forests(nodes: int, largest: int) -> Iterator[Tree]:
    if nodes == 0:
        yield ()
        return
    for size in range(min(nodes, largest), 0, -1):
        for count in range(1, nodes // size + 1):
            for trees in combinations_with_replacement(rooted_trees(size), count):
                for smaller in _forests(nodes - size * count, size - 1):
                    yield trees + smaller


def _size(tree: Tree) -> int:
    return 1 + sum(map(_size, tree))


def _density(tree: Tree) -> int:
    return _size(tree) * prod(map(_density, tree))


def _stage_weights(tree: Tree, a: tuple[tuple[Fraction, ...], ...]) -> list[Fraction]:
    # Phi_i(tree) = prod over branches of sum_j a_ij Phi_j(branch)
    weights = [Fraction(1)] * len(a)
    for branch in tree:
        below = _stage_weights(branch, a)
        weights = [
            w * sum((entry * phi for entry, phi in zip(row, below, strict=False)), Fraction(0))
            for w, row in zip(weights, a, strict=True)
        ]
    return weights


TABLEAUS = {
    "euler": tableau("""
        0 |
          | 1"""),
    "midpoint": tableau("""
        0   |
        1/2 | 1/2
            | 0   1"""),
    "heun": tableau("""
        0 |
        1 | 1
          | 1/2 1/2"""),
    "ralston": tableau("""
        0   |
        2/3 | 2/3
            | 1/4 3/4"""),
    "kutta3": tableau("""
        0   |
        1/2 | 1/2
        1   | -1  2
            | 1/6 2/3 1/6"""),
    "rk4": tableau("""
        0   |
        1/2 | 1/2
        1/2 | 0   1/2
        1   | 0   0   1
            | 1/6 1/3 1/3 1/6"""),
    "rk4_38": tableau("""
        0   |
        1/3 | 1/3
        2/3 | -1/3 1
        1   | 1   -1  1
            | 1/8 3/8 3/8 1/8"""),
    "bogacki_shampine": tableau("""
        0   |
        1/2 | 1/2
        3/4 | 0    3/4
        1   | 2/9  1/3 4/9
            | 2/9  1/3 4/9 0
            | 7/24 1/4 1/3 1/8"""),
    "dopri5": tableau("""
        0    |
        1/5  | 1/5
        3/10 | 3/40       9/40
        4/5  | 44/45      -56/15      32/9
        8/9  | 19372/6561 -25360/2187 64448/6561 -212/729
        1    | 9017/3168  -355/33     46732/5247 49/176   -5103/18656
        1    | 35/384     0           500/1113   125/192  -2187/6784    11/84
             | 35/384     0           500/1113   125/192  -2187/6784    11/84    0
             | 5179/57600 0           7571/16695 393/640  -92097/339200 187/2100 1/40"""),
}
