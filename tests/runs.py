"""What two runs have in common."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from splitstep.tasks.prediction import Predictor

CLOCK = {"tokens_per_second", "data_wait", "seconds", "images_per_second", "examples_per_second"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run."""
    return load_file(folder / "model" / "model.safetensors")


def log(folder: Path) -> list[dict]:
    """The log of a run, but for the clock."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in entry.items() if key not in CLOCK} for entry in entries]


def losses(folder: Path) -> list[float]:
    """The losses of training and validation in their order."""
    return [entry.get("loss", entry.get("eval_loss")) for entry in log(folder)]


def results(folder: Path) -> dict:
    """What a finished run reached."""
    return json.loads((folder / "results.json").read_text())


def overfits(model: torch.nn.Module, batch: dict, *, updates: int = 150) -> bool:
    """Whether a model learns a batch by heart."""
    batch = {key: torch.as_tensor(value) for key, value in batch.items() if not key.startswith("num_")}
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-2)
    for _ in range(updates):
        loss = model(**batch).loss
        if loss < 0.05:
            return True
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return False


def stands_alone(task, model: torch.nn.Module, sequences, *, atol: float) -> None:
    """Neither padding nor the rest of a batch changes a prediction."""
    together, alone = (task.logits(Predictor(model, tokens=tokens), sequences) for tokens in (10**6, 1))
    assert np.ptp(together) > 1e-3
    np.testing.assert_allclose(together, alone, atol=atol)
    batch = {key: torch.as_tensor(value) for key, value in task.model_inputs(sequences, np.arange(12)).items()}
    longer = {key: torch.nn.functional.pad(tensor, (0, 9)) for key, tensor in batch.items()}
    with torch.no_grad():
        torch.testing.assert_close(model(**longer).logits, model(**batch).logits, atol=atol, rtol=0)


def same(one: Path, other: Path) -> None:
    """Two runs that no one can tell apart: weights, log and results."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert log(one) == log(other)
    assert results(one)["metrics"] == results(other)["metrics"]
