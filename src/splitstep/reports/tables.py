"""A comparison as a table for people: the same rows in the terminal, in Markdown and in HTML."""

from typing import Any

NAMES = {"bleu": "BLEU", "accuracy": "accuracy", "perplexity": "perplexity"}


def shown(value: float | None, metric: str) -> str:
    """A metric as people write it; accuracies in percent."""
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.2f}"


def quality(row: dict[str, Any]) -> str:
    """Mean and standard deviation over seeds, or why there is none."""
    if not row["values"]:
        return "failed"
    spread = "" if row["std"] is None else f" ± {shown(row['std'], row['metric'])}"
    return f"{shown(row['mean'], row['metric'])}{spread}"


def gap(row: dict[str, Any]) -> str:
    """The difference to the baseline with its interval."""
    if "difference" not in row:
        return ""
    low, high = row["interval"]
    parts = (shown(value, row["metric"]) for value in (row["difference"], low, high))
    value, low_text, high_text = parts
    return f"{'+' if row['difference'] > 0 else ''}{value} [{low_text}, {high_text}]"


def count(value: float | None) -> str:
    """A large number in short: 2.1 M, 3.4e15."""
    if value is None:
        return "-"
    for size, name in ((1e12, None), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value:.2e}" if name is None else f"{value / size:.1f} {name}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Seconds or minutes."""
    if seconds is None:
        return "-"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """The table of a comparison, cell by cell."""
    metric = NAMES.get(results["metric"], results["metric"])
    table = []
    for row in results["schemes"]:
        speed = next((key for key in row if key.endswith("_per_second")), "tokens_per_second")
        evaluations = row["evaluations_per_layer"] or {}
        table.append(
            {
                "scheme": row["name"],
                metric: quality(row),
                "difference": gap(row),
                "p": f"{row['p_corrected']:.3f}" if "p_corrected" in row else "",
                "verdict": row.get("verdict", "baseline" if row is results["schemes"][0] else "failed"),
                "parameters": count(row["parameters"]),
                "in layers": count(row["body"]),
                "training FLOPs": count(row["flops"]),
                "evaluations a layer": " + ".join(f"{n} {term}" for term, n in evaluations.items()),
                speed.replace("_per_second", "/s"): count(row.get(speed)),
                "training": duration(row["seconds"]),
                "memory": f"{count(row['peak_memory_bytes'])}B",
                "latency": "-" if row["latency_seconds"] is None else f"{1000 * row['latency_seconds']:.1f} ms",
            }
        )
    return table


def markdown(table: list[dict[str, str]]) -> str:
    """The table in Markdown."""
    if not table:
        return ""
    head = list(table[0])
    lines = [head, ["---"] * len(head), *(list(row.values()) for row in table)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def sentence(results: dict[str, Any]) -> str:
    """What was found, in one sentence."""
    base, *others = results["schemes"]
    metric = NAMES.get(results["metric"], results["metric"])
    said = []
    for verdict in ("better", "worse", "no significant difference"):
        names = [row["name"] for row in others if row.get("verdict") == verdict]
        if names:
            said.append(f"{', '.join(names)}: {verdict}")
    failed = [row["name"] for row in results["schemes"] if not row["values"]]
    if failed:
        said.append(f"failed: {', '.join(failed)}")
    seeds = results["seeds"]
    luck = "one seed: luck in training is not counted" if seeds == 1 else f"{seeds} seeds"
    return f"{results['task']}, {metric} against {base['name']} ({quality(base)}; {luck}): {'; '.join(said)}."


def claim_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """What the papers claim, and whether this comparison bears it out."""
    return [
        {
            "claim": claim["claim"],
            "source": claim["source"],
            "here": claim["answer"],
            "difference": gap({**claim, "metric": results["metric"]}),
            "p": f"{claim['p_corrected']:.3f}",
        }
        for claim in results.get("claims", [])
    ]


def published_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """The numbers of the papers, as the recipe quotes them."""
    quoted = results.get("published") or {}
    table = []
    for row in quoted.get("rows", []):
        where = ", ".join(f"{key} = {value}" for key, value in row.items() if "." in key)
        table.append({"published": where or "the row", "value": str(row["value"]), "source": quoted["source"]})
    return table
