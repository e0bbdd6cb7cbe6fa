"""`splitstep` in a process that waits for its run folder, and ends when the one that started it does.

    python -m splitstep.compare.child PARENT FOLDER WORD ...

It becomes the command by exec, which a signal of the parent's death outlives.
"""

import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE = 60.0  # seconds; a run that was told to end saves before it does
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def at_work(folder: Path) -> bool:
    """Whether another process holds the lock of a run folder."""
    lock = folder / ".lock"
    if not os.access(lock, os.W_OK):  # it is not there, or the run itself will say what is wrong
        return False
    with lock.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False


def wait_for(folder: Path, *, patience: float = PATIENCE) -> None:
    """Wait until no other process is at work in a run folder, or patience ends."""
    until = time.monotonic() + patience
    while at_work(folder) and time.monotonic() < until:
        time.sleep(0.2)


def end_with(parent: int) -> None:
    """Have SIGTERM sent to this process when its parent ends, where the system can do that."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    wait_for(Path(sys.argv[2]))
    os.execv(sys.executable, [sys.executable, "-m", "splitstep", *sys.argv[3:]])
