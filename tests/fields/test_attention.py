import pytest
import torch

from splitstep.fields.attention import Attention, attend, rotate
from splitstep.fields.evaluation import Evaluation, Sight
from splitstep.fields.noise import Noise

SILENT = Noise(training=False)


def heads(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def masks(n, m):
    padding = torch.ones(2, 1, 1, m, dtype=torch.bool)
    padding[1, ..., m // 2 :] = False
    blind = padding.expand(2, 1, n, m).clone()
    blind[0, 0, 1] = False
    return {"none": None, "padding": padding, "blind row": blind}


@pytest.mark.parametrize("mask", ["none", "padding", "blind row"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_kernels_agree_forwards_and_backwards(mask, dtype, tolerance):
    q, k, v = heads(2, 3, 5, 4, dtype=dtype), heads(2, 3, 6, 4, dtype=dtype), heads(2, 3, 6, 4, dtype=dtype)
    found = {}
    for kernel in ("eager", "sdpa"):
        sight = Sight(mask=masks(5, 6)[mask], kernel=kernel)
        out = attend(q, k, v, sight=sight, noise=SILENT)
        found[kernel] = out, *torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(found["eager"], found["sdpa"], atol=tolerance, rtol=0)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_particle_that_sees_nobody_feels_no_force(kernel):
    q, k, v = (heads(2, 3, 5, 4) for _ in range(3))
    out = attend(q, k, v, sight=Sight(mask=masks(5, 5)["blind row"], kernel=kernel), noise=SILENT)
    assert torch.equal(out[0, :, 1], torch.zeros(3, 4, dtype=torch.float64))
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("length", [5, 256, 257, 400, 512, 513])  # some are computed in blocks of queries
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_causal_is_the_triangular_mask(kernel, length):
    q, k, v = (heads(1, 2, length, 4) for _ in range(3))
    triangle = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    found, expected = (
        (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
        for out in (
            attend(q, k, v, sight=Sight(causal=True, kernel=kernel), noise=SILENT),
            attend(q, k, v, sight=Sight(mask=triangle, kernel="eager"), noise=SILENT),
        )
    )
    torch.testing.assert_close(found, expected)


def test_the_choice_of_a_kernel_by_speed_does_not_cost_accuracy():
    """In bf16 both kernels err by bf16's rounding against float64."""
    q, k, v = (heads(1, 2, 64, 16) for _ in range(3))
    exact = torch.autograd.grad(attend(q, k, v, sight=Sight(), noise=SILENT).square().sum(), (q, k, v))
    for kernel in ("auto", "eager", "sdpa"):
        half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        out = attend(*half, sight=Sight(kernel=kernel), noise=SILENT)
        for found, expected in zip(torch.autograd.grad(out.float().square().sum(), half), exact, strict=True):
            assert (found - expected).norm() / expected.norm() < 0.02


def test_recorded_weights_are_the_distribution_over_visible_keys():
    record = []
    sight = Sight(mask=masks(5, 6)["blind row"], record=record)
    attend(heads(2, 3, 5, 4), heads(2, 3, 6, 4), heads(2, 3, 6, 4), sight=sight, noise=SILENT)
    (weights,) = record
    sums = torch.ones(2, 3, 5, dtype=torch.float64)
    sums[0, :, 1] = 0
    torch.testing.assert_close(weights.sum(-1), sums)
    assert weights[1, ..., 3:].abs().max() == 0


def test_rotary_scores_depend_on_the_distance_only():
    angle = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])
    q, k = torch.randn(4), torch.randn(4)
    turned_q, turned_k = (
        rotate(x.expand(1, 1, 8, 4), angle.cos(), angle.sin())[0, 0] for x in (q, k)
    )  # fmt: skip
    scores = turned_q @ turned_k.T
    for distance in range(-7, 8):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_equal_to_torch_with_copied_weights():
    ours, theirs = Attention(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    weights = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    for projection, weight, bias in zip((ours.q_proj, ours.k_proj, ours.v_proj), *weights, strict=True):
        projection.weight, projection.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    ours.out_proj = theirs.out_proj
    x, source = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    found = ours(x, Evaluation(0.0, SILENT, Sight(source=source)))
    torch.testing.assert_close(found, theirs(x, source, source)[0], atol=1e-6, rtol=0)
