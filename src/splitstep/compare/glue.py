"""Fine-tuning on the tasks of GLUE as one experiment: every task, setting and seed, each run resumable."""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitstep.compare.jobs import Job, finish
from splitstep.recipe import Recipe, recipe, runs
from splitstep.reports.published import spread
from splitstep.solver.errors import RunError, UserError, lookup
from splitstep.tables import read, setting, with_setting, with_settings
from splitstep.tasks.glue import GLUE, WNLI, averages, metrics_of, score
from splitstep.training.checkpoints import write_atomically
from splitstep.training.initial import initial_folder, known_configuration
from splitstep.training.progress import Say
from splitstep.training.ready import all_ready, origin, updates_of
from splitstep.training.run import Run

SKIPPED = {"WNLI": f"left out, as in the papers; a mean of nine tasks counts its majority, {WNLI}"}
SEEDS = 3  # where neither the command nor the recipe's grid says


@dataclass(frozen=True)
class Trial:
    """One run: a task under a setting of the recipe's grid, with a seed."""

    task: str
    setting: str
    seed: int
    recipe: Recipe
    folder: Path

    def job(self, updates: int) -> Job:
        """The run as work to be done."""
        name = " ".join(filter(None, (self.task, self.setting, f"seed {self.seed}")))
        return Job(name, self.recipe, self.folder, updates)


@dataclass(frozen=True)
class Experiment:
    """Recipes, the model that all their runs begin with, and the folder that they lie in."""

    folder: Path
    recipe_names: tuple[str, ...]
    run: Path
    tasks: tuple[str, ...] = ()  # all that the recipes have, without it
    seeds: int | None = None
    weights: str = "trained"  # or random: architecture and vocabulary alone
    settings: tuple[str, ...] = ()
    jobs: int = 1

    def trials(self) -> list[Trial]:
        """All runs: every task with the first seed, then with the next."""
        told = dict(map(setting, self.settings))
        self._refuse_without_effect(told)
        one = told.pop("data.task", None)
        asked = self.tasks or ((one,) if one else ())
        found = [trial for name in self.recipe_names for trial in self._trials(name, told)]
        for task in asked:
            if task in SKIPPED:
                raise UserError(f"{task} is {SKIPPED[task]}")
            lookup(f"task of {', '.join(self.recipe_names)}", task, {trial.task: trial for trial in found})
        for folder, count in Counter(trial.folder for trial in found).items():
            if count > 1:
                names = ", ".join(self.recipe_names)
                raise UserError(f"{count} runs of {names} would share {folder}; name one recipe at a time")
        if asked:
            found = sorted((trial for trial in found if trial.task in asked), key=lambda t: asked.index(t.task))
        return sorted(found, key=lambda t: t.seed)

    def _refuse_without_effect(self, told: dict[str, Any]) -> None:
        """Refuse settings for which the command has another word, as far as it was given."""
        words = {"training.init": "RUN", "training.init_weights": "--from-scratch"}
        words |= {"data.task": "--tasks"} if self.tasks else {}
        words |= {"training.seed": "--seeds"} if self.seeds else {}
        for key in told.keys() & words.keys():
            raise UserError(f"{key} has no effect here; it is {words[key]} that says it")

    def _trials(self, name: str, told: dict[str, Any]) -> Iterator[Trial]:
        tables = with_settings(read(name), told.items())
        if tables.get("task") != "glue":
            raise UserError(f"{name} is a recipe of the task {tables.get('task')}, not glue")
        begin = [("training.init", str(self.run.resolve())), ("training.init_weights", self.weights)]
        tables = with_settings(tables, begin)
        grid = dict(tables.get("grid", {}))
        tasks = grid.pop("data.task", list(GLUE))
        seeds = [told["training.seed"]] if "training.seed" in told else grid.pop("training.seed", range(1, SEEDS + 1))
        for seed in range(1, self.seeds + 1) if self.seeds else seeds:
            for task in tasks:
                for label, whole in runs(self._of(tables | {"grid": grid}, task, seed)):
                    folder = self.folder / task / ",".join(filter(None, (label, f"seed={seed}")))
                    yield Trial(task, label, seed, whole, folder)

    def _of(self, tables: dict[str, Any], task: str, seed: int) -> dict[str, Any]:
        of_task = with_settings(tables, [("data.task", task), ("training.seed", seed)])
        folder = initial_folder(recipe(of_task))
        assert folder is not None
        room = known_configuration(folder).max_position_embeddings
        return with_setting(of_task, "data.max_length", min(of_task["data"].get("max_length", room), room))


def fine_tune(experiment: Experiment, *, say: Say) -> dict[str, Any]:
    """Train what is not yet trained, and set the tasks side by side."""
    trials = experiment.trials()
    for task, reason in SKIPPED.items():
        say(f"{task}: {reason}")
    tasks = all_ready((trial.recipe for trial in trials), say)
    jobs = [trial.job(updates_of(task, trial.recipe.training)) for trial, task in zip(trials, tasks, strict=True)]
    left = [job for job, task in zip(jobs, tasks, strict=True) if not job.finished(origin(task))]
    for job in finish(left, at_a_time=experiment.jobs, say=say):
        shutil.rmtree(Run(job.folder).checkpoints, ignore_errors=True)  # each as large as three models
    if failed := [job for job in jobs if job.failure is not None]:
        raise RunError(f"{len(failed)} of {len(jobs)} runs failed; {failed[0].name}: {failed[0].failure}")
    results = summary(experiment, trials)
    write_atomically(experiment.folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False))
    return results


def summary(experiment: Experiment, trials: list[Trial]) -> dict[str, Any]:
    """Each task under the setting that is best on its development set, and the means over tasks, all in per cent."""
    rows = [_row(task, own) for task, own in _grouped(trials, lambda trial: trial.task)]
    return {
        "run": str(experiment.run),
        "recipes": list(experiment.recipe_names),
        "weights": experiment.weights,
        "tasks": rows,
        "averages": _averages({row["task"]: row["score"] for row in rows}),
        "skipped": SKIPPED,
    }


def _averages(scores: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The means over tasks; with their spread over seeds where all tasks have as many."""
    counts = {len(score["values"]) for score in scores.values()}
    if len(counts) > 1:
        whole = averages({task: score["mean"] for task, score in scores.items()})
        return {name: spread([mean]) for name, mean in whole.items()}
    means = [averages({task: score["values"][i] for task, score in scores.items()}) for i in range(*counts)]
    return {name: spread([mean[name] for mean in means]) for name in means[0]}


def _row(task: str, trials: list[Trial]) -> dict[str, Any]:
    settings = [_measured(task, setting, own) for setting, own in _grouped(trials, lambda trial: trial.setting)]
    best = max(settings, key=lambda row: row["score"]["mean"])
    return best | {"settings_tried": len(settings)}


def _measured(task: str, setting: str, trials: list[Trial]) -> dict[str, Any]:
    """What the seeds of one setting reached."""
    runs = [Run(trial.folder).results() for trial in trials]
    found = [result["metrics"] for result in runs if result is not None]
    metrics = {
        name if split == "valid" else f"{name} ({split})": spread([100 * metrics[split][name] for metrics in found])
        for split in found[0]
        for name in metrics_of(task)
    }
    return {"task": task, "setting": setting, "metrics": metrics, "score": spread([score(task, m) for m in found])}


def _grouped(trials: list[Trial], key: Callable[[Trial], str]) -> Iterator[tuple[str, list[Trial]]]:
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[key(trial)].append(trial)
    yield from groups.items()
