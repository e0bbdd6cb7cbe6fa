"""Released weights: a reference of the published computation, written out here, against the loaded model."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from splitstep import load_published
from splitstep.solver.errors import UserError

SIZE, WIDTH, HEADS, VOCABULARY = 16, 24, 4, 30


def macaron_arrays(norm, *, encoder_layers=2, decoder_layers=3):
    """A state dict under the names of Macaron Net's release, with random values."""
    rng = np.random.default_rng(0)
    arrays = {"encoder.version": np.array([2.0]), "decoder.version": np.array([2.0])}

    def put(name, *shape):
        arrays[name] = (rng.standard_normal(shape) * 0.3).astype(np.float32)

    def linear(name, rows, columns):
        put(f"{name}.weight", rows, columns)
        put(f"{name}.bias", rows)

    def layer_norm(name):
        put(f"{name}.weight", SIZE)
        put(f"{name}.bias", SIZE)

    put("encoder.embed_tokens.weight", VOCABULARY, SIZE)
    arrays["decoder.embed_tokens.weight"] = arrays["encoder.embed_tokens.weight"]
    for part, layers in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        arrays[f"{part}.embed_positions._float_tensor"] = np.zeros(1, dtype=np.float32)
        for i in range(layers):
            layer = f"{part}.layers.{i}"
            for attention in ["self_attn"] + ["encoder_attn"] * (part == "decoder"):
                put(f"{layer}.{attention}.in_proj_weight", 3 * SIZE, SIZE)
                put(f"{layer}.{attention}.in_proj_bias", 3 * SIZE)
                linear(f"{layer}.{attention}.out_proj", SIZE, SIZE)
            for first, second in (("macaron_fc1", "macaron_fc2"), ("fc1", "fc2")):
                linear(f"{layer}.{first}", WIDTH, SIZE)
                linear(f"{layer}.{second}", SIZE, WIDTH)
            if part == "encoder":
                for number in range(3):
                    layer_norm(f"{layer}.layer_norms.{number}")
            else:
                for name in ("macaron", "self_attn", "encoder_attn", "final"):
                    layer_norm(f"{layer}.{name}_layer_norm")
        if norm == "pre":
            layer_norm(f"{part}.layer_norm")
    return arrays


class Reference:
    """Macaron Net as released: sub-layers in fairseq's order, sinusoids from position 2, embeddings times sqrt(d)."""

    def __init__(self, arrays, norm):
        self.w = {name: torch.from_numpy(value) for name, value in arrays.items()}
        self.norm = norm

    def layer_norm(self, name, x):
        return functional.layer_norm(x, (SIZE,), self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def sublayer(self, x, norm, factor, function):
        if self.norm == "pre":
            return x + factor * function(self.layer_norm(norm, x))
        return self.layer_norm(norm, x + factor * function(x))

    def ffn(self, first, second):
        def run(x):
            x = functional.linear(x, self.w[f"{first}.weight"], self.w[f"{first}.bias"]).relu()
            return functional.linear(x, self.w[f"{second}.weight"], self.w[f"{second}.bias"])

        return run

    def attention(self, name, source, hidden):
        def run(x):
            weight, bias = self.w[f"{name}.in_proj_weight"].chunk(3), self.w[f"{name}.in_proj_bias"].chunk(3)
            inputs = (x, x if source is None else source, x if source is None else source)
            q, k, v = (
                functional.linear(z, weight[n], bias[n]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for n, z in enumerate(inputs)
            )
            scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE // HEADS)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            return functional.linear(mixed, self.w[f"{name}.out_proj.weight"], self.w[f"{name}.out_proj.bias"])

        return run

    def embed(self, ids):
        half = SIZE // 2
        frequency = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
        angle = (torch.arange(ids.shape[1]) + 2)[:, None] * frequency
        table = self.w["encoder.embed_tokens.weight"]
        return math.sqrt(SIZE) * table[ids] + torch.cat((angle.sin(), angle.cos()), dim=1)

    def stack(self, part, x, *, own, memory=None, cross=None):
        layers = {name.split(".")[2] for name in self.w if name.startswith(f"{part}.layers.")}
        for i in sorted(layers, key=int):
            name = f"{part}.layers.{i}"
            norms = (
                {"first": "layer_norms.2", "own": "layer_norms.0", "last": "layer_norms.1"}
                if part == "encoder"
                else {"first": "macaron_layer_norm", "own": "self_attn_layer_norm", "last": "final_layer_norm"}
            )
            x = self.sublayer(
                x, f"{name}.{norms['first']}", 0.5, self.ffn(f"{name}.macaron_fc1", f"{name}.macaron_fc2")
            )
            x = self.sublayer(x, f"{name}.{norms['own']}", 1.0, self.attention(f"{name}.self_attn", None, own))
            if part == "decoder":
                coupled = self.attention(f"{name}.encoder_attn", memory, cross)
                x = self.sublayer(x, f"{name}.encoder_attn_layer_norm", 1.0, coupled)
            x = self.sublayer(x, f"{name}.{norms['last']}", 0.5, self.ffn(f"{name}.fc1", f"{name}.fc2"))
        return self.layer_norm(f"{part}.layer_norm", x) if self.norm == "pre" else x

    def logits(self, source, target):
        padding = (source == 1)[:, None, None]
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        memory = self.stack("encoder", self.embed(source), own=padding)
        x = self.stack("decoder", self.embed(target), own=future, memory=memory, cross=padding)
        return functional.linear(x, self.w["encoder.embed_tokens.weight"])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_macaron_gives_the_published_logits(norm):
    arrays = macaron_arrays(norm)
    model = load_published("macaron", arrays, num_heads=HEADS, norm=norm)
    source, target = torch.randint(3, VOCABULARY, (2, 7)), torch.randint(3, VOCABULARY, (2, 5))
    source[1, 4:] = 1
    with torch.no_grad():
        found = model(input_ids=source, attention_mask=(source != 1).long(), decoder_input_ids=target).logits
        assert torch.equal(model(input_ids=source, decoder_input_ids=target).logits, found)  # padding is known
    expected = Reference(arrays, norm).logits(source, target)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda a: a.pop("encoder.layers.1.fc1.bias"), r"encoder.layers.1.fc1.bias is missing"),
        (lambda a: a.pop("encoder.embed_tokens.weight"), r"encoder.embed_tokens.weight is missing"),
        (lambda a: a.update({"encoder.layers.0.surprise": np.zeros(3)}), r"unknown array encoder.layers.0.surprise"),
        (lambda a: a.update({"encoder.layers.0.fc2.bias": np.zeros(3)}), r"down_proj.bias is \(3,\), not \(16,\)"),
        (lambda a: a.update({"decoder.embed_tokens.weight": np.zeros((30, 16))}), r"must be shared"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(change, complaint):
    arrays = macaron_arrays("pre")
    change(arrays)
    with pytest.raises(UserError, match=complaint):
        load_published("macaron", arrays, num_heads=HEADS, norm="pre")


def test_an_unknown_system_is_refused():
    with pytest.raises(UserError, match=r"unknown published system 'macron'.*did you mean 'macaron'"):
        load_published("macron", {}, num_heads=1)


def transevolve_arrays(feed_forward, *, segments=2, layers=3, tau=SIZE // HEADS):
    """Weights under the names of TransEvolve's release, with random values."""
    rng = np.random.default_rng(1)
    arrays = {}
    width = SIZE + HEADS * tau

    def put(name, *shape, scale=0.3):
        arrays[name] = (rng.standard_normal(shape) * scale).astype(np.float32)

    def norm(name):
        put(f"{name}.gamma", SIZE)
        put(f"{name}.beta", SIZE)

    put("embedding", VOCABULARY, SIZE)
    for part, kinds in (("encoder", {"": "attention"}), ("decoder", {"self.": "self", "cross.": "cross"})):
        for b in range(segments):
            for prefix in kinds:
                put(f"{part}.segment{b}.{prefix}query_projection", width, width)
                put(f"{part}.segment{b}.{prefix}key_projection", width, width)
            norm(f"{part}.segment{b}.out_norm")
            for i in range(layers):
                layer = f"{part}.segment{b}.layer{i}"
                for name in kinds.values():
                    put(f"{layer}.{name}.coefficients", HEADS * tau, scale=1.0)
                    put(f"{layer}.{name}.linear_out", SIZE, SIZE)
                    norm(f"{layer}.{name}.norm")
                norm(f"{layer}.ff.norm")
                for k, (rows, columns) in enumerate(((SIZE, WIDTH), (WIDTH, SIZE)), start=1):
                    put(f"{layer}.ff.{k}.bias", columns)
                    if feed_forward == "full":
                        put(f"{layer}.ff.{k}.kernel", rows, columns)
                    else:
                        put(f"{layer}.ff.{k}.svals", rows, 1, scale=2.0)
                        put(f"{layer}.ff.{k}.G_U", rows, rows // 2, scale=rows)
                        put(f"{layer}.ff.{k}.G_V", columns, columns // 2, scale=columns)
    return arrays


class TransEvolveReference:
    """TransEvolve as released, every term of its operator computed, in double precision."""

    def __init__(self, arrays, segments=2, layers=3):
        self.w = {name: torch.from_numpy(value).double() for name, value in arrays.items()}
        self.segments, self.layers = segments, layers

    def norm(self, name, x):
        return functional.layer_norm(x, (SIZE,), self.w[f"{name}.gamma"], self.w[f"{name}.beta"], eps=1e-3)

    @staticmethod
    def heads(x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def operator(self, name, x, y):
        query_matrix, key_matrix = self.w[f"{name}query_projection"], self.w[f"{name}key_projection"]
        query, key = x @ query_matrix[:, :SIZE].T, y @ key_matrix[:, :SIZE].T
        width = query.shape[-1]
        a0 = self.heads(query) @ self.heads(key).transpose(-1, -2) / math.sqrt(width / HEADS)
        query_time, key_time = (m[:, SIZE:].reshape(width, HEADS, -1) for m in (query_matrix, key_matrix))
        a1q = torch.einsum("bnc,cht->bhnt", query, key_time)
        a1k = torch.einsum("bnc,cht->bhnt", key, query_time)
        return a0, a1q, a1k, torch.einsum("cht,cht->ht", query_time, key_time)

    def attention(self, operator, name, values, depth, hidden):
        a0, a1q, a1k, a2 = operator
        w = self.w[f"{name}.coefficients"]
        phase = depth * math.pi / 64 * torch.arange(len(w) // 2, dtype=torch.float64)
        time = (w * torch.cat((phase.sin(), phase.cos()))).view(HEADS, -1)
        scores = a0 + torch.einsum("bhnt,ht->bhn", a1q, time)[..., None]
        scores = scores + torch.einsum("bhmt,ht->bhm", a1k, time)[:, :, None, :]
        scores = scores + torch.einsum("ht,ht->h", a2, time**2)[:, None, None]
        mixed = (scores - 1e9 * hidden).softmax(-1) @ self.heads(self.norm(f"{name}.norm", values))
        return mixed.transpose(1, 2).flatten(2) @ self.w[f"{name}.linear_out"]

    def projection(self, name, h, depth):
        if f"{name}.kernel" in self.w:
            return h @ self.w[f"{name}.kernel"] + self.w[f"{name}.bias"]
        left, right = self.w[f"{name}.G_U"], self.w[f"{name}.G_V"]
        a, c = len(left), len(right)
        angles = [depth * math.pi / len(g) * torch.arange(g.shape[1], dtype=torch.float64) * g for g in (left, right)]
        u, v = (torch.cat((angle.sin(), angle.cos()), dim=1) / math.sqrt(c) for angle in angles)
        sigma = torch.zeros(a, c, dtype=torch.float64)
        for j in range(min(a, c)):
            sigma[j, j] = self.w[f"{name}.svals"][j, 0]
        return h @ (u @ sigma @ v) + self.w[f"{name}.bias"]

    def ff(self, name, x, depth):
        inner = self.projection(f"{name}.ff.1", self.norm(f"{name}.ff.norm", x), depth).relu()
        return self.projection(f"{name}.ff.2", inner, depth)

    def embed(self, ids):
        half = SIZE // 2
        scale = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(10000) / (half - 1)))
        angle = torch.arange(ids.shape[1], dtype=torch.float64)[:, None] * scale
        return math.sqrt(SIZE) * self.w["embedding"][ids] + torch.cat((angle.sin(), angle.cos()), dim=1)

    def logits(self, source, target):
        padding = (source == 0).double()[:, None, None]
        future = torch.ones(target.shape[1], target.shape[1]).triu(1)
        x = self.embed(source)
        for b in range(self.segments):
            operator = self.operator(f"encoder.segment{b}.", x, x)
            for i in range(self.layers):
                name = f"encoder.segment{b}.layer{i}"
                x = x + self.attention(operator, f"{name}.attention", x, i, padding)
                x = x + self.ff(name, x, i)
            x = self.norm(f"encoder.segment{b}.out_norm", x)
        memory, x = x, self.embed(target)
        for b in range(self.segments):
            own = self.operator(f"decoder.segment{b}.self.", x, x)
            cross = self.operator(f"decoder.segment{b}.cross.", x, memory)
            for i in range(self.layers):
                name = f"decoder.segment{b}.layer{i}"
                x = x + self.attention(own, f"{name}.self", x, i, future)
                x = x + self.attention(cross, f"{name}.cross", memory, i, padding)
                x = x + self.ff(name, x, i)
            x = self.norm(f"decoder.segment{b}.out_norm", x)
        return x @ self.w["embedding"].T


@pytest.mark.parametrize("feed_forward", ["full", "random"])
@pytest.mark.parametrize("tau", [SIZE // HEADS, 6])
def test_transevolve_gives_the_published_logits(feed_forward, tau):
    arrays = transevolve_arrays(feed_forward, tau=tau)
    model = load_published("transevolve", arrays, num_heads=HEADS)
    source, target = torch.randint(3, VOCABULARY, (2, 7)), torch.randint(3, VOCABULARY, (2, 5))
    source[1, 4:] = 0
    with torch.no_grad():
        found = model(input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=target).logits
    expected = TransEvolveReference(arrays).logits(source, target)
    assert expected.std() > 0.1
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda a: a.pop("embedding"), "embedding is missing"),
        (lambda a: a.pop("decoder.segment1.layer2.cross.coefficients"), "layer2.cross.coefficients is missing"),
        (lambda a: a.update({"encoder.segment0.surprise": np.zeros(2)}), "unknown array encoder.segment0.surprise"),
    ],
)
def test_transevolve_arrays_that_do_not_fit_are_refused_by_name(change, complaint):
    arrays = transevolve_arrays("full")
    change(arrays)
    with pytest.raises(UserError, match=complaint):
        load_published("transevolve", arrays, num_heads=HEADS)
