"""The models as citizens of Hugging Face's world."""

import json
import os
import subprocess
import sys

import jaxtyping
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments, pipeline
from transformers.utils.generic import find_labels

import splitstep
from splitstep import SplitstepModel, preset
from splitstep.fields.attention import Attention
from splitstep.fields.evolution import PublishedCondition
from splitstep.models.heads import Pool
from splitstep.models.presets import PRESETS
from splitstep.solver.errors import UserError

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
TEXT = SIZES | {
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGE = SIZES | {"image_size": 32, "patch_size": 8, "num_labels": 5}
MODELS = {
    "SplitstepModel": ("encoder", "AutoModel"),
    "SplitstepForMaskedLM": ("encoder", "AutoModelForMaskedLM"),
    "SplitstepForPreTraining": ("encoder", "AutoModelForPreTraining"),
    "SplitstepForSequenceClassification": ("encoder", "AutoModelForSequenceClassification"),
    "SplitstepForCausalLM": ("causal", "AutoModelForCausalLM"),
    "SplitstepForConditionalGeneration": ("seq2seq", "AutoModelForSeq2SeqLM"),
    "SplitstepForImageClassification": ("image", "AutoModelForImageClassification"),
}
EVERY = [(model, name) for model in MODELS for name in PRESETS]


def build(model, name="macaron", **more):
    kind = MODELS[model][0]
    return getattr(splitstep, model)(preset(name, kind, **(IMAGE if kind == "image" else TEXT) | more)).eval()


def batch(model, rows=2):
    kind = MODELS[model][0]
    if kind == "image":
        return {"pixel_values": torch.randn(rows, 3, 32, 32)}
    ids = torch.randint(3, 50, (rows, 7))
    mask = torch.ones_like(ids)
    mask[-1, 4:] = 0
    target = {"decoder_input_ids": torch.randint(3, 50, (rows, 5))} if kind == "seq2seq" else {}
    return {"input_ids": ids, "attention_mask": mask} | target


def labels(model, rows=2):
    if model in ("SplitstepForSequenceClassification", "SplitstepForImageClassification"):
        return {"labels": torch.randint(0, 2, (rows,))}
    length = 5 if model == "SplitstepForConditionalGeneration" else 7
    found = {"labels": torch.randint(3, 50, (rows, length))}
    if model == "SplitstepForPreTraining":
        found["next_sentence_label"] = torch.randint(0, 2, (rows,))
    return found


def first(output):
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize(("model", "name"), EVERY)
def test_saved_and_loaded_through_the_auto_class_is_bit_equal(model, name, tmp_path):
    made, inputs = build(model, name), batch(model)
    made.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = getattr(transformers, MODELS[model][1]).from_pretrained(tmp_path)
    assert type(loaded) is type(made)
    with torch.no_grad():
        assert torch.equal(first(loaded.eval()(**inputs)), first(made(**inputs)))


FRESH = """
import sys, pathlib, torch, transformers
import splitstep
from safetensors.torch import load_file
torch.set_num_threads(1)
for folder in pathlib.Path(sys.argv[1]).iterdir():
    model = getattr(transformers, folder.name.partition("+")[0]).from_pretrained(folder / "model").eval()
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers())), folder
    data = load_file(folder / "inputs.safetensors")
    expected = data.pop("expected")
    with torch.no_grad():
        found = model(**data)
    found = found.logits if "logits" in found else found.last_hidden_state
    assert torch.equal(found, expected), folder
"""


def test_a_fresh_process_gives_the_same_bits(tmp_path):
    """Every model of every preset, where memory that nobody has written to holds 3.4e38."""
    halted = [(model, "universal", {"halting": "act"}) for model in MODELS]
    for model, name, settings in [(model, name, {}) for model, name in EVERY] + halted:
        folder = tmp_path / f"{MODELS[model][1]}+{name}+{len(settings)}"
        made, inputs = build(model, name, **settings), batch(model)
        made.save_pretrained(folder / "model")
        with torch.no_grad():
            save_file(inputs | {"expected": first(made(**inputs))}, folder / "inputs.safetensors")
    poisoned = os.environ | {"MALLOC_PERTURB_": str(0x7F ^ 0xFF)}
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], check=True, timeout=300, env=poisoned)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_no_code_of_a_model_folder_is_run(tmp_path, name):
    build("SplitstepForMaskedLM").save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'struck')!r}, 'w')\nclass Model: pass\nclass Config: pass\n"
    )
    told = json.loads((tmp_path / "config.json").read_text()) if name == "config.json" else {}
    entry = {"AutoConfig": "evil.Config", "AutoModelForMaskedLM": "evil.Model", "AutoTokenizer": ["evil.Model", None]}
    (tmp_path / name).write_text(json.dumps(told | {"auto_map": entry}))
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is splitstep.SplitstepForMaskedLM
    assert not (tmp_path / "struck").exists()


@pytest.mark.parametrize(
    "order",
    [
        "import splitstep; from transformers import AutoConfig, AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM, AutoConfig; import splitstep",
        "from splitstep import SplitstepForCausalLM; from transformers import AutoConfig, AutoModelForCausalLM",
        "import splitstep; from transformers import pipeline, AutoConfig, AutoModelForCausalLM",
    ],
)
def test_models_are_registered_in_whatever_order_is_imported(order):
    check = "import splitstep; assert AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model('splitstep'))]"
    subprocess.run([sys.executable, "-c", f"{order}; {check}"], check=True, timeout=120, capture_output=True)


def test_importing_the_package_is_quick_because_it_imports_nothing_heavy():
    check = "import sys, splitstep; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


class TestLoading:
    """What does not fit is refused by name."""

    BODY = "model.encoder.stack.layers.0.interaction.0.operator.q_proj.weight"

    @pytest.fixture
    def folder(self, tmp_path):
        build("SplitstepForMaskedLM").save_pretrained(tmp_path)
        return tmp_path

    def alter(self, folder, change):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def test_a_missing_tensor_of_the_body(self, folder):
        self.alter(folder, lambda weights: weights.pop(self.BODY))
        with pytest.raises(UserError, match=rf"do not fit SplitstepForMaskedLM: {self.BODY}: missing"):
            splitstep.SplitstepForMaskedLM.from_pretrained(folder)

    def test_a_wrong_shape(self, folder):
        self.alter(folder, lambda weights: weights.update({self.BODY: torch.zeros(3, 3)}))
        with pytest.raises(UserError, match=rf"{self.BODY}: \(3, 3\) instead of \(32, 32\)"):
            splitstep.SplitstepForMaskedLM.from_pretrained(folder)

    def test_an_unknown_configuration_key(self, folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hiden_size": 3}))
        with pytest.raises(UserError, match="unknown configuration key 'hiden_size'"):
            splitstep.SplitstepForMaskedLM.from_pretrained(folder)

    def test_a_new_head_is_named_in_one_line(self, folder, caplog):
        splitstep.SplitstepForSequenceClassification.from_pretrained(folder)
        (line,) = caplog.messages
        assert line.endswith("initialised at random: classifier.bias, classifier.weight")

    def test_a_head_of_another_size_is_new_only_where_asked(self, tmp_path):
        build("SplitstepForSequenceClassification", num_labels=3).save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"classifier.weight: \(3, 32\) instead of \(7, 32\)"):
            splitstep.SplitstepForSequenceClassification.from_pretrained(tmp_path, num_labels=7)
        loaded = splitstep.SplitstepForSequenceClassification.from_pretrained(
            tmp_path, num_labels=7, ignore_mismatched_sizes=True
        )
        assert loaded.classifier.out_features == 7

    def test_a_model_of_another_kind(self):
        with pytest.raises(UserError, match="SplitstepForCausalLM needs kind 'causal', got 'encoder'"):
            splitstep.SplitstepForCausalLM(preset("macaron", "encoder"))


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_has_no_part_in_the_vector_of_a_sequence(pooling, side, dtype):
    pool = Pool(preset("transformer", pooling=pooling))
    states = torch.randn(1, 400, 8, dtype=dtype)
    padded = torch.nn.functional.pad(states, (0, 0, 30, 0) if side == "left" else (0, 0, 0, 30), value=7.0)
    mask = torch.nn.functional.pad(torch.ones(1, 400), (30, 0) if side == "left" else (0, 30))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(pool(padded, mask), pool(states, None), atol=tolerance, rtol=0)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "SplitstepModel"])
def test_losses_train(model):
    made = build(model, halting="act").train()
    inputs = batch(model) | labels(model)
    out = made(**inputs)
    assert out.loss.isfinite()
    assert out.ponder_cost is not None
    out.loss.backward()
    without = {n for n, p in made.named_parameters() if p.grad is None}
    assert not without


HEADS = [name for name in MODELS if name != "SplitstepModel"]
VOCABULARIES = [name for name in HEADS if "Classification" not in name]


def partly_labelled(model, rows=2):
    """Labels of which some are ignored, in each example another number."""
    found = labels(model, rows)
    given = found["labels"]
    if given.ndim == 1:
        given[0] = -100
    else:
        for row in range(rows):
            given[row, : row + 1] = -100
    if "next_sentence_label" in found:
        found["next_sentence_label"][0] = -100
    return found


def counts(model, given):
    """The items of these labels, as the Trainer counts them, and the pairs."""
    tokens = given["labels"][:, 1:] if model == "SplitstepForCausalLM" else given["labels"]
    found = {"num_items_in_batch": tokens.ne(-100).sum()}
    if "next_sentence_label" in given:
        found["num_pairs_in_batch"] = given["next_sentence_label"].ne(-100).sum()
    return found


def part(given, rows):
    return {key: value[rows] for key, value in given.items()}


@pytest.mark.parametrize("model", HEADS)
def test_micro_batches_of_unequal_size_add_up_to_the_update(model):
    made, given = build(model).double(), batch(model, 5) | partly_labelled(model, 5)
    given |= {key: value.double() for key, value in given.items() if key == "pixel_values"}
    items = counts(model, given)
    whole = made(**given).loss
    torch.testing.assert_close(made(**given, **items).loss, whole)
    parts = [made(**part(given, rows), **items).loss for rows in (slice(0, 1), slice(1, 3), slice(3, 5))]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("model", HEADS)
def test_the_ponder_cost_of_an_update_is_counted_once(model):
    made, given = build(model, halting="act", ponder_weight=1.0).train(), batch(model, 4) | labels(model, 4)
    parts = [made(**part(given, rows), **counts(model, given)).loss for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(parts), made(**given).loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("model", HEADS)
def test_a_head_smooths_labels_as_torch_does(model, smoothing):
    made, given = build(model), batch(model) | partly_labelled(model)
    given.pop("next_sentence_label", None)
    with torch.no_grad():
        out = made(**given, label_smoothing=smoothing)
    logits, targets = out.logits, given["labels"]
    if model == "SplitstepForCausalLM":
        logits, targets = logits[:, :-1], targets[:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("more", [{}, {"lm_head_bias": True, "mlm_transform": False, "tie_word_embeddings": False}])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("model", VOCABULARIES)
def test_without_logits_loss_and_gradients_are_the_same(model, smoothing, more):
    made, given = build(model, **more).double(), batch(model) | partly_labelled(model)
    found = []
    for skip in (False, True):
        made.zero_grad()
        out = made(**given, label_smoothing=smoothing, skip_logits=skip)
        assert (out.logits is None) == skip
        out.loss.backward()
        found.append([out.loss.detach(), *(parameter.grad for parameter in made.parameters())])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("model", VOCABULARIES)
def test_a_batch_without_labels_moves_nothing_and_leaves_no_parameter_out(model):
    made, given = build(model), batch(model) | labels(model)
    for key in ("labels", "next_sentence_label"):
        if key in given:
            given[key] = torch.full_like(given[key], -100)
    out = made(**given, num_items_in_batch=9, num_pairs_in_batch=9, skip_logits=True)
    assert out.loss == 0
    out.loss.backward()
    assert all((parameter.grad == 0).all() for parameter in made.parameters())


@pytest.mark.parametrize("model", HEADS)
def test_the_trainer_finds_the_labels_and_nothing_else(model):
    """By their names in the signature."""
    assert find_labels(getattr(splitstep, model)) == list(labels(model))


def test_a_label_that_is_none_is_refused():
    with pytest.raises(UserError, match="label 9 is none of the 2 labels 0 to 1"):
        build("SplitstepForSequenceClassification")(
            **batch("SplitstepForSequenceClassification"), labels=torch.tensor([9, 0])
        )


def test_a_text_that_is_too_long_is_refused():
    with pytest.raises(UserError, match="a sequence of 40 tokens is longer than max_position_embeddings = 32"):
        build("SplitstepForCausalLM")(torch.randint(3, 50, (1, 40)))


@pytest.mark.parametrize("model", MODELS)
def test_hidden_states_and_attentions_on_request(model):
    made, inputs = build(model, "parallel-rk4", steps_per_layer=2), batch(model)
    with torch.no_grad():
        plain, out = made(**inputs), made(**inputs, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(first(out), first(plain), atol=1e-5, rtol=0)
    decoder = model == "SplitstepForConditionalGeneration"
    states = out.decoder_hidden_states if decoder else out.hidden_states
    attentions = out.decoder_attentions if decoder else out.attentions
    assert len(states) == 1 + 2
    assert len(attentions) == 2 * 2 * 4  # layers x inner steps x stages
    for weights in attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    if "last_hidden_state" in out:
        assert torch.equal(states[-1], out.last_hidden_state)


@pytest.mark.parametrize("implementation", ["auto", "sdpa", "eager"])
def test_attention_implementations_agree(implementation, tmp_path):
    made, inputs = build("SplitstepForMaskedLM"), batch("SplitstepForMaskedLM")
    made.save_pretrained(tmp_path)
    other = splitstep.SplitstepForMaskedLM.from_pretrained(tmp_path, attn_implementation=implementation).eval()
    assert other.config._attn_implementation == implementation
    with torch.no_grad():
        torch.testing.assert_close(first(other(**inputs)), first(made(**inputs)), atol=1e-5, rtol=0)
        made.set_attn_implementation(implementation)
        torch.testing.assert_close(first(other(**inputs)), first(made(**inputs)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_works_in_bf16_and_under_autocast(model):
    made, inputs = build(model, "parallel-rk4"), batch(model)
    with torch.no_grad():
        exact = first(made(**inputs))
        with torch.autocast("cpu", torch.bfloat16):
            mixed = first(made(**inputs))
        half = first(made.bfloat16()(**inputs))
    assert half.dtype == torch.bfloat16
    for found in (mixed, half):
        assert (found.float() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feed_forward", ["random", "rotated"])
def test_what_was_drawn_is_loaded_as_it_was_whatever_the_precision(feed_forward, dtype, tmp_path):
    model = "SplitstepForMaskedLM"
    made, inputs = build(model, feed_forward=feed_forward, hidden_act="relu", intermediate_size=64), batch(model)
    drawn = {name: buffer.clone() for name, buffer in made.named_buffers()}
    made.save_pretrained(tmp_path / "float32")
    made.to(dtype).save_pretrained(tmp_path / "cast")
    for folder, asked in (("float32", {"dtype": dtype}), ("cast", {})):
        loaded = getattr(splitstep, model).from_pretrained(tmp_path / folder, **asked).eval()
        assert all(parameter.dtype == dtype for parameter in loaded.parameters())
        assert all(torch.equal(buffer, drawn[name]) for name, buffer in loaded.named_buffers())
        with torch.no_grad():
            assert torch.equal(first(loaded(**inputs)), first(made(**inputs)))


@pytest.mark.parametrize("model", MODELS)
def test_works_on_the_meta_device(model):
    with torch.device("meta"):
        made = build(model)
        assert all(parameter.is_meta for parameter in made.parameters())


@pytest.mark.parametrize("model", ["SplitstepForMaskedLM", "SplitstepForConditionalGeneration"])
def test_gradient_checkpointing_enabled_by_hugging_face_changes_no_gradient(model):
    made = build(model, "parallel-rk4", num_independent_layers=1, dropout=0.2, drop_path=0.2).train()
    inputs = batch(model) | labels(model)
    found = []
    for enable in (False, True):
        if enable:
            made.gradient_checkpointing_enable()
        made.zero_grad()
        torch.manual_seed(0)
        made(**inputs).loss.backward()
        found.append([parameter.grad.clone() for parameter in made.parameters()])
    assert all(torch.equal(plain, kept) for plain, kept in zip(*found, strict=True))


def test_xavier_starts_queries_keys_and_values_as_one_matrix():
    made = build("SplitstepForConditionalGeneration", hidden_size=64, initialization="xavier")
    found = [module for module in made.modules() if isinstance(module, Attention)]
    assert found
    for module in found:
        for projection in (module.q_proj, module.k_proj, module.v_proj):
            limit = (6 / (3 * 64 + 64)) ** 0.5
            assert projection.weight.abs().max().item() == pytest.approx(limit, rel=0.01)
        assert module.out_proj.weight.abs().max().item() == pytest.approx((6 / (64 + 64)) ** 0.5, rel=0.01)


def test_kaiming_starts_with_the_inverse_of_what_a_matrix_reads_and_twice_that_behind_an_activation():
    made = build("SplitstepForMaskedLM", hidden_size=64, intermediate_size=256, initialization="kaiming")
    read = {name: p.shape[1] * p.var().item() for name, p in made.named_parameters() if p.ndim == 2}
    for part, gain in {"q_proj": 1, "out_proj": 1, "up_proj": 1, "down_proj": 2, "tokens": 1}.items():
        found = [share for name, share in read.items() if part in name]
        assert found
        assert found == pytest.approx([gain] * len(found), rel=0.1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", ["SplitstepForMaskedLM", "SplitstepForCausalLM", "SplitstepForConditionalGeneration"])
def test_token_embeddings_can_be_resized(model, tied):
    made, inputs = build(model, tie_word_embeddings=tied), batch(model)
    with torch.no_grad():
        before = made(**inputs).logits
        made.resize_token_embeddings(57)
        after = made(**inputs).logits
    assert after.shape[-1] == made.config.vocab_size == 57
    torch.testing.assert_close(after[..., :50], before)
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) == tied


COMPILED = """
import torch
from splitstep import SplitstepForMaskedLM, preset
from splitstep.models.presets import PRESETS

sizes = dict(hidden_size=32, num_attention_heads=4, intermediate_size=40, num_hidden_layers=2, vocab_size=50)
ids = torch.randint(3, 50, (2, 7))
batch = {"input_ids": ids, "attention_mask": (torch.arange(7) < torch.tensor([[7], [4]])).long(), "labels": ids}
for name in PRESETS:
    model = SplitstepForMaskedLM(preset(name, **sizes))
    with torch.no_grad():  # away from the kink of ReLU, at which the first random network starts
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    torch.compiler.reset()  # each preset compiles the same code anew
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(**batch)
        out.loss.backward()
        gradients = (p.grad.clone() for p in model.parameters() if p.requires_grad)
        found.append([out.logits.detach(), *gradients])
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(plain, traced, atol=1e-5, rtol=1e-4)
"""


def test_compiled_is_eager_forwards_and_backwards_in_one_graph():
    """In a process of its own: what checks shapes in these tests cannot be traced."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=250)


def test_lora_on_the_attention_projections_trains_only_itself():
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(
        build("SplitstepForSequenceClassification"), LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    )
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    made(**batch("SplitstepForSequenceClassification"), labels=torch.tensor([0, 1])).loss.backward()
    assert all(p.grad is not None for n, p in made.named_parameters() if n in trained)


def test_an_adapter_on_the_output_layer_is_part_of_the_loss_without_logits():
    from peft import LoraConfig, get_peft_model

    base = build("SplitstepForCausalLM", tie_word_embeddings=False)
    made = get_peft_model(base, LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)).eval()
    given = batch("SplitstepForCausalLM") | labels("SplitstepForCausalLM")
    torch.testing.assert_close(made(**given, skip_logits=True).loss, made(**given).loss)


class Copying(torch.utils.data.Dataset):
    """Sequences whose target is their source."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 50, (6,), generator=generator)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def test_hugging_faces_trainer_trains_and_resumes_a_folder(tmp_path):
    made = build("SplitstepForConditionalGeneration", "macaron")
    arguments = TrainingArguments(
        tmp_path,
        max_steps=30,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        report_to=[],
        logging_steps=5,
        disable_tqdm=True,
        use_cpu=True,
        save_steps=30,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(made, arguments, train_dataset=Copying())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    loaded = splitstep.SplitstepForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-30").eval()
    inputs = batch("SplitstepForConditionalGeneration")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, made.eval()(**inputs).logits)


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", "[MASK]", "tokens", "are", "particles"]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="[MASK]",
    )


@pytest.mark.parametrize(
    ("task", "model", "text", "key"),
    [
        ("text-generation", "SplitstepForCausalLM", "tokens are", "generated_text"),
        ("fill-mask", "SplitstepForMaskedLM", "tokens are [MASK]", "token_str"),
        ("text-classification", "SplitstepForSequenceClassification", "tokens are particles", "label"),
    ],
)
def test_pipelines_of_texts(task, model, text, key, tokenizer, tmp_path):
    build(model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    more = {"max_new_tokens": 3} if task == "text-generation" else {"top_k": 2} if task == "fill-mask" else {}
    (answer, *_) = pipeline(task, model=str(tmp_path), device="cpu")(text, **more)
    assert key in answer


def test_pipeline_of_images(tmp_path):
    from PIL import Image
    from transformers import ViTImageProcessorPil

    build("SplitstepForImageClassification").save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    answer = pipeline("image-classification", model=str(tmp_path), device="cpu")(Image.new("RGB", (40, 40)))
    assert len(answer) == 5


# What Hugging Face's own code asks of a model


@pytest.mark.parametrize(("rows", "count"), [(2, 1), (1, 5), (1, 7)])
def test_logits_do_not_depend_on_where_a_file_lies_in_memory(rows, count, tmp_path):
    """Products of few rows and columns round by how their weights are aligned."""
    for _ in range(4):
        made = build("SplitstepForSequenceClassification", num_labels=count)
        made.save_pretrained(tmp_path)
        loaded = type(made).from_pretrained(tmp_path).eval()
        inputs = batch("SplitstepForSequenceClassification", rows)
        with torch.no_grad():
            assert torch.equal(loaded(**inputs).logits, made(**inputs).logits)


def test_the_trainer_predicts_logits_and_nothing_else(tmp_path):
    model = build("SplitstepForSequenceClassification", num_labels=3)
    rows = [{"input_ids": torch.randint(3, 50, (8,)), "labels": torch.tensor(i % 3)} for i in range(6)]
    seen = []

    def measured(found):
        seen.append(found.predictions.shape)
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    metrics = Trainer(model, arguments, eval_dataset=rows, compute_metrics=measured).evaluate()
    assert seen == [(6, 3)]
    assert 0 <= metrics["eval_accuracy"] <= 1


@pytest.mark.parametrize("model", ["SplitstepModel", "SplitstepForCausalLM", "SplitstepForConditionalGeneration"])
def test_a_mask_is_the_same_with_two_three_and_four_dimensions(model):
    made, inputs = build(model), batch(model)
    mask = inputs.pop("attention_mask")
    length = inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1]
    positions = {"position_ids": torch.arange(7)[None]} if model != "SplitstepForConditionalGeneration" else {}
    if model == "SplitstepForConditionalGeneration":  # whose mask is over the keys of two attentions
        forms = [mask, mask[:, None, None]]
    else:
        square = mask[:, None].expand(-1, length, -1)
        added = torch.where(square[:, None].bool(), 0.0, torch.finfo(torch.float32).min)
        forms = [mask, square, square[:, None], added]
    visible = mask.bool() if length == mask.shape[1] else torch.ones(2, length, dtype=torch.bool)
    with torch.no_grad():
        found = [first(made(**inputs, **positions, attention_mask=form))[visible] for form in forms]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    with pytest.raises(UserError, match="attention_mask has 2, 3 or 4 dimensions, got 1"):
        made(**inputs, attention_mask=mask[0])


def test_states_are_pooled_by_a_mask_over_tokens():
    made, inputs = build("SplitstepForSequenceClassification", pooling="mean"), batch("SplitstepForMaskedLM")
    with pytest.raises(UserError, match=r"give attention_mask as \[batch, tokens\]"):
        made(inputs["input_ids"], attention_mask=inputs["attention_mask"][:, None, None])


@pytest.mark.parametrize("model", MODELS)
def test_a_configuration_that_asks_for_tuples_gets_them(model):
    made = build(model)
    with torch.no_grad():
        inputs = batch(model) | ({} if model == "SplitstepModel" else labels(model))
        named = made(**inputs)
        made.config.return_dict = False
        plain = made(**inputs)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], next(iter(named.values())))
    assert list(named)[:1] == (["last_hidden_state"] if model == "SplitstepModel" else ["loss"])


def test_the_loss_comes_first_whichever_labels_there_are():
    made, inputs = build("SplitstepForPreTraining"), batch("SplitstepForPreTraining")
    for key, value in labels("SplitstepForPreTraining").items():
        out = made(**inputs, **{key: value}, return_dict=False)
        assert out[0].ndim == 0
        assert (out[1].shape, out[2].shape) == ((2, 7, 50), (2, 2))


def test_what_generation_and_pipelines_pass_is_taken():
    causal, inputs = build("SplitstepForCausalLM"), batch("SplitstepForCausalLM")
    with torch.no_grad():
        whole = causal(**inputs).logits
        assert torch.equal(causal(**inputs, logits_to_keep=torch.tensor([1, 3])).logits, whole[:, [1, 3]])
        assert causal(torch.zeros(0, 7, dtype=torch.long), torch.ones(0, 7)).logits.shape == (0, 7, 50)
    classifier = build("SplitstepForSequenceClassification")
    assert classifier(**inputs, use_cache=False).logits.shape == (2, 2)
    told = {"quantization_config": {"quant_method": "none"}, "_commit_hash": "0" * 40}
    assert splitstep.SplitstepConfig(**told).quantization_config == told["quantization_config"]


def test_the_same_weights_under_another_solver_generate_by_the_same_settings():
    made = build("SplitstepForCausalLM", "transformer")
    made.generation_config.max_new_tokens, made.generation_config.num_beams = 7, 3
    made.gradient_checkpointing_enable()
    other = made.with_solver(integrator="rk4")
    assert (other.generation_config.max_new_tokens, other.generation_config.num_beams) == (7, 3)
    assert other.is_gradient_checkpointing
    other.generation_config.num_beams = 1
    assert made.generation_config.num_beams == 3


def test_the_first_operator_of_transevolve_has_the_published_size():
    """The release initialises content and time of a side as one square matrix; its scores deviate by about 0.73."""
    torch.manual_seed(0)
    config = preset("transevolve-full-1", "seq2seq", vocab_size=400, hidden_size=512, num_attention_heads=8)
    model = SplitstepModel(config).eval()
    condition = next(module for module in model.encoder.modules() if isinstance(module, PublishedCondition))
    seen = []
    condition.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.encoder(torch.randint(3, 400, (4, 40)))
        queries, keys = (side(seen[0]).unflatten(-1, (8, -1)) for side in (condition.query, condition.key))
        scores = torch.einsum("bihc,bjhc->bhij", queries, keys) / keys.shape[-1] ** 0.5
    assert float(scores.std()) == pytest.approx(0.73, abs=0.06)
    for weight in (condition.query.weight, condition.query_time, condition.key_time):
        assert float(weight.detach().std()) == pytest.approx(1024**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "name"), [("encoder", "SplitstepForSequenceClassification"), ("image", "SplitstepForImageClassification")]
)
def test_a_classifier_is_exported_for_batches_of_any_size(kind, name):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    more = {"image_size": 32} if kind == "image" else {"vocab_size": 20}
    model = getattr(splitstep, name)(preset("macaron", kind, num_labels=3, **sizes, **more)).eval()
    assert model.num_labels == 3
    if kind == "image":
        batch = [{"pixel_values": torch.randn(n, 3, 32, 32)} for n in (2, 5)]
    else:
        batch = [{key: torch.ones(n, 9, dtype=torch.long) for key in ("input_ids", "attention_mask")} for n in (2, 5)]
    dynamic = {key: {0: torch.export.Dim("batch")} for key in batch[0]}
    exported = torch.export.export(model, (), batch[0], dynamic_shapes=dynamic).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(**batch[1]).logits, model(**batch[1]).logits)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_a_causal_model_is_exported_for_texts_of_any_length(name, masked, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it compares shapes that are symbols here
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    model = splitstep.SplitstepForCausalLM(preset(name, "causal", vocab_size=20, use_cache=False, **sizes)).eval()
    short, long = ({"input_ids": torch.randint(20, (n, length))} for n, length in ((2, 9), (3, 300)))
    for batch in (short, long):
        batch |= {"attention_mask": torch.ones_like(batch["input_ids"])} if masked else {}
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    exported = torch.export.export(model, (), short, dynamic_shapes=dict.fromkeys(short, dims)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(**long).logits, model(**long).logits)
