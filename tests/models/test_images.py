import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from splitstep import SplitstepForImageClassification, preset
from splitstep.models.conversion import convert
from splitstep.solver.errors import UserError

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2, "num_labels": 5}


@pytest.mark.parametrize(("image_size", "patch_size"), [(224, 16), (32, 4)])
@pytest.mark.parametrize(("pooling", "extra"), [("first", 1), ("mean", 0)])
def test_an_image_is_its_patches_and_perhaps_a_class_token(image_size, patch_size, pooling, extra):
    config = preset("parallel", "image", **SIZES, image_size=image_size, patch_size=patch_size, pooling=pooling)
    model = SplitstepForImageClassification(config).eval()
    states = model.model(pixel_values=torch.randn(1, 3, image_size, image_size)).last_hidden_state
    assert states.shape[1] == (image_size // patch_size) ** 2 + extra
    assert model(torch.randn(2, 3, image_size, image_size)).logits.shape == (2, 5)


def test_positions_are_interpolated_as_vit_does():
    theirs = ViTForImageClassification(
        ViTConfig(image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    )
    ours = convert(theirs).eval()
    pixels = torch.randn(2, 3, 48, 40)
    with torch.no_grad():
        expected = theirs.eval()(pixels, interpolate_pos_encoding=True).logits
        torch.testing.assert_close(ours(pixels, interpolate_pos_encoding=True).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((1, 3, 40, 32), "images are 32 x 32, got 40 x 32; interpolate_pos_encoding=True takes other sizes"),
        ((1, 1, 32, 32), "images have num_channels = 3, got 1"),
    ],
)
def test_an_image_of_another_size_is_refused(shape, complaint):
    model = SplitstepForImageClassification(preset("parallel", "image", **SIZES, image_size=32, patch_size=4))
    with pytest.raises(UserError, match=complaint):
        model(torch.randn(shape))
