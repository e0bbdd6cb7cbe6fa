"""Ctrl-C and SIGTERM, obeyed between updates."""

import os
import signal
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

STDERR = 2
SAME_SIGNAL = 0.5  # seconds; torchrun passes on a Ctrl-C that the terminal has already sent to every process


@dataclass
class Signals:
    """Ctrl-C and SIGTERM asked for: the run ends after the update at hand. A second Ctrl-C ends it at once.

    Of several processes that a terminal signals, one is `told`, and answers it.
    """

    told: bool = True
    received: int | None = None
    _since: float = 0.0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
            if self.told and number == signal.SIGINT:
                # Not by `print`: a handler may have come in the middle of one, which forbids a second.
                os.write(STDERR, b"\nending after the update at hand; Ctrl-C again ends at once\n")
        elif number == signal.SIGINT and now - self._since > SAME_SIGNAL:
            raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        """As a shell counts a process that a signal ended."""
        return 0 if self.received is None else 128 + self.received


def leave_signals_to_the_trainer(worker: int) -> None:
    """Have a worker live on when a terminal signals all processes: the trainer makes its last update with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
