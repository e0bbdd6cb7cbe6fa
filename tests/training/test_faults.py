"""Faults that really happen: whatever strikes, nothing is lost, and the same command ends with the same bits."""

import os
import random
import re
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from tests import corpora, faults
from tests.image_files import cifar, images_recipe
from tests.runs import losses, results, same

import splitstep
from splitstep.tables import toml
from splitstep.training.run import Run


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def _images(folder, **sections):
    augmentation = {"crop": "padded", "hflip": 0.5, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25, "mixup": 0.8}
    return corpora.merged(images_recipe(cifar(folder), data={"augmentation": augmentation}), sections)


TASKS = {
    "translation": lambda folder, **s: corpora.translation_recipe(corpora.parallel(folder), **s),
    "language": lambda folder, **s: corpora.language_recipe(corpora.articles(folder), **s),
    "images": _images,
    "pre-training": lambda folder, **s: corpora.pretraining_recipe(corpora.documents(folder), **s),
}
DROPOUT = {"dropout": 0.2}


def words(tables: dict, folder: Path, name: str = "recipe") -> list[str]:
    (folder / f"{name}.toml").write_text(toml(tables))
    return ["train", str(folder / f"{name}.toml"), "--out"]


def command(tmp_path, task="language", **training):
    settings = {"threads": 1, "save_every": 2, "log_every": 1, **training}
    return words(TASKS[task](tmp_path / "data", model=DROPOUT, training=settings), tmp_path)


def undisturbed(tmp_path, asked: list[str]) -> Path:
    code, said = faults.run([*asked, str(tmp_path / "whole")], log=tmp_path / "whole.log")
    assert code == 0, said
    return tmp_path / "whole"


def goes_on(tmp_path, asked: list[str], whole: Path, run: Path) -> str:
    """The same command once more ends as the undisturbed run did."""
    code, said = faults.run([*asked, str(run)], log=tmp_path / "again.log")
    assert code == 0, said
    same(whole, run)
    return said


KILLED = [("translation", {}), ("language", {"workers": 2}), ("images", {"micro_batches": 2}), ("pre-training", {})]


@pytest.mark.parametrize(("task", "settings"), KILLED, ids=[task for task, _ in KILLED])
def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bits(tmp_path, task, settings):
    _killed(tmp_path, task, settings, kills=20)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("task", TASKS)
def test_a_run_killed_at_a_hundred_random_moments_ends_with_the_same_bits(tmp_path, task, workers):
    _killed(tmp_path, task, {"workers": workers, "micro_batches": 2}, kills=100)


def _killed(tmp_path, task, settings, *, kills):
    # Checkpoints at every update and many evaluations: most moments are in the middle of something.
    asked = command(tmp_path, task, **{"updates": 2 * kills, "save_every": 1, "evaluate_every": 3, **settings})
    begun = time.monotonic()
    whole = undisturbed(tmp_path, asked)
    update = (time.monotonic() - begun) / (2 * kills)
    rng = random.Random(task)
    run, struck, wait = tmp_path / "run", 0, 2.0
    while struck < kills:
        process = faults.start([*asked, str(run)], log=tmp_path / "killed.log")
        _after_its_start(process, run, wait)
        process.join(rng.uniform(0, 2 * update))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        struck += 1
    assert struck >= kills // 2, (tmp_path / "killed.log").read_text()
    goes_on(tmp_path, asked, whole, run)


def _after_its_start(process, run: Path, longest: float) -> None:
    """Wait until the process writes to the run folder: before that there is nothing to damage."""
    before = _newest(run)
    until = time.monotonic() + longest
    while _newest(run) == before and process.exitcode is None and time.monotonic() < until:
        time.sleep(0.002)


def _newest(folder: Path) -> float:
    try:
        return max((path.stat().st_mtime for path in folder.rglob("*") if path.name != ".lock"), default=0.0)
    except FileNotFoundError:  # while it is being written
        return -1.0


PHASES = {"forward": "training_step", "save": "_save_checkpoint", "evaluation": "evaluate"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_saves_and_leaves(tmp_path, phase, number):
    asked = command(tmp_path, evaluate_every=2)
    whole = undisturbed(tmp_path, asked)
    run = tmp_path / "run"
    fault = ("signal", PHASES[phase], str(int(number)))
    code, said = faults.run([*asked, str(run)], log=tmp_path / "log", fault=fault)
    assert code == 128 + number, said
    assert "stopped by a signal after update 3; the same command goes on" in said
    assert ("Ctrl-C again ends at once" in said) == (number == signal.SIGINT)
    assert "going on from update 3" in goes_on(tmp_path, asked, whole, run)


SIGNALLED = [
    ("forward", signal.SIGTERM, "none"),
    ("save", signal.SIGTERM, "none"),
    ("evaluation", signal.SIGINT, "none"),
    ("forward", signal.SIGINT, "fsdp"),
]


@pytest.mark.parametrize(("phase", "number", "sharding"), SIGNALLED)
def test_a_signal_to_one_of_two_processes_stops_both(tmp_path, phase, number, sharding):
    asked = command(tmp_path, sharding=sharding, evaluate_every=2)
    (code, said), _ = faults.run_ranks([*asked, str(tmp_path / "whole")], log=tmp_path / "whole.log")
    assert code == 0, said
    run = tmp_path / "run"
    fault = {1: ("signal", PHASES[phase], str(int(number)))}
    found = faults.run_ranks([*asked, str(run)], log=tmp_path / "log", faults=fault)
    assert [code for code, _ in found] == [128 + number] * 2, found
    assert "stopped by a signal after update 3" in found[0][1]
    (code, said), _ = faults.run_ranks([*asked, str(run)], log=tmp_path / "again")
    assert code == 0, said
    same(tmp_path / "whole", run)


def test_a_second_interrupt_leaves_at_once_and_damages_nothing(tmp_path):
    asked = command(tmp_path, updates=400, save_every=50, evaluate_every=400)
    whole, run = undisturbed(tmp_path, asked), tmp_path / "run"
    process = faults.start([*asked, str(run)], log=tmp_path / "log", fault=("slow",))
    _until(lambda: (run / "checkpoints" / "checkpoint-50" / "complete.json").exists())
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.6)
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    assert process.exitcode == 130, (tmp_path / "log").read_text()
    assert "interrupted" in (tmp_path / "log").read_text()
    goes_on(tmp_path, asked, whole, run)


def _until(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_loss_that_is_no_number_on_one_of_two_processes_stops_both(tmp_path, spoilt):
    asked = command(tmp_path)
    run = tmp_path / "run"
    found = faults.run_ranks([*asked, str(run)], log=tmp_path / "log", faults={spoilt: ("not finite", "3")})
    assert [code for code, _ in found] == [1, 1], found
    for _, said in found:
        assert "not finite in update 4 (epoch 1, training examples" in said
        assert f"the last good checkpoint is {run}/checkpoints/checkpoint-2" in said
    assert not (run / "checkpoints" / "checkpoint-4").exists()


def test_out_of_memory_names_the_batch_and_what_to_change(tmp_path):
    asked = command(tmp_path)
    code, said = faults.run([*asked, str(tmp_path / "run")], log=tmp_path / "log", fault=("out of memory", "3"))
    assert code == 1
    assert "out of memory in update 4, with a micro-batch of input_ids [8, 32]" in said
    assert "training.micro_batches = 2" in said
    assert "Traceback" not in said


def test_a_file_that_may_not_grow_ends_a_run_without_damage(tmp_path):
    asked = command(tmp_path)
    whole, run = undisturbed(tmp_path, asked), tmp_path / "run"
    code, said = faults.run([*asked, str(run)], log=tmp_path / "log", fault=("file size", "20000"))
    assert code == 1, said
    assert f"cannot save {run}/checkpoints/checkpoint-2" in said
    assert "bytes" in said
    assert "Traceback" not in said
    assert list((run / "checkpoints").iterdir()) == []
    goes_on(tmp_path, asked, whole, run)


ROOT = pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system, which only root may do")


@pytest.fixture
def disk(tmp_path):
    """A file system with little room."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


def _on_disk(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


@ROOT
def test_a_full_disk_ends_a_run_and_room_lets_it_go_on(tmp_path, disk):
    asked = command(tmp_path)
    whole, run = undisturbed(tmp_path, asked), disk / "run"
    size = _on_disk(whole / "checkpoints" / "checkpoint-6")
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(bytes(free - _on_disk(whole) + _on_disk(whole / "checkpoints") - size - size // 2))
    code, said = faults.run([*asked, str(run)], log=tmp_path / "log")
    assert code == 1, said
    assert f"cannot save {run}/checkpoints/checkpoint-4: " in said
    assert "No space left on device" in said
    assert re.search(r"It needs about \d{3},\d{3} bytes and [\d,]+ are free", said)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]
    (disk / "ballast").unlink()
    assert "going on from update 2" in goes_on(tmp_path, asked, whole, run)


@ROOT
@pytest.mark.skipif(
    not all(
        folder.stat().st_mode & stat.S_IXOTH
        for code in (Path(splitstep.__file__), Path(pytest.__file__))
        for folder in code.parents
    ),
    reason="the code or its environment lies in a folder that no other user may enter",
)
def test_a_folder_that_may_not_be_written_is_told(tmp_path):
    asked = command(tmp_path)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.name.startswith(("test", "pytest", "popen")):
            folder.chmod(0o755)
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "log").touch(mode=0o666)
    code, said = faults.run([*asked, str(tmp_path / "run")], log=tmp_path / "log", fault=("user", "65534"))
    assert code == 2, said
    assert said.endswith(f"splitstep: cannot write to {tmp_path}/run: Permission denied\n")


@pytest.mark.parametrize("name", ["with spaces", "Straße/日本", "quote'\"$x"])
def test_a_path_may_have_any_name(tmp_path, name):
    asked = command(tmp_path)
    whole = undisturbed(tmp_path, asked)
    goes_on(tmp_path, asked, whole, tmp_path / name / "run")


SHARED = [(task, {"preset": "transformer"}) for task in TASKS] + [
    ("language", {"preset": "macaron"}),
    ("translation", {"preset": "transevolve-full-1"}),
    ("images", {"preset": "parallel", "patch_size": 4}),  # of 65 particles, more than they have entries
]


@pytest.mark.parametrize(("task", "model"), SHARED)
def test_one_process_two_processes_and_shards_learn_the_same(tmp_path, task, model):
    """Updates of seven examples do not divide evenly, and a token budget seldom does."""
    size = {} if task == "translation" else {"batch_size": 7}
    settings = {"threads": 1, "log_every": 1, "micro_batches": 2, **size}
    tables = TASKS[task](tmp_path / "data", training=settings, model={**model, "dropout": 0.0})
    one = undisturbed(tmp_path, words(tables, tmp_path))
    for sharding in ("none", "fsdp"):
        shared = corpora.merged(tables, {"training": {**settings, "sharding": sharding}})
        run = tmp_path / sharding
        found = faults.run_ranks([*words(shared, tmp_path, sharding), str(run)], log=tmp_path / "log")
        assert [code for code, _ in found] == [0, 0], found
        assert (run / "checkpoints" / "checkpoint-6" / "pytorch_model_fsdp.bin").exists() == (sharding == "fsdp")
        assert losses(run) == pytest.approx(losses(one), abs=1e-6, rel=1e-6)
        expected, measured = results(one), results(run)
        assert measured["metrics"]["valid"]["loss"] == pytest.approx(expected["metrics"]["valid"]["loss"], rel=1e-5)
        lines = [(folder / "predictions-valid.jsonl").read_text().count("\n") for folder in (one, run)]
        assert lines[0] == lines[1]  # every example once


def test_one_process_at_a_time_writes_to_a_run_folder(tmp_path):
    asked = command(tmp_path)
    run = tmp_path / "run"
    with Run(run).locked():
        code, said = faults.run([*asked, str(run)], log=tmp_path / "log")
    assert code == 2
    assert f"another process is at work in {run}" in said
    goes_on(tmp_path, asked, undisturbed(tmp_path, asked), run)
