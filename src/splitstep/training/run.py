"""The run folder: what a run is, what it has done, and who may write to it."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from splitstep import __version__
from splitstep.recipe import HOW_IT_IS_DONE, Recipe, recipe
from splitstep.solver.errors import UserError
from splitstep.tables import differences, read_json, toml
from splitstep.training.checkpoints import write_atomically

SIDE_BY_SIDE = (
    "SPLITSTEP_SIDE_BY_SIDE"  # the variable by which a run is told how many are at work together, itself among them
)

# What may change when a run goes on: it alters where it ends or how it is done, not what is learnt.
MAY_CHANGE = HOW_IT_IS_DONE | {"training.updates", "training.epochs", "training.patience"}


@dataclass(frozen=True)
class Run:
    """A folder with recipe.toml, environment.json, metrics.jsonl, checkpoints/, model/ and results.json."""

    folder: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.folder / "recipe.toml"

    @property
    def checkpoints(self) -> Path:
        """Where the Trainer saves."""
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        """The finished model with its tokenizer or image processor."""
        return self.folder / "model"

    @property
    def results_file(self) -> Path:
        """What the finished model reached."""
        return self.folder / "results.json"

    @property
    def metrics_file(self) -> Path:
        """A line a log entry."""
        return self.folder / "metrics.jsonl"

    @classmethod
    def existing(cls, folder: Path) -> "Run":
        """The run of a folder, which must be one."""
        run = cls(folder)
        if not folder.exists():
            raise UserError(f"there is no run folder {folder}")
        if not run.recipe_file.is_file():
            parents = [parent for parent in folder.resolve().parents if cls(parent).recipe_file.is_file()]
            hint = f"; did you mean {parents[0]}?" if parents else ""
            raise UserError(f"{folder} is no run folder: it has no recipe.toml{hint}")
        return run

    def recipe(self) -> Recipe:
        """What the run was made from."""
        try:
            return recipe(tomllib.loads(self.recipe_file.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.recipe_file} is no TOML: {error}") from None

    def results(self) -> dict[str, Any] | None:
        """The results of a finished run."""
        return self._json(self.results_file) if self.results_file.is_file() else None

    def environment(self) -> dict[str, Any]:
        """Under what the run was begun."""
        return self._json(self.folder / "environment.json")

    def _json(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            raise UserError(f"{self.folder} has no {path.name}: it is no whole run folder")
        return read_json(path)

    def check(self, wanted: Recipe, data: dict[str, str], *, instead: str = "--fresh starts beside it") -> None:
        """Refuse to go on with another recipe or other data; `instead` says what can be done."""
        changed = {
            key: values
            for key, values in differences(self.recipe().settings(), wanted.settings()).items()
            if key not in MAY_CHANGE
        }
        if changed:
            listed = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
            raise UserError(f"{self.folder} was begun with another recipe: {listed}; {instead}")
        before = self.environment()["data"]
        altered = sorted(name for name in before.keys() | data.keys() if before.get(name) != data.get(name))
        if altered:
            raise UserError(f"{self.folder} was begun with other data: {', '.join(altered)} changed")

    def begin(self, wanted: Recipe, data: dict[str, str], **facts: Any) -> None:
        """Make the folder, or make it anew."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.results_file.unlink(missing_ok=True)
        written = json.dumps(environment() | facts | {"seed": wanted.training.seed, "data": data}, indent=2)
        write_atomically(self.folder / "environment.json", written)
        self.write_recipe(wanted)

    def goes_on(self, update: int, **facts: Any) -> None:
        """Note the command that goes on with the run, where versions, the commit or the facts are not those before."""
        before, now = self.environment(), environment() | facts
        latest = before | {key: value for entry in before.get("continued", []) for key, value in entry.items()}
        changed = {key: value for key, value in now.items() if key != "command" and latest.get(key) != value}
        if changed:
            entry = {"update": update, "command": now["command"], **changed}
            noted = before | {"continued": [*before.get("continued", []), entry]}
            write_atomically(self.folder / "environment.json", json.dumps(noted, indent=2))

    def facts(self, key: str) -> set[Any]:
        """What its environment says of a key, when it was begun and whenever it went on."""
        begun = self.environment()
        return {entry[key] for entry in (begun, *begun.get("continued", [])) if entry.get(key)}

    def write_recipe(self, wanted: Recipe) -> None:
        """The resolved recipe, with the numbers others published for it."""
        tables = wanted.settings() | ({"published": wanted.published} if wanted.published else {})
        write_atomically(self.recipe_file, toml(tables))

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Put the log back to what a checkpoint remembers."""
        write_atomically(self.metrics_file, "".join(f"{json.dumps(entry)}\n" for entry in history))

    def log(self, entry: dict[str, Any]) -> None:
        """Append to the log."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(entry)}\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others out while this process lives; a crash leaves no lock behind."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}") from None
        with lock as file:
            try:
                # A lock of this process alone: workers, which may outlive it for seconds, do not inherit it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise UserError(f"another process is at work in {self.folder}") from None
            yield


def environment() -> dict[str, Any]:
    """Versions, commit and machine: what a number depends on beside the recipe."""
    packages = ("torch", "transformers", "accelerate", "tokenizers", "numpy", "sacrebleu", "scikit-learn", "scipy")
    return {
        "splitstep": __version__,
        "commit": _commit(),
        "command": sys.argv[1:],
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "side_by_side": int(os.environ.get(SIDE_BY_SIDE, "1")),
        **{name: version(name) for name in packages},
    }


def _commit() -> str | None:
    """Of our own repository; an installed package may lie in another, whose commit says nothing."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None

    def answer(*words: str) -> str:
        asked = ["git", "-C", str(root), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = answer("status", "--porcelain", "--untracked-files=no", "--", "src", "pyproject.toml")
        return answer("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
