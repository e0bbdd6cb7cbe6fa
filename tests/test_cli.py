"""The command as a user meets it: in a process of its own."""

import json
import signal
import subprocess
import sys

import pytest

from splitstep import __version__
from splitstep.cli.run import chosen_folder
from splitstep.solver.errors import UserError
from splitstep.solver.splittings import SPLITTINGS
from splitstep.solver.tableaus import TABLEAUS


def splitstep(*words):
    return subprocess.run([sys.executable, "-m", "splitstep", *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["order", "--integrator", "rk5"], "unknown integrator 'rk5'; choose from euler,"),
        (["order", "--integrator", "dopri5"], "dopri5 chooses its steps"),
        (["order", "--splitting", "strng"], "did you mean 'strang'?"),
        (["order", "--part", "encodr"], "did you mean 'encoder'?"),
        (["params", "macarn"], "did you mean 'macaron'?"),
        (["params", "macaron-base"], "did you mean 'macaron/macaron-base'?"),
        (["params", "macaron", "kind=imag"], "did you mean 'image'?"),
        (["params", "macaron", "hidden_size"], "a setting is KEY=VALUE, got 'hidden_size'"),
        (["params", "macaron", "hiden_size=3"], "did you mean 'hidden_size'?"),
        (["bench", "evolutoin"], "did you mean 'evolution'?"),
        (["bench", "--repeats", "0"], "--repeats must be at least 1, got 0"),
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


@pytest.mark.parametrize("words", [["compare", "demo/digits", "--out"], ["demo", "--out"], ["make-listops"]])
@pytest.mark.parametrize("below", ["", "/sub"])
def test_a_file_where_a_folder_is_needed_is_named(tmp_path, words, below):
    (tmp_path / "afile").write_text("mine")
    answer = splitstep(*words, f"{tmp_path}/afile{below}")
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].endswith(f"{tmp_path}/afile is a file, not a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_a_comparison_of_a_recipe_with_a_grid_says_what_to_choose():
    answer = splitstep("compare", "parallel/cifar100-schemes")
    assert answer.returncode == 2
    assert "has a grid over model." in answer.stderr


def test_the_model_of_a_recipe_is_counted_with_its_data_where_they_are(monkeypatch):
    monkeypatch.delenv("SPLITSTEP_DATA", raising=False)
    counted, checked = (json.loads(splitstep(word, "demo/digits", "--json").stdout) for word in ("params", "check"))
    assert counted["total"] == checked["parameters"]
    answer = splitstep("params", "laptop/cifar100")
    assert answer.returncode == 0
    assert "neither data.root nor SPLITSTEP_DATA names a folder that has cifar-100-binary" in answer.stderr
    assert "  head        258" in answer.stdout


def test_all_public_names_are_offered():
    import splitstep as package

    assert set(package.__all__) <= set(dir(package))


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


def test_params_prints_the_contract_as_json():
    sizes = ["hidden_size=192", "num_attention_heads=3", "intermediate_size=768", "num_hidden_layers=12"]
    answer = splitstep(
        "params", "parallel", "kind=image", *sizes, "num_independent_layers=4", "num_labels=100", "--json"
    )
    report = json.loads(answer.stdout)
    assert report["total"] == 1_984_804 == report["body"] + report["embeddings"] + report["head"]
    assert (report["layers"], report["independent_layers"]) == (12, 4)
    assert report["evaluations_per_layer"] == {"interaction": 1, "convection": 1}
    assert report["flops_per_token"] > 2 * report["body"]
    assert (
        "1,984,804"
        in splitstep("params", "parallel", "kind=image", *sizes, "num_independent_layers=4", "num_labels=100").stdout
    )


@pytest.mark.slow
def test_bench_prints_the_contract_as_json():
    report = json.loads(splitstep("bench", "attention", "--repeats", "1", "--json").stdout)
    assert report["machine"]["threads"] >= 1
    assert {"case", "contestant", "median_seconds", "ratio", "precision"} <= report["cases"][0].keys()


def test_help_teaches_and_version_is_told():
    page = splitstep("--help").stdout
    assert "tokens are particles" in page
    assert splitstep().returncode == 2
    assert splitstep("--version").stdout.strip() == __version__


def test_an_interrupt_is_one_line_and_exit_code_130():
    command = [sys.executable, "-m", "splitstep", "order"]
    # A shell that starts tests in the background has them ignore the signal.
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heeding) as process:
        process.stdout.readline()  # the header: the command is at work
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "splitstep: interrupted\n"


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m splitstep list | head -1"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    "recipe",
    [
        "laptop/multi30k-en-de training.updatse=3",
        "laptop/mnist data.format=jpg",
        "laptop/mnist model.integrator=rk5",
        "laptop/mnist model.splitting=strng",
        "laptop/mnits",
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_wrong_recipe_is_told_before_anything_heavy_is_imported(recipe, command):
    program = (
        "import sys; sys.argv = ['splitstep', *sys.argv[1:]]\n"
        "from splitstep.cli import main\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code == 2, left.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, command, *recipe.split()], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_a_fresh_folder_lies_beside_the_one_there_is(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert chosen_folder(folder, fresh=True) == folder
    for number in (2, 3):
        (folder if number == 2 else tmp_path / "run-2").mkdir()
        assert chosen_folder(folder, fresh=False) == folder
        assert chosen_folder(folder, fresh=True) == tmp_path / f"run-{number}"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="cannot agree on a new folder"):
        chosen_folder(folder, fresh=True)


def test_a_reader_who_leaves_early_sees_no_traceback():
    """As `splitstep list | head -n 0`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "splitstep", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) in (0, 1, 141)
