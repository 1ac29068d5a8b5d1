"""The attention seam: unchanged outputs with nothing attached, exact scales, clean uninstall."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from families import FAMILIES, SHAPE, VOCABULARY, Family, tokens
from farspan.attention import backends, seam
from farspan.attention.call import scale_queries
from farspan.attention.probe import probe
from farspan.attention.scales import BASES, Scales
from farspan.errors import FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def padded_batch() -> dict[str, torch.Tensor]:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def scales_for(model, value: float | None = None, basis: str = "constant") -> Scales:
    """One value for all heads, or random scales above 1, for every attention layer."""
    layers = probe(model)
    indices, shape = tuple(layer.index for layer in layers), (len(layers), layers[0].heads)
    generator = torch.Generator().manual_seed(5)
    base = torch.full(shape, value) if value else 1 + torch.rand(shape, generator=generator)
    slope = None if basis == "constant" else torch.rand(shape, generator=generator)
    return Scales(indices, base, slope, basis, 6).check(64)


@every_family
@torch.no_grad()
def test_scale_one_is_bit_identical(family: Family):
    model = family.build()
    calls = [{"input_ids": tokens()}, padded_batch()]
    stock = [model(**call, use_cache=False).logits for call in calls]
    generated = model.generate(tokens(9), max_new_tokens=4, do_sample=False)
    for scales in (None, scales_for(model, 1.0)):
        seam.install(model, scales)
        for call, expected in zip(calls, stock, strict=True):
            assert torch.equal(model(**call, use_cache=False).logits, expected)
        assert torch.equal(model.generate(tokens(9), max_new_tokens=4, do_sample=False), generated)


@every_family
@torch.no_grad()
def test_uninstall_restores_the_model(family: Family):
    model = family.build()
    before_config, before_state = model.config.to_dict(), copy.deepcopy(model.state_dict())
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    expected = model(tokens(), use_cache=False).logits
    seam.install(model, scales_for(model, basis="log"))
    assert list(model.state_dict()) == list(before_state), (
        "scales must not leak into a saved checkpoint"
    )
    assert not torch.equal(model(tokens(), use_cache=False).logits, expected)
    with seam.observing(model, lambda call: None):
        pass
    seam.uninstall(model)
    assert model.config.to_dict() == before_config
    assert model.config._attn_implementation == family.attention
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(value, before_state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(tokens(), use_cache=False).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "farspan-none", "farspan-alibi"])
def test_scaling_queries_equals_scaling_the_query_projection(name: str):
    model = next(family for family in FAMILIES if family.name == name).build()
    scales = scales_for(model)
    expected = seam.install(copy.deepcopy(model), scales)(tokens()).logits
    for layer, row in zip(model.model.layers, scales.base, strict=True):
        layer.self_attn.q_proj.weight.mul_(row.repeat_interleave(layer.self_attn.head_dim)[:, None])
    assert (model(tokens()).logits - expected).abs().max() < 1e-6


@pytest.mark.parametrize("basis", [basis for basis in BASES if basis != "constant"])
@torch.no_grad()
def test_schedule_equals_the_constant_scale_of_its_length(basis: str):
    """The last of n tokens gets λ̂(n); with one layer, the scales of other tokens do not count."""
    model = FarspanForCausalLM(
        FarspanConfig(**{**SHAPE, "num_hidden_layers": 1, "position": "none"})
    ).eval()
    for parameter in model.parameters():
        parameter.mul_(5)
    schedule = scales_for(model, basis=basis)
    for n in (1, 2, 5, 6, 7, 12, 24):
        scheduled = seam.install(model, schedule)(tokens(n)).logits[:, -1]
        constant = Scales((0,), schedule.at(torch.tensor([n]))[..., 0])
        expected = seam.install(model, constant)(tokens(n)).logits[:, -1]
        assert (expected - scheduled).abs().max() < 1e-6


def test_frozen_model_gives_gradients_only_to_scales():
    model = FAMILIES[0].build().train()
    scales = scales_for(model, basis="log")
    scales.base.requires_grad_()
    scales.slope.requires_grad_()
    seam.install(model, scales)
    with seam.frozen(model):
        model(tokens(), labels=tokens()).loss.backward()
    assert all(
        parameter.grad is None and parameter.requires_grad for parameter in model.parameters()
    )
    assert (scales.base.grad != 0).all()
    assert (scales.slope.grad != 0).all()


@pytest.mark.parametrize("table", ["base", "slope"])
def test_scale_gradients_equal_finite_differences(table: str):
    model = FAMILIES[0].build(dtype=torch.float64)
    scales = scales_for(model, basis="log")
    scales = Scales(scales.layers, scales.base.double(), scales.slope.double(), "log", 6)
    values = getattr(scales, table).requires_grad_()
    seam.install(model, scales)

    def loss() -> torch.Tensor:  # the model's loss is computed in float32
        return torch.nn.functional.cross_entropy(
            model(tokens()).logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()
        )

    with seam.frozen(model):
        loss().backward()
        for row, head in ((0, 0), (1, 3), (3, 2)):
            step = 1e-5
            with torch.no_grad():
                values[row, head] += step
                above = loss()
                values[row, head] -= 2 * step
                below = loss()
                values[row, head] += step
            assert values.grad[row, head].item() == pytest.approx(
                ((above - below) / (2 * step)).item(), rel=1e-5
            )


def test_optimizer_updates_installed_scales():
    model = FAMILIES[0].build()
    scales = scales_for(model, 1.5)
    optimizer = torch.optim.SGD([scales.base.requires_grad_()], lr=50.0)
    seam.install(model, scales)
    losses = []
    with seam.frozen(model):
        for _ in range(3):
            loss = model(tokens(), labels=tokens()).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


def test_models_sharing_a_config_object_stay_independent():
    config = FarspanConfig(**SHAPE)
    first, second = FarspanForCausalLM(config).eval(), FarspanForCausalLM(config).eval()
    expected = second(tokens()).logits
    seam.install(first, scales_for(first))
    assert torch.equal(second(tokens()).logits, expected)
    assert not seam.installed(second)
    seam.install(second, scales_for(second))
    scaled = second(tokens()).logits
    seam.uninstall(first)
    assert torch.equal(second(tokens()).logits, scaled)


@every_family
def test_observers_see_every_attention_layer_once_and_change_nothing(family: Family):
    model = family.build()
    expected = model(tokens(), use_cache=False).logits
    calls: list[seam.Call] = []
    with seam.observing(model, calls.append):
        assert torch.equal(model(tokens(), use_cache=False).logits, expected)
    assert [call.layer for call in calls] == [layer.index for layer in probe(model)]
    for call in calls:
        assert not call.q.requires_grad
        visible = visible_keys(call).expand(2, -1).tolist()
        window = call.options.get("sliding_window")
        if window is None and family.name != "llama4":  # its chunks are only in the mask
            assert visible == [list(range(1, 25))] * 2
        elif window is not None:
            assert visible == [[min(n, window) for n in range(1, 25)]] * 2


def visible_keys(call: seam.Call) -> torch.Tensor:
    return backends.visible_keys(call.q, call.k, call.mask)


def test_an_observer_ends_alone_while_a_later_one_goes_on():
    model, first, second = FAMILIES[0].build(), [], []
    blocks = [seam.observing(model, calls.append) for calls in (first, second)]
    for block in blocks:
        block.__enter__()
    for block in blocks:
        model(tokens())
        block.__exit__(None, None, None)
    model(tokens())
    assert (len(first), len(second)) == (4, 8)


def test_visible_keys_exclude_padding_and_other_packed_documents():
    model = FAMILIES[0].build()
    calls: list[seam.Call] = []
    with seam.observing(model, calls.append):
        model(**padded_batch(), use_cache=False)
        assert visible_keys(calls[0]).tolist() == [
            [0] * 5 + list(range(1, 20)),
            list(range(1, 25)),
        ]
        calls.clear()
        positions = torch.cat((torch.arange(10), torch.arange(14)))[None]
        model(tokens(batch=1), position_ids=positions, use_cache=False)
        assert visible_keys(calls[0]).tolist() == [[*range(1, 11), *range(1, 15)]]


@pytest.mark.parametrize("reentrant", [False, True])
def test_observers_run_once_under_gradient_checkpointing(reentrant: bool):
    model = FAMILIES[0].build().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    layers = []
    with seam.observing(model, lambda call: layers.append(call.layer)):
        model(tokens(), labels=tokens()).loss.backward()
    assert layers == [0, 1, 2, 3]
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_using_replaces_the_backend_in_its_block():
    model = FAMILIES[0].build()
    expected = model(tokens()).logits

    def mean_of_values(module, query, key, value, mask, **kwargs):
        mean = value.cumsum(2) / torch.arange(1, value.shape[2] + 1)[:, None]
        return mean.repeat_interleave(module.num_key_value_groups, 1).transpose(1, 2), None

    with seam.using(model, mean_of_values):
        seam_output = model(tokens(), use_cache=False).logits
    assert not torch.allclose(seam_output, expected)
    # A scale near 0 makes attention uniform, which is the same mean.
    uniform = Scales.uniform(1e-30, range(4), 4)
    assert (seam.install(model, uniform)(tokens()).logits - seam_output).abs().max() < 1e-6


@torch.no_grad()
def test_nested_blocks_restore_observers_backend_and_scales():
    model = FAMILIES[0].build()
    expected = model(tokens()).logits
    scales = scales_for(model)
    layers: list[int] = []

    def record(call: seam.Call) -> None:
        layers.append(call.layer)

    def queries(module, q, k, v, mask, **kwargs):
        return q.transpose(1, 2), None

    with seam.observing(model, record), seam.using(model, queries):
        with seam.observing(model, record):
            model(tokens())
        assert len(layers) == 8
        model(tokens())
        assert len(layers) == 12, "the outer observer stays when the inner one is removed"
        seam.install(model, scales)
    scaled = model(tokens()).logits
    assert not torch.equal(scaled, expected), "scales installed inside a block stay"
    assert torch.equal(scaled, seam.install(FAMILIES[0].build(), scales)(tokens()).logits)
    assert torch.equal(seam.install(model)(tokens()).logits, expected), (
        "installing without scales clears them"
    )


def test_scales_of_a_block_end_with_it():
    model = FAMILIES[0].build()
    expected = model(tokens()).logits
    with pytest.raises(ZeroDivisionError), seam.scaled(model, scales_for(model)):
        scaled = model(tokens()).logits
        with seam.scaled(model, None):
            assert torch.equal(model(tokens()).logits, scaled)
        assert torch.equal(model(tokens()).logits, scaled), "no scales to begin or to end"
        _ = 1 / 0
    assert not torch.equal(scaled, expected)
    assert torch.equal(model(tokens()).logits, expected)
    assert not seam.installed(model)


def test_probe_and_install_keep_training_modes_and_random_state():
    model = FAMILIES[0].build().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    probe(model)
    seam.install(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_bf16_queries_are_scaled_in_float32_and_rounded_once():
    q = torch.randn(1, 4, 8, 8).bfloat16()
    base = 1 + torch.rand(1, 4)
    scaled = scale_queries(q, q, None, Scales((0,), base))
    assert torch.equal(scaled, (q.float() * base[0][:, None, None]).bfloat16())
    assert scaled.dtype == torch.bfloat16


def test_a_position_table_of_two_rows_is_enough_to_see_every_layer():
    config = hf.GPT2Config(vocab_size=8, n_embd=8, n_layer=2, n_head=2, n_positions=2)
    assert len(seam.attention_calls(hf.GPT2LMHeadModel(config))) == 2


def test_layers_with_equal_indices_are_renumbered():
    model = FAMILIES[0].build()
    for layer in model.model.layers:
        layer.self_attn.layer_idx = -1
    assert [call.layer for call in seam.attention_calls(model)] == [0, 1, 2, 3]


def test_farspan_models_run_on_eager():
    model = FAMILIES[0].build()
    expected = seam.install(model, scales_for(model))(tokens(), use_cache=False).logits
    seam.uninstall(model)
    model.set_attn_implementation("eager")
    scaled = seam.install(model, scales_for(model))(tokens(), use_cache=False).logits
    assert (scaled - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    "bad", [torch.full((4, 4), torch.nan), -torch.ones(4, 4), torch.ones(4, 4).bfloat16()]
)
def test_install_refuses_invalid_scales(bad: torch.Tensor):
    model = FAMILIES[0].build()
    with pytest.raises(FarspanError):
        seam.install(model, Scales(tuple(range(4)), bad))
    assert not seam.installed(model)


OFF_INTERFACE = {
    "bloom": lambda: hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: hf.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64
    ),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
    ),
}


@pytest.mark.parametrize("name", OFF_INTERFACE)
def test_refuses_models_off_the_attention_interface(name: str):
    model = hf.AutoModelForCausalLM.from_config(OFF_INTERFACE[name]()).eval()
    expected = model(tokens()).logits
    with pytest.raises(
        FarspanError, match="does not call transformers' attention interface.*evaluate it as it is"
    ):
        seam.install(model)
    assert torch.equal(model(tokens()).logits, expected)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma2"])
def test_refuses_sinks_and_soft_caps_on_sdpa(name: str):
    model = next(family for family in FAMILIES if family.name == name).build()
    model.config._attn_implementation_internal = "sdpa"  # past transformers' check
    with pytest.raises(FarspanError, match='load it with attn_implementation="eager"'):
        seam.install(model)


def test_refuses_sinks_on_sdpa_where_transformers_allows_them(monkeypatch):
    model = next(family for family in FAMILIES if family.name == "gpt-oss").build()
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    model.set_attn_implementation("sdpa")
    with pytest.raises(FarspanError, match="attention sinks, which SDPA drops"):
        seam.install(model)


def test_refuses_scales_of_another_model():
    model = FAMILIES[0].build()
    with pytest.raises(FarspanError, match="layer 7, .*attention in layers"):
        seam.install(model, Scales.uniform(1.2, (0, 7), 4))
    with pytest.raises(FarspanError, match="8 heads, but layer 0 has 4"):
        seam.install(model, Scales.uniform(1.2, range(4), 8))
    with pytest.raises(FarspanError, match="8 heads, but layer 2 has 4"):
        seam.install(model, Scales.uniform(1.2, (2,), 8))
    assert not seam.installed(model)


@pytest.mark.parametrize("kind", ["none", "scaled", "rope"])
def test_compiled_layers_share_two_graphs_and_pass_sdpa_no_mask(kind: str):
    config = FarspanConfig(
        **{**SHAPE, "num_hidden_layers": 12, "position": "rope" if kind == "rope" else "none"}
    )
    model = FarspanForCausalLM(config)
    expected = model(tokens(), use_cache=False).logits
    if kind == "scaled":
        scales = scales_for(model, basis="log")
        scales.base.requires_grad_()
        expected = seam.install(model, scales)(tokens(), use_cache=False).logits
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=collect, fullgraph=True)
    for _ in range(2):
        output = model(tokens(), labels=tokens(), use_cache=False)
        output.loss.backward()
    assert (output.logits - expected).abs().max() < 1e-6
    assert len(graphs) <= 2
    for graph in graphs:
        (call,) = graph.graph.find_nodes(
            op="call_function", target=torch._C._nn.scaled_dot_product_attention
        )
        assert call.kwargs["attn_mask"] is None
        assert call.kwargs["is_causal"] is True
