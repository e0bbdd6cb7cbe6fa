"""Checkpoints: whatever happens to a file, the run knows, and uses the one before."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import corpora

from splitstep.recipe import recipe
from splitstep.solver.errors import RunError, UserError
from splitstep.training import checkpoints
from splitstep.training.engine import train


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that crashed after its fifth update, and its undisturbed twin."""
    folder = tmp_path_factory.mktemp("stopped")
    every = {"updates": 6, "save_every": 1, "evaluate_every": 6, "keep": 6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPLITSTEP_CACHE", str(folder / "cache"))
        torch.set_num_threads(1)
        whole = recipe(corpora.language_recipe(corpora.articles(folder / "data"), training=every))
        train(whole, folder / "whole")
    shutil.copytree(folder / "whole", folder / "run")
    (folder / "run" / "results.json").unlink()
    shutil.rmtree(folder / "run" / "model")
    shutil.rmtree(folder / "run" / "checkpoints" / "checkpoint-6")
    return whole, folder


def _names(folder):
    return sorted(json.loads((folder / "complete.json").read_text()))


def _damages():
    return {
        "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
        "removed": lambda path: path.unlink(),
        "altered": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    }


@pytest.mark.parametrize("damage", _damages())
def test_every_damaged_file_is_named_and_the_checkpoint_before_is_used(stopped, tmp_path, damage, capsys):
    _, folder = stopped
    for name in [*_names(folder / "run" / "checkpoints" / "checkpoint-5"), "complete.json"]:
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(folder / "run" / "checkpoints", copy)
        _damages()[damage](copy / "checkpoint-5" / name)
        said = []
        found = checkpoints.newest(copy, said.append)
        assert found is not None
        assert found.name == "checkpoint-4"
        assert name in said[0] or "not finished" in said[0] or name == "complete.json"


def test_from_the_checkpoint_before_the_run_ends_the_same(stopped, tmp_path, monkeypatch):
    whole, folder = stopped
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "checkpoint-5" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-100])
    train(whole, tmp_path / "run")
    one, other = (load_file(run / "model" / "model.safetensors") for run in (folder / "whole", tmp_path / "run"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_with_no_good_checkpoint_left_the_run_refuses_to_start_anew(stopped, tmp_path, monkeypatch):
    whole, folder = stopped
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no complete checkpoint is left .*model.safetensors has 0 bytes"):
        train(whole, tmp_path / "run")


@pytest.mark.parametrize("damage", _damages())
def test_no_damaged_checkpoint_has_a_part_in_the_average(stopped, tmp_path, monkeypatch, damage):
    _, folder = stopped
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    averaging = {"final": "average", "average": 3, "updates": 6, "save_every": 1, "evaluate_every": 6, "keep": 6}
    settings = recipe(corpora.language_recipe(folder / "data", training=averaging))
    train(settings, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    _damages()[damage](tmp_path / "run" / "checkpoints" / "checkpoint-5" / "model.safetensors")
    with pytest.raises(
        UserError, match=r"the checkpoint to average, .*checkpoint-5, cannot be used: model.safetensors"
    ):
        train(settings, tmp_path / "run")


def test_a_damaged_checkpoint_does_not_pass_for_newer_than_the_next_one(stopped, tmp_path):
    _, folder = stopped
    shutil.copytree(folder / "run" / "checkpoints", tmp_path / "all")
    _damages()["truncated"](tmp_path / "all" / "checkpoint-5" / "model.safetensors")
    assert checkpoints.newest(tmp_path / "all", lambda line: None, clear=False).name == "checkpoint-4"
    assert (tmp_path / "all" / "checkpoint-5").exists()
    assert checkpoints.newest(tmp_path / "all", lambda line: None).name == "checkpoint-4"
    checkpoints.rotate(tmp_path / "all", keep=1, best=None, regular=lambda update: True)
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "all")] == ["checkpoint-4"]


def test_the_average_is_the_mean_of_the_weights(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        save_file(
            {"w": torch.full((3,), float(number)), "n": torch.tensor([7])}, tmp_path / str(number) / "model.safetensors"
        )
    found = checkpoints.averaged([tmp_path / "1", tmp_path / "2"])
    assert torch.equal(found["w"], torch.full((3,), 1.5))
    assert torch.equal(found["n"], torch.tensor([7]))


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    checkpoints.write_atomically(path, "first")
    monkeypatch.setattr(checkpoints, "_sync", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoints.write_atomically(path, "second")
    assert path.read_text() == "first"


class Bomb:
    """What a pickle runs when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_no_code_of_a_checkpoint_is_run(stopped, tmp_path, monkeypatch, name):
    whole, folder = stopped
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder / "run", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-5"
    torch.save({"state": Bomb(tmp_path / "struck")}, checkpoint / name)
    (checkpoint / checkpoints.SEAL).unlink()
    checkpoints.seal(checkpoint)  # as an attacker would
    with pytest.raises((pickle.UnpicklingError, RunError), match="weights"):
        train(whole, tmp_path / "run")
    assert not (tmp_path / "struck").exists()
