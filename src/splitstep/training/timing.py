"""How long training took, and what for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds of training and what was done in them, evaluations left out."""

    seconds: float = 0.0
    items: int = 0
    _lap: float = field(default_factory=time.monotonic)
    _lap_items: int = -1
    _waited: float = 0.0

    def __post_init__(self) -> None:
        self._lap_items = self.items

    @property
    def total(self) -> float:
        """All seconds so far, also those after the last lap."""
        return self.seconds + time.monotonic() - self._lap

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        begun = time.monotonic()
        yield
        self._waited += time.monotonic() - begun

    def pause(self, seconds: float) -> None:
        """Take time that was not training out of the lap."""
        self._lap += seconds

    def lap(self, unit: str) -> dict[str, float]:
        """Speed and the share of waiting since the last lap."""
        passed = max(time.monotonic() - self._lap, 1e-9)
        speed = (self.items - self._lap_items) / passed
        waited = self._waited / passed
        self.seconds += passed
        self._lap, self._lap_items, self._waited = time.monotonic(), self.items, 0.0
        return {f"{unit}_per_second": speed, "data_wait": waited, "seconds": self.seconds}
