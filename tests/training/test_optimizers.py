"""Optimizers: a run makes the steps that their equations say."""

import copy
from itertools import islice
from typing import get_args

import pytest
import torch
from tests import corpora
from tests.runs import weights

from splitstep import SplitstepModel, preset
from splitstep.recipe import Training, recipe
from splitstep.training.engine import train
from splitstep.training.optimizers import OPTIMIZERS, optimizer
from splitstep.training.ready import build, configuration, plan, task_of

STEPS = {"updates": 3, "evaluate_every": 3, "optimizer": "nag", "learning_rate": 0.05, "momentum": 0.9}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def gradients(model, task, update, seed):
    """Of the mean loss over the items of an update."""
    batch = {name: torch.as_tensor(a) for name, a in task.batch("train", update.indices, epoch=0, seed=seed).items()}
    items = int(batch.pop("num_items"))
    model.zero_grad()
    model(**batch, num_items_in_batch=items).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_nag_trains_by_the_steps_of_nesterov(tmp_path):
    whole = recipe(corpora.language_recipe(corpora.articles(tmp_path / "data"), training=STEPS))
    settings = whole.training
    train(whole, tmp_path / "run")
    task = task_of(whole)
    model = build(whole, configuration(whole, task)).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for update in islice(plan(task, settings).updates(), settings.updates):
        # v <- mu v + g;  p <- p - lr (g + mu v)
        for name, gradient in gradients(model, task, update, settings.seed).items():
            velocity[name] = settings.momentum * velocity[name] + gradient
            step = gradient + settings.momentum * velocity[name]
            with torch.no_grad():
                model.get_parameter(name).sub_(settings.learning_rate * step)
    found = weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        if name in found:  # tied weights are stored once
            moved = float((found[name] - before[name]).abs().max())
            torch.testing.assert_close(found[name], parameter.detach(), atol=1e-4 * moved + 1e-7, rtol=1e-5)
    assert sum((found[name] - before[name]).abs().sum() for name in before if name in found) > 1


def quadratic():
    """A bowl, whose gradient is known."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"stack": torch.nn.Linear(4, 3)})
    slopes = torch.rand(3, 4), torch.rand(3)
    return model, lambda: sum((s * p**2).sum() for s, p in zip(slopes, model.parameters(), strict=True)) / 2


def path(make, steps=6):
    model, loss = quadratic()
    stepping = make(model)
    for _ in range(steps):
        stepping.zero_grad()
        loss().backward()
        stepping.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("momentum", [0.5, 0.99])
def test_nag_is_torch_s_nesterov(momentum):
    settings = Training(updates=1, batch_size=1, learning_rate=0.1, optimizer="nag", momentum=momentum)
    ours = path(lambda model: optimizer(model, settings))
    theirs = path(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, nesterov=True))
    plain = path(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, plain, atol=1e-3)


@pytest.mark.parametrize(("feed_forward", "matrices"), [("full", 4 + 4), ("random", 4), ("rotated", 4)])
def test_muon_moves_the_matrices_of_layers_and_adamw_all_else(feed_forward, matrices):
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    model = SplitstepModel(preset("macaron", **sizes, num_hidden_layers=2, feed_forward=feed_forward))
    tokens = torch.randint(20, (3, 5))
    settings = Training(updates=1, batch_size=1, learning_rate=0.01, weight_decay=0.1, optimizer="muon")

    def trained(make):
        moving = copy.deepcopy(model)
        steps = make(moving)
        for _ in range(4):
            moving.zero_grad()
            moving(input_ids=tokens).last_hidden_state.pow(3).mean().backward()
            for step in steps:
                step.step()
        return dict(moving.named_parameters())

    def apart(moving):
        inner = [m.weight for m in moving.encoder.stack.modules() if isinstance(m, torch.nn.Linear)]
        rest = [p for p in moving.parameters() if all(p is not q for q in inner)]
        return (
            torch.optim.Muon(inner, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, fused=True),
        )

    ours, theirs = trained(lambda moving: [optimizer(moving, settings)]), trained(apart)
    assert sum(p.ndim == 2 for p in model.encoder.stack.parameters()) == 2 * matrices
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], msg=name)


def test_muon_refuses_matrices_in_parts():
    with pytest.raises(ValueError, match="needs whole matrices"):
        Training(updates=1, batch_size=1, learning_rate=0.1, optimizer="muon", sharding="fsdp")


def test_every_optimizer_has_its_name_in_recipes():
    assert set(get_args(Training.model_fields["optimizer"].annotation)) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_shrinks_weights_beside_the_step_and_not_through_it(name):
    settings = {"updates": 1, "batch_size": 1, "learning_rate": 0.1, "optimizer": name, "momentum": 0.9}
    decaying, free = (Training(**settings, weight_decay=decay) for decay in (0.5, 0.0))

    def by_hand(model):
        """The free optimizer, with each weight shrunk by lr * decay before each step."""
        stepping = optimizer(model, free)

        def shrink(*_):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 - 0.1 * 0.5)

        stepping.register_step_pre_hook(shrink)
        return stepping

    torch.testing.assert_close(path(lambda model: optimizer(model, decaying)), path(by_hand))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_of_matrices_spares_the_vectors(name):
    settings = {"updates": 1, "batch_size": 1, "learning_rate": 0.1, "weight_decay": 0.5, "decay": "matrices"}
    model, _ = quadratic()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    stepping = optimizer(model, Training(**settings, optimizer=name))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepping.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["stack.bias"], before["stack.bias"], check_stride=False)
    assert (after["stack.weight"].abs() < before["stack.weight"].abs()).all()
