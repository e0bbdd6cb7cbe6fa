"""A training step of our models beside those of the libraries a user would pick instead, at the same sizes.

Forward, backward and AdamW, without dropout. A peer is another library's model of the same width, depth and number of
tokens; what it computes beside the layers is small.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splitstep.bench import Case, Missing, Run, precisions, race
from splitstep.models.accounting import flops_per_token, sequence_length
from splitstep.models.heads import SplitstepForCausalLM, SplitstepForImageClassification
from splitstep.models.presets import preset
from splitstep.models.trunk import Stack

Loss = Callable[[], Tensor]
Contestant = Callable[[], tuple[nn.Module, Loss]]


@dataclass(frozen=True)
class Work:
    """The same work for all: its contestants, those the ratio is to, and the operations of a step of each."""

    contestants: dict[str, Contestant]
    reference: tuple[str, ...]
    flops: dict[str, float]


def cases(*, repeats: int) -> Iterator[Case]:
    """All works in every precision of this machine."""
    for title, make in WORKS.items():
        work = make()
        for precision, dtype in precisions().items():
            runs = {name: _step(contestant, dtype) for name, contestant in work.contestants.items()}
            yield from race(
                title,
                runs,
                reference=work.reference,
                precision=precision,
                repeats=repeats,
                flops=work.flops,
                memory=True,
            )


def _step(contestant: Contestant, dtype: torch.dtype) -> Run | Missing:
    torch.manual_seed(0)
    try:
        model, loss = contestant()
    except ModuleNotFoundError as error:
        return Missing(str(error.name))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


# An encoder: 4 layers, d = 512, 16 sequences of 128 particles.

ENCODER: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
}
SEQUENCES, PARTICLES = 16, 128


def _particles() -> Tensor:
    return torch.randn(SEQUENCES, PARTICLES, ENCODER["hidden_size"])


def _ours(name: str = "transformer", **settings: Any) -> Contestant:
    def make() -> tuple[nn.Module, Loss]:
        config = preset(name, "encoder", vocab_size=2, **{**ENCODER, **settings})
        stack, x = Stack(config), _particles()
        return stack, lambda: stack(x).square().mean()

    return make


def _bert(kernel: str) -> Contestant:
    def make() -> tuple[nn.Module, Loss]:
        from transformers import BertConfig, BertModel

        silent: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(**ENCODER, **silent, vocab_size=2)
        config._attn_implementation = kernel
        model, x = BertModel(config, add_pooling_layer=False), _particles()
        return model, lambda: model(inputs_embeds=x).last_hidden_state.square().mean()

    return make


def _torch_encoder() -> tuple[nn.Module, Loss]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
    model, x = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(512), enable_nested_tensor=False), _particles()
    return model, lambda: model(x).square().mean()


def _x_transformers() -> tuple[nn.Module, Loss]:
    from x_transformers import Encoder

    model, x = Encoder(dim=512, depth=4, heads=8, attn_flash=True), _particles()
    return model, lambda: model(x).square().mean()


def _layer_flops(name: str = "transformer") -> float:
    """Of a training step over the layers alone."""
    config = preset(name, "encoder", vocab_size=2, mlm_transform=False, **ENCODER)
    outer = 2 * config.hidden_size * config.vocab_size
    return 3 * SEQUENCES * PARTICLES * (flops_per_token(config, length=PARTICLES) - outer)


def _encoder() -> Work:
    peers: dict[str, Contestant] = {
        "transformers BERT, sdpa": _bert("sdpa"),
        "transformers BERT, eager": _bert("eager"),
        "torch.nn.TransformerEncoder": _torch_encoder,
        "x-transformers Encoder": _x_transformers,
    }
    contestants = {"splitstep": _ours(), **peers}
    return Work(contestants, reference=tuple(peers), flops=dict.fromkeys(contestants, _layer_flops()))


SCHEMES = ("transformer", "macaron", "parallel", "parallel-rk4", "transevolve-full-1")


def _schemes() -> Work:
    ours = {name: _ours(name) for name in SCHEMES}
    return Work(ours, reference=SCHEMES[:1], flops={name: _layer_flops(name) for name in SCHEMES})


# Images: DeiT-Ti.

TINY: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_hidden_layers": 12}
IMAGES = 64


def _images(size: int, patch: int) -> Work:
    shape: dict[str, Any] = {"image_size": size, "patch_size": patch}
    config = preset("transformer", "image", num_labels=100, **TINY, **shape)

    def data() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(IMAGES, 3, size, size), "labels": torch.randint(0, 100, (IMAGES,))}

    def ours() -> tuple[nn.Module, Loss]:
        model, batch = SplitstepForImageClassification(config), data()
        return model, lambda: model(**batch).loss

    def vit(kernel: str) -> Contestant:
        def make() -> tuple[nn.Module, Loss]:
            from transformers import ViTConfig, ViTForImageClassification

            settings: dict[str, Any] = {**TINY, **shape, "num_labels": 100}
            other = ViTConfig(**settings, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
            other._attn_implementation = kernel
            model, batch = ViTForImageClassification(other), data()
            return model, lambda: model(**batch).loss

        return make

    peers = {f"transformers ViT, {kernel}": vit(kernel) for kernel in ("sdpa", "eager")}
    flops = 3 * IMAGES * sequence_length(config) * flops_per_token(config)
    contestants = {"splitstep": ours, **peers}
    return Work(contestants, reference=tuple(peers), flops=dict.fromkeys(contestants, flops))


# A language model with a large vocabulary.

LANGUAGE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
}
VOCABULARY, BLOCKS, BLOCK = 33_000, 4, 512


def _words() -> Tensor:
    """Words by Zipf's law, the most frequent first, as an adaptive vocabulary numbers them."""
    frequencies = 1 / torch.arange(1, VOCABULARY + 1)
    return frequencies.multinomial(BLOCKS * BLOCK, replacement=True).view(BLOCKS, BLOCK)


def _language() -> Work:
    def ours(**settings: Any) -> Contestant:
        def make() -> tuple[nn.Module, Loss]:
            config = preset(
                "transformer",
                "causal",
                vocab_size=VOCABULARY,
                max_position_embeddings=BLOCK,
                hidden_act="gelu",
                **LANGUAGE,
                **settings,
            )
            model, ids = SplitstepForCausalLM(config), _words()
            return model, lambda: model(input_ids=ids, labels=ids, skip_logits=True).loss

        return make

    def gpt2() -> tuple[nn.Module, Loss]:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=BLOCK,
            n_embd=128,
            n_head=4,
            n_layer=6,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model, ids = GPT2LMHeadModel(config), _words()
        return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss

    full = preset("transformer", "causal", vocab_size=VOCABULARY, **LANGUAGE)
    whole: dict[str, Contestant] = {"transformers GPT-2": gpt2, "splitstep, loss in chunks": ours()}
    # What an adaptive softmax costs depends on how often each band occurs, so its share of the peak is left out.
    adaptive = ours(adaptive_cutoffs=[VOCABULARY * 3 // 40, VOCABULARY * 9 // 40])
    return Work(
        {**whole, "splitstep, adaptive softmax": adaptive},
        reference=("transformers GPT-2",),
        flops=dict.fromkeys(whole, 3 * BLOCKS * BLOCK * flops_per_token(full, length=BLOCK)),
    )


# A new work is one entry.
WORKS: dict[str, Callable[[], Work]] = {
    "encoder, 4 layers, d 512": _encoder,
    "schemes, 4 layers, d 512": _schemes,
    "DeiT-Ti, 65 tokens": lambda: _images(32, 4),
    "DeiT-Ti, 197 tokens": lambda: _images(224, 16),
    "language model, 33,000 words": _language,
}
