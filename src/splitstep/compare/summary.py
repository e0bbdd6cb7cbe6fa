"""What the runs of a comparison say: means over seeds, differences with their certainty, claims, and costs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from splitstep.compare.claims import Claim, claims_among
from splitstep.compare.costs import LATENCY, PACE, Costs
from splitstep.compare.examples import predictions, statistics
from splitstep.compare.measures import MEASURES, Array, measure_name
from splitstep.compare.schemes import Contestant
from splitstep.compare.statistics import LEVEL, Difference, corrected, difference
from splitstep.models.presets import MANNERS
from splitstep.recipe import Recipe
from splitstep.reports.published import UNTESTED, beside, mean, spread, whole_settings
from splitstep.tasks.base import METRICS, Task
from splitstep.tasks.bleu import bleu
from splitstep.training.run import Run

if TYPE_CHECKING:
    from splitstep.compare.experiment import Experiment

Found = dict[tuple[str, str], dict[str, Any]]  # what is said of a scheme held against another, by their names


def summary(experiment: "Experiment", rivals: list[Contestant], task: Task, costs: Costs) -> dict[str, Any]:
    """The comparison as its report shows it."""
    split = task.measured_split
    entries = {
        rival.scheme.name: Entry(experiment, rival, task, split, costs.get(rival.scheme.name, {})) for rival in rivals
    }
    base, *others = entries.values()
    claims = claims_among(entries)
    pairs = [(other, base) for other in others]
    pairs += [(entries[claim.scheme], entries[claim.other]) for claim in claims]
    found = held(pairs, task.metric)
    return {
        "task": experiment.recipe.task,
        "metric": task.metric,
        "split": split,
        "tested": _tested(entries.values(), task),
        "weights": experiment.recipe.training.final,
        "match": experiment.match,
        "seeds": experiment.seeds,
        "commits": sorted(
            {commit for entry in entries.values() for run, _ in entry.runs.values() for commit in run.facts("commit")}
        ),
        "level": LEVEL,
        "pairs": len(found) // 2,
        "schemes": [
            entry.row() | {"besides": _besides(entry, base)} | found.get((entry.name, base.name), UNTESTED)
            for entry in entries.values()
        ],
        "claims": [
            _answered(claim, entries, found[claim.scheme, claim.other])
            for claim in claims
            if (claim.scheme, claim.other) in found
        ],
        "published": _beside(experiment.recipe, entries, task.metric),
        **next(({"signature": entry.signature} for entry in entries.values() if entry.signature), {}),
    }


def _tested(entries: Iterable["Entry"], task: Task) -> dict[str, Any] | None:
    """On how many examples the runs were measured, and what one of them is."""
    counts = {len(rows) for entry in entries for rows in entry.statistics.values()}
    return {"count": max(counts), "unit": MEASURES[measure_name(task)].unit} if counts else None


def _besides(entry: "Entry", base: "Entry") -> dict[str, list[Any]]:
    """What a published model has beside its scheme that the baseline has otherwise: both values."""
    both = {key: [getattr(one.rival.config, key) for one in (entry, base)] for key in sorted(MANNERS)}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _beside(recipe: Recipe, entries: dict[str, "Entry"], metric: str) -> dict[str, Any]:
    """The published numbers beside ours, BLEU by the published convention."""
    published, preset = recipe.published, recipe.model.get("preset", "transformer")
    metric, convention = published.get("metric", metric), published.get("convention")
    schemes = {name: entry.settings for name, entry in entries.items()}
    changed = {
        name: [f"model.{key}" for key in entry.rival.scheme.settings if key != "preset"]
        for name, entry in entries.items()
    }
    reached = {name: entry.reached(metric, convention) for name, entry in entries.items()}
    return beside(published, schemes, reached.__getitem__, preset=preset, changed=changed)


def _answered(claim: Claim, entries: dict[str, "Entry"], found: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = entries[claim.scheme].rival, entries[claim.other].rival
    differs = claim.differs(ours, theirs)
    answer = f"not tested: {differs}" if differs else claim.answer(found["verdict"], seeds=found["common_seeds"])
    if claim.no_worse and not differs:
        answer += f", with {ours.parameters.body / theirs.parameters.body:.0%} of the parameters in the layers"
    return {"claim": claim.says, "source": claim.source, "answer": answer, **found}


@dataclass(frozen=True)
class Entry:
    """A scheme with its finished runs."""

    experiment: "Experiment"
    rival: Contestant
    task: Task
    split: str
    costs: dict[str, float]

    @property
    def name(self) -> str:
        """The name of the scheme."""
        return self.rival.scheme.name

    @cached_property
    def runs(self) -> dict[int, tuple[Run, dict[str, Any]]]:
        """The finished runs by their seeds, with their results."""
        return {seed: found for seed, found in self._ended.items() if self._finite(found[1])}

    @cached_property
    def _ended(self) -> dict[int, tuple[Run, dict[str, Any]]]:
        runs = {seed: Run(job.folder) for seed, job in self.experiment.runs(self.rival).items()}
        return {seed: (run, results) for seed, run in runs.items() if (results := run.results()) is not None}

    def _finite(self, results: dict[str, Any]) -> bool:
        return math.isfinite(results["metrics"][self.split][self.task.metric])

    @property
    def failed(self) -> dict[str, str]:
        """Why the other runs are no part of what is said, by their folders."""
        jobs = self.experiment.runs(self.rival)
        reasons = {job.folder.name: job.failure for job in jobs.values() if job.failure is not None}
        wild = [jobs[seed].folder.name for seed in self._ended.keys() - self.runs.keys()]
        return reasons | dict.fromkeys(wild, f"its {self.task.metric} is not finite")

    @cached_property
    def statistics(self) -> dict[int, Array]:
        """What the measure of the task needs of each example, by seeds."""
        return {seed: statistics(run, self.task) for seed, (run, _) in self.runs.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe of the scheme, with what the configuration has by default."""
        return whole_settings(self.rival.recipe.settings(), self.rival.config)

    @property
    def signature(self) -> str | None:
        """How sacrebleu names what was computed."""
        return next((results["metrics"][self.split].get("signature") for _, results in self.runs.values()), None)

    def reached(self, metric: str, convention: str | None) -> list[float]:
        """What the runs reached under a metric of theirs, or under another convention of BLEU."""
        if metric == self.task.metric == "bleu" and convention not in (None, self.task.evaluation.bleu):
            known = [predictions(run, self.task) for run, _ in self.runs.values()]
            # A mean over some of the seeds would not be that of the row.
            return [] if None in known else [self._bleu(rows, convention) for rows in known if rows is not None]
        measured = [results["metrics"][self.split] for _, results in self.runs.values()]
        return [found[metric] for found in measured if metric in found]

    def _bleu(self, rows: list[dict[str, Any]], convention: str) -> float:
        texts = ([row[key] for row in rows] for key in ("hypothesis", "reference"))
        return bleu(*texts, convention=convention, language=self.task.data.target)[0]

    def row(self) -> dict[str, Any]:
        """Quality and costs."""
        results = [results for _, results in self.runs.values()]
        values = [found["metrics"][self.split][self.task.metric] for found in results]
        costs = ("flops", "seconds", "peak_memory_bytes")
        return {
            "name": self.name,
            "metric": self.task.metric,
            **spread(values),
            "seeds": list(self.runs),
            "failed": self.failed,
            "adjusted": self.rival.adjusted,
            "parameters": self.rival.parameters.total,
            **vars(self.rival.parameters),
            "evaluations_per_layer": results[0]["evaluations_per_layer"] if results else None,
            **{key: mean(found.get(key) for found in results) for key in costs},
            "seconds_of_runs": [found["seconds"] for found in results],
            "side_by_side": sorted(set().union(*(run.facts("side_by_side") for run, _ in self.runs.values()))),
            f"{self.task.unit}_per_second": self._speed(results),
            LATENCY: self.costs.get(LATENCY),
            "runs": [str(run.folder.relative_to(self.experiment.folder)) for run, _ in self.runs.values()],
        }

    def _speed(self, results: list[dict[str, Any]]) -> float | None:
        """Units of the task a second of training."""
        size = mean([found[self.task.unit] / found["updates"] for found in results])  # of an update
        pace = self.costs.get(PACE)
        return None if size is None or pace is None else size / pace


def held(pairs: Iterable[tuple[Entry, Entry]], metric: str) -> Found:
    """Schemes with a common seed held against each other, from both sides, under one correction for all the pairs."""
    differ: dict[tuple[str, str], Difference] = {}
    for one, other in pairs:
        known = (one.name, other.name) in differ or (other.name, one.name) in differ
        if not known and one.runs.keys() & other.runs.keys():
            differ[one.name, other.name] = _difference(one, other)
    chances = corrected([gap.p_value for gap in differ.values()])
    found: Found = {}
    for ((one_name, other_name), gap), chance in zip(differ.items(), chances, strict=True):
        found[one_name, other_name] = _said(gap, chance, metric)
        found[other_name, one_name] = _said(gap.reversed(), chance, metric)
    return found


def _difference(one: Entry, other: Entry) -> Difference:
    seeds = sorted(one.runs.keys() & other.runs.keys())
    statistics = ([entry.statistics[seed] for seed in seeds] for entry in (one, other))
    return difference(measure_name(one.task), *statistics)


def _said(gap: Difference, chance: float, metric: str) -> dict[str, Any]:
    return {
        "common_seeds": gap.seeds,
        "difference": gap.value,
        "interval": list(gap.interval),
        "p_value": gap.p_value,
        "test": gap.method,
        "p_corrected": chance,
        "verdict": verdict(gap.value, chance, metric),
    }


def verdict(value: float, chance: float, metric: str) -> str:
    """What can be said about a difference."""
    if chance >= LEVEL:
        return "no significant difference"
    return "better" if (value > 0) == (METRICS[metric] is max) else "worse"
