"""farspan's model: every position encoding equals its definition, and with rope it equals Llama."""

from __future__ import annotations

import cmath
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from families import FAMILIES, OURS, SHAPE, tokens
from farspan.errors import FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.attend import attend, attend_flex
from farspan.model.positions import AlibiBias, PlacedBias, T5Bias, TableBias, alibi_slopes

every_encoding = pytest.mark.parametrize("family", OURS, ids=lambda family: family.name)


# ---- one layer against a NumPy reference ---------------------------------------------------------


def reference_logits(model: FarspanForCausalLM, ids: list[int]) -> np.ndarray:
    """A one-layer model by definition, in loops; it shares no code with the model."""
    config = model.config
    weight = {name: value.double().numpy() for name, value in model.state_dict().items()}
    layer = {name.removeprefix("model.layers.0."): value for name, value in weight.items()}
    x = weight["model.embed_tokens.weight"][ids]
    if config.position[0] == "learned":
        x = x + weight["model.positions.learned.table.weight"][: len(ids)]
    if config.position[0] == "sinusoidal":
        half = x.shape[1] // 2
        for t in range(len(ids)):
            for i in range(half):
                angle = t * 10_000 ** (-i / half)
                x[t, i] += math.sin(angle)
                x[t, half + i] += math.cos(angle)
    h = rms_norm(x, layer["input_layernorm.weight"], config.rms_norm_eps)
    x = x + reference_attention(h, layer, weight, config) @ layer["self_attn.o_proj.weight"].T
    h = rms_norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
    up = h @ layer["mlp.up_proj.weight"].T
    if config.mlp == "swiglu":
        gate = h @ layer["mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = np.maximum(up, 0)
    x = x + hidden @ layer["mlp.down_proj.weight"].T
    return (
        rms_norm(x, weight["model.norm.weight"], config.rms_norm_eps) @ weight["lm_head.weight"].T
    )


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def reference_attention(
    h: np.ndarray, layer: dict, weight: dict, config: FarspanConfig
) -> np.ndarray:
    width, heads = config.head_dim, config.num_attention_heads
    q, k, v = (h @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    output = np.zeros((len(h), heads * width))
    for head in range(heads):
        shared = head // (heads // config.num_key_value_heads)
        for i in range(len(h)):
            first = max(0, i - config.sliding_window + 1) if config.sliding_window else 0
            visible = range(first, i + 1)
            scores = []
            for j in visible:
                query = q[i, head * width : (head + 1) * width]
                key = k[j, shared * width : (shared + 1) * width]
                if config.position[0] == "rope":
                    rotated = int(width * config.rotary_fraction)
                    query, key = rotate(query, i, rotated), rotate(key, j, rotated)
                score = config.base_scale * float(query @ key)
                if config.position[0] == "alibi":
                    score -= 2 ** (-8 * (head + 1) / heads) * (i - j)
                if config.position[0] == "t5":
                    score += weight["model.positions.t5.bias.table.weight"][t5_bucket(i - j), head]
                scores.append(score)
            p = np.exp(np.array(scores) - max(scores))
            values = v[list(visible), shared * width : (shared + 1) * width]
            output[i, head * width : (head + 1) * width] = p / p.sum() @ values
    return output


def rotate(x: np.ndarray, position: int, dims: int) -> np.ndarray:
    """Rotation as a product of complex numbers; dimension i pairs with dimension i + dims/2."""
    x, half = x.copy(), dims // 2
    for i in range(half):
        z = complex(x[i], x[i + half]) * cmath.exp(1j * position * 10_000 ** (-2 * i / dims))
        x[i], x[i + half] = z.real, z.imag
    return x


def t5_bucket(distance: int) -> int:
    if distance < 16:
        return distance
    return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "extra",
    [
        {"position": "none"},
        {"position": "rope"},
        {"position": "rope", "rotary_fraction": 0.25},
        {"position": "alibi"},
        {"position": "t5", "base_scale": 1.0, "mlp": "relu"},
        {"position": "learned"},
        {"position": "sinusoidal", "tie_word_embeddings": False},
    ],
    ids=lambda extra: "-".join(map(str, extra.values())),
)
@torch.no_grad()
def test_each_encoding_equals_its_definition(extra: dict, window: int | None):
    spec = {**SHAPE, **extra, "num_hidden_layers": 1}
    spec["position"] += f"/{window}" if window else ""
    model = FarspanForCausalLM(FarspanConfig(**spec)).double().eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    ids = tokens(40, batch=1)
    expected = reference_logits(model, ids[0].tolist())
    error = np.abs(model(ids).logits[0].numpy() - expected).max() / np.abs(expected).max()
    assert error < 2e-6  # angles and sinusoids are computed in float32


def test_biases_equal_bloom_and_t5():
    for heads in (4, 6, 8, 12):
        slopes = AlibiBias(heads).slopes
        bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]
        assert torch.allclose(slopes.double(), bloom, atol=1e-7)
    assert alibi_slopes(12)[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    distance = torch.arange(5000)
    ours = T5Bias(4, 32, 128).bucket(distance)
    assert torch.equal(ours, T5Attention._relative_position_bucket(-distance, False, 32, 128))


@pytest.mark.parametrize("rule", [AlibiBias(4), T5Bias(4, 32, 128)], ids=["alibi", "t5"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_tensor_paths_agree(rule):
    q, k, v = torch.randn(2, 4, 24, 16), torch.randn(2, 2, 24, 16), torch.randn(2, 2, 24, 16)
    index = torch.arange(24)
    bias = PlacedBias(rule(24), rule.heads, index, index)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    tensor, _ = attend(module, q, k, v, None, bias=bias, scaling=0.25)
    with torch.no_grad():  # FlexAttention has no backward on the CPU
        flex = attend_flex(q, k, v, bias, 0.25, compiled=False)
        # Under no_grad the table takes no gradient, so its values are gathered directly.
        fixed = replace(bias, function=rule(24))
        gathered = attend_flex(q, k, v, fixed, 0.25, compiled=False)
    assert (tensor - flex).abs().max() < 1e-6
    assert (tensor - gathered).abs().max() < 1e-6
    rows = bias.tensor(slice(10, 13))
    assert torch.equal(rows, bias.tensor()[:, :, 10:13])


def test_toeplitz_bias_and_its_gradient_equal_gathering():
    matrices, gradients = [], []
    for as_toeplitz in (True, False):
        torch.manual_seed(0)
        table = TableBias(torch.randn(3, 40, requires_grad=True))
        index = torch.arange(24)
        gathered = PlacedBias(table, 3, index, index).tensor()[0]
        matrix = (table.toeplitz(24) if as_toeplitz else gathered).tril()
        (matrix * torch.randn(3, 24, 24)).sum().backward()
        matrices.append(matrix)
        gradients.append(table.values.grad)
    assert torch.equal(*matrices)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5


# ---- invariances of NoPE -------------------------------------------------------------------------


@torch.no_grad()
def test_only_nope_and_score_biases_ignore_position_ids():
    """Score biases use cache slots instead of position ids."""
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    shuffled = torch.randperm(24)[None]
    for family in OURS:
        model = family.build()
        before = model(ids, attention_mask=mask).logits
        after = model(ids, attention_mask=mask, position_ids=shuffled).logits
        if set(family.positions) <= {"none", "alibi", "t5"}:
            assert torch.equal(before, after)
        else:
            assert (before - after).abs().max() > 1e-4, family.name


@torch.no_grad()
def test_one_nope_layer_is_invariant_to_the_order_of_the_past():
    for position, invariant in (
        ("none", True),
        ("rope", False),
        ("alibi", False),
        ("sinusoidal", False),
    ):
        config = FarspanConfig(**{**SHAPE, "num_hidden_layers": 1, "position": position})
        model = FarspanForCausalLM(config).double().eval()
        for parameter in model.parameters():
            parameter.mul_(5)
        ids = tokens()
        permuted = torch.cat((ids[:, :-1][:, torch.randperm(23)], ids[:, -1:]), 1)
        change = (model(ids).logits[:, -1] - model(permuted).logits[:, -1]).abs().max()
        assert (change < 1e-12) == invariant, position
    # Several layers are not: through the causal mask, past tokens depend on their own past.
    model = FAMILIES[0].build()
    assert (model(ids).logits[:, -1] - model(permuted).logits[:, -1]).abs().max() > 1e-5


# ---- Llama ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@torch.no_grad()
def test_rope_model_equals_llama(rope: dict):
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, rope_parameters=dict(rope))).eval()
    ours = FarspanForCausalLM(
        FarspanConfig(
            **SHAPE, position="rope", rope_parameters=dict(rope), tie_word_embeddings=False
        )
    ).eval()
    assert set(ours.state_dict()) == set(llama.state_dict())
    ours.load_state_dict(llama.state_dict())
    ids = tokens(100)  # beyond max_position_embeddings, where dynamic NTK changes the frequencies
    assert (ours(ids).logits - llama(ids).logits).abs().max() < 1e-6


def test_llama_refuses_a_nope_checkpoint(tmp_path):
    FAMILIES[0].build().save_pretrained(tmp_path)
    with pytest.raises(KeyError, match="none"):
        hf.LlamaForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(KeyError, match="none"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


# ---- config --------------------------------------------------------------------------------------


def test_config_expands_hybrid_position_patterns():
    smollm3 = FarspanConfig(num_hidden_layers=8, position=["rope", "rope", "rope", "none"])
    assert smollm3.position == ["rope", "rope", "rope", "none"] * 2
    assert smollm3.sliding_window is None
    swan = FarspanConfig(num_hidden_layers=8, position=["rope/128", "rope/128", "rope/128", "none"])
    assert swan.layer_types == (["sliding_attention"] * 3 + ["full_attention"]) * 2
    assert swan.sliding_window == 128
    assert FarspanConfig.from_dict(swan.to_dict()).to_dict() == swan.to_dict()


def test_masks_exist_only_where_keys_are_hidden(monkeypatch):
    """Also while tracing or recording: a mask in only some calls would compile a layer twice."""
    masks: dict[int, object] = {}

    def record_mask(module, q, k, v, mask, **kwargs):
        masks[module.layer_idx] = mask
        return attend(module, q, k, v, None, **{**kwargs, "sliding_window": None})

    def layers_with_mask(position: object, implementation: str = "recorded") -> list[bool]:
        model = FarspanForCausalLM(FarspanConfig(**SHAPE, position=position))
        monkeypatch.setattr(model.config, "_attn_implementation_internal", implementation)
        model(tokens(24), use_cache=False)
        return [masks[index] is not None for index in range(len(masks))]

    monkeypatch.setattr(hf.masking_utils, "is_tracing", lambda *tensors: True)
    # FlexAttention always gets a mask; its own mask function compiles for half a minute.
    for name, mask_function in (
        ("recorded", hf.masking_utils.sdpa_mask),
        ("flex_attention", hf.masking_utils.eager_mask),
    ):
        monkeypatch.setitem(hf.AttentionInterface._global_mapping, name, record_mask)
        monkeypatch.setitem(hf.AttentionMaskInterface._global_mapping, name, mask_function)
    assert not any(layers_with_mask("none"))
    assert not any(layers_with_mask("rope/24"))
    assert layers_with_mask(["rope/23", "none"]) == [True, False] * 2
    assert all(layers_with_mask("none", "flex_attention"))


PACKED = ("none", "rope", "rope/5", "alibi", "t5", "kerple", "cope", "learned", "sinusoidal")


@pytest.mark.parametrize("position", PACKED)
@torch.no_grad()
def test_packed_texts_are_computed_as_separate_ones(position: str):
    model = FarspanForCausalLM(FarspanConfig(**SHAPE, position=position)).double().eval()
    for name, parameter in model.named_parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3 * ("norm" not in name))
    texts = tokens(9, batch=1), tokens(16, batch=1)[:, 9:]
    places = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    expected = torch.cat([model(text, use_cache=False).logits for text in texts], dim=1)
    whole = torch.cat(texts, dim=1)
    packed = model(whole, position_ids=places, use_cache=False).logits
    assert (packed - expected).abs().max() < 1e-10
    assert (model(whole, use_cache=False).logits - expected).abs().max() > 1e-3


def test_rope_type_none_makes_rope_layers_nope():
    config = FarspanConfig(
        num_hidden_layers=4, position=["rope", "none"], rope_parameters={"rope_type": "none"}
    )
    assert config.position == ["none"] * 4


BAD_CONFIGS = {
    "'rpoe' is unknown; did you mean rope": {"position": "rpoe"},
    "choose one of none, rope": {"position": "xyz"},
    r"window sizes \[64, 128\]": {"position": ["rope/128", "rope/64"]},
    r"window sizes \[64, 128\].*one sliding_window": {"position": "rope/128", "sliding_window": 64},
    "has no valid window": {"position": "rope/"},
    "has no valid window; write it as rope/128": {"position": "rope/-1"},
    "'none/1' has no valid window; .* with a window of 2 or more": {"position": "none/1"},
    "sliding_window is 1; set a window size of 2 or more": {
        "layer_types": ["sliding_attention"] * 8,
        "sliding_window": 1,
    },
    "3 entries does not fit 8 layers": {"position": ["none"] * 3},
    "0 entries does not fit": {"position": []},
    "'learned' is added to the embeddings": {"position": ["learned", "none"]},
    "8 query heads cannot share 3": {"num_key_value_heads": 3},
    "500 is not a multiple of 8 heads": {"hidden_size": 500},
    "11 dimensions of a head are rotated; choose an even number": {
        "hidden_size": 88,
        "num_attention_heads": 8,
        "position": "rope",
    },
    "mlp 'gelu' is unknown": {"mlp": "gelu"},
    "num_key_value_heads is -1; set a whole number of 1 or more": {"num_key_value_heads": -1},
    "num_attention_heads is 0": {"num_attention_heads": 0},
    "num_hidden_layers is 0": {"num_hidden_layers": 0},
    "num_hidden_layers is 'x'": {"num_hidden_layers": "x"},
    "hidden_size is 0": {"hidden_size": 0},
    "intermediate_size is 0": {"intermediate_size": 0},
    "head_dim is -2": {"head_dim": -2},
    "vocab_size is -1": {"vocab_size": -1},
    "max_position_embeddings is 0": {"max_position_embeddings": 0},
    "position_table is -3": {"position_table": -3, "position": "learned"},
    "t5_buckets is 1 and": {"t5_buckets": 1, "position": "t5"},
    "t5_max_distance is 16; set": {"t5_max_distance": 16, "position": "t5"},
    "rotary_fraction is 0, which rotates 0 dimensions": {
        "rotary_fraction": 0.0,
        "position": "rope",
    },
    "rotary_fraction is 2, which rotates 128": {"rotary_fraction": 2.0, "position": "rope"},
    "sliding_window is None": {"layer_types": ["sliding_attention"] * 8},
    "layer_types names 'linear'": {"layer_types": ["linear"] * 8},
    "2 entries for 8 layers": {"layer_types": ["full_attention"] * 2},
    "position None is not a name": {"position": None},
    "position 3 is not a name": {"position": ["none", 3]},
    r"custom_encodings is \['a'\]; write names": {"custom_encodings": ["a"]},
    "custom_encodings has the name '../x'; write": {"custom_encodings": {"../x": "x.py:X"}},
    "custom_encodings has the name 'fire'": {"custom_encodings": {"fire": "x.py:X"}},
    "custom_encodings.mine is 3; write file.py:Class": {"custom_encodings": {"mine": 3}},
    "sinusoidal positions come in pairs": {
        "hidden_size": 33,
        "num_attention_heads": 3,
        "position": "randomized",
    },
    "'randomized' is added to the embeddings": {"position": ["randomized", "fire"]},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_config_refuses_impossible_values(message: str):
    with pytest.raises(FarspanError, match=message):
        FarspanConfig(**BAD_CONFIGS[message])


def test_refuses_attention_that_drops_the_bias():
    model = next(family for family in OURS if family.name == "farspan-alibi").build()
    for name in ("flex_attention", "paged|eager"):
        with pytest.raises(FarspanError, match="would drop the score bias"):
            model.set_attn_implementation(name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", [AlibiBias(8), T5Bias(8, 32, 128)], ids=["alibi", "t5"])
def test_compiled_flex_and_tensor_paths_agree_on_gpu_with_gradients(rule):
    """In bf16, against float32: forward, and the gradients of q, k, v and of T5's table."""
    torch.manual_seed(0)
    rule = rule.cuda()
    index = torch.arange(512, device="cuda")
    parts = [
        torch.randn(2, heads, 512, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    ]
    weight = torch.randn(2, 512, 8, 64, device="cuda")
    results = []
    for compiled in (True, False):
        q, k, v = (part.clone().requires_grad_() for part in parts)
        rule.zero_grad()
        bias = PlacedBias(rule(512), rule.heads, index, index)
        if compiled:
            output = attend_flex(q, k, v, bias, 0.125, compiled=True)
        else:
            k4, v4 = (part.float().repeat_interleave(4, 1) for part in (k, v))
            scores = q.float() @ k4.mT * 0.125 + bias.tensor()
            causal = index[:, None] >= index
            output = (scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v4).transpose(1, 2)
        (output * weight).sum().backward()
        tables = [parameter.grad.clone() for parameter in rule.parameters()]
        results.append([output.detach(), q.grad, k.grad, v.grad, *tables])
    for fast, slow in zip(*results, strict=True):
        error = (fast.float() - slow.float()).norm() / slow.float().norm()
        assert error < 2e-2


def test_padding_token_is_trained_where_it_is_an_input():
    """In pretraining the end-of-text token is also the padding token."""
    config = FarspanConfig(
        **{**SHAPE, "pad_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False}
    )
    model = FarspanForCausalLM(config)
    model(torch.tensor([[5, 1, 7]])).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad[1].abs().max() > 0
    assert model.model.embed_tokens.weight[1].abs().max() > 0
