import pytest
import torch

from splitstep.fields.attention import attend
from splitstep.fields.evaluation import Sight
from splitstep.fields.noise import Noise, dropped


def stages(noise, draw, count=4):
    for _ in range(count):
        noise.rewind()
        yield draw()


@pytest.mark.parametrize("kind", ["dropout", "drop_path"])
def test_all_stages_of_a_sub_step_see_one_mask(kind):
    noise, x = Noise(training=True, stages=4), torch.ones(64, 3, 5)
    first, *others = stages(noise, lambda: getattr(noise, kind)(x, 0.5))
    assert 0 < (first == 0).float().mean() < 1
    assert all(torch.equal(first, other) for other in others)


def test_two_sites_and_two_sub_steps_draw_anew():
    x = torch.ones(64, 3, 5)
    noise = Noise(training=True, stages=2)
    assert not torch.equal(noise.dropout(x, 0.5), noise.dropout(x, 0.5))
    assert not torch.equal(Noise(training=True).dropout(x, 0.5), Noise(training=True).dropout(x, 0.5))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_attention_replays_its_dropout_at_every_stage(kernel):
    noise, q = Noise(training=True, stages=3), torch.randn(2, 2, 8, 4)
    first, *others = stages(noise, lambda: attend(q, q, q, sight=Sight(kernel=kernel), noise=noise, dropout=0.5), 3)
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, attend(q, q, q, sight=Sight(), noise=Noise(training=False), dropout=0.5))


def test_a_replay_leaves_the_stream_of_random_numbers_as_one_draw_would():
    q = torch.randn(2, 2, 8, 4)
    after = []
    for count in (1, 4):
        torch.manual_seed(3)
        noise = Noise(training=True, stages=4)
        list(stages(noise, lambda n=noise: attend(q, q, q, sight=Sight(kernel="sdpa"), noise=n, dropout=0.5), count))
        after.append(torch.rand(5))
    assert torch.equal(*after)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_noise_keeps_the_mean(rate):
    x = torch.ones(20000, 1, 1)
    for recalls in (1, 4):
        noise = Noise(training=True, stages=recalls)
        assert noise.dropout(x, rate).mean() == pytest.approx(1, abs=0.03)
        assert noise.drop_path(x, rate).mean() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.001, 0.2, 0.99])
def test_values_are_dropped_each_by_itself_at_the_rate(rate, dtype):
    torch.manual_seed(0)
    x = torch.ones(701, 1001, dtype=dtype, requires_grad=True)  # no multiple of what a draw decides
    y = dropped(x, rate)
    gone = (y == 0).double()
    deviation = (rate * (1 - rate) / gone.numel()) ** 0.5
    assert gone.mean().item() == pytest.approx(rate, abs=4 * deviation + 1e-5)
    for step in (1, 2, 3, 4, 1001):  # neighbours in a draw, in draws, in columns
        one, other = gone.flatten()[:-step] - rate, gone.flatten()[step:] - rate
        assert (one * other).mean().item() == pytest.approx(0, abs=4 * rate * (1 - rate) / gone.numel() ** 0.5)
    assert y[y != 0].unique().tolist() == pytest.approx([1 / (1 - rate)], rel=0.01 if dtype is torch.bfloat16 else 1e-3)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


def test_nothing_to_drop_and_nothing_to_drop_from():
    assert torch.equal(dropped(torch.ones(5, 3), 0.0), torch.ones(5, 3))
    assert dropped(torch.ones(0, 3), 0.5).shape == (0, 3)


def test_without_training_there_is_no_noise():
    noise, x = Noise(training=False, stages=4), torch.randn(4, 3, 5)
    assert noise.dropout(x, 0.5) is x
    assert noise.drop_path(x, 0.5) is x


class Several:
    """Two devices of a kind, of which the first is the current one."""

    def __init__(self):
        self.states = [torch.tensor([10]), torch.tensor([20])]

    def get_rng_state(self, device=None):
        return self.states[0 if device is None else device.index]

    def set_rng_state(self, state, device=None):
        self.states[0 if device is None else device.index] = state


def test_of_several_devices_the_noise_is_that_of_the_tensors(monkeypatch):
    devices, second = Several(), torch.device("cuda", 1)
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    noise, seen = Noise(training=True, stages=2), []
    for _ in range(2):
        noise.rewind()
        with noise.replay(second):
            seen.append(int(devices.states[1]))
            devices.states[1] = devices.states[1] + 1
    assert seen == [20, 20]
    assert [int(state) for state in devices.states] == [10, 21]
