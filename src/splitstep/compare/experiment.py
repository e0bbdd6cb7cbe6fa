"""A comparison: which runs it has, where they lie, and what is found when they are done."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitstep.compare import examples
from splitstep.compare.costs import in_turns
from splitstep.compare.jobs import Job, finish, threads_of_each
from splitstep.compare.measures import measure_name
from splitstep.compare.schemes import Candidate, Contestant, contestants
from splitstep.recipe import HOW_IT_IS_DONE, Recipe, recipe
from splitstep.solver.errors import RunError, UserError
from splitstep.tables import differences, read_json, with_setting
from splitstep.training.checkpoints import write_atomically
from splitstep.training.progress import Say
from splitstep.training.run import Run


@dataclass(frozen=True)
class Experiment:
    """A recipe, the schemes that follow it on equal terms, and the seeds each is trained with."""

    folder: Path
    recipe: Recipe
    names: list[str]
    match: str
    seeds: int
    jobs: int = 1

    @property
    def file(self) -> Path:
        """What the comparison is."""
        return self.folder / "comparison.json"

    def runs(self, rival: Contestant) -> dict[int, Job]:
        """The runs of a scheme by their seeds."""
        count = min(self.seeds, rival.scheme.seeds or self.seeds)
        first = self.recipe.training.seed
        return {seed: self._run(rival, seed) for seed in range(first, first + count)}

    def _run(self, rival: Contestant, seed: int) -> Job:
        tables = rival.recipe.settings() | {"published": rival.recipe.published}
        folder = self.folder / rival.scheme.name.replace("/", ",") / f"seed-{seed}"
        whole = recipe(with_setting(tables, "training.seed", seed))
        return Job(f"{rival.scheme.name} {seed}", whole, folder, rival.updates, rival.flops_per_unit)

    def all_runs(self, rivals: list[Contestant]) -> list[Job]:
        """The runs of all schemes with the first seed, then with the next."""
        runs = [(seed, job) for rival in rivals for seed, job in self.runs(rival).items()]
        return [job for _, job in sorted(runs, key=lambda run: run[0])]

    def paces(self) -> dict[str, float] | None:
        """Seconds of an update of each scheme where time is made equal: measured once, when the comparison begins."""
        if self.match != "seconds":
            return None
        if "pace" in (before := self._before()):
            return before["pace"]
        from splitstep.training.trials import paces

        plain = contestants(self.recipe, self.names, "none")
        measured = paces([one.recipe for one in plain], threads=self.threads)
        return dict(zip((one.scheme.name for one in plain), measured, strict=True))

    def _before(self) -> dict[str, Any]:
        """What the folder says of the comparison it holds; nothing where it holds none."""
        if not self.file.is_file():
            return {}
        before = read_json(self.file)
        if not {"comparison", "recipe"} <= before.keys():
            raise UserError(f"{self.file} does not say what was compared")
        return before

    @property
    def threads(self) -> int | None:
        """How many each run has, where that is not all there are."""
        return threads_of_each(self.jobs) if self.jobs > 1 else None

    def setup(self) -> dict[str, Any]:
        """What makes a comparison this one."""
        schemes = [Candidate.named(name) for name in self.names]
        chosen = {"schemes": [scheme.name for scheme in schemes], "match": self.match, "jobs": self.jobs}
        seeds = {scheme.name: min(self.seeds, scheme.seeds or self.seeds) for scheme in schemes}
        return {"comparison": chosen | {"seeds": seeds}, "recipe": self.recipe.settings()}

    def check(self) -> None:
        """See that the folder is this comparison's, or nobody's."""
        if before := self._before():
            # Keys that are newer than the comparison have their defaults.
            began = {"comparison": before["comparison"], "recipe": recipe(before["recipe"]).settings()}
            changed = differences(*(json.loads(json.dumps(whole)) for whole in (began, self.setup())))
            may_change = {f"recipe.{key}" for key in HOW_IT_IS_DONE}
            if self.match != "seconds":  # where paces were measured side by side, with that many threads
                may_change |= {"comparison.jobs", "comparison.schemes"}
            changed = {
                key: values
                for key, values in changed.items()
                if key not in may_change and not key.startswith("comparison.seeds")
            }
            if changed:
                listed = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
                raise UserError(f"{self.folder} holds another comparison: {listed}")
            self._refuse_less(before["comparison"])
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} is no comparison: it has other files and no comparison.json")

    def _refuse_less(self, before: dict[str, Any]) -> None:
        """Schemes and seeds may be added behind those that a comparison has; to leave some out is to choose."""
        now = self.setup()["comparison"]
        if now["schemes"][: len(before["schemes"])] != before["schemes"]:
            raise UserError(
                f"{self.folder} compares {', '.join(before['schemes'])}: others may follow them, but to leave some out "
                "would choose by the result"
            )
        for name, had in before["seeds"].items():
            if now["seeds"][name] < had:
                raise UserError(
                    f"{self.folder} has {had} seeds of {name}; to leave some out would choose by the result"
                )

    def begin(self, pace: dict[str, float] | None) -> None:
        """Make the folder."""
        whole = self.setup() | ({} if pace is None else {"pace": pace})
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps(whole, indent=2))


def compare(experiment: Experiment, *, say: Say) -> dict[str, Any]:
    """Train what is not yet trained, and say what the runs say."""
    from splitstep.compare.summary import summary
    from splitstep.training.ready import all_ready, origin, task_of

    experiment.check()
    task = task_of(experiment.recipe)
    measure_name(task)  # one that has no test is refused before hours of training
    pace = experiment.paces()
    rivals = contestants(experiment.recipe, experiment.names, experiment.match, pace=pace)
    all_ready((rival.recipe for rival in rivals), say)
    experiment.begin(pace)
    jobs = experiment.all_runs(rivals)
    data = origin(task)
    left = [job for job in jobs if not job.finished(data)]
    if not left:
        say(f"{experiment.folder} is finished: {len(jobs)} runs; nothing to train")
    for rival in rivals if left else []:
        changed = ", ".join(f"{key} = {value}" for key, value in rival.adjusted.items())
        say(f"{rival.scheme.name}: {rival.parameters.total:,} parameters{f'; adjusted: {changed}' if changed else ''}")
    before = [job for job in jobs if job not in left]
    for job in before:
        examples.keep(Run(job.folder), task)
        examples.statistics(Run(job.folder), task)  # what is missing is better known now than after hours
    for job in finish(left, at_a_time=experiment.jobs, say=say):
        examples.keep(Run(job.folder), task)
    if not any(Run(job.folder).results() for job in jobs):
        raise RunError(f"not one of {len(jobs)} runs finished; {jobs[0].name} failed: {jobs[0].failure}")
    costs = in_turns(experiment, rivals, say=say)
    results = {"command": shlex.join(["splitstep", *sys.argv[1:]]), **summary(experiment, rivals, task, costs)}
    write_atomically(experiment.folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False))
    return results
