"""Commands in processes of their own that start at once, and faults that strike in the middle of them.

The processes are forked from a server that has imported torch, so that a test can afford to kill twenty of them.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["splitstep.training.engine", "torch.utils.tensorboard", "splitstep.models"])


def start(words: list[str], *, log: Path, fault: tuple[str, ...] = (), **environment: str) -> Any:
    """`splitstep WORDS` as a process, with its stderr in a file."""
    kept = {key: os.environ[key] for key in ("SPLITSTEP_CACHE",) if key in os.environ}
    process = SERVER.Process(target=_command, args=(words, str(log), fault, kept | environment))
    process.start()
    return process


def run(words: list[str], *, log: Path, fault: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """The exit code of the command and what it said."""
    process = start(words, log=log, fault=fault, **environment)
    process.join(120)
    code = process.exitcode
    if code is None:
        process.kill()
        raise TimeoutError(f"splitstep {' '.join(words)} hangs:\n{log.read_text()}")
    return code, log.read_text()


def run_ranks(
    words: list[str], *, log: Path, faults: dict[int, tuple[str, ...]] | None = None
) -> list[tuple[int, str]]:
    """The command in two processes that share the work; what became of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    logs = [log.with_suffix(f".{rank}") for rank in range(2)]
    ranks = [
        start(words, log=logs[r], fault=(faults or {}).get(r, ()), RANK=str(r), LOCAL_RANK=str(r), **world)
        for r in range(2)
    ]
    for process in ranks:
        process.join(120)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert None not in codes, [path.read_text() for path in logs]
    return [(code, path.read_text()) for code, path in zip(codes, logs, strict=True)]


def _command(words: list[str], log: str, fault: tuple[str, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with open(log, "w") as file, open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(file.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    if fault:
        FAULTS[fault[0]](*fault[1:])
    sys.argv = ["splitstep", *words]
    from splitstep.cli import main

    main()


def _before(name: str, update: int, act: Callable[[], None]) -> None:
    """Act at the beginning of a method of the trainer, once, when so many updates are done."""
    from splitstep.training.trainer import SplitstepTrainer

    method, done = getattr(SplitstepTrainer, name), []

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step >= update and not done:
            done.append(True)
            act()
        return method(self, *args, **kwargs)

    setattr(SplitstepTrainer, name, changed)


def _signal(method: str, number: str) -> None:
    _before(method, 2, lambda: os.kill(os.getpid(), int(number)))


def _not_finite(update: str) -> None:
    from splitstep.training.trainer import SplitstepTrainer

    compute = SplitstepTrainer.compute_loss

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return loss * float("inf") if self.state.global_step == int(update) else loss

    SplitstepTrainer.compute_loss = spoilt  # type: ignore[method-assign]


def _out_of_memory(update: str) -> None:
    def fail() -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 10 bytes")

    from transformers import Trainer

    step = Trainer.training_step

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == int(update):
            fail()
        return step(self, *args, **kwargs)

    Trainer.training_step = failing  # type: ignore[method-assign]


def _file_size(limit: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))


def _user(number: str) -> None:
    os.setuid(int(number))


def _slow() -> None:
    """Updates after the fiftieth take long, so that there is a middle to strike in."""
    import time

    from splitstep.training.trainer import SplitstepTrainer

    step = SplitstepTrainer.training_step

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step >= 50:
            time.sleep(5)
        return step(self, *args, **kwargs)

    SplitstepTrainer.training_step = slow  # type: ignore[method-assign]


FAULTS: dict[str, Callable[..., None]] = {
    "signal": _signal,
    "not finite": _not_finite,
    "out of memory": _out_of_memory,
    "file size": _file_size,
    "user": _user,
    "slow": _slow,
}
