"""Models that would run wrongly are refused before any work: quantised, contradicting, drawing numbers of their own."""

import json

import pytest
import torch

import lindos
from lindos.core.errors import InputError, RefusedError
from lindos.hf import models
from lindos.hf.twin import twin, twin_config
from lindos.parallel.dropout import has_dropout, refuse_unkeyed


def boost(config):
    model = models.model_of(config)
    return lindos.Booster(lindos.DDP()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_heads_that_are_no_multiple_are_named():
    config = twin_config("llama", heads=6, kv_heads=3)
    config.num_key_value_heads = 4
    with pytest.raises(InputError, match=r"self_attn: 6 attention heads must be a multiple of the 4 key-value heads"):
        boost(config)


def test_more_experts_a_token_than_there_are_is_named():
    config = twin_config("mixtral")
    config.num_experts_per_tok = config.num_local_experts + 1
    with pytest.raises(InputError, match="each token takes 5 experts of 4"):
        boost(config)


def folder(path, **fields):
    config = twin_config("llama").to_dict() | fields
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_quantised_folder_is_refused(tmp_path):
    quantised = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    with pytest.raises(RefusedError, match=r"has a quantization_config \(bitnet\)"):
        models.config_of(folder(tmp_path, quantization_config=quantised))


def test_a_quantised_model_is_refused():
    model = twin("llama", dtype=torch.float32)
    model.is_quantized = True
    with pytest.raises(RefusedError, match="the model is quantised"):
        lindos.Booster(lindos.DDP()).boost(model)


def test_a_class_that_is_not_there_is_named_not_guessed(tmp_path):
    config = models.config_of(folder(tmp_path, architectures=["MyLlamaForCausalLM"]))
    with pytest.raises(RefusedError, match=r"names the class MyLlamaForCausalLM \(architectures\)"):
        models.model_of(config)


@pytest.mark.parametrize("model_type", ["jetmoe", "dbrx"])
def test_router_losses_by_other_coefficients_are_refused(model_type):
    model = twin(model_type, dtype=torch.float32)
    model.config.output_router_logits = True
    with pytest.raises(RefusedError, match="coefficients of its own"):
        lindos.Booster(lindos.DDP(), allow=("router_aux_loss",)).boost(model)


def test_dropout_inside_a_configuration_is_seen():
    model = twin("dbrx", dtype=torch.float32)
    assert not has_dropout(model)
    model.config.attn_config.attn_pdrop = 0.3
    assert has_dropout(model)


@pytest.mark.parametrize(
    ("model_type", "inner", "field", "value"),
    [("dbrx", "ffn_config", "moe_jitter_eps", 0.1), ("whisper", None, "apply_spec_augment", True)],
)
def test_numbers_that_a_model_draws_by_itself_are_refused(model_type, inner, field, value):
    model = twin(model_type, dtype=torch.float32)
    refuse_unkeyed(model)
    setattr(getattr(model.config, inner) if inner else model.config, field, value)
    with pytest.raises(RefusedError, match=rf"config\.({inner}\.)?{field}="):
        refuse_unkeyed(model)
