"""Two processes with half the batch each, shared layers and checkpointing: the gradients of one process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from splitstep import SplitstepForSequenceClassification, preset


def build(checkpointing):
    torch.manual_seed(0)
    config = preset(
        "macaron",
        integrator="heun",
        vocab_size=50,
        hidden_size=12,
        num_attention_heads=3,
        intermediate_size=24,
        num_hidden_layers=4,
        num_independent_layers=2,
    )
    model = SplitstepForSequenceClassification(config).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model, {"input_ids": torch.randint(50, (4, 5)), "labels": torch.randint(2, (4,))}


def worker(rank, folder, checkpointing):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, batch = build(checkpointing)
    parallel = DistributedDataParallel(model)  # must outlive the backward pass, in which it averages
    parallel(**{name: tensor[2 * rank : 2 * rank + 2] for name, tensor in batch.items()}).loss.backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/gradients")
    dist.barrier()
    del parallel  # while its process group is still there
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_processes_give_the_gradients_of_one(tmp_path, checkpointing):
    mp.spawn(worker, args=(tmp_path, checkpointing), nprocs=2)
    found = torch.load(tmp_path / "gradients", weights_only=True)
    model, batch = build(checkpointing=False)
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, atol=1e-12, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
