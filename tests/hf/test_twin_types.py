"""Twins of every causal type of transformers, and of other kinds: they build, they are small, their words are heard."""

import pytest
import torch

from lindos.core.errors import InputError, RefusedError
from lindos.hf.kinds import KINDS
from lindos.hf.twin import batch, twin, twin_config, types

torch.set_num_threads(1)
# gemma3n needs packages of its own; AutoModelForCausalLM builds no musicgen from its own default configuration.
REFUSED = {"gemma3n": "timm", "musicgen": "AttributeError", "musicgen_melody": "AttributeError"}
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


@pytest.mark.parametrize("part", range(4))
def test_every_causal_type(part):
    for model_type in types()[part::4]:
        if model_type in REFUSED:
            with pytest.raises(RefusedError, match=REFUSED[model_type]):
                twin(model_type)
            continue
        model = twin(model_type, dtype=torch.float32)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count < 600_000, (model_type, count)
        if model_type in ASSISTANTS:
            with pytest.raises(RefusedError, match="shared_kv_states"):
                batch(model.config, 2, 8, seed=0)


HEARD = ["llama", "qwen3", "mixtral", "gemma2", "phi3", "cohere", "olmo", "starcoder2", "qwen2_moe", "granite", "jamba",
         "glm4", "smollm3", "nemotron", "stablelm", "gemma4_text", "dory", "zamba2", "qwen3_next", "afmoe"]  # fmt: skip


@pytest.mark.parametrize("model_type", HEARD)
def test_words_of_the_tensor_cuts(model_type):
    config = twin_config(model_type, heads=6, kv_heads=3, vocabulary=131)
    head_dim = config.to_dict().get("head_dim")
    sizes = [config.hidden_size, 6 * head_dim, 3 * head_dim] if head_dim else []
    assert len(set(sizes)) == len(sizes)
    data = batch(config, 2, 9, seed=0)
    data.pop("labels")
    out = twin(config, dtype=torch.float32)(**data, use_cache=False).logits
    assert out.shape == (2, 9, 131)
    assert out.isfinite().all()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt2", "opt", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_is_heard(model_type, tied):
    model = twin(model_type, tied=tied, dtype=torch.float32)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


@pytest.mark.parametrize(
    ("model_type", "words", "message"),
    [
        ("rembert", {"tied": True}, "does not tie its head"),
        ("deepseek_v2", {"kv_heads": 2}, "latent attention"),
        ("mamba", {"heads": 4}, "no field for heads"),
        ("gpt2", {"kv_heads": 2}, "no field for kv_heads"),
    ],
)
def test_words_that_a_type_cannot_follow(model_type, words, message):
    with pytest.raises(InputError, match=message):
        twin(model_type, **words)


def test_kinds_of_layers_with_sizes_of_their_own():
    config = twin_config("dots3_note_text")
    assert config.layer_types == ["indexed_attention", "sliding_attention"]
    own = config.per_layer_config[1]
    assert (own.num_attention_heads, own.kv_lora_rank, own.qk_nope_head_dim) == (2, 56, 24)
    assert twin_config("gemma4_text").per_layer_config[1].head_dim == 32
    assert twin_config("zamba").layers_block_type.count("hybrid") == 2
    assert twin_config("dory").n_recurrent_layers == 1


@pytest.mark.parametrize(
    ("model_type", "kind", "inputs"),
    [
        ("bert", "masked", ["input_ids", "attention_mask"]),
        ("albert", "masked", ["input_ids", "attention_mask"]),
        ("deberta-v2", "masked", ["input_ids", "attention_mask"]),
        ("swin", "image", ["pixel_values"]),
        ("dinov2", "image", ["pixel_values"]),
        ("llama", "sequence", ["input_ids", "attention_mask"]),
        ("mt5", "conditional", ["input_ids", "attention_mask"]),
        ("whisper", "conditional", ["input_features"]),
    ],
)
def test_batches_of_other_kinds(model_type, kind, inputs):
    model = twin(model_type, kind=kind, dtype=torch.float32)
    data = batch(model.config, 4, 13, seed=1, kind=kind)
    assert list(data) == [*inputs, "labels"]
    again = batch(model.config, 4, 13, seed=1, kind=kind)
    assert all(torch.equal(value, again[name]) for name, value in data.items())
    labels = data["labels"]
    assert 0 < int((labels != -100).sum()) < labels.numel()
    if kind == "masked":
        assert (data["input_ids"][labels != -100] != labels[labels != -100]).any()
        assert (labels[data["attention_mask"] == 0] == -100).all()
    if kind == "conditional":
        assert labels.shape == (4, 16)
    out = model(**data)
    assert out.logits.shape[:-1] == labels.shape
    assert out.loss.isfinite()
    assert kind in KINDS
