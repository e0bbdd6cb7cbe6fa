"""The state of a device's random numbers, for what must be drawn a second time."""

from typing import Any

import torch
from torch import Tensor

SINGLE = {"cpu", "mps"}  # kinds of device of which there is one, whose functions name none


def random_state(device: torch.device) -> Tensor:
    """Where the random numbers of this device are, of all devices of its kind."""
    return _module(device).get_rng_state(*_which(device))


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Go back to where they were."""
    _module(device).set_rng_state(state, *_which(device))


def _module(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type in SINGLE else (device,)
