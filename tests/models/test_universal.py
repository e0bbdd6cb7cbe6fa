"""The Universal Transformer: one weight set, coordinates at every step, and halting."""

import pytest
import torch

from splitstep import SplitstepForMaskedLM, SplitstepModel, preset
from splitstep.models.trunk import Halted
from splitstep.solver.sinusoids import sinusoid

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_hidden_layers": 5, "vocab_size": 50}
IDS = torch.randint(3, 50, (3, 6), generator=torch.Generator().manual_seed(0))


def universal(**more):
    model = SplitstepModel(preset("universal", **SIZES, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def test_one_weight_set_serves_every_step():
    assert len(universal().encoder.stack.layers) == 1


def test_published_coordinates_are_added_to_the_state_at_every_step():
    model = universal(time_embedding="state", norm="post", position_embedding="none")
    stack, tower = model.encoder.stack, model.encoder
    x = tower.embeddings(tower.embeddings.tokens(IDS), torch.arange(6)[None])
    positions = sinusoid(torch.arange(6.0), 16)
    plain = SplitstepModel(
        preset("transformer", **SIZES | {"num_hidden_layers": 1}, norm="post", position_embedding="none")
    ).eval()
    plain.encoder.stack.layers[0].load_state_dict(stack.layers[0].state_dict())
    with torch.no_grad():
        for step in range(5):
            x = plain.encoder.stack(x + positions + sinusoid(torch.tensor(float(step)), 16))
        torch.testing.assert_close(model(IDS).last_hidden_state, x, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("time_embedding", ["field", "state"])
def test_the_time_embedding_tells_the_steps_apart(time_embedding):
    model = universal(time_embedding=time_embedding)
    blind = SplitstepModel(preset("universal", **SIZES, time_embedding="none")).eval()
    blind.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (model(IDS).last_hidden_state - blind(IDS).last_hidden_state).abs().max() > 1e-3


class TestHalting:
    """Adaptive computation time (Graves 2016), checked against a loop over particles."""

    def written_out(self, stack, records):
        """States and costs by Graves' equations, one particle at a time, from the states after every step."""
        last = len(records) - 1
        shape = records[0].shape[:2]
        states, costs = [], []
        for row, place in torch.cartesian_prod(*map(torch.arange, shape)):
            spent, mean, cost = 0.0, 0.0, None
            for step in range(last):
                before, after = records[step][row, place], records[step + 1][row, place]
                probability = float(stack.halting(before[None, None]))
                if spent + probability >= stack.halting.threshold or step == last - 1:
                    mean, cost = mean + (1 - spent) * after, step + 1 + (1 - spent)
                    break
                spent, mean = spent + probability, mean + probability * after
            states.append(mean)
            costs.append(cost)
        return torch.stack(states).view(*shape, -1), torch.tensor(costs).view(shape)

    def test_states_are_means_weighted_by_the_halting_probabilities(self, monkeypatch):
        model = universal(halting="act", norm="post", time_embedding="none")  # post-norm: the mean leaves as it is
        with torch.no_grad():
            model.encoder.stack.halting.probability.weight.mul_(2)  # some halt early, some late
        advanced = []
        advance = Halted.advance
        monkeypatch.setattr(Halted, "advance", lambda *a: advanced.append(advance(*a)) or advanced[-1])
        with torch.no_grad():
            out = model(IDS, output_hidden_states=True)
            expected, costs = self.written_out(model.encoder.stack, [out.hidden_states[0], *advanced])
        torch.testing.assert_close(out.last_hidden_state, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(out.ponder_cost, costs.mean(-1), atol=1e-4, rtol=0)
        assert costs.floor().unique().numel() > 1

    def test_a_particle_that_is_sure_at_once_takes_one_step(self):
        model = universal(halting="act")
        with torch.no_grad():
            model.encoder.stack.halting.probability.bias.fill_(50.0)
            cost = model(IDS).ponder_cost
        torch.testing.assert_close(cost, torch.full((3,), 2.0))  # one step, and all of the probability left

    def test_the_ponder_cost_joins_the_loss_that_is_trained_and_no_other(self):
        model = SplitstepForMaskedLM(preset("universal", **SIZES, halting="act", ponder_weight=0.5))
        with torch.no_grad():
            trained, measured = model.train()(IDS, labels=IDS), model.eval()(IDS, labels=IDS)
        torch.testing.assert_close(trained.loss, measured.loss + 0.5 * measured.ponder_cost.mean())

    def test_padding_costs_nothing(self):
        model = universal(halting="act")
        mask = torch.ones_like(IDS)
        mask[0, 3:] = 0
        with torch.no_grad():
            padded, alone = model(IDS, attention_mask=mask), model(IDS[:1, :3])
        torch.testing.assert_close(padded.ponder_cost[:1], alone.ponder_cost, atol=1e-5, rtol=0)
