"""farspan's model is a full citizen of transformers: what its users expect of a causal model holds.

The laws are those that transformers' published test suite checks for every causal language model,
in our own words. NOT_APPLICABLE lists those of its assumptions that do not hold here, with reasons.
"""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch.nn import functional as F

from families import OURS, SHAPE, VOCABULARY, Family, tokens
from farspan.errors import FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM, FarspanModel

# What transformers' suite tests and this model does not have; docs/python.md has the same list.
NOT_APPLICABLE = {
    "heads for classification and question answering": "there is a base model and a causal LM",
    "contrastive, group beam, constrained and DoLa search": "transformers 5 loads their code from "
    "the hub",
    "feed-forward chunking": "as in Llama, layers ignore `chunk_size_feed_forward`",
    "resizing a table of positions": "set `position_table` before training",
    "attention weights on SDPA": "SDPA computes none, in any family; set `eager`",
    "Flash and FlexAttention with alibi, t5, kerple, fire or cope": "they would drop the score "
    "bias, so they are refused",
    "padded batches and static caches with kerple, fire or cope": "scores depend on more than "
    "distances; they are refused",
    "caches with randomized positions": "positions are drawn for a whole text",
    "a window under a 4D mask": "a 4D mask is used as it is, in any family",
    "alibi and t5 under a 4D mask": "they count places among the keys, not position ids",
    "plans for tensor and pipeline parallelism": "the config declares none",
    "quantized and offloaded caches": "not tested: they need further packages or a GPU",
}

CITIZENS = OURS[:8]  # one of each encoding, a hybrid, and one with windows
UNBIASED = [family for family in CITIZENS if family.attention == "sdpa"]
every_config = pytest.mark.parametrize("family", CITIZENS, ids=lambda family: family.name)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def models() -> dict[str, FarspanForCausalLM]:
    """One model of each config that tests only read."""
    return {family.name: family.build() for family in CITIZENS}


@pytest.fixture
def model(models, family: Family) -> FarspanForCausalLM:
    return models[family.name]


@pytest.fixture
def own_model(family: Family) -> FarspanForCausalLM:
    """A model that a test may change."""
    return family.build()


@pytest.fixture(scope="module")
def eager_models(models) -> dict[str, FarspanForCausalLM]:
    copies = {name: copy.deepcopy(model) for name, model in models.items()}
    for model in copies.values():
        model.set_attn_implementation("eager")
    return copies


@pytest.fixture
def eager(eager_models, family: Family) -> FarspanForCausalLM:
    return eager_models[family.name]


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(root / name)
    return root


@pytest.fixture
def folder(folders, family: Family):
    return folders / family.name


def largest_change(first: torch.Tensor, second: torch.Tensor) -> float:
    return ((first - second).abs().max() / first.abs().max()).item()


def left_padded(ids: torch.Tensor, padding: int = 4) -> dict[str, torch.Tensor]:
    padded = F.pad(ids, (padding, 0))
    mask = (torch.arange(padded.shape[1]) >= padding).long().expand_as(padded)
    return {"input_ids": padded, "attention_mask": mask}


# ---- saving and loading --------------------------------------------------------------------------


@every_config
@torch.no_grad()
def test_auto_classes_load_saved_models_unchanged(model, folder):
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.to_diff_dict() == {**model.config.to_diff_dict(), "dtype": "float32"}
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    base = hf.AutoModel.from_pretrained(folder)
    assert torch.equal(base(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)


@every_config
@torch.no_grad()
def test_a_base_model_loads_into_a_language_model(model, tmp_path):
    model.model.save_pretrained(tmp_path)
    loaded = FarspanForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


@every_config
@torch.no_grad()
def test_tied_weights_are_saved_once_and_shards_load(model, folder, tmp_path):
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict()) - {"lm_head.weight"}
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = FarspanForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


@every_config
@torch.no_grad()
def test_dtype_of_a_load_is_that_of_every_weight(model, folder, tmp_path):
    half = FarspanForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.dtype == half.config.dtype == half(tokens()).logits.dtype == torch.bfloat16
    assert largest_change(model(tokens()).logits, half(tokens()).logits.float()) < 0.1
    half.save_pretrained(tmp_path)
    again = FarspanForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(again(tokens()).logits, half(tokens()).logits)


@every_config
@torch.no_grad()
def test_weights_that_a_checkpoint_lacks_are_initialized(model):
    """Also on the meta device, where a constructor's values are lost."""
    torch.manual_seed(0)
    loaded = FarspanForCausalLM.from_pretrained(None, config=model.config, state_dict={})
    assert not any(part.is_meta for part in (*loaded.parameters(), *loaded.buffers()))
    torch.manual_seed(0)
    fresh = FarspanForCausalLM(model.config)
    for (name, part), other in zip(fresh.named_parameters(), loaded.parameters(), strict=True):
        assert part.mean().item() == pytest.approx(other.mean().item(), abs=0.02), name
        assert part.std().item() == pytest.approx(other.std().item(), abs=0.02), name
    for (name, part), other in zip(fresh.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(part, other), name


@every_config
@torch.no_grad()
def test_layers_on_the_disk_run(model, folder, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.dropout": "cpu"}
    places |= {"model.positions": "cpu", "lm_head": "cpu", "model.layers.0": "cpu"}
    places |= {f"model.layers.{index}": "disk" for index in range(1, 4)}
    loaded = FarspanForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


@every_config
def test_other_shapes_are_refused_or_initialized_anew(model, folder):
    options = {"vocab_size": VOCABULARY + 8}
    with pytest.raises(RuntimeError, match="size mismatch|mismatch"):
        FarspanForCausalLM.from_pretrained(folder, **options)
    loaded = FarspanForCausalLM.from_pretrained(folder, **options, ignore_mismatched_sizes=True)
    assert loaded(tokens()).logits.shape[-1] == VOCABULARY + 8
    layer, other = (m.model.layers[0].self_attn.q_proj.weight for m in (model, loaded))
    assert torch.equal(layer, other)


@every_config
@torch.no_grad()
def test_every_tensor_is_a_parameter_or_a_buffer(own_model):
    duplicate = copy.deepcopy(own_model)
    assert torch.equal(duplicate(tokens()).logits, own_model(tokens()).logits)
    for module in own_model.to("meta").modules():
        plain = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        assert not plain, type(module).__name__


# ---- config --------------------------------------------------------------------------------------


@every_config
def test_configs_survive_files_and_dicts(model, folder):
    config = model.config
    assert model.model.config is config
    loaded = hf.AutoConfig.from_pretrained(folder)
    assert type(loaded) is FarspanConfig
    saved = json.loads((folder / "config.json").read_text())
    assert saved["architectures"] == ["FarspanForCausalLM"]
    for other in (loaded, FarspanConfig(**config.to_dict()), copy.deepcopy(config)):
        assert other.position == config.position
        assert {**other.to_diff_dict(), "dtype": None} == {**config.to_diff_dict(), "dtype": None}


@every_config
def test_the_attention_implementation_is_set_at_any_time(folder, family: Family):
    loaded = FarspanForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"
    loaded.set_attn_implementation("sdpa")
    assert loaded.config._attn_implementation == family.attention
    assert loaded.model.layers[0].self_attn.config._attn_implementation == family.attention


# ---- embeddings ----------------------------------------------------------------------------------


@every_config
@torch.no_grad()
def test_embeddings_are_tied_resized_and_replaced(own_model):
    assert own_model.lm_head.weight is own_model.get_input_embeddings().weight
    for size in (VOCABULARY + 10, VOCABULARY - 8):
        own_model.resize_token_embeddings(size)
        assert own_model.config.vocab_size == own_model.get_output_embeddings().out_features == size
        assert own_model.lm_head.weight is own_model.get_input_embeddings().weight
        ids = tokens().clamp(max=size - 1)
        assert own_model(ids, labels=ids).logits.shape[-1] == size
    own_model.resize_token_embeddings(VOCABULARY, pad_to_multiple_of=64)
    assert own_model.config.vocab_size == 128
    own_model.set_input_embeddings(torch.nn.Embedding(20, SHAPE["hidden_size"]))
    assert own_model.model.embed_tokens.num_embeddings == 20


@torch.no_grad()
def test_resized_rows_keep_their_logits_with_and_without_tying():
    for tied in (True, False):
        config = FarspanConfig(**SHAPE, tie_word_embeddings=tied, embedding_scale=3.0)
        model = FarspanForCausalLM(config).eval()
        before = model(tokens()).logits
        model.resize_token_embeddings(VOCABULARY + 10)
        assert torch.equal(model(tokens()).logits[..., :VOCABULARY], before)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@every_config
@torch.no_grad()
def test_embeddings_of_tokens_are_an_input_too(model):
    embeds = model.get_input_embeddings()(tokens())
    expected = model(tokens()).logits
    assert torch.equal(model(inputs_embeds=embeds).logits, expected)
    generated = model.generate(inputs_embeds=embeds, **GREEDY)
    assert torch.equal(generated, model.generate(tokens(), **GREEDY)[:, tokens().shape[1] :])
    for both in ({}, {"input_ids": tokens(), "inputs_embeds": embeds}):
        with pytest.raises(FarspanError, match="input_ids or inputs_embeds, and got"):
            model(**both)


# ---- outputs -------------------------------------------------------------------------------------


@every_config
@torch.no_grad()
def test_hidden_states_are_those_between_layers(own_model):
    output = own_model(tokens(), output_hidden_states=True)
    states = output.hidden_states
    assert len(states) == own_model.config.num_hidden_layers + 1
    assert {state.shape for state in states} == {(2, 24, SHAPE["hidden_size"])}
    assert torch.equal(own_model.lm_head(states[-1]), output.logits)
    base = own_model.model
    assert torch.equal(base(tokens(), output_hidden_states=True).hidden_states[0], states[0])
    assert own_model(tokens()).hidden_states is None
    own_model.config.output_hidden_states = True
    again = own_model(tokens()).hidden_states
    assert all(torch.equal(*pair) for pair in zip(states, again, strict=True))


@every_config
@torch.no_grad()
def test_attention_weights_sum_to_one_over_visible_keys(eager):
    config, length = eager.config, tokens().shape[1]
    output = eager(tokens(), output_attentions=True)
    assert len(output.attentions) == config.num_hidden_layers
    assert len(eager.model(tokens(), output_attentions=True).attentions) == config.num_hidden_layers
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for weights, kind in zip(output.attentions, config.layer_types, strict=True):
        assert weights.shape == (2, config.num_attention_heads, length, length)
        assert (weights.sum(-1) - 1).abs().max() < 1e-5
        window = config.sliding_window if kind == "sliding_attention" else length
        visible = (distance >= 0) & (distance < window)
        assert (weights > 0).all(0).all(0).equal(visible)
    assert eager(tokens()).attentions is None
    both = eager(tokens(), output_attentions=True, output_hidden_states=True, use_cache=True)
    assert list(both) == ["logits", "past_key_values", "hidden_states", "attentions"]


@every_config
@torch.no_grad()
def test_the_config_asks_for_attention_weights(own_model):
    own_model.set_attn_implementation("eager")
    own_model.config.output_attentions = True
    assert len(own_model(tokens()).attentions) == own_model.config.num_hidden_layers
    assert own_model(tokens(), output_attentions=False).attentions is None


@every_config
def test_gradients_reach_hidden_states_and_attention_weights(eager):
    output = eager(tokens(), output_attentions=True, output_hidden_states=True)
    inner = (*output.hidden_states, *output.attentions)
    for part in inner:
        part.retain_grad()
    output.logits.sum().backward()
    eager.zero_grad()
    assert all(part.grad is not None for part in inner)


@every_config
@torch.no_grad()
def test_tuples_and_dicts_have_the_same_outputs(own_model):
    options = {"output_hidden_states": True, "use_cache": False}
    for part in (own_model, own_model.model):
        named = part(tokens(), **options)
        plain = part(tokens(), **options, return_dict=False)
        assert isinstance(plain, tuple)
        assert torch.equal(plain[0], named[0])
        assert len(plain) == len(named)
        assert all(torch.equal(*pair) for pair in zip(plain[1], named.hidden_states, strict=True))
    own_model.config.return_dict = False
    assert torch.equal(own_model(tokens())[0], own_model(tokens(), return_dict=True).logits)
    assert isinstance(own_model.model(tokens()), tuple)


@every_config
@torch.no_grad()
def test_output_options_select_from_the_full_output(model):
    full = model(tokens()).logits
    assert torch.equal(model(tokens(), logits_to_keep=3).logits, full[:, -3:])
    chosen = torch.tensor([1, 5])
    assert torch.equal(model(tokens(), logits_to_keep=chosen).logits, full[:, chosen])


def test_signatures_begin_as_in_every_family():
    for part in (FarspanForCausalLM, FarspanModel):
        names = list(inspect.signature(part.forward).parameters)
        assert names[1:6] == [
            "input_ids",
            "attention_mask",
            "position_ids",
            "past_key_values",
            "inputs_embeds",
        ]
        assert part.main_input_name == "input_ids"
    assert FarspanForCausalLM.can_generate()
    assert issubclass(FarspanForCausalLM, hf.GenerationMixin)


def test_dropout_acts_only_in_training():
    model = FarspanForCausalLM(FarspanConfig(**SHAPE, dropout=0.5))
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.train()
        assert not torch.equal(model(tokens()).logits, model(tokens()).logits)
        model.eval()
        assert torch.equal(model(tokens()).logits, model(tokens()).logits)


# ---- attention implementations and batches -------------------------------------------------------


@every_config
def test_sdpa_equals_eager_with_gradients_and_padding(model, eager):
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5], mask[1, -5:] = 0, 0
    for options in ({"use_cache": False}, {"attention_mask": mask}):
        results = []
        for part in (model, eager):
            logits = part(tokens(), **options).logits[mask.bool()]
            logits.square().sum().backward()
            results.append([logits.detach(), *(p.grad.clone() for p in part.parameters())])
            part.zero_grad()
        assert all(largest_change(*pair) < 2e-5 for pair in zip(*results, strict=True))


@every_config
def test_flags_say_which_implementations_run(model, family: Family):
    """These implementations are compared here; refusals are in test_model.py."""
    assert model._supports_sdpa
    assert model._supports_attention_backend
    assert model._can_compile_fullgraph
    assert model._supports_flex_attn == model._supports_flash_attn == (family in UNBIASED)


@every_config
@torch.no_grad()
def test_sdpa_equals_eager_in_half_precision(model, eager):
    half, eager_half = (copy.deepcopy(part).bfloat16() for part in (model, eager))
    assert largest_change(half(tokens()).logits, eager_half(tokens()).logits) < 0.05


@pytest.mark.long
@pytest.mark.parametrize("family", UNBIASED, ids=lambda family: family.name)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_equals_sdpa_with_padding_and_caches(own_model):
    """FlexAttention in steps: compiled it takes a minute."""
    ids, padded = tokens(9), left_padded(tokens(9))
    expected = [own_model(ids).logits, own_model.generate(**padded, **GREEDY)]
    own_model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        assert largest_change(expected[0], own_model(ids).logits) < 1e-5
        assert torch.equal(expected[1], own_model.generate(**padded, **GREEDY))


@every_config
@torch.no_grad()
def test_a_row_of_a_batch_equals_the_row_by_itself(model):
    batch = model(tokens(), output_hidden_states=True)
    single = model(tokens()[1:], output_hidden_states=True)
    assert largest_change(batch.logits[1:], single.logits) < 1e-5
    for states in zip(batch.hidden_states, single.hidden_states, strict=True):
        assert largest_change(states[0][1:], states[1]) < 1e-5


@every_config
@torch.no_grad()
def test_left_padding_changes_no_logit(model):
    padded = left_padded(tokens(9))
    positions = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    logits = model(**padded, position_ids=positions).logits[:, 4:]
    assert largest_change(model(tokens(9)).logits, logits) < 1e-5


@pytest.mark.parametrize(
    "family",
    [family for family in UNBIASED if family.name != "farspan-swan"],
    ids=lambda family: family.name,
)
@torch.no_grad()
def test_a_mask_of_four_dimensions_is_taken_as_it_is(model):
    """Three rows with one prefix as one row: the suffixes do not see each other."""
    prefix, suffixes = tokens(4, batch=1), tokens(2, batch=3)
    rows = torch.cat((prefix.expand(3, -1), suffixes), 1)
    shared = torch.cat((prefix, suffixes.reshape(1, -1)), 1)
    visible = torch.ones(10, 10, dtype=torch.bool).tril()
    for start in (6, 8):
        visible[start:, 4:start] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5, 4, 5]])
    options = {"attention_mask": visible[None, None], "position_ids": positions}
    logits = model(shared, **options).logits[0, 4:].reshape(3, 2, -1)
    assert largest_change(model(rows).logits[:, 4:], logits) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("position", [["rope/8", "none"], ["t5", "t5"]], ids=["windowed", "t5"])
@torch.no_grad()
def test_a_compiled_model_is_one_graph(position: list[str]):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = FarspanConfig(**{**SHAPE, "num_hidden_layers": 2, "position": position})
    model = FarspanForCausalLM(config)
    compiled = torch.compile(model.eval(), backend=count, fullgraph=True)
    assert largest_change(model(tokens()).logits, compiled(tokens(), use_cache=False).logits) < 1e-5
    assert len(graphs) == 1


# ---- training ------------------------------------------------------------------------------------


@every_config
def test_the_loss_is_that_of_the_next_tokens(model):
    ids, labels = tokens(), tokens().clone()
    labels[0, :10] = -100
    output = model(ids, labels=labels)
    parts = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    assert output.loss.item() == pytest.approx(F.cross_entropy(*parts).item(), rel=1e-5)
    total = F.cross_entropy(*parts, reduction="sum").item()
    per_item = model(ids, labels=labels, num_items_in_batch=7).loss.item()
    assert per_item == pytest.approx(total / 7, rel=1e-5)


@every_config
def test_gradient_checkpointing_changes_no_gradient(own_model):
    """Nor does its reentrant kind, which sees positional arguments only."""
    own_model.train()
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if options is not None:
            own_model.gradient_checkpointing_enable(options)
            assert own_model.is_gradient_checkpointing
        own_model.zero_grad()
        own_model(tokens(), labels=tokens()).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in own_model.parameters()])
    plain, checkpointed, reentrant = gradients
    assert all(torch.equal(*pair) for pair in zip(plain, checkpointed, strict=True))
    # Without a gradient, in its first pass, T5's bias runs on another SDPA kernel.
    assert all(largest_change(*pair) < 1e-5 for pair in zip(plain, reentrant, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    own_model.gradient_checkpointing_disable()
    assert not own_model.is_gradient_checkpointing


@every_config
@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_train_under_gradient_checkpointing(own_model, reentrant: bool):
    adapted = get_peft_model(own_model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    adapted.gradient_checkpointing_enable({"use_reentrant": reentrant})
    adapted.enable_input_require_grads()
    adapted.train()
    adapted(input_ids=tokens(), labels=tokens()).loss.backward()
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None) == ("lora" in name)


@every_config
def test_a_few_steps_learn_a_batch_by_heart(family: Family):
    torch.manual_seed(0)
    model = FarspanForCausalLM(family.config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 1.5


@every_config
def test_new_weights_have_the_spread_of_the_config(family: Family):
    model = FarspanForCausalLM(family.config())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert abs(parameter.mean().item()) < 0.01, name
            assert 0.01 < parameter.std().item() < 0.03, name


# ---- generation ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def continuations(models) -> dict[str, torch.Tensor]:
    """The most likely tokens, by whole forward passes."""
    generated = {}
    with torch.no_grad():
        for name, model in models.items():
            ids = tokens(9)
            for _ in range(GREEDY["max_new_tokens"]):
                ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
            generated[name] = ids
    return generated


@pytest.fixture
def expected(continuations, family: Family) -> torch.Tensor:
    return continuations[family.name]


CACHES = {
    "none": {"use_cache": False},
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@every_config
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES.keys())
def test_greedy_generation_is_equal_with_every_cache(model, expected, options: dict):
    assert torch.equal(model.generate(tokens(9), **GREEDY, **options), expected)


@every_config
def test_padded_prompts_continue_as_unpadded_ones(model, expected):
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        generated = model.generate(**left_padded(tokens(9)), **GREEDY, **options)
        assert torch.equal(generated[:, 4:], expected)


@every_config
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_returns_scores_states_and_weights(eager, expected, use_cache: bool):
    output = eager.generate(
        tokens(9),
        **GREEDY,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    assert torch.equal(output.sequences, expected)
    layers, steps = eager.config.num_hidden_layers, GREEDY["max_new_tokens"]
    assert len(output.scores) == len(output.logits) == steps
    assert [len(part) for part in output.attentions] == [layers] * steps
    assert [len(part) for part in output.hidden_states] == [layers + 1] * steps
    for step, (weights, states) in enumerate(
        zip(output.attentions, output.hidden_states, strict=True)
    ):
        queries = 1 if use_cache and step else 9 + step
        assert {part.shape[2] for part in weights} == {queries}
        assert {part.shape[1] for part in states} == {queries}


@every_config
@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
def test_beams_are_equal_with_and_without_a_cache(model, do_sample: bool):
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(
            model.generate(
                tokens(9),
                **options,
                do_sample=do_sample,
                use_cache=use_cache,
                return_dict_in_generate=True,
                output_scores=True,
            )
        )
    cached, plain = results
    assert torch.equal(cached.sequences, plain.sequences)
    assert cached.sequences.shape == (4, 14)
    assert largest_change(plain.sequences_scores, cached.sequences_scores) < 1e-4


@every_config
def test_samples_repeat_with_their_seed(model):
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(model.generate(tokens(9), do_sample=True, max_new_tokens=4))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@every_config
@pytest.mark.parametrize("assistant", ["itself", "another", "prompt lookup"])
def test_assisted_generation_equals_greedy(eager, eager_models, expected, assistant: str):
    helpers = {"itself": eager, "another": eager_models["farspan-none"]}
    options = (
        {"prompt_lookup_num_tokens": 2}
        if assistant == "prompt lookup"
        else {"assistant_model": helpers[assistant]}
    )
    output = eager.generate(
        tokens(9)[:1],
        **GREEDY,
        **options,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    assert torch.equal(output.sequences, expected[:1])
    assert len(output.attentions) == len(output.hidden_states) == GREEDY["max_new_tokens"]


@every_config
def test_generation_continues_from_a_cache(model, expected):
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(tokens(9), **options, max_new_tokens=2)
    cache = first.past_key_values
    rest = model.generate(first.sequences, past_key_values=cache, **options, max_new_tokens=3)
    assert torch.equal(rest.sequences, expected)


@every_config
def test_settings_of_generation_come_from_the_config_and_are_saved(model, folder):
    settings = hf.GenerationConfig.from_pretrained(folder)
    assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (0, 1, 2)
    assert model.generation_config.eos_token_id == 2
    assert model._supports_logits_to_keep()


# ---- exceptions ----------------------------------------------------------------------------------


def test_the_docs_list_the_exceptions():
    page = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
    for assumption, reason in NOT_APPLICABLE.items():
        assert f"| {assumption} | {reason} |" in page


@torch.no_grad()
def test_the_listed_exceptions_are_those_of_every_family():
    """They go once transformers changes these."""
    ours, llama = OURS[1].build(), hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).eval()
    for model in (ours, llama):
        assert model(tokens(), output_attentions=True).attentions == ()
        for options in ({"penalty_alpha": 0.6, "top_k": 4}, {"num_beams": 4, "num_beam_groups": 2}):
            with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
                model.generate(tokens(), **options, max_new_tokens=2)
        before = model(tokens()).logits
        model.config.chunk_size_feed_forward = 2
        assert torch.equal(model(tokens()).logits, before)
