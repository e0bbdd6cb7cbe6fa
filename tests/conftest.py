"""What every test can count on: one thread, and the same random numbers each time."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible():
    torch.set_num_threads(1)
    torch.manual_seed(0)
