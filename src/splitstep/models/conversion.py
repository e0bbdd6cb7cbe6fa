"""Models of transformers in ours: a row of settings and a table of names for each architecture.

Weights are copied; the logits of the converted model are those of the original. `{i}` is the number of a layer.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from splitstep.models import heads
from splitstep.models.backbone import SplitstepPreTrainedModel
from splitstep.models.presets import preset
from splitstep.models.published import copy_weights
from splitstep.solver.errors import UserError, lookup

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True)
class Conversion:
    """How one architecture of transformers becomes ours."""

    kind: str
    model: type[SplitstepPreTrainedModel]
    settings: Callable[[Any], Mapping[str, Any]]
    names: Mapping[str, str]  # our name -> their name
    transposed: bool = False  # GPT-2 keeps its weights as [in, out]
    head: str | None = None  # their output layer, which is ours where it is not tied to the table of tokens
    needs: Callable[[Any], Mapping[str, Any]] = lambda config: {}  # settings of theirs without which ours is another
    unused: tuple[str, ...] = ()  # how names of tensors end that our model has no use for


def convert(model: PreTrainedModel) -> SplitstepPreTrainedModel:
    """The same model as one of ours; which architectures there are, CONVERSIONS says."""
    whose = type(model).__name__
    conversion = lookup("architecture", whose, CONVERSIONS)
    for key, value in conversion.needs(model.config).items():
        if (has := getattr(model.config, key, value)) != value:
            raise UserError(f"{whose}: {key} = {has!r} has no counterpart here; what has {value!r} can be converted")
    names, settings = dict(conversion.names), dict(conversion.settings(model.config))
    if conversion.head is not None and not model.config.tie_word_embeddings:
        names["lm_head.weight"], settings["tie_word_embeddings"] = conversion.head, False
    config = preset("transformer", conversion.kind, **settings)
    ours = conversion.model(config)
    source = _source(model, conversion)
    tensors: dict[str, Tensor] = {}
    for pattern, theirs in names.items():
        part = "decoder" if "decoder.stack" in pattern else "encoder"
        for i in range(config.schedule(part).num_layers if "{i}" in pattern else 1):
            tensors |= _entries(pattern.replace("{i}", str(i)), theirs.replace("{i}", str(i)), source)
    _refuse_left_over(source, tensors.values(), conversion.unused, whose=whose)
    copy_weights(ours, tensors, whose=whose)
    if model.can_generate():
        ours.generation_config = copy.deepcopy(model.generation_config)
    return ours.train(model.training)


def _refuse_left_over(
    source: Mapping[str, Tensor], used: Iterable[Tensor], unused: tuple[str, ...], *, whose: str
) -> None:
    """Refuse a model with weights that ours would do without; those that are tied have several names."""
    known = {tensor.data_ptr() for tensor in used}
    for name, tensor in source.items():
        if tensor.data_ptr() not in known and not name.endswith(unused):
            raise UserError(f"{whose}: no place for {name}")


def _entries(ours: str, theirs: str, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weight and bias of a module, or one bare tensor where their name is a tensor's."""
    if theirs in source:
        bare = source[theirs]
        return {ours: bare.squeeze(0) if ours.endswith(".bias") else bare}
    return {f"{ours}.{kind}": source[f"{theirs}.{kind}"] for kind in ("weight", "bias") if f"{theirs}.{kind}" in source}


def _source(model: nn.Module, conversion: Conversion) -> dict[str, Tensor]:
    source = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if not conversion.transposed:
        return source
    turned: dict[str, Tensor] = {}
    for name, tensor in source.items():
        is_matrix = tensor.ndim == 2 and ".h." in name
        value = tensor.T if is_matrix else tensor
        if ".attn.c_attn." in name:
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                turned[name.replace("c_attn", f"c_attn_{part}")] = piece
        else:
            turned[name] = value
    return turned


def _attention(ours: str, theirs: str, names: tuple[str, str, str, str]) -> dict[str, str]:
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    return {f"{ours}.operator.{own}": f"{theirs}.{name}" for own, name in zip(projections, names, strict=True)}


LAYER, DECODER_LAYER = "model.encoder.stack.layers.{i}", "model.decoder.stack.layers.{i}"
EMBEDDINGS = "model.encoder.embeddings"

BERT = {
    f"{EMBEDDINGS}.tokens": "bert.embeddings.word_embeddings",
    f"{EMBEDDINGS}.positions": "bert.embeddings.position_embeddings",
    f"{EMBEDDINGS}.types": "bert.embeddings.token_type_embeddings",
    f"{EMBEDDINGS}.norm": "bert.embeddings.LayerNorm",
    **_attention(
        f"{LAYER}.interaction.0",
        "bert.encoder.layer.{i}.attention",
        ("self.query", "self.key", "self.value", "output.dense"),
    ),
    f"{LAYER}.interaction.0.norm": "bert.encoder.layer.{i}.attention.output.LayerNorm",
    f"{LAYER}.convection.0.operator.up_proj": "bert.encoder.layer.{i}.intermediate.dense",
    f"{LAYER}.convection.0.operator.down_proj": "bert.encoder.layer.{i}.output.dense",
    f"{LAYER}.convection.0.norm": "bert.encoder.layer.{i}.output.LayerNorm",
}


def _bert(config: Any) -> dict[str, Any]:
    return _sizes(config) | {
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "hidden_act": lookup("activation", config.hidden_act, ACTIVATIONS),
        "norm": "post",
        "embedding_norm": True,
        "lm_head_bias": True,
        "pooler": True,
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "pad_token_id": config.pad_token_id,
    }


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": getattr(config, "vocab_size", 1),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "layer_norm_eps": config.layer_norm_eps,
    }


def _vit(config: Any) -> dict[str, Any]:
    return _sizes(config) | {
        "hidden_act": lookup("activation", config.hidden_act, ACTIVATIONS),
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "id2label": dict(config.id2label),
        "label2id": dict(config.label2id),
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
    }


def _gpt2(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "max_position_embeddings": config.n_positions,
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_act": lookup("activation", config.activation_function, ACTIVATIONS),
        "dropout": config.resid_pdrop,
        "embedding_dropout": config.embd_pdrop,
        "attention_dropout": config.attn_pdrop,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }


def _marian(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_attention_heads": config.encoder_attention_heads,
        "intermediate_size": config.encoder_ffn_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": lookup("activation", config.activation_function, ACTIVATIONS),
        "scale_embedding": config.scale_embedding,
        "sinusoid_ladder": "vaswani",
        "norm": "post",
        "lm_head_bias": True,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
    }


def _marian_layer(ours: str, theirs: str, *, decoder: bool) -> dict[str, str]:
    own = ("q_proj", "k_proj", "v_proj", "out_proj")
    names = _attention(f"{ours}.interaction.0", f"{theirs}.self_attn", own) | {
        f"{ours}.interaction.0.norm": f"{theirs}.self_attn_layer_norm",
        f"{ours}.convection.0.operator.up_proj": f"{theirs}.fc1",
        f"{ours}.convection.0.operator.down_proj": f"{theirs}.fc2",
        f"{ours}.convection.0.norm": f"{theirs}.final_layer_norm",
    }
    if decoder:
        names |= _attention(f"{ours}.coupling.0", f"{theirs}.encoder_attn", own)
        names[f"{ours}.coupling.0.norm"] = f"{theirs}.encoder_attn_layer_norm"
    return names


def _reads_both_ways(config: Any) -> dict[str, Any]:
    return {"is_decoder": False, "add_cross_attention": False}


def _plain_scores(config: Any) -> dict[str, Any]:
    return {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def _equal_towers(config: Any) -> dict[str, Any]:
    return {
        "decoder_attention_heads": config.encoder_attention_heads,
        "decoder_ffn_dim": config.encoder_ffn_dim,
        "share_encoder_decoder_embeddings": True,
    }


CONVERSIONS = {
    "BertForMaskedLM": Conversion(
        "encoder",
        heads.SplitstepForMaskedLM,
        _bert,
        BERT
        | {
            "transform.dense": "cls.predictions.transform.dense",
            "transform.norm": "cls.predictions.transform.LayerNorm",
            "lm_head.bias": "cls.predictions.decoder.bias",
        },
        head="cls.predictions.decoder.weight",
        needs=_reads_both_ways,
        unused=("cls.predictions.bias",),  # another name of the bias above, or one that their model does not read
    ),
    "BertForPreTraining": Conversion(
        "encoder",
        heads.SplitstepForPreTraining,
        _bert,
        BERT
        | {
            "transform.dense": "cls.predictions.transform.dense",
            "transform.norm": "cls.predictions.transform.LayerNorm",
            "lm_head.bias": "cls.predictions.decoder.bias",
            "pool.dense": "bert.pooler.dense",
            "next_sentence": "cls.seq_relationship",
        },
        head="cls.predictions.decoder.weight",
        needs=_reads_both_ways,
        unused=("cls.predictions.bias",),  # another name of the bias above, or one that their model does not read
    ),
    "BertModel": Conversion(
        "encoder",
        heads.SplitstepModel,
        _bert,
        {ours.removeprefix("model."): theirs.removeprefix("bert.") for ours, theirs in BERT.items()},
        needs=_reads_both_ways,
        unused=("pooler.dense.weight", "pooler.dense.bias"),
    ),
    "ViTForImageClassification": Conversion(
        "image",
        heads.SplitstepForImageClassification,
        _vit,
        {
            f"{EMBEDDINGS}.patches": "vit.embeddings.patch_embeddings.projection",
            f"{EMBEDDINGS}.class_token": "vit.embeddings.cls_token",
            f"{EMBEDDINGS}.positions": "vit.embeddings.position_embeddings",
            **_attention(
                f"{LAYER}.interaction.0",
                "vit.layers.{i}.attention",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
            ),
            f"{LAYER}.interaction.0.norm": "vit.layers.{i}.layernorm_before",
            f"{LAYER}.convection.0.operator.up_proj": "vit.layers.{i}.mlp.fc1",
            f"{LAYER}.convection.0.operator.down_proj": "vit.layers.{i}.mlp.fc2",
            f"{LAYER}.convection.0.norm": "vit.layers.{i}.layernorm_after",
            "model.encoder.stack.norm": "vit.layernorm",
            "classifier": "classifier",
        },
    ),
    "GPT2LMHeadModel": Conversion(
        "causal",
        heads.SplitstepForCausalLM,
        _gpt2,
        {
            f"{EMBEDDINGS}.tokens": "transformer.wte",
            f"{EMBEDDINGS}.positions": "transformer.wpe",
            **_attention(
                f"{LAYER}.interaction.0", "transformer.h.{i}.attn", ("c_attn_q", "c_attn_k", "c_attn_v", "c_proj")
            ),
            f"{LAYER}.interaction.0.norm": "transformer.h.{i}.ln_1",
            f"{LAYER}.convection.0.operator.up_proj": "transformer.h.{i}.mlp.c_fc",
            f"{LAYER}.convection.0.operator.down_proj": "transformer.h.{i}.mlp.c_proj",
            f"{LAYER}.convection.0.norm": "transformer.h.{i}.ln_2",
            "model.encoder.stack.norm": "transformer.ln_f",
        },
        transposed=True,
        head="lm_head.weight",
        needs=_plain_scores,
    ),
    "MarianMTModel": Conversion(
        "seq2seq",
        heads.SplitstepForConditionalGeneration,
        _marian,
        {
            f"{EMBEDDINGS}.tokens": "model.shared",
            **_marian_layer(LAYER, "model.encoder.layers.{i}", decoder=False),
            **_marian_layer(DECODER_LAYER, "model.decoder.layers.{i}", decoder=True),
            "lm_head.bias": "final_logits_bias",
        },
        head="lm_head.weight",
        needs=_equal_towers,
        unused=("embed_positions.weight",),  # sinusoids
    ),
}
