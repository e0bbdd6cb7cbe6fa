"""A comparison as a table for people: the same rows in the terminal, in Markdown and in HTML."""

from typing import Any

from splitstep.tasks.base import METRICS

NAMES = {"bleu": "BLEU", "f1": "F1", "mlm_loss": "masked-token loss"}
PERCENT = ("accuracy",)  # metrics that people write in percent, and their differences in points
DECIMALS = {"f1": 4, "matthews": 4, "pearson": 4, "spearman": 4, "mlm_loss": 4}  # two, without an entry


def shown(value: float | None, metric: str) -> str:
    """A metric as people write it."""
    if value is None:
        return "-"
    return f"{_number(value, metric)}{' %' if metric in PERCENT else ''}"


def _number(value: float, metric: str) -> str:
    return f"{100 * value if metric in PERCENT else value:.{DECIMALS.get(metric, 2)}f}"


def chance(p: float, results: dict[str, Any]) -> str:
    """A p-value, rounded to no other verdict."""
    if p < 0.001:
        return "<0.001"
    short, level = f"{p:.3f}", results.get("level", 0.05)
    return short if (float(short) < level) == (p < level) else f"{p:.5f}"


def quality(row: dict[str, Any]) -> str:
    """Mean and standard deviation over seeds, or why there is none."""
    if not row["values"]:
        return "failed"
    if row["std"] is None:
        return shown(row["mean"], row["metric"])
    return f"{_number(row['mean'], row['metric'])} ± {shown(row['std'], row['metric'])}"


def change(row: dict[str, Any]) -> str:
    """The difference to the baseline; of percentages in points."""
    if row.get("difference") is None:
        return ""
    sign, unit = "+" if row["difference"] > 0 else "", " points" if row["metric"] in PERCENT else ""
    return f"{sign}{_number(row['difference'], row['metric'])}{unit}"


def gap(row: dict[str, Any]) -> str:
    """The difference to the baseline with its interval."""
    if row.get("difference") is None:
        return ""
    low, high = (_number(end, row["metric"]) for end in row["interval"])
    return f"{change(row)} [{low}, {high}]"


def verdict(row: dict[str, Any], *, baseline: bool) -> str:
    """What is said of a scheme, or why nothing is, and what is not to be overlooked."""
    if not row["values"]:
        return "failed"
    said = "baseline" if baseline else row.get("verdict", "no seed in common with the baseline")
    if said in ("better", "worse") and row.get("common_seeds") == 1:
        said += " by one seed"
    runs = len(row["values"]) + len(row["failed"])
    return f"{said}; {len(row['failed'])} of {runs} runs failed" if row["failed"] else said


def count(value: float | None) -> str:
    """A large number in short: 2.1 M, 3.4e15."""
    if value is None:
        return "-"
    for size, name in ((1e12, None), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value:.2e}" if name is None else f"{value / size:.1f} {name}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def is_comparison(results: dict[str, Any]) -> bool:
    """Whether schemes were held against each other; runs that lie side by side were not."""
    return "match" in results and len(results["schemes"]) > 1


def rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """The table of a comparison or of runs side by side, cell by cell."""
    metric = NAMES.get(results["metric"], results["metric"])
    seeds = {len(row["values"]) for row in results["schemes"]}
    table = []
    for row in results["schemes"]:
        speed = next((key for key in row if key.endswith("_per_second")), "tokens_per_second")
        evaluations = row["evaluations_per_layer"] or {}
        table.append(
            {
                "scheme": row["name"],
                metric: quality(row),
                **({"seeds": str(len(row["values"]))} if len(seeds) > 1 else {}),
                **(_held(row, results) if is_comparison(results) else {}),
                "parameters": count(row["parameters"]),
                "in layers": count(row.get("body")),
                "in embeddings": count(row.get("embeddings")),
                "in the head": count(row.get("head")),
                "training FLOPs": count(row["flops"]),
                "evaluations a layer": " + ".join(f"{n} {term}" for term, n in evaluations.items()),
                speed.replace("_per_second", "/s"): count(row.get(speed)),
                "training": duration(row["seconds"]),
                "memory": "-" if row["peak_memory_bytes"] is None else f"{count(row['peak_memory_bytes'])}B",
                "latency": "-" if row["latency_seconds"] is None else f"{1000 * row['latency_seconds']:.1f} ms",
            }
        )
    return table


def _held(row: dict[str, Any], results: dict[str, Any]) -> dict[str, str]:
    """What is said of a scheme against the baseline."""
    return {
        "difference": gap(row),
        "p": chance(row["p_corrected"], results) if "p_corrected" in row else "",
        "verdict": verdict(row, baseline=row is results["schemes"][0]),
    }


def brief(row: dict[str, str]) -> dict[str, str]:
    """The cells that a terminal has room for: quality, and two costs."""
    keys = list(row)
    return {key: row[key] for key in [*keys[: keys.index("parameters") + 1], "training"]}


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
    if not is_comparison(results):
        reached = "; ".join(f"{row['name']}: {quality(row)}" for row in results["schemes"])
        return f"{results['task']}, {metric} of {reached} ({_luck(results)})."
    verdicts: dict[str, list[str]] = {}
    for row in others:
        verdicts.setdefault(verdict(row, baseline=False), []).append(row["name"])
    said = [f"{', '.join(names)}: {found}" for found, names in sorted(verdicts.items(), key=_order)]
    failed = f"; {len(base['failed'])} of its runs failed" if base["failed"] else ""
    about = f"{quality(base)}; {_luck(results)}{failed}"
    return f"{results['task']}, {metric} against {base['name']} ({about}): {'; '.join(said)}."


def _order(found: tuple[str, list[str]]) -> int:
    first = ("better", "worse", "no significant difference", "no seed in common", "failed")
    return next((place for place, word in enumerate(first) if found[0].startswith(word)), len(first))


def _luck(results: dict[str, Any]) -> str:
    """Over how many seeds the means are, and where that differs."""
    counts = {row["name"]: len(row["values"]) for row in results["schemes"] if row["values"]}
    most = max(counts.values(), default=0)
    if most == 1:
        return "one seed: luck in training is not counted"
    fewer = ", ".join(f"{name} {count}" for name, count in counts.items() if count < most)
    return f"{most} seeds, but {fewer}" if fewer else f"{most} seeds"


def terms(results: dict[str, Any]) -> str:
    """On what terms the schemes were compared, and what the numbers of the table are."""
    match = {
        "none": "nothing is matched",
        "parameters": "equal parameters",
        "flops": "equal training FLOPs were aimed at",
        "seconds": "equal seconds of training were aimed at",
    }
    # What is best on a split is a little too good there.
    chosen = ", which also chose each run's checkpoint" * (
        results["split"] == "valid" and results.get("weights") == "best"
    )
    equal = f"{match[results['match']]}{_reached(results)}; " if is_comparison(results) else ""
    said = [f"Terms: {equal}measured on the {results['split']} split{_tested(results)}{chosen}."]
    if METRICS[results["metric"]] is min:
        said.append(f"Lower {NAMES.get(results['metric'], results['metric'])} is better.")
    if results.get("unfinished"):
        said.append(f"Not finished: {', '.join(results['unfinished'])}.")
    if "signature" in results:
        said.append(f"BLEU: {results['signature']}.")
    said += [*_tests(results), *_costs(results)]
    adjusted = [
        f"{row['name']}: {', '.join(f'{key} = {value}' for key, value in row['adjusted'].items())}"
        for row in results["schemes"]
        if row["adjusted"]
    ]
    said += [f"Adjusted: {'; '.join(adjusted)}."] if adjusted else []
    return " ".join([*said, *_besides(results)])


def _tested(results: dict[str, Any]) -> str:
    """On how much it was measured."""
    tested = results.get("tested")
    return f" ({tested['count']:,} {tested['unit']})" if tested else ""


def _besides(results: dict[str, Any]) -> list[str]:
    """What schemes have of their published models beside what makes them, so that it is a part of what is compared."""
    alike: dict[str, list[str]] = {}
    for row in results["schemes"]:
        has = (f"{key} = {own} (baseline: {base})" for key, (own, base) in row.get("besides", {}).items())
        alike.setdefault(", ".join(has), []).append(row["name"])
    said = "; ".join(f"{', '.join(names)}: {has}" for has, names in alike.items() if has)
    return [f"Beside its scheme, as its paper has it: {said}."] if said else []


def _reached(results: dict[str, Any]) -> str:
    """How far what was to be equal is, as shares of the baseline's."""
    key = results["match"]
    base, *others = results["schemes"]
    if key not in ("flops", "seconds") or not base[key]:
        return ""
    shares = ", ".join(f"{row['name']} {row[key] / base[key]:.2f}" for row in others if row[key])
    return f" (reached, against {base['name']}: {shares})" if shares else ""


def _costs(results: dict[str, Any]) -> list[str]:
    """How speed, latency and time were measured, and by which versions of the code."""
    said = []
    if is_comparison(results):
        said.append(
            "Speed is measured in turns when all runs are done, and so is latency, the time of one answer, of schemes "
            f"whose weights are at hand; training is the mean time that the runs took{_together(results)}."
        )
    commits = [version(commit) for commit in results.get("commits", [])]
    if len(commits) > 1:
        said.append(f"The runs were made by {len(commits)} versions of the code: {', '.join(commits)}.")
    return said


def _together(results: dict[str, Any]) -> str:
    """How many runs were at work at a time, where that is known, and for which schemes it differs."""
    alike: dict[str, list[str]] = {}
    for row in results["schemes"]:
        if numbers := row.get("side_by_side"):
            words = (f"{number} side by side" if number > 1 else "one at a time" for number in numbers)
            alike.setdefault(" or ".join(words), []).append(row["name"])
    if len(alike) > 1:
        return ": " + "; ".join(f"{words} ({', '.join(names)})" for words, names in alike.items())
    return "".join(f", {words}" for words in alike)


def version(commit: str | None) -> str:
    """A commit in short, with what is said of changes to it."""
    return (commit or "")[:8] + (commit or "")[40:]


def _tests(results: dict[str, Any]) -> list[str]:
    """By which test each scheme was held against the baseline, and what is corrected."""
    tests: dict[str, list[str]] = {}
    for row in results["schemes"]:
        if "test" in row:
            tests.setdefault(row["test"], []).append(row["name"])
    if not tests:
        return []
    named = [f"{test} ({', '.join(names)})" if len(tests) > 1 else test for test, names in tests.items()]
    pairs = f" {results['pairs']}" if "pairs" in results else ""
    return [
        f"Differences are over the seeds that both schemes have: {'; '.join(named)}.",
        f"Intervals are of 95 % for each difference by itself; p and verdict are corrected for all{pairs} pairs of "
        "schemes that are held against each other here (Holm).",
    ]


def claim_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """What the papers claim, and whether this comparison bears it out."""
    return [
        {
            "claim": claim["claim"],
            "source": claim["source"],
            "here": claim["answer"],
            "difference": gap({**claim, "metric": results["metric"]}),
            "p": chance(claim["p_corrected"], results),
        }
        for claim in results.get("claims", [])
    ]


def published_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """The numbers of the papers, as the recipe quotes them, beside ours."""
    quoted = results.get("published") or {}
    metric = quoted.get("metric", results["metric"])
    return [
        {
            "published": ", ".join(f"{k} = {v}" for k, v in row.items() if k not in ("value", "here")) or "the row",
            "value": shown(row["value"], metric) if metric in PERCENT else str(row["value"]),
            "here": ", ".join(
                f"{own['scheme']}: {quality(own | {'metric': metric})}" for own in row.get("here", []) if own["values"]
            )
            or "-",
        }
        for row in quoted.get("rows", [])
    ]


def published_notes(results: dict[str, Any]) -> str:
    """Where the published numbers are from, what they are, and how their making differs."""
    quoted = results.get("published") or {}
    labels = {"source": "Source", "convention": "BLEU by the convention", "claim": "Claim"}
    labels |= {"differs": "How it differs"}
    notes = [f"{label}: {str(quoted[key]).rstrip('.')}." for key, label in labels.items() if key in quoted]
    return " ".join(" ".join(notes).split())


def failures(results: dict[str, Any]) -> list[str]:
    """The runs that failed, with their reasons."""
    return [f"{row['name']}, {run}: {reason}" for row in results["schemes"] for run, reason in row["failed"].items()]
