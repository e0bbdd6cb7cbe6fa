"""Two processes with half the batch each, shared layers and checkpointing: the gradients of one process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from splitstep.models.configuration import SplitstepConfig
from splitstep.models.trunk import Stack


def build(checkpointing):
    torch.manual_seed(0)
    config = SplitstepConfig(
        splitting="strang",
        integrator="heun",
        hidden_size=12,
        num_attention_heads=3,
        intermediate_size=24,
        num_hidden_layers=4,
        num_independent_layers=2,
    )
    model = Stack(config).double().train()
    model.gradient_checkpointing = checkpointing
    return model, torch.randn(4, 5, 12, dtype=torch.float64)


def loss(out):
    return (out**3).mean()  # the mean square would be constant behind the final norm


def worker(rank, folder, checkpointing):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, x = build(checkpointing)
    parallel = DistributedDataParallel(model)  # must outlive the backward pass, in which it averages
    loss(parallel(x[2 * rank : 2 * rank + 2])).backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/gradients")
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_processes_give_the_gradients_of_one(tmp_path, checkpointing):
    mp.spawn(worker, args=(tmp_path, checkpointing), nprocs=2)
    found = torch.load(tmp_path / "gradients", weights_only=True)
    model, x = build(checkpointing=False)
    loss(model(x)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, atol=1e-12, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
