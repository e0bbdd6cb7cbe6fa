"""How long a command and an import take to be ready, each in a process of its own, beside importing transformers."""

import subprocess
import sys
from collections.abc import Iterator

from splitstep.bench import Case, Run, race

READY = {
    "splitstep --help": ["-m", "splitstep", "--help"],
    "splitstep list": ["-m", "splitstep", "list"],
    "import splitstep": ["-c", "import splitstep"],
    "from splitstep import SplitstepModel": ["-c", "from splitstep import SplitstepModel"],
}
PEER = {"from transformers import PreTrainedModel": ["-c", "from transformers import PreTrainedModel"]}


def cases(*, repeats: int) -> Iterator[Case]:
    """The ratio is to importing the class that our models are built on."""
    runs = {name: _run(arguments) for name, arguments in (READY | PEER).items()}
    yield from race("start-up", runs, reference=tuple(PEER), precision="", repeats=repeats)


def _run(arguments: list[str]) -> Run:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    return run
