"""The differences of all schemes to their baselines as one picture (SVG), for pages that show no scripts."""

from html import escape
from statistics import median
from typing import Any

from splitstep.reports import tables
from splitstep.tasks.base import METRICS

# How a verdict looks: colours that colour-blind readers can tell apart, and shapes for print.
LOOKS = {
    "better": ("#0072B2", '<circle cx="{x}" cy="{y}" r="6" fill="{colour}"/>'),
    "worse": ("#D55E00", '<rect x="{left}" y="{top}" width="11" height="11" fill="{colour}"/>'),
    "no significant difference": (
        "#555555",
        '<circle cx="{x}" cy="{y}" r="5.5" fill="white" stroke="{colour}" stroke-width="2"/>',
    ),
}
NAMES, PLOT, WORDS, LINE, MARGIN = 280.0, 300.0, 270.0, 26.0, 14.0
WIDEST = 8.0  # times the middle one of the intervals' reaches: what goes farther ends at the edge, its number beside it


def differences(comparisons: dict[str, dict[str, Any]]) -> str:
    """Each scheme's difference to the baseline with its 95 % interval, dashed of one seed; to the right is better."""
    parts, y = [], 0.0
    for title, results in comparisons.items():
        drawn, y = _panel(title, results, y + LINE)
        parts += drawn
    width, height = NAMES + PLOT + WORDS, y + MARGIN
    words = "; ".join(tables.sentence(results) for results in comparisons.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" aria-label="{escape(words)}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{chr(10).join(parts)}\n</svg>\n'
    )


def _panel(title: str, results: dict[str, Any], y: float) -> tuple[list[str], float]:
    base, *others = results["schemes"]
    others = [row for row in others if row.get("difference") is not None]
    sign = 1 if METRICS[results["metric"]] is max else -1
    reaches = [reach for row in others if (reach := max(map(abs, row["interval"])))]
    reach = min(max(reaches), WIDEST * median(reaches)) if reaches else 1.0

    def place(value: float) -> float:
        share = min(max(sign * value / reach, -1.0), 1.0)
        return NAMES + PLOT / 2 * (1 + share * 0.92)

    metric = tables.NAMES.get(results["metric"], results["metric"])
    drawn = [
        _text(MARGIN, y, f"{title}, {metric} (baseline {base['name']}: {tables.quality(base)})", weight="bold"),
    ]
    first = y + LINE
    for row in others:
        y += LINE
        colour, mark = LOOKS[row["verdict"]]
        x, low, high = place(row["difference"]), *(place(end) for end in row["interval"])
        drawn += [
            _text(MARGIN, y, row["name"]),
            _line(low, y - 4, high, y - 4, f'stroke="{colour}" stroke-width="2"{_dashes(row)}'),
            mark.format(x=f"{x:.1f}", y=f"{y - 4:g}", left=f"{x - 5.5:.1f}", top=f"{y - 9.5:g}", colour=colour),
            _text(NAMES + PLOT + MARGIN, y, f"{tables.change(row)}, {tables.verdict(row, baseline=False)}"),
        ]
    middle = place(0.0)
    y += LINE
    drawn += [
        _line(middle, first - 18, middle, y - 16, 'stroke="#999" stroke-dasharray="4 3"'),
        _text(middle, y, "← worse | better →", anchor="middle", colour="#555555"),
        *(_scale(sign * end, results["metric"], place(sign * end), y) for end in (-reach, reach) if others),
    ]
    return drawn, y


def _dashes(row: dict[str, Any]) -> str:
    """An interval that leaves the luck of training out is drawn as less sure."""
    return ' stroke-dasharray="2 3"' if row.get("common_seeds") == 1 else ""


def _scale(value: float, metric: str, x: float, y: float) -> str:
    return _text(x, y, tables.change({"difference": value, "metric": metric}), anchor="middle", colour="#555555")


def _line(x1: float, y1: float, x2: float, y2: float, look: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:g}" x2="{x2:.1f}" y2="{y2:g}" {look}/>'


def _text(
    x: float, y: float, words: str, *, weight: str = "normal", anchor: str = "start", colour: str = "#111"
) -> str:
    look = f'font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>'
