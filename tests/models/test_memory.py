"""How the memory of a training step grows with depth and stages, by the allocator's own record."""

import pytest

from splitstep.bench import peak_bytes
from splitstep.bench.memory import CONTESTANTS, step

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}


@pytest.fixture(scope="module")
def activations():
    found = {}
    for name, contestant in CONTESTANTS.items():
        run, gradients = step(*contestant, sizes=SMALL, shape=(8, 64))
        found[name] = peak_bytes(run) - gradients
    return found


def test_four_stages_with_checkpointing_cost_little_more_than_one_without(activations):
    assert activations["12 layers, rk4, checkpointing"] <= 1.3 * activations["12 layers, euler"]
    assert activations["12 layers, rk4"] > 3 * activations["12 layers, euler"]


def test_four_times_the_depth_with_checkpointing_costs_less_than_twice(activations):
    assert activations["48 layers, euler, checkpointing"] <= 2 * activations["12 layers, euler"]


def test_reversible_depth_costs_nothing(activations):
    assert activations["48 layers, euler, reversible"] <= 1.2 * activations["12 layers, euler, reversible"]
