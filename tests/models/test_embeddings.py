"""The first state of the particles."""

import pytest
import torch

from splitstep import preset
from splitstep.models.embeddings import ImageEmbeddings, TextEmbeddings


@pytest.mark.parametrize("kind", ["encoder", "image"])
@pytest.mark.parametrize(
    ("settings", "kept"), [({}, 0.6), ({"embedding_dropout": 0.0}, 1.0), ({"embedding_dropout": 0.2}, 0.8)], ids=str
)
def test_dropout_of_the_first_state_is_the_models_unless_it_has_its_own(kind, settings, kept):
    config = preset("transformer", kind, hidden_size=64, num_attention_heads=4, dropout=0.4, **settings)
    if kind == "image":
        embedded = ImageEmbeddings(config).train()(torch.randn(20, 3, config.image_size, config.image_size))
    else:
        tokens = torch.randn(20, 30, 64)
        embedded = TextEmbeddings(config, "encoder").train()(tokens, torch.arange(30)[None])
    assert (embedded != 0).float().mean().item() == pytest.approx(kept, abs=0.03)
