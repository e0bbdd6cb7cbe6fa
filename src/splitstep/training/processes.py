"""The processes of a run: who this one is among them, and how they find each other and part."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from splitstep.recipe import Training
from splitstep.solver.errors import RunError


def rank() -> int:
    """The number of this process among those that torchrun started."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes there are."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def together() -> None:
    """Wait until all processes are here."""
    if world() > 1:
        torch.distributed.barrier()


@dataclass(frozen=True)
class Teller:
    """Says what happens on stderr, once whatever the number of processes."""

    name: str = ""

    def __call__(self, line: str) -> None:
        """Say a line."""
        if rank() == 0:
            print(f"{self.name}: {line}" if self.name else line, file=sys.stderr, flush=True)


@contextmanager
def processes(settings: Training) -> Iterator[None]:
    """Join the processes that torchrun started, if it did."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    # The Trainer leaves out its own timeout on CPU, and a lost process would be waited for without end.
    timeout = timedelta(seconds=settings.timeout)
    torch.distributed.init_process_group(timeout=timeout, **_backend(), **_meeting(timeout))
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise RunError(
            f"the other processes no longer answer ({str(error).splitlines()[0][:200]}); the same command goes on from "
            "the last checkpoint"
        ) from None
    finally:
        torch.distributed.destroy_process_group()


def _backend() -> dict[str, Any]:
    """How processes talk; on GPUs each has its own from the start, or all would meet on the first."""
    if not torch.cuda.is_available():
        return {"backend": "gloo"}
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return {"backend": "nccl", "device_id": device}


def _meeting(timeout: timedelta) -> dict[str, Any]:
    """Where processes find each other. After a restart torchrun's store still has the addresses of the dead."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    world = int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, world, is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": torch.distributed.PrefixStore(f"attempt-{attempt}", store), "rank": rank(), "world_size": world}


# How gloo and NCCL say that another process died, hangs or cannot be reached.
_LOST = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|[Tt]imed out|Broken pipe")
