"""Twins build, repeat, keep their type's pattern and take generic overrides."""

import pytest
import torch

from lindos.core.errors import InputError
from lindos.hf.twin import batch, twin, twin_config, types

torch.set_num_threads(1)
NAMED = ["llama", "qwen3", "mixtral", "gemma3_text", "phi3", "cohere2", "olmo2", "starcoder2", "gpt2"]


@pytest.mark.parametrize("kind", NAMED)
def test_builds_and_repeats(kind):
    first, again, other = twin(kind), twin(kind), twin(kind, seed=1)
    state, state_again, state_other = first.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.equal(value, state_again[name]) for name, value in state.items())
    names = [name for name, _ in first.named_parameters()]
    assert not any(torch.equal(state[name], state_other[name]) for name in names)
    assert first.training
    assert all(p.dtype is torch.float64 and p.std() > 1e-3 for p in first.parameters())
    assert sum(p.numel() for p in first.parameters()) < 300_000

    data = batch(first.config, rows=3, length=16, seed=0)
    data.pop("labels")
    out, out_again = first(**data, use_cache=False).logits, first(**data, use_cache=False).logits
    assert out.isfinite().all()
    assert torch.equal(out, out_again), "a twin must have no dropout"


@pytest.mark.parametrize("kind", NAMED)
def test_sizes_differ(kind):
    config = twin_config(kind)
    inner = getattr(config, "intermediate_size", None) or config.n_inner
    sizes = [config.hidden_size, inner, config.vocab_size, config.max_position_embeddings]
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        sizes += [head_dim, head_dim * config.num_attention_heads]
        if config.num_key_value_heads != config.num_attention_heads:
            sizes.append(head_dim * config.num_key_value_heads)
    assert len(set(sizes)) == len(sizes)


def test_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    twin("llama")
    assert torch.equal(torch.rand(4), expected)


def test_dtypes_agree():
    exact, single = twin("gemma3_text"), twin("gemma3_text", dtype=torch.float32)
    for a, b in zip(exact.parameters(), single.parameters()):
        assert torch.equal(a.float(), b)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "gpt_neox", "opt", "qwen3_moe"])
def test_generic_words(kind):
    words = {"heads": 8, "vocabulary": 160, "layers": 3, "hidden": 64, "tied": kind != "gpt2"}
    if kind in ("llama", "qwen3_moe"):
        words["kv_heads"] = 2
    model = twin(kind, **words)
    config = model.config
    assert (config.num_attention_heads, config.vocab_size, config.hidden_size) == (8, 160, 64)
    assert config.num_hidden_layers == 3
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied is words["tied"]
    if "kv_heads" in words:
        head_dim = getattr(config, "head_dim", None) or 64 // 8
        assert model.model.layers[0].self_attn.k_proj.weight.shape == (2 * head_dim, 64)


def test_patterns_stay():
    gemma = twin_config("gemma3_text")
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert gemma.sliding_window == 5
    assert twin_config("gemma3_text", layers=4).layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert set(twin_config("cohere2").layer_types) == {"sliding_attention", "full_attention"}
    assert twin_config("gemma2").attn_logit_softcapping == 50.0
    assert twin_config("mixtral").num_key_value_heads == 2
    assert twin_config("mixtral").sliding_window is None
    assert twin_config("gpt_neox").rope_parameters["partial_rotary_factor"] == 0.25
    assert twin_config("qwen3_next").layer_types == ["linear_attention", "full_attention"]


def test_a_given_configuration():
    config = twin_config("llama", vocabulary=160)
    assert twin(config).config.vocab_size == 160
    smaller = twin_config(config, layers=1)
    assert (smaller.num_hidden_layers, smaller.vocab_size) == (1, 131)
    with pytest.raises(InputError, match="twin_config"):
        twin(config, layers=3)


def test_errors_name_the_word():
    with pytest.raises(InputError, match="did you mean 'llama'"):
        twin("lama")
    with pytest.raises(InputError, match="did you mean 'heads'"):
        twin_config("llama", head=4)
    with pytest.raises(InputError, match="gpt2 has no field for kv_heads"):
        twin_config("gpt2", kv_heads=2)
    with pytest.raises(InputError, match="multiple of heads"):
        twin_config("gpt2", hidden=50)
    assert {"llama", "gpt2", "bloom"} <= set(types())


def test_batch():
    config = twin_config("phi3")
    data = batch(config, rows=4, length=16, seed=2)
    again = batch(config, rows=4, length=16, seed=2)
    assert all(torch.equal(value, again[name]) for name, value in data.items())
    mask, labels = data["attention_mask"], data["labels"]
    assert mask[:, 0].all()
    assert (mask.diff(dim=1) <= 0).all(), "padding is on the right"
    assert (labels[mask == 0] == -100).all()
    assert (data["input_ids"][mask == 0] == config.pad_token_id).all()
    assert (data["input_ids"][mask == 1] != config.pad_token_id).all()
    kept = labels != -100
    assert torch.equal(labels[kept], data["input_ids"][kept])
    assert len(set(kept.sum(1).tolist())) > 1
    assert (kept.sum(1) < mask.sum(1)).any()
    even = batch(config, rows=2, length=8, seed=2, ragged=False)
    assert even["attention_mask"].all()
    assert torch.equal(even["labels"], even["input_ids"])
