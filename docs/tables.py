"""The tables of README.md and of the documentation, computed from the data.

python docs/tables.py --write     rewrite the tables between their markers
python docs/tables.py             check that they are up to date
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from splitstep.solver.schemes import scheme
from splitstep.solver.splittings import SPLITTINGS
from splitstep.solver.tableaus import TABLEAUS

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/mathematics.md")


def markdown(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(header), ["---"] * len(list(header)), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def orders() -> str:
    """The order of every splitting x fixed-step integrator."""
    fixed = [name for name, entry in TABLEAUS.items() if not entry.adaptive]
    rows = [
        [part, f"`{name}`", *(scheme(part, splitting=name, integrator=integrator).order for integrator in fixed)]
        for part, entries in SPLITTINGS.items()
        for name in entries
    ]
    return markdown(["part", "splitting", *(f"`{name}`" for name in fixed)], rows)


def splittings() -> str:
    """Every splitting as its sentence."""
    rows = [
        [part, f"`{name}`", "exact" if entry.order == float("inf") else entry.order, str(entry)]
        for part, entries in SPLITTINGS.items()
        for name, entry in entries.items()
    ]
    return markdown(["part", "splitting", "order", "sub-steps"], rows)


def integrators() -> str:
    """Every integrator with what its coefficients give."""
    rows = [
        [
            f"`{name}`",
            entry.order,
            entry.stages,
            f"adaptive, error of order {entry.embedded_order}" if entry.adaptive else "",
        ]
        for name, entry in TABLEAUS.items()
    ]
    return markdown(["integrator", "order", "evaluations a sub-step", ""], rows)


TABLES: dict[str, Callable[[], str]] = {"orders": orders, "splittings": splittings, "integrators": integrators}


def filled(page: str) -> str:
    """The page with every table between its markers made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->).*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def main() -> int:
    stale = []
    for name in PAGES:
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        if filled(page) != page:
            stale.append(name)
            if "--write" in sys.argv:
                path.write_text(filled(page), encoding="utf-8")
    verb = "rewritten" if "--write" in sys.argv else "out of date (make tables rewrites them)"
    print(f"{verb}: {', '.join(stale)}" if stale else "the tables are up to date")
    return int(bool(stale) and "--write" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
