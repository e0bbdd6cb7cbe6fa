"""What a user sees of a long run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID


Say = Callable[[str], None]


def clock(seconds: float) -> str:
    """A duration for people: 42 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress(Protocol):
    """Where progress goes."""

    def update(self, done: int, entry: dict[str, Any]) -> None:
        """Show a log entry after that many updates."""


Opened = Callable[..., AbstractContextManager[Progress]]  # of a total, with the name of what is shown


class Lines:
    """A line a log entry."""

    def __init__(self, total: int, *, name: str = "") -> None:
        self.total, self.name = total, f"{name}: " if name else ""
        self.begun: tuple[float, int] | None = None

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, done: int, entry: dict[str, Any]) -> None:
        """Loss or metrics, speed, time left."""
        self.say(f"update {done:,} of {self.total:,}  {described(entry)}{self._left(done)}")

    def part(self, total: int, *, name: str, weight: float = 1.0) -> "Lines":
        """One of several runs, with lines of its own."""
        return Lines(total, name=name)

    def _left(self, done: int) -> str:
        now = time.monotonic()
        if self.begun is None:
            self.begun = now, done
            return ""
        since, first = self.begun
        return f"  {clock((now - since) / max(done - first, 1) * (self.total - done))} left" if done > first else ""

    def say(self, line: str) -> None:
        """To stderr."""
        print(f"{self.name}{line}", file=sys.stderr, flush=True)


class Bar:
    """A bar with loss, speed and time left; evaluations stay as lines above it."""

    def __init__(self, total: int, *, name: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Display

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[described]}"),
            TimeRemainingColumn(),
        )
        self.display = Display(*columns, console=Console(stderr=True))
        self.task = self.display.add_task(name or "training", total=total, described="")

    def __enter__(self) -> "Bar":
        self.display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.stop()

    @contextmanager
    def part(self, total: int, *, name: str, weight: float = 1.0) -> Iterator[Progress]:
        """One of several runs: a bar under that of all, which moves with it by `weight` an update."""
        before = self.display.tasks[0].completed
        task = self.display.add_task(name, total=total, described="")
        try:
            yield _Part(self, task, name, before, weight)
        finally:
            self.display.remove_task(task)
            self.update(round(before + weight * total), {})

    def update(self, done: int, entry: dict[str, Any]) -> None:
        """Move the bar; an evaluation is a line of its own."""
        self.move(self.task, done, entry)

    def move(self, task: "TaskID", done: int, entry: dict[str, Any], *, name: str = "") -> None:
        """Move one of the bars."""
        if "eval_loss" in entry:
            self.say(f"{name}update {done:,}  {described(entry)}")
        else:
            self.display.update(task, completed=done, described=described(entry))

    def say(self, line: str) -> None:
        """Above the bar."""
        self.display.console.print(line, markup=False, highlight=False)


@dataclass(frozen=True)
class _Part:
    """The bar of one of several runs."""

    whole: Bar
    task: "TaskID"
    name: str
    before: float  # what the runs before it count
    weight: float  # what one of its updates counts

    def update(self, done: int, entry: dict[str, Any]) -> None:
        """Move both bars."""
        self.whole.move(self.task, done, entry, name=f"{self.name}: ")
        self.whole.update(round(self.before + self.weight * done), {})


def progress(total: int, *, name: str = "") -> Lines | Bar:
    """A bar on a terminal, lines elsewhere."""
    return Bar(total, name=name) if sys.stderr.isatty() else Lines(total, name=name)


def described(entry: dict[str, Any]) -> str:
    """A log entry in a few words."""
    words = []
    for key, value in entry.items():
        if key.startswith("eval_") and isinstance(value, float):
            words.append(f"valid {key.removeprefix('eval_')} {value:.4g}")
    if "loss" in entry:
        words.append(f"loss {entry['loss']:.4f}")
    for key, value in entry.items():
        if key.endswith("_per_second"):
            words.append(f"{value:,.0f} {key.removesuffix('_per_second')}/s")
    if entry.get("data_wait", 0) > 0.05:
        words.append(f"waiting for data {entry['data_wait']:.0%}")
    return "  ".join(words)
