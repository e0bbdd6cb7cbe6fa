"""Memory that is kept in training is given back while a model is measured."""

import subprocess
import sys

import pytest

FREEING = """
import sys, torch
from pathlib import Path
from splitstep.tasks.memory import freed_memory

def now():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in status if "VmRSS" in line)

with freed_memory("kept"):
    before = now()
    with freed_memory(sys.argv[1]):
        logits = [torch.ones(12 << 20) for _ in range(10)]  # 48 MiB each
        del logits
        print(now() - before)
"""


def _left(how):
    command = [sys.executable, "-c", FREEING, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_in_training_and_given_back_in_between():
    assert _left("kept") > 400
    assert _left("returned") < 100
