"""The command as a user meets it: in a process of its own."""

import json
import subprocess
import sys

import pytest

from splitstep import __version__
from splitstep.solver.splittings import SPLITTINGS
from splitstep.solver.tableaus import TABLEAUS


def splitstep(*words):
    return subprocess.run([sys.executable, "-m", "splitstep", *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["order", "--integrator", "rk5"], "unknown integrator 'rk5'; choose from euler,"),
        (["order", "--integrator", "dopri5"], "unknown integrator 'dopri5'; choose from euler,"),
        (["order", "--splitting", "strng"], "(did you mean 'strang'?)"),
        (["order", "--part", "encodr"], "(did you mean 'encoder'?)"),
        (["oder"], "No such command 'oder'"),
        (["list", "--jsn"], "No such option: --jsn"),
        (["list", "everything"], "unexpected extra argument"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(words, complaint):
    answer = splitstep(*words)
    assert answer.returncode == 2
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert line.startswith("splitstep: ")
    assert complaint in line


@pytest.mark.parametrize("words", [["--help"], ["list"], ["order", "--help"], ["order", "--integrator", "rk5"]])
def test_quick_answers_import_neither_torch_nor_transformers(words):
    program = (
        "import sys; sys.argv = ['splitstep', *sys.argv[1:]]\n"
        "from splitstep.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, timeout=60)


def test_list_names_every_entry_of_the_tables():
    listed = json.loads(splitstep("list", "--json").stdout)
    assert [(row["part"], row["name"]) for row in listed["splittings"]] == [
        (part, name) for part, entries in SPLITTINGS.items() for name in entries
    ]
    assert [row["name"] for row in listed["integrators"]] == list(TABLEAUS)
    page = splitstep("list").stdout
    assert all(name in page for name in TABLEAUS)


def test_order_prints_a_row_a_scheme():
    answer = splitstep("order", "--part", "encoder", "--splitting", "strang", "--integrator", "euler")
    assert answer.returncode == 0
    header, row = answer.stdout.splitlines()
    assert header.split()[:5] == ["part", "splitting", "integrator", "derived", "measured"]
    assert row.split()[:4] == ["encoder", "strang", "euler", "1"]


def test_help_teaches_and_version_is_told():
    page = splitstep("--help").stdout
    assert "tokens are particles" in page
    assert splitstep().returncode == 2
    assert splitstep("--version").stdout.strip() == __version__


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m splitstep list | head -1"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in answer.stderr
